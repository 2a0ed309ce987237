"""Qwen3-Next and Qwen3.5: three Gated DeltaNet layers to one of attention, whose outputs are gated.

Norms are stored as their distance from 1, as Gemma's are, but for that of the recurrent layers' outputs. Rotary
positions are of a quarter of each head. The layers that predict further tokens ahead (`mtp`) are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import gcd

from triptych.model.config.attention import AttentionConfig, GatedDeltaConfig, NormConfig, NormKind
from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama, qwen_moe
from triptych.model.families.table.helpers import fused, heads_norm, ignore_unless, layers_by_type, refuse_unless
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule

_PERIOD = 4  # every fourth layer has attention, where the types of layers are not listed


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, attn_output_gate=True, mamba_ssm_dtype="float32", hidden_act="silu")
    raw.get("mtp_num_hidden_layers"), raw.get("mtp_use_dedicated_embeddings")  # of layers that are dropped
    raw = raw.otherwise(head_dim=256, num_key_value_heads=4, max_position_embeddings=32_768, partial_rotary_factor=0.25)
    base = llama.config(raw, names, partial=True)
    norm = NormConfig(NormKind.RMS, raw.get("rms_norm_eps", 1e-6), unit_offset=True)
    full = replace(base.decoder_stack.layers[0], norms=(Norms(pre=norm),) * 2)
    full = replace(full, mixer=replace(full.attention, qk_norm=norm, output_gate=True))
    types = {"full_attention": full, "linear_attention": replace(full, mixer=_recurrence(raw, norm.eps))}
    count, period = base.decoder_stack.num_layers, raw.get("full_attention_interval", _PERIOD)
    kinds = raw.get("layer_types") or [_kind(index, period) for index in range(count)]
    layers = layers_by_type(raw.but(layer_types=kinds), types, count, period)
    return replace(base, decoder=replace(base.decoder_stack, layers=layers, final_norm=norm))


def _kind(index: int, period: int) -> str:
    return "linear_attention" if (index + 1) % period else "full_attention"


def _recurrence(raw: Settings, eps: float) -> GatedDeltaConfig:
    return GatedDeltaConfig(
        num_key_heads=raw.get("linear_num_key_heads", 16),
        num_value_heads=raw.get("linear_num_value_heads", 32),
        key_dim=raw.get("linear_key_head_dim", 128),
        value_dim=raw.get("linear_value_head_dim", 128),
        kernel=raw.get("linear_conv_kernel_dim", 4),
        eps=eps,
    )


def qwen3_next(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build Qwen3-Next, in which layers may have an MLP instead of experts."""
    raw = raw.otherwise(intermediate_size=5632, num_key_value_heads=2, num_experts=512, num_experts_per_tok=10)
    return _sparse(raw, config(raw, names))


# What Qwen3.5 with experts computes whatever a file says: its class knows none of these.
_FIXED: dict[str, object] = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def qwen3_5_moe(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build Qwen3.5 with experts in all layers, whose scores are always of the chosen ones alone."""
    ignore_unless(raw, **_FIXED)
    raw = raw.but(**_FIXED).otherwise(num_key_value_heads=2, num_experts=256, num_experts_per_tok=8)
    return _sparse(raw, config(raw.otherwise(intermediate_size=1), names))


def _sparse(raw: Settings, base: ModelConfig) -> ModelConfig:
    raw = raw.otherwise(moe_intermediate_size=512, shared_expert_intermediate_size=512, norm_topk_prob=True)
    shared = raw["shared_expert_intermediate_size"]
    return qwen_moe.sparse(raw, base, shared=shared) if raw["num_experts"] else base


def rules(config: ModelConfig, *, by_heads: bool = False) -> Iterator[Rule]:
    """Yield the weight rules; `by_heads`: a recurrent layer's inputs are stored by key heads (Qwen3-Next)."""
    yield from llama.NAMES.outside(config)
    for i, layer in enumerate(config.decoder_stack.layers):
        here, there = f"layers.{i}", f"decoder.layers.{i}"
        if isinstance(layer.mixer, AttentionConfig):
            yield from _attention(layer.mixer, f"{here}.self_attn", f"{there}.attn")
        else:
            yield from _recurrent(layer.mixer, f"{here}.linear_attn", f"{there}.delta", by_heads=by_heads)
        yield from llama.rest(config, i, experts=qwen_moe.NAMES)


def _attention(attention: AttentionConfig, here: str, there: str) -> Iterator[Rule]:
    """Yield the rules of q and its gate, which are stored head by head in one matrix, k, v, norms and the output."""
    end, bias = 2 * attention.query_size, attention.qkv_bias
    stored = Interleaved(attention.num_heads, (1, 1), (0, 1))
    yield LinearRule(f"{here}.q_proj", f"{there}.qkv", bias, rows=(0, end), interleaved=stored)
    for part in "kv":
        yield LinearRule(f"{here}.{part}_proj", f"{there}.qkv", bias, rows=(end, end + attention.kv_size))
        end += attention.kv_size
    yield LinearRule(f"{here}.o_proj", f"{there}.out", attention.out_bias)
    yield from heads_norm(attention, there, f"{here}.q_norm", f"{here}.k_norm")


def _recurrent(mixer: GatedDeltaConfig, here: str, there: str, *, by_heads: bool) -> Iterator[Rule]:
    if by_heads:
        groups, shared = mixer.num_key_heads, mixer.num_value_heads // mixer.num_key_heads
        unit = gcd(mixer.key_dim, mixer.value_dim)
        keys, values = mixer.key_dim // unit, shared * mixer.value_dim // unit
        stored = Interleaved(groups, (keys, keys, values, values), (0, 1, 2, 3))
        yield LinearRule(f"{here}.in_proj_qkvz", f"{there}.input", bias=False, interleaved=stored)
        stored = Interleaved(groups, (shared, shared), (0, 1))
        yield LinearRule(f"{here}.in_proj_ba", f"{there}.gates", bias=False, interleaved=stored)
    else:
        inputs = {f"{here}.in_proj_qkv": mixer.channels, f"{here}.in_proj_z": mixer.value_size}
        yield from fused(inputs, f"{there}.input", bias=False)
        gates = dict.fromkeys((f"{here}.in_proj_b", f"{here}.in_proj_a"), mixer.num_value_heads)
        yield from fused(gates, f"{there}.gates", bias=False)
    shape = (mixer.channels, 1, mixer.kernel)
    yield TensorRule(f"{here}.conv1d.weight", f"{there}.convolution", shape=shape)
    yield TensorRule(f"{here}.A_log", f"{there}.decay")
    yield TensorRule(f"{here}.dt_bias", f"{there}.dt_bias")
    yield TensorRule(f"{here}.norm.weight", f"{there}.norm.weight")
    yield LinearRule(f"{here}.out_proj", f"{there}.out", bias=False)


def _by_heads(config: ModelConfig) -> Iterator[Rule]:
    return rules(config, by_heads=True)


_DROPPED = (*llama.DROPPED, "mtp.*", "*visual.*")
FAMILIES = {
    "qwen3_next": Family(qwen3_next, _by_heads, "model.", _DROPPED, fused=qwen_moe.NAMES.fused()),
    "qwen3_5_text": Family(config, rules, "model.", _DROPPED),
    "qwen3_5_moe_text": Family(qwen3_5_moe, rules, "model.", _DROPPED, fused=qwen_moe.NAMES.fused()),
}
