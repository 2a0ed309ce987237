"""Encoders that differ from BERT by where a norm is, by their positions, by shared layers, or by one more vector.

Megatron-BERT (Shoeybi et al. 2019) and RoBERTa-PreLayerNorm are pre-norm. data2vec's text model (Baevski et al.
2022) is a RoBERTa. RemBERT (Chung et al. 2021) has narrow embeddings and a wide output of its own. ERNIE (Sun et al.
2020) adds a vector of its task to every token. All layers of ALBERT (Lan et al. 2020) share the weights of one.
DistilBERT (Sanh et al. 2019) has neither segments nor a pooler. MPNet (Song et al. 2020) adds bucketed relative
positions to the scores.

ESM reads proteins, whose tokens are amino acids (Rives et al. 2021; ESM-2: Lin et al. 2023). It is pre-norm; ESM-2 has
rotary positions, ESM-1b learned ones, which begin at the padding id + 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from triptych.model.config.attention import BucketBiasConfig, RotaryConfig
from triptych.model.config.layer import Activation, Norms
from triptych.model.config.model import MaskDropout, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind
from triptych.model.errors import ConfigError
from triptych.model.families import bert
from triptych.model.families.table.heads import tied_names
from triptych.model.families.table.helpers import refuse_unless, repeat
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number
from triptych.model.families.table.rules import Family, Rule, TensorRule

_TASKS = "embeddings.task_type_embeddings.weight"


def _pre_norm(base: ModelConfig, *, embed_norm: bool) -> ModelConfig:
    """Return BERT with norms before its sublayers, and a last one."""
    norm = base.encoder_stack.embed_norm
    encoder = base.encoder_stack.with_layers(lambda layer: replace(layer, norms=(Norms(pre=norm),) * 2))
    return replace(base, encoder=replace(encoder, embed_norm=norm if embed_norm else None, final_norm=norm))


def megatron(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    return _pre_norm(bert.config(raw, names), embed_norm=False)


def roberta_pre_norm(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    return _pre_norm(bert.roberta(raw, names), embed_norm=True)


def rembert(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw = raw.otherwise(tie_word_embeddings=False)
    base, wide = bert.config(raw, names), raw.get("output_embedding_size", 1664)
    head = base.masked_head and replace(base.masked_head, size=wide)
    width, encoder = raw.get("input_embedding_size", 256), replace(base.encoder_stack, project_equal=True)
    embedding = replace(base.embedding, embedding_size=width)
    return replace(base, embedding=embedding, encoder=encoder, masked_head=head)


def ernie(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build ERNIE, of whose tasks a text has the first."""
    base = bert.config(raw, names)
    tasks = raw.get("task_type_vocab_size", 3)
    return replace(base, encoder=replace(base.encoder_stack, tasks=tasks if raw.get("use_task_id", False) else 0))


def albert(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, inner_group_num=1)
    if raw.get("num_hidden_groups", 1) != 1:
        raise ConfigError(f"num_hidden_groups = {raw['num_hidden_groups']} is not served for 'albert', only 1")
    base = bert.config(raw.otherwise(hidden_act="gelu_new"), names, pooler=_ALBERT.pooler)
    width, encoder = raw["embedding_size"], base.encoder_stack
    first = encoder.layers[0]
    layers = (first, *repeat(replace(first, shares_weights_with=0), encoder.num_layers)[1:])
    return replace(
        base,
        embedding=replace(base.embedding, embedding_size=width),
        encoder=replace(encoder, layers=layers, project_equal=True),
        masked_head=base.masked_head and replace(base.masked_head, size=width),
    )


def distilbert(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    raw.get("sinusoidal_pos_embds")  # only the table's initial values; it is stored in either case
    raw = raw.otherwise(activation="gelu", max_position_embeddings=512).but(layer_norm_eps=1e-12, type_vocab_size=0)
    shape = dict(hidden_size="dim", num_attention_heads="n_heads", num_hidden_layers="n_layers")
    shape |= dict(intermediate_size="hidden_dim", hidden_act="activation")
    base = bert.config(raw.but(**{name: raw[own] for name, own in shape.items()}), names)
    return replace(base, pooler=False)


_PAD = 1  # for the positions, whatever pad_token_id says


def mpnet(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, relative_attention_num_buckets=32)  # `transformers` computes with 32 whatever the file says
    base = bert.roberta(raw.but(type_vocab_size=0, pad_token_id=_PAD), names)
    buckets = BucketBiasConfig(num_buckets=32, max_distance=128)
    stack = base.encoder_stack
    encoder = stack.with_layers(lambda layer: replace(layer, mixer=replace(layer.attention, position=buckets)))
    return replace(base, encoder=encoder, pad_token_id=raw.get("pad_token_id", _PAD))


_MASKED = 0.15 * 0.8  # of the tokens in training


def esm(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, is_folding_model=False, hidden_act="gelu")
    for unused in ("vocab_list", "esmfold_config", "rope_theta"):
        raw.get(unused)
    kind = raw.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise ConfigError(f"position_embedding_type {kind!r} is not served for 'esm'; served are absolute and rotary")
    raw = raw.otherwise(pad_token_id=1, max_position_embeddings=1026)
    base = bert.config(raw.but(position_embedding_type="absolute", type_vocab_size=0), names)
    encoder = base.encoder_stack
    assert base.pad_token_id is not None
    norm, offset = encoder.embed_norm, base.pad_token_id + 1
    theta, dim = number(raw, "rope_theta", 10_000.0), encoder.layers[0].attention.head_dim
    rotation = RotaryConfig(dim, theta) if kind == "rotary" else None  # whatever `rope_scaling` says
    encoder = encoder.with_layers(
        lambda layer: replace(layer, mixer=replace(layer.attention, position=rotation), norms=(Norms(pre=norm),) * 2)
    )
    longest = raw["max_position_embeddings"]
    position = PositionConfig()
    if rotation is None:
        longest -= offset
        position = PositionConfig(PositionKind.LEARNED, max_positions=longest, offset=offset, padding=base.pad_token_id)
    encoder = replace(
        encoder,
        position=position,
        embed_norm=norm if raw.get("emb_layer_norm_before", False) else None,
        final_norm=norm,
    )
    head = base.masked_head and replace(base.masked_head, activation=Activation.GELU)
    return replace(
        base,
        embedding=replace(base.embedding, mask_dropout=_mask_dropout(raw)),
        encoder=encoder,
        masked_head=head,
        max_positions=longest,
    )


def _mask_dropout(raw: Settings) -> MaskDropout | None:
    mask = raw.get("mask_token_id")
    if not raw.get("token_dropout", False):
        return None
    if mask is None:
        raise ConfigError("token_dropout needs mask_token_id")
    return MaskDropout(mask, _MASKED)


_ALBERT = replace(
    bert.NAMES,
    project="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.0.albert_layers.0",
    attention=tuple(f"attention.{part}" for part in ("query", "key", "value", "dense")),
    norms=("attention.LayerNorm", "full_layer_layer_norm"),
    mlp=("ffn", "ffn_output"),
    pooler="pooler",
)
_DISTILBERT = replace(
    bert.NAMES,
    layer="transformer.layer.{}",
    attention=tuple(f"attention.{part}_lin" for part in ("q", "k", "v", "out")),
    norms=("sa_layer_norm", "output_layer_norm"),
    mlp=("ffn.lin1", "ffn.lin2"),
)
_MPNET = replace(
    bert.NAMES,
    attention=tuple(f"attention.attn.{part}" for part in "qkvo"),
    norms=("attention.LayerNorm", "output.LayerNorm"),
)
_ESM = replace(
    bert.NAMES,
    embed_norm="embeddings.layer_norm",
    norms=("attention.LayerNorm", "LayerNorm"),
    final_norm="encoder.emb_layer_norm_after",
)
_MEGATRON = replace(bert.NAMES, norms=("attention.ln", "ln"), final_norm="encoder.ln")
_PRE_NORM = replace(bert.NAMES, norms=("attention.LayerNorm", "intermediate.LayerNorm"), final_norm="LayerNorm")
_REMBERT = replace(bert.NAMES, project="encoder.embedding_hidden_mapping_in")


def _ernie_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.NAMES.rules(config)
    if config.encoder_stack.tasks:
        shape = (config.encoder_stack.tasks, config.embedding.embedding_size)
        yield TensorRule(_TASKS, "encoder.task", shape=shape, part=(0, 1))


def _mpnet_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from _MPNET.rules(config)
    yield TensorRule("encoder.relative_attention_bias.weight", "encoder.bias.weight")


def _own(model_type: str, base: Family, prefix: str, **changes: Any) -> Family:
    """Return the table of a variant, whose head has names of its own."""
    return replace(base, prefix=prefix, **tied_names(model_type), **changes)


_BERT, _ROBERTA = bert.FAMILIES["bert"], bert.FAMILIES["roberta"]
_IDS = "embeddings.position_ids"
# A head for contacts of amino acids is left out, and what rotary positions compute; ESM's folders may have a table of
# learned positions too, which the network has no use for.
_ESM_DROPPED = (
    *(_IDS, "contact_head.*", "*.rotary_embeddings.inv_freq", "rotary_embeddings.inv_freq"),
    *("lm_head.*", "embeddings.position_embeddings.weight"),
)
FAMILIES = {
    "data2vec-text": _own("data2vec-text", _ROBERTA, "data2vec_text."),
    "megatron-bert": replace(_BERT, config=megatron, rules=_MEGATRON.rules),
    "roberta-prelayernorm": _own(
        "roberta-prelayernorm", _ROBERTA, "roberta_prelayernorm.", config=roberta_pre_norm, rules=_PRE_NORM.rules
    ),
    "rembert": _own("rembert", _BERT, "rembert.", config=rembert, rules=_REMBERT.rules),
    # The vectors of other tasks are left out.
    "ernie": _own("ernie", _BERT, "ernie.", config=ernie, rules=_ernie_rules, dropped=(*bert.DROPPED, _TASKS)),
    "albert": _own(
        "albert",
        _BERT,
        "albert.",
        config=albert,
        rules=_ALBERT.rules,
        dropped=(_IDS, "predictions.*", "sop_classifier.*"),
    ),
    "distilbert": _own(
        "distilbert", _BERT, "distilbert.", config=distilbert, rules=_DISTILBERT.rules, dropped=(_IDS, "vocab_*")
    ),
    "mpnet": _own("mpnet", _BERT, "mpnet.", config=mpnet, rules=_mpnet_rules, dropped=(_IDS, "lm_head.*")),
    "esm": _own("esm", _BERT, "esm.", config=esm, rules=_ESM.rules, dropped=_ESM_DROPPED),
}
