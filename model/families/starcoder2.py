"""StarCoder 2: rotary positions, LayerNorm, biases, an MLP without a gate, grouped queries (Lozhkov et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import NormConfig, NormKind
from triptych.model.config.layer import MLPConfig
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import either_way, with_attention, with_layers
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, refuse_unless, self_attention
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

# Of StarCoder's first files: how its softmax was computed, and what has other names now.
_OLDER = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "activation_function", "layer_norm_epsilon")


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    for unused in _OLDER:
        raw.get(unused)
    raw = raw.otherwise(max_position_embeddings=4096, num_key_value_heads=2)
    bias = bool(raw.get("use_bias", True))
    norm = NormConfig(NormKind.LAYER, raw.get("norm_epsilon", 1e-5))
    base = llama.config(raw.but(hidden_act="silu"), names, norm=norm)
    base = with_attention(base, qkv_bias=bias, out_bias=bias, window=raw.get("sliding_window"))
    mlp = MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu_pytorch_tanh"), bias=bias)
    return with_layers(base, feed_forward=mlp)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("embed_tokens.weight", "tokens.weight")
    for i, layer in enumerate(config.decoder.layers):
        here, there, bias = f"layers.{i}", f"decoder.layers.{i}", layer.mlp.bias
        names = (f"{here}.self_attn.{part}_proj" for part in "qkvo")
        yield from self_attention(layer.attention, f"{there}.attn", *names)
        yield from affine(f"{here}.input_layernorm", f"{there}.attn_norms.pre")
        yield from affine(f"{here}.post_attention_layernorm", f"{there}.mlp_norms.pre")
        yield LinearRule(f"{here}.mlp.c_fc", f"{there}.mlp.up", bias)
        yield LinearRule(f"{here}.mlp.c_proj", f"{there}.mlp.down", bias)
    yield from affine("norm", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


FAMILIES = {"starcoder2": either_way(Family(config, rules, "model.", llama.DROPPED))}
