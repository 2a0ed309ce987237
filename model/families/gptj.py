"""GPT-J and CodeGen: attention and MLP in parallel after one LayerNorm, rotary positions of neighbours on a part of
each head (Wang and Komatsuzaki 2021; Nijkamp et al. 2022)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.decoders import decoder_model
from triptych.model.families.table.heads import classifier_rules
from triptych.model.families.table.helpers import activation, affine, refuse_unless, repeat, self_attention, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, Interleaved, LinearRule, Rule, TensorRule

_CORES = 4  # CodeGen's q, v and k are stored for each of the 4 cores that it was trained on


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    refuse_unless(raw, rotary=True, scale_attn_weights=True)
    size, heads, positions = raw["n_embd"], raw["n_head"], raw.get("n_positions", 2048)
    dim, turning = split_width(size, heads), raw.get("rotary_dim", 64)
    if raw["model_type"] == "codegen" and heads % _CORES:
        raise ConfigError(f"heads of CodeGen come in fours, found {heads}")
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_epsilon", 1e-5))
    position = RotaryConfig(turning, interleaved=True)
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, position=position),
        feed_forward=MLPConfig(raw.get("n_inner") or 4 * size, activation(raw, "activation_function", "gelu_new")),
        norms=(Norms(pre=norm), Norms()),
        parallel=True,
        one_norm=True,
    )
    decoder = StackConfig(repeat(layer, raw["n_layer"]), size, causal=True, final_norm=norm)
    return decoder_model(raw.otherwise(tie_word_embeddings=False), names, decoder, positions, head_bias=True)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.decoder is not None
    yield TensorRule("wte.weight", "tokens.weight")
    for i, layer in enumerate(config.decoder.layers):
        attention = layer.attention
        here, there = f"h.{i}", f"decoder.layers.{i}"
        if config.model_type == "codegen":
            local = attention.num_heads // _CORES
            stored = Interleaved(_CORES, (local, local, local), order=(0, 2, 1))
            yield LinearRule(f"{here}.attn.qkv_proj", f"{there}.attn.qkv", bias=False, interleaved=stored)
            yield LinearRule(f"{here}.attn.out_proj", f"{there}.attn.out", bias=False)
        else:
            names = (f"{here}.attn.{part}_proj" for part in ("q", "k", "v", "out"))
            yield from self_attention(attention, f"{there}.attn", *names)
        yield from affine(f"{here}.ln_1", f"{there}.attn_norms.pre")
        yield LinearRule(f"{here}.mlp.fc_in", f"{there}.mlp.up")
        yield LinearRule(f"{here}.mlp.fc_out", f"{there}.mlp.down")
    yield from affine("ln_f", "decoder.final_norm")
    yield from classifier_rules(config)
    if config.head is not None and config.head.tied:
        yield TensorRule("lm_head.bias", "head.bias")
    elif config.head is not None:
        yield LinearRule("lm_head", "head")


# Old checkpoints contain the causal mask and the angles as tensors.
_DROPPED = ("h.*.attn.bias", "h.*.attn.masked_bias", "h.*.attn.embed_positions", "h.*.attn.causal_mask")
_FAMILY = Family(config, rules, "transformer.", _DROPPED, tables=("wte.weight",))
FAMILIES = {"gptj": _FAMILY, "codegen": _FAMILY}
