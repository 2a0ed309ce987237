"""StableLM: Llama with LayerNorm, rotary positions on a quarter of each head, and maybe attention and MLP in parallel
after one norm and a norm for each head (Bellagente et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import NormConfig, NormKind, NormSpan
from triptych.model.config.layer import Norms
from triptych.model.config.model import ModelConfig
from triptych.model.families import llama
from triptych.model.families.table.decoders import either_way, with_attention, with_layers
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-5))
    raw = raw.otherwise(max_position_embeddings=4096, partial_rotary_factor=raw.get("rope_pct", 0.25))
    base = llama.config(raw, names, norm=norm, partial=True)
    base = with_attention(base, qkv_bias=bool(raw.get("use_qkv_bias", False)), out_bias=False)
    if raw.get("qk_layernorm", False):
        base = with_attention(base, qk_norm=replace(norm, bias=False), qk_norm_span=NormSpan.OWN_GAINS)
    if raw.get("use_parallel_residual", False):
        base = with_layers(base, parallel=True, one_norm=True, norms=(Norms(pre=norm), Norms()))
    return base


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    one_norm = config.decoder.layers[0].one_norm
    norms = {"input_layernorm": "attn_norms.pre"} | ({} if one_norm else {"post_attention_layernorm": "mlp_norms.pre"})
    yield from llama.rules(with_attention(config, qk_norm=None), norms=norms)
    for i, layer in enumerate(config.decoder.layers):
        attention = layer.attention
        for side, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads)) if attention.qk_norm else ():
            for head in range(heads):
                source = f"layers.{i}.self_attn.{side}_layernorm.norms.{head}.weight"
                target, rows = f"decoder.layers.{i}.attn.{side}_norm.weight", (head, head + 1)
                yield TensorRule(source, target, rows, shape=(attention.head_dim,))


FAMILIES = {"stablelm": either_way(Family(config, rules, "model.", llama.DROPPED))}
