"""T5: bucketed relative bias shared by a stack's layers, RMS pre-norm, no scaling of scores (Raffel et al. 2020).

mT5, ByT5 and Flan-T5 are T5 with a gated MLP and a head of their own; umT5 has a bias table in every layer. Folders of
T5EncoderModel have no decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, BucketBiasConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, HeadConfig, ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.families.table.helpers import (
    activation,
    affine,
    cross_attention,
    fused,
    ids,
    refuse_unless,
    repeat,
    self_attention,
    tied,
)
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def _stack(raw: Settings, side: str) -> StackConfig:
    decoder = side == "decoder"
    heads = raw["num_heads"]
    projection = raw.get("feed_forward_proj", "relu" if raw["model_type"] == "t5" else "gated-gelu")
    gated = projection.startswith("gated-")
    name = projection.removeprefix("gated-")
    if gated and name == "gelu":
        name = "gelu_new"  # gated-gelu is the tanh approximation
    act = activation({"feed_forward_proj": name}, "feed_forward_proj", "relu")
    refuse_unless(raw, dense_act_fn=name, is_gated_act=gated)  # derived settings that are stored too
    for unused in ("n_positions", "scalable_attention"):
        raw.get(unused)  # of training: buckets do not bound positions, and `transformers` has one kind of attention
    buckets = BucketBiasConfig(
        num_buckets=raw.get("relative_attention_num_buckets", 32),
        max_distance=raw.get("relative_attention_max_distance", 128),
        shared=raw["model_type"] != "umt5",
    )
    attention = AttentionConfig(heads, heads, raw["d_kv"], scale=1.0)
    norm = NormConfig(NormKind.RMS, raw.get("layer_norm_epsilon", 1e-6))
    layer = LayerConfig(
        mixer=replace(attention, position=buckets),
        cross=attention if decoder else None,
        feed_forward=MLPConfig(raw["d_ff"], act, gated=gated, bias=False),
        norms=(Norms(pre=norm),) * (3 if decoder else 2),
    )
    layers = (raw.get("num_decoder_layers") if decoder else None) or raw["num_layers"]
    return StackConfig(repeat(layer, layers), raw["d_model"], causal=decoder, final_norm=norm)


def _is_encoder(raw: Settings, names: Collection[str] | None) -> bool:
    """Return whether the architecture is the encoder alone, and no decoder is stored either."""
    is_named = any(str(name).endswith("EncoderModel") for name in raw.get("architectures") or ())
    return is_named and not any(name.startswith("decoder.") for name in names or ())


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size = raw["d_model"]
    raw.get("is_decoder")  # of both stacks by themselves
    if _is_encoder(raw, names):
        return _encoder_config(raw)
    is_tied = tied(raw, names)
    # Models with an untied head, and mT5 always, are trained without scaling. `transformers` 5.x scales umT5, unlike
    # earlier versions and the original code.
    tied_by_setting = raw.get("tie_word_embeddings", True) is not False
    scaled = raw.get("scale_decoder_outputs", tied_by_setting and raw["model_type"] != "mt5")
    start = raw.get("decoder_start_token_id")
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(raw["vocab_size"], size),
        encoder=_stack(raw, "encoder"),
        decoder=_stack(raw, "decoder"),
        head=HeadConfig(tied=is_tied, scale=size**-0.5 if scaled else 1.0),
        eos_token_ids=ids(raw.get("eos_token_id", 1)),
        pad_token_id=raw.get("pad_token_id", 0),
        decoder_start_token_id=raw.get("pad_token_id", 0) if start is None else start,
        float16_overflows=True,  # `transformers` keeps `wo` in float32 and clamps what follows
    )


def _encoder_config(raw: Settings) -> ModelConfig:
    """The encoder alone, as GTR, Sentence-T5 and encoders of images have it."""
    for unused in ("num_decoder_layers", "scale_decoder_outputs"):
        raw.get(unused)
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(raw["vocab_size"], raw["d_model"]),
        encoder=_stack(raw, "encoder"),
        eos_token_ids=ids(raw.get("eos_token_id", 1)),
        pad_token_id=raw.get("pad_token_id", 0),
        float16_overflows=True,
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield TensorRule("shared.weight", "tokens.weight")
    for side, stack in config.stacks.items():
        yield TensorRule(f"{side}.embed_tokens.weight", "tokens.weight", duplicate=True)
        for i, layer in enumerate(stack.layers):
            here, there = f"{side}.block.{i}.layer", f"{side}.layers.{i}"
            if stack.shared_bias is None or i == 0:
                table = f"{there}.bias.weight" if stack.shared_bias is None else f"{side}.bias.weight"
                yield TensorRule(f"{here}.0.SelfAttention.relative_attention_bias.weight", table)
            names = (f"{here}.0.SelfAttention.{part}" for part in "qkvo")
            yield from self_attention(layer.attention, f"{there}.attn", *names)
            yield from affine(f"{here}.0.layer_norm", f"{there}.attn_norms.pre", bias=False)
            if layer.cross is not None:
                names = (f"{here}.1.EncDecAttention.{part}" for part in "qkvo")
                yield from cross_attention(layer.cross, f"{there}.cross", *names)
                yield from affine(f"{here}.1.layer_norm", f"{there}.cross_norms.pre", bias=False)
            yield from _mlp(layer.mlp, f"{here}.{1 if layer.cross is None else 2}", there)
        yield TensorRule(f"{side}.final_layer_norm.weight", f"{side}.final_norm.weight")
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


def _mlp(mlp: MLPConfig, here: str, there: str) -> Iterator[Rule]:
    dense = f"{here}.DenseReluDense"
    inner = ("wi_0", "wi_1") if mlp.gated else ("wi",)
    sizes = {f"{dense}.{name}": mlp.intermediate_size for name in inner}
    yield from fused(sizes, f"{there}.mlp.up", bias=False)
    yield LinearRule(f"{dense}.wo", f"{there}.mlp.down", bias=False)
    yield from affine(f"{here}.layer_norm", f"{there}.mlp_norms.pre", bias=False)


# Early checkpoints contain a bias table for cross attention, which T5 does not use.
_FAMILY = Family(
    config,
    rules,
    dropped=("decoder.block.*.layer.1.EncDecAttention.relative_attention_bias.weight",),
    tables=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
FAMILIES = {"t5": _FAMILY, "mt5": _FAMILY, "umt5": _FAMILY}
