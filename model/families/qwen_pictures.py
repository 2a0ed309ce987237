"""The pictures of Qwen: a tower over patches of any number, with positions of rows and columns.

Patches get a learned position, resampled to the picture, and queries and keys turn by row and column. Four patches
become one row of the decoder, whose positions count pictures' rows and columns too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.pictures import MergerConfig, PatchConfig, PicturesConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.table.helpers import activation, affine, axial_rotary, check_layers, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import LinearRule, Rule, TensorRule
from triptych.model.families.table.stored_names import StoredNames
from triptych.model.families.table.text_part import PictureTable

_EPS = 1e-6
_SECTIONS = (11, 11, 10)


def qwen3(raw: Settings, text: ModelConfig) -> ModelConfig:
    """Read Qwen3-VL's settings, or Qwen3.5's."""
    vision = _vision(raw, text)
    merge, size = vision["spatial_merge_size"], vision["hidden_size"]
    norm = NormConfig(NormKind.LAYER, _EPS)
    merger = MergerConfig(norm, Activation.GELU, size * merge**2)
    deep = vision.get("deepstack_visual_indexes") or []
    if not isinstance(deep, list) or not all(type(one) is int for one in deep) or deep != sorted(set(deep)):
        raise ConfigError(f"vision_config.deepstack_visual_indexes must be layers in their order, found {shown(deep)}")
    mlp = MLPConfig(vision["intermediate_size"], activation(vision, "hidden_act", "gelu_pytorch_tanh"))
    pictures = PicturesConfig(
        token_id=raw["image_token_id"],
        patches=replace(_patches(vision), grid=isqrt(vision["num_position_embeddings"])),
        tower=StackConfig(repeat(_layer(vision, norm, mlp), vision["depth"]), size, causal=False),
        merger=merger,
        deep=tuple(deep),
        deep_merger=replace(merger, norm_last=True) if deep else None,
    )
    vision.refuse_unread()
    return replace(text, pictures=pictures, decoder=_by_coordinates(raw, text.decoder_stack, in_turn=True))


def qwen2_5(raw: Settings, text: ModelConfig) -> ModelConfig:
    vision = _vision(raw, text)
    patches, norm = replace(_patches(vision), bias=False), NormConfig(NormKind.RMS, _EPS)
    size, count, window = vision["hidden_size"], vision["depth"], vision["window_size"]
    whole = vision["fullatt_block_indexes"]
    if not isinstance(whole, list) or type(window) is not int or window < patches.cell:
        found = f"{shown(window)} and {shown(whole)}"
        raise ConfigError(
            f"vision_config: window_size and fullatt_block_indexes must be pixels and layers, found {found}"
        )
    mlp = MLPConfig(vision["intermediate_size"], activation(vision, "hidden_act", "silu"), gated=True)
    layer = _layer(vision, norm, mlp)
    windowed = replace(layer, mixer=replace(layer.attention, windowed=True))
    check_layers(count)
    layers = tuple(layer if index in whole else windowed for index in range(count))
    vision.get("tokens_per_second")  # of films
    pictures = PicturesConfig(
        token_id=raw["image_token_id"],
        patches=patches,
        tower=StackConfig(layers, size, causal=False),
        merger=MergerConfig(norm, Activation.GELU, size * patches.merge**2),
        window=window // patches.cell if any(one is windowed for one in layers) else None,
    )
    vision.refuse_unread()
    return replace(text, pictures=pictures, decoder=_by_coordinates(raw, text.decoder_stack, in_turn=False))


def _vision(raw: Settings, text: ModelConfig) -> Settings:
    """Return the settings of the tower, with the defaults of its class."""
    vision = raw.part("vision_config", raw.get("vision_config") or {}, f"{raw['model_type']}_vision")
    vision = vision.otherwise(**vision.class_defaults())
    width = vision["out_hidden_size"]
    if width != text.decoder_stack.hidden_size:
        found = f"{width}, and text_config.hidden_size is {text.decoder_stack.hidden_size}"
        raise ConfigError(f"vision_config.out_hidden_size must be text_config.hidden_size; it is {found}")
    return vision


def _patches(vision: Settings) -> PatchConfig:
    return PatchConfig(
        size=_side(vision, "patch_size"),
        merge=vision["spatial_merge_size"],
        channels=vision["in_channels"],
        frames=_side(vision, "temporal_patch_size"),
    )


def _layer(vision: Settings, norm: NormConfig, mlp: MLPConfig) -> LayerConfig:
    size, heads = vision["hidden_size"], vision["num_heads"]
    dim = split_width(size, heads)
    rotary = axial_rotary(vision, dim, 10_000.0, kinds=("axial",))
    attention = AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True, position=rotary)
    return LayerConfig(mixer=attention, feed_forward=mlp, norms=(Norms(pre=norm),) * 2)


def _by_coordinates(raw: Settings, decoder: StackConfig, *, in_turn: bool) -> StackConfig:
    """Let the pairs of the decoder's dimensions turn by time, row and column, in turn or one after the other."""
    text = raw.get("text_config") or raw
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section", list(_SECTIONS))
    if (
        not isinstance(sections, list)
        or len(sections) != 3
        or not all(type(one) is int and one >= 0 for one in sections)
    ):
        raise ConfigError(f"text_config: mrope_section must be three numbers of pairs, found {shown(sections)}")

    def turned(layer: LayerConfig) -> LayerConfig:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig) or not isinstance(position := mixer.position, RotaryConfig):
            return layer
        position = replace(position, sections=tuple(sections), in_turn=in_turn)
        return replace(layer, mixer=replace(mixer, position=position))

    return decoder.with_layers(turned)


def _side(raw: Settings, key: str) -> int:
    value = raw[key]
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    if type(value) is not int or value < 1:
        raise ConfigError(f"vision_config.{key} must be one number for all sides, found {shown(value)}")
    return value


_NAMES = StoredNames(
    layer="visual.blocks.{}",
    attention=("attn.qkv", "attn.proj"),
    norms=("norm1", "norm2"),
    mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
)


_OF_QWEN2_5 = replace(_NAMES, mlp=tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down")))


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.pictures is not None
    patches, size = config.pictures.patches, config.pictures.tower.hidden_size
    shape = (size, patches.channels, patches.frames, patches.size, patches.size)
    yield TensorRule("visual.patch_embed.proj.weight", "pictures.project.weight", shape=shape)
    names = _OF_QWEN2_5 if patches.grid is None else _NAMES
    if patches.grid is not None:
        yield TensorRule("visual.patch_embed.proj.bias", "pictures.project.bias")
        yield TensorRule("visual.pos_embed.weight", "pictures.table")
    for index, layer in enumerate(config.pictures.tower.layers):
        yield from names.layer_rules(layer, names.layer.format(index), f"tower.layers.{index}")
    if patches.grid is None:
        yield TensorRule("visual.merger.ln_q.weight", "pictures.merger.norm.weight")
        yield LinearRule("visual.merger.mlp.0", "pictures.merger.inner")
        yield LinearRule("visual.merger.mlp.2", "pictures.merger.out")
        return
    mergers = {"merger": "merger"}
    mergers |= {f"deepstack_merger_list.{place}": f"deep.{place}" for place, _ in enumerate(config.pictures.deep)}
    for stored, merger in mergers.items():
        yield from affine(f"visual.{stored}.norm", f"pictures.{merger}.norm")
        yield LinearRule(f"visual.{stored}.linear_fc1", f"pictures.{merger}.inner")
        yield LinearRule(f"visual.{stored}.linear_fc2", f"pictures.{merger}.out")


QWEN3, QWEN2_5 = (PictureTable(config, rules, "visual.patch_embed.proj.weight") for config in (qwen3, qwen2_5))
