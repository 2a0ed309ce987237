"""BERT and its variants: learned positions and segments, LayerNorm post-norm, GELU (Devlin et al. 2019).

RoBERTa, CamemBERT and XLM-RoBERTa count positions from the padding id + 1 and have one segment (Liu et al. 2019).
XLM-RoBERTa-XL is one of them with pre-norm (Goyal et al. 2021). ELECTRA may have narrower embeddings (Clark et al.
2020).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.heads import classifier, has_pooler, masked_head, tied_names
from triptych.model.families.table.helpers import activation, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family
from triptych.model.families.table.stored_names import StoredNames

NAMES = StoredNames(
    layer="encoder.layer.{}",
    attention=tuple(f"attention.{part}" for part in ("self.query", "self.key", "self.value", "output.dense")),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    mlp=("intermediate.dense", "output.dense"),
    final_norm="encoder.LayerNorm",
)
_XL_NAMES = replace(NAMES, norms=("attention.self_attn_layer_norm", "LayerNorm"))


def config(raw: Settings, names: Collection[str] | None, *, pooler: str = NAMES.pooler) -> ModelConfig:
    """Build the configuration; `pooler` is what the tensors of a pooler are called."""
    refuse_unless(raw, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = split_width(size, heads)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-12))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu")),
        norms=(Norms(post=norm),) * 2,
    )
    encoder = StackConfig(
        layers=repeat(layer, raw["num_hidden_layers"]),
        hidden_size=size,
        causal=False,
        position=PositionConfig(PositionKind.LEARNED, max_positions=raw["max_position_embeddings"]),
        embed_norm=norm,
        token_types=raw.get("type_vocab_size", 2),
    )
    labels, embedding = classifier(raw, names), EmbeddingConfig(raw["vocab_size"], size)
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=embedding,
        encoder=encoder,
        masked_head=masked_head(raw, names, embedding, layer.mlp.activation, norm),
        pooler=has_pooler(labels, names, f"{pooler}.weight"),
        classifier=labels,
        max_positions=raw["max_position_embeddings"],
        pad_token_id=raw.get("pad_token_id", 0),
    )


def roberta(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build RoBERTa, whose position table also has rows for the padding id and the ids before it."""
    base = config(raw.otherwise(pad_token_id=1), names)
    assert base.pad_token_id is not None
    offset = base.pad_token_id + 1
    longest = raw["max_position_embeddings"] - offset
    position = replace(base.encoder_stack.position, max_positions=longest, offset=offset, padding=base.pad_token_id)
    head = base.masked_head and replace(base.masked_head, activation=Activation.GELU)
    encoder = replace(base.encoder_stack, position=position)
    return replace(base, encoder=encoder, max_positions=longest, masked_head=head)


def roberta_xl(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build XLM-RoBERTa-XL: pre-norm, a last norm, and none after the embeddings."""
    base = roberta(raw.otherwise(layer_norm_eps=1e-5, type_vocab_size=1), names)
    norm = base.encoder_stack.embed_norm
    encoder = base.encoder_stack.with_layers(lambda layer: replace(layer, norms=(Norms(pre=norm),) * 2))
    return replace(base, encoder=replace(encoder, embed_norm=None, final_norm=norm))


def electra(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    base = config(raw, names)
    width = raw.get("embedding_size", 128)
    head = base.masked_head and replace(base.masked_head, size=width, activation=Activation.GELU)
    return replace(base, embedding=replace(base.embedding, embedding_size=width), pooler=False, masked_head=head)


# Of pre-training heads only the one for masked tokens is served; what is left of them is passed over. ColBERT's
# projection of tokens, `linear`, is no part of the network (model/checkpoint/sentence_transformers.py).
DROPPED = ("linear.*", "embeddings.position_ids", "cls.*", "lm_head.*", "discriminator_predictions.*", "generator_*")
_FAMILY = Family(
    config, NAMES.rules, "bert.", DROPPED, tables=("embeddings.word_embeddings.weight",), **tied_names("bert")
)
_ROBERTA = replace(_FAMILY, config=roberta, prefix="roberta.", **tied_names("roberta"))
FAMILIES = {
    "bert": _FAMILY,
    "roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": replace(_ROBERTA, config=roberta_xl, rules=_XL_NAMES.rules),
    "electra": replace(_FAMILY, config=electra, prefix="electra.", **tied_names("electra")),
}
