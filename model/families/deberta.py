"""DeBERTa: disentangled attention, LayerNorm post-norm, GELU (He et al. 2021).

The second version, whose third is the same network trained otherwise, has logarithmic buckets of positions, may
project them by the matrices of the contents, and in larger models has a convolution parallel to the first layer
(He et al. 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from triptych.model.config.attention import AttentionConfig, DisentangledConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ClassifierConfig, EmbeddingConfig, ModelConfig
from triptych.model.config.stack import ConvolutionConfig, PositionConfig, PositionKind, StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families import bert
from triptych.model.families.table.heads import classifier, masked_head, tied_names
from triptych.model.families.table.helpers import activation, affine, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule, ZeroRule
from triptych.model.families.table.stored_names import StoredNames

_KINDS = {"c2p", "p2c"}


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, talking_head=False)
    raw.get("legacy")  # which head masked words have: its tensors tell
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim, kinds = split_width(size, heads), _kinds(raw)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-7))
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        scale=(dim * (1 + len(kinds))) ** -0.5,
        qkv_bias=True,
        out_bias=True,
        position=_relative(raw, kinds),
    )
    layer = LayerConfig(
        mixer=attention,
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu")),
        norms=(Norms(post=norm),) * 2,
    )
    longest, position = raw["max_position_embeddings"], PositionConfig()
    if raw.get("position_biased_input", True):
        position = PositionConfig(PositionKind.LEARNED, max_positions=longest)
    encoder = StackConfig(
        layers=repeat(layer, raw["num_hidden_layers"]),
        hidden_size=size,
        causal=False,
        position=position,
        embed_norm=norm,
        embed_norm_last=True,
        project_bias=False,
        token_types=raw.get("type_vocab_size", 0),
    )
    embedding = EmbeddingConfig(raw["vocab_size"], raw.get("embedding_size") or size)
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=embedding,
        encoder=encoder,
        masked_head=masked_head(raw, names, embedding, layer.mlp.activation, norm),
        classifier=_classifier(raw, names),
        max_positions=longest,
        pad_token_id=raw.get("pad_token_id", 0),
    )


def version_2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = config(raw, names)
    encoder = base.encoder_stack
    assert encoder.embed_norm is not None
    refuse_unless(raw, attention_head_size=encoder.layers[0].attention.head_dim)
    norms = {word.strip() for word in raw.get("norm_rel_ebd", "none").lower().split("|")}
    if norms - {"none", "layer_norm"}:
        raise ConfigError(f"norm_rel_ebd {raw['norm_rel_ebd']!r} is not served, only none and layer_norm")
    width, convolution = raw.get("conv_kernel_size") or 0, None
    for unused in ("conv_groups", "conv_act"):  # without a convolution
        raw.get(unused)
    if width > 0:
        refuse_unless(raw, conv_groups=1)
        convolution = ConvolutionConfig(width, activation(raw, "conv_act", "tanh"), encoder.embed_norm.eps)
    shared, buckets = bool(raw.get("share_att_key", False)), raw.get("position_buckets") or -1

    def buckets_of(layer: LayerConfig) -> LayerConfig:
        position = layer.attention.position
        if not isinstance(position, DisentangledConfig):
            return layer
        position = replace(position, shared=shared, key_bias=True)
        if buckets > 0:
            position = replace(position, span=buckets, max_distance=position.span)
        return replace(layer, mixer=replace(layer.attention, position=position))

    encoder = encoder.with_layers(buckets_of)
    relative_norm = encoder.embed_norm if "layer_norm" in norms and encoder.relative_span else None
    return replace(base, encoder=replace(encoder, relative_norm=relative_norm, convolution=convolution))


def _kinds(raw: Settings) -> set[str]:
    """Return which scores with positions there are: they count for the scale even where relative attention is off."""
    found = raw.get("pos_att_type") or []
    kinds = {kind.strip() for kind in (found.lower().split("|") if isinstance(found, str) else found)} - {""}
    if kinds - _KINDS:
        raise ConfigError(f"pos_att_type {found!r} is not served, only c2p and p2c")
    return kinds


def _relative(raw: Settings, kinds: set[str]) -> DisentangledConfig | None:
    longest = raw.get("max_relative_positions", -1)
    longest = longest if longest >= 1 else raw["max_position_embeddings"]
    if not raw.get("relative_attention", False):
        return None
    if not kinds:
        raise ConfigError("relative_attention without pos_att_type is not served: it would read no positions")
    return DisentangledConfig(
        span=longest, content_to_position="c2p" in kinds, position_to_content="p2c" in kinds, key_bias=False
    )


def _classifier(raw: Settings, names: Collection[str] | None) -> ClassifierConfig | None:
    labels = classifier(raw, names)
    if labels is None or labels.dense is None:  # keys of the pooler have no effect
        for unused in ("pooler_hidden_size", "pooler_hidden_act"):
            raw.get(unused)
        return labels
    refuse_unless(raw, pooler_hidden_size=raw["hidden_size"])
    return replace(labels, dense=activation(raw, "pooler_hidden_act", "gelu"))


def _attention(config: AttentionConfig, here: str, there: str) -> Iterator[Rule]:
    """The first version stores queries, keys and values head by head, and no bias of keys."""
    size = config.query_size
    stored = Interleaved(config.num_heads)
    yield LinearRule(f"{here}.self.in_proj", f"{there}.attn.qkv", bias=False, interleaved=stored)
    yield TensorRule(f"{here}.self.q_bias", f"{there}.attn.qkv.bias", rows=(0, size))
    yield ZeroRule(f"{there}.attn.qkv.bias", rows=(size, 2 * size))
    yield TensorRule(f"{here}.self.v_bias", f"{there}.attn.qkv.bias", rows=(2 * size, 3 * size))
    yield LinearRule(f"{here}.output.dense", f"{there}.attn.out")
    yield from _positions(config, f"{here}.self.pos_proj", f"{here}.self.pos_q_proj", there)


def _positions(config: AttentionConfig, key: str, query: str, there: str) -> Iterator[LinearRule]:
    position = config.position
    if not isinstance(position, DisentangledConfig) or position.shared:
        return
    if position.content_to_position:
        yield LinearRule(key, f"{there}.relative.key", bias=position.key_bias)
    if position.position_to_content:
        yield LinearRule(query, f"{there}.relative.query")


# Attention has rules of its own in the first version.
_NAMES = replace(bert.NAMES, project="embeddings.embed_proj")
_PARTS = ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense")
_NAMES_1 = replace(_NAMES, attention=())
_NAMES_2 = replace(_NAMES, attention=tuple(f"attention.{part}" for part in _PARTS))


def _rules(config: ModelConfig, names: StoredNames) -> Iterator[Rule]:
    encoder = config.encoder_stack
    yield from names.rules(config)
    if encoder.relative_span is not None:
        yield TensorRule("encoder.rel_embeddings.weight", "encoder.relative.weight")
    if encoder.relative_norm is not None:
        yield from affine("encoder.LayerNorm", "encoder.relative.norm")
    if encoder.convolution is not None:
        stored = (encoder.hidden_size, encoder.hidden_size, encoder.convolution.width)
        yield TensorRule("encoder.conv.conv.weight", "encoder.convolution.project.weight", shape=stored)
        yield TensorRule("encoder.conv.conv.bias", "encoder.convolution.project.bias")
        yield from affine("encoder.conv.LayerNorm", "encoder.convolution.norm")
    for i, layer in enumerate(encoder.layers):
        here, there = f"encoder.layer.{i}.attention", f"encoder.layers.{i}"
        if names is _NAMES_1:
            yield from _attention(layer.attention, here, there)
        else:
            yield from _positions(layer.attention, f"{here}.self.pos_key_proj", f"{here}.self.pos_query_proj", there)


# Pre-training heads, and tables that a configuration has switched off.
_DROPPED = (
    *("embeddings.position_ids", "embeddings.position_embeddings.*", "encoder.rel_embeddings.*", "encoder.LayerNorm.*"),
    *("cls.*", "lm_predictions.*", "mask_predictions.*"),
)
# The head for masked words as it was trained, which `transformers` reads only if told that it is not legacy.
_RENAMED = {
    "lm_predictions.lm_head": "cls.predictions",
    "lm_predictions.lm_head.dense": "cls.predictions.transform.dense",
    "lm_predictions.lm_head.LayerNorm": "cls.predictions.transform.LayerNorm",
}
_FAMILY = Family(
    config,
    partial(_rules, names=_NAMES_1),
    "deberta.",
    _DROPPED,
    _RENAMED,
    tables=("embeddings.word_embeddings.weight",),
    **tied_names("deberta"),
)
FAMILIES = {"deberta": _FAMILY, "deberta-v2": replace(_FAMILY, config=version_2, rules=partial(_rules, names=_NAMES_2))}
