"""ModernBERT: windows in two of three layers, a rotary base for each kind, a gated MLP (Warner et al. 2024).

It is pre-norm with a norm after the embeddings, which is why the first layer's attention has none. Norms do not shift
and projections have no biases unless the configuration says so. EuroBERT is Llama's network, whose attention sees both
directions (Boizard et al. 2025).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ClassifierConfig, ClassifierInput, EmbeddingConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import as_encoder, encoder_rules
from triptych.model.families.table.heads import (
    classifier,
    masked_head,
    pooled_by,
    tied_names,
)
from triptych.model.families.table.helpers import activation, layers_by_type, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rope import number, rotary, settings_by_type
from triptych.model.families.table.rules import Family
from triptych.model.families.table.stored_names import StoredNames

_POOLING = {"cls": ClassifierInput.FIRST, "mean": ClassifierInput.MEAN}
# Keys of training, of how `transformers` computes, and old spellings of other keys.
_WITHOUT_EFFECT = (
    *("initializer_cutoff_factor", "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn"),
    *("reference_compile", "repad_logits_with_grad", "layer_norm_eps"),
)
_PERIOD = 3  # every third layer from the first on has full attention


def modernbert(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, position_embedding_type="absolute")  # what old files say of a model without such embeddings
    size, longest = raw["hidden_size"], raw.get("max_position_embeddings", 8192)
    norm = NormConfig(NormKind.LAYER, raw.get("norm_eps", 1e-5), bias=bool(raw.get("norm_bias", False)))
    for unused in _WITHOUT_EFFECT:
        raw.get(unused)
    encoder = StackConfig(_layers(raw, norm), size, causal=False, embed_norm=norm, final_norm=norm)
    embedding, act = EmbeddingConfig(raw["vocab_size"], size), activation(raw, "classifier_activation", "gelu")
    bias = bool(raw.get("classifier_bias", False))
    masked = masked_head(raw, names, embedding, act, norm, dense_bias=bias)
    return ModelConfig(
        model_type="modernbert",
        embedding=embedding,
        encoder=encoder,
        masked_head=masked and replace(masked, bias=bool(raw.get("decoder_bias", True))),
        classifier=_classifier(raw, names, norm),
        max_positions=longest,
        pad_token_id=raw.get("pad_token_id", 50283),
    )


def _layers(raw: Settings, norm: NormConfig) -> tuple[LayerConfig, ...]:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim, bias = split_width(size, heads), bool(raw.get("attention_bias", False))
    ropes = _ropes(raw.otherwise(max_position_embeddings=8192))
    full = AttentionConfig(heads, heads, dim, dim**-0.5, bias, bias, rotary(ropes["full_attention"], dim))
    reach = raw.get("local_attention", 128) // 2  # tokens on each side
    window = replace(full, window=reach + 1, position=rotary(ropes["sliding_attention"], dim))
    inner, act = raw["intermediate_size"], activation(raw, "hidden_activation", "gelu")
    mlp = MLPConfig(inner, act, gated=True, bias=bool(raw.get("mlp_bias", False)))
    layer = LayerConfig(full, mlp, (Norms(pre=norm),) * 2)
    kinds = {"full_attention": layer, "sliding_attention": replace(layer, mixer=window)}
    count = len(repeat(layer, raw["num_hidden_layers"]))
    first, *rest = layers_by_type(raw, kinds, count, raw.get("global_attn_every_n_layers", _PERIOD), first=0)
    return replace(first, norms=(Norms(), Norms(pre=norm))), *rest


def _ropes(raw: Settings) -> dict[str, Settings]:
    """Return the settings of each type of layer; old files have two bases, and scale both types."""
    base = number(raw, "global_rope_theta", 160_000.0)
    local = number(raw, "local_rope_theta", base if "local_rope_theta" in raw else 10_000.0)
    return settings_by_type(
        raw,
        {
            "full_attention": raw.but(rope_theta=base),
            "sliding_attention": raw.but(rope_theta=local),
        },
    )


def _classifier(raw: Settings, names: Collection[str] | None, norm: NormConfig) -> ClassifierConfig | None:
    head = classifier(raw, names)
    act = activation(raw, "classifier_activation", "gelu")
    bias = bool(raw.get("classifier_bias", False))
    if head is None:
        raw.get("classifier_pooling")
        return None
    head = replace(head, dense=act, dense_bias=bias, norm=norm)
    return pooled_by(head, raw, _POOLING, "cls")


_NAMES = StoredNames(
    tokens="embeddings.tok_embeddings",
    embed_norm="embeddings.norm",
    layer="layers.{}",
    attention=("attn.Wqkv", "attn.Wo"),
    norms=("attn_norm", "mlp_norm"),
    mlp=("mlp.Wi", "mlp.Wo"),
    final_norm="final_norm",
)
_EURO_POOLING = {"bos": ClassifierInput.FIRST, "mean": ClassifierInput.MEAN, "late": ClassifierInput.ALL}


def eurobert(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    for unused in ("bos_token", "eos_token", "pad_token", "mask_token"):  # their ids are what counts
        raw.get(unused)
    base = as_encoder(llama.config(raw.otherwise(max_position_embeddings=8192, rms_norm_eps=1e-5), names))
    raw = raw.otherwise(classifier_pooling=raw.get("clf_pooling", "late"))
    raw.get("classifier_pooling")
    untied = raw.otherwise(tie_word_embeddings=False)
    return replace(
        base,
        classifier=base.classifier and pooled_by(base.classifier, raw, _EURO_POOLING, "late"),
        masked_head=masked_head(untied, names, base.embedding, None, None),
    )


_DROPPED = ("head.*", "decoder.*")
FAMILIES = {
    "modernbert": Family(
        modernbert, _NAMES.rules, "model.", _DROPPED, tables=(f"{_NAMES.tokens}.weight",), **tied_names("modernbert")
    ),
    "eurobert": Family(eurobert, encoder_rules(llama.rules), "model.", llama.DROPPED),
}
