"""GPT-Neo: GPT-2 with a window in every second layer, scores that are not scaled, and no biases of q, k and v (Black et
al. 2021)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, check_layers, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule

_KINDS = ("global", "local")


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads, positions = raw["hidden_size"], raw["num_heads"], raw.get("max_position_embeddings", 2048)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    plain = LayerConfig(
        mixer=AttentionConfig(heads, heads, split_width(size, heads), 1.0, out_bias=True),
        feed_forward=MLPConfig(
            raw.get("intermediate_size") or 4 * size, activation(raw, "activation_function", "gelu_new")
        ),
        norms=(Norms(pre=norm),) * 2,
    )
    local = replace(plain, mixer=replace(plain.attention, window=raw.get("window_size", 256)))
    decoder = StackConfig(
        layers=tuple(plain if kind == _KINDS[0] else local for kind in _kinds(raw)),
        hidden_size=size,
        causal=True,
        position=PositionConfig(PositionKind.LEARNED, max_positions=positions),
        final_norm=norm,
    )
    return decoder_model(raw, names, decoder, positions)


def _kinds(raw: Settings) -> list[str]:
    """Return the kind of each layer, which `attention_types` has as lists to be repeated: `[[kinds, times], ...]`."""
    count, types = raw["num_layers"], raw.get("attention_types") or [[list(_KINDS), 12]]
    raw.get("attention_layers")  # the same, written out
    check_layers(count)
    listed = (kind for kinds, times in types for _ in range(min(times, count + 1)) for kind in kinds)
    found = list(islice(listed, count + 1))
    if len(found) != count or set(found) - set(_KINDS):
        raise ConfigError(f"attention_types must name {count} layers as global or local, found {str(types)[:200]}")
    return found


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("wte.weight", "tokens.weight")
    yield TensorRule("wpe.weight", "decoder.positions.weight")
    for i, layer in enumerate(config.decoder.layers):
        here, there = f"h.{i}", f"decoder.layers.{i}"
        sources = (f"{here}.attn.attention.{part}_proj" for part in ("q", "k", "v", "out"))
        yield from self_attention(layer.attention, f"{there}.attn", *sources)
        yield from affine(f"{here}.ln_1", f"{there}.attn_norms.pre")
        yield from affine(f"{here}.ln_2", f"{there}.mlp_norms.pre")
        yield LinearRule(f"{here}.mlp.c_fc", f"{there}.mlp.up")
        yield LinearRule(f"{here}.mlp.c_proj", f"{there}.mlp.down")
    yield from affine("ln_f", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and not config.head.tied:
        yield LinearRule("lm_head", "head", bias=False)


# Old checkpoints contain the causal mask as tensors.
_DROPPED = ("h.*.attn.attention.bias", "h.*.attn.attention.masked_bias")
FAMILIES = {"gpt_neo": Family(config, rules, "transformer.", _DROPPED, tables=("wte.weight",))}
