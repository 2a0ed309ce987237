"""GPT-2: learned positions, LayerNorm pre-norm, a tanh GELU, matrices stored transposed (Radford et al. 2019).

StarCoder 1 and SantaCoder (`gpt_bigcode`, Li et al. 2023) have one head of keys and values, and matrices that are not
transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families.table.decoders import decoder_model, with_attention
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, ignore_unless, refuse_unless, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, scale_attn_by_inverse_layer_idx=False)
    ignore_unless(raw, add_cross_attention=False)  # which a source that it does not have would pass through
    raw.get("reorder_and_upcast_attn")  # how scores are rounded in float16
    size, heads = raw["n_embd"], raw["n_head"]
    dim = split_width(size, heads)
    scale = dim**-0.5 if raw.get("scale_attn_weights", True) else 1.0
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, scale, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw.get("n_inner") or 4 * size, activation(raw, "activation_function", "gelu_new")),
        norms=(Norms(pre=norm),) * 2,
    )
    decoder = StackConfig(
        layers=repeat(layer, raw["n_layer"]),
        hidden_size=size,
        causal=True,
        position=PositionConfig(PositionKind.LEARNED, max_positions=raw["n_positions"]),
        final_norm=norm,
    )
    return decoder_model(raw, names, decoder, raw["n_positions"])


def bigcode(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    for unused in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"):
        raw.get(unused)  # of float16; what `multi_query` says
    base = config(raw.otherwise(activation_function="gelu_pytorch_tanh"), names)
    return with_attention(base, num_kv_heads=1) if raw.get("multi_query", True) else base


def bigcode_rules(config: ModelConfig) -> Iterator[Rule]:
    """Yield GPT-2's rules without transposing; with as many keys as queries q, k and v are stored head by head."""
    assert config.decoder is not None
    attention = config.decoder.layers[0].attention
    stored = Interleaved(attention.num_heads) if attention.num_kv_heads == attention.num_heads > 1 else None
    for rule in rules(config):
        if isinstance(rule, LinearRule):
            qkv = rule.target.endswith(".qkv")
            yield replace(rule, transpose=False, interleaved=stored if qkv else None)
        else:
            yield rule


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("wte.weight", "tokens.weight")
    yield TensorRule("wpe.weight", "decoder.positions.weight")
    for i in range(config.decoder.num_layers):
        here, there = f"h.{i}", f"decoder.layers.{i}"
        yield from affine(f"{here}.ln_1", f"{there}.attn_norms.pre")
        yield LinearRule(f"{here}.attn.c_attn", f"{there}.attn.qkv", transpose=True)
        yield LinearRule(f"{here}.attn.c_proj", f"{there}.attn.out", transpose=True)
        yield from affine(f"{here}.ln_2", f"{there}.mlp_norms.pre")
        yield LinearRule(f"{here}.mlp.c_fc", f"{there}.mlp.up", transpose=True)
        yield LinearRule(f"{here}.mlp.c_proj", f"{there}.mlp.down", transpose=True)
    yield from affine("ln_f", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


# Old checkpoints contain the causal mask as tensors.
_DROPPED = ("h.*.attn.bias", "h.*.attn.masked_bias")
FAMILIES = {
    "gpt2": Family(config, rules, "transformer.", _DROPPED, tables=("wte.weight",)),
    "gpt_bigcode": Family(bigcode, bigcode_rules, "transformer.", _DROPPED, tables=("wte.weight",)),
}
