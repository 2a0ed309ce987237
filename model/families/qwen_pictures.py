"""The pictures of Qwen3.5: a tower over patches of any number, with positions of rows and columns.

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
from triptych.model.families.table.helpers import activation, affine, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import LinearRule, Rule, TensorRule
from triptych.model.families.table.stored_names import StoredNames
from triptych.model.families.table.text_part import PictureTable

_EPS = 1e-6
_SECTIONS = (11, 11, 10)


def qwen3_5(raw: Settings, text: ModelConfig) -> ModelConfig:
    vision = raw.part("vision_config", raw.get("vision_config") or {}, f"{raw['model_type']}_vision")
    vision = vision.otherwise(**vision.class_defaults())
    if vision.get("deepstack_visual_indexes"):
        raise ConfigError("vision_config.deepstack_visual_indexes: outputs of several layers are not served here")
    size, width = vision["hidden_size"], vision["out_hidden_size"]
    assert text.decoder is not None
    if width != text.decoder.hidden_size:
        found = f"{width}, and text_config.hidden_size is {text.decoder.hidden_size}"
        raise ConfigError(f"vision_config.out_hidden_size must be text_config.hidden_size; it is {found}")
    merge, norm = vision["spatial_merge_size"], NormConfig(NormKind.LAYER, _EPS)
    pictures = PicturesConfig(
        token_id=raw["image_token_id"],
        patches=PatchConfig(
            size=_side(vision, "patch_size"),
            merge=merge,
            channels=vision["in_channels"],
            frames=_side(vision, "temporal_patch_size"),
            grid=isqrt(vision["num_position_embeddings"]),
        ),
        tower=StackConfig(repeat(_layer(vision, norm), vision["depth"]), size, causal=False),
        merger=MergerConfig(norm, Activation.GELU, size * merge**2),
    )
    vision.refuse_unread()
    return replace(text, pictures=pictures, decoder=_by_coordinates(raw, text.decoder))


def _layer(vision: Settings, norm: NormConfig) -> LayerConfig:
    size, heads = vision["hidden_size"], vision["num_heads"]
    dim = split_width(size, heads)
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial":
        raise ConfigError(f"vision_config.rope_parameters.rope_type must be 'axial', found {shown(rope['rope_type'])}")
    if dim % 4:
        raise ConfigError(f"vision_config: heads of {dim} dimensions do not turn by rows and columns")
    rotary = RotaryConfig(dim, rope.get("rope_theta", 10_000.0), sections=(dim // 4,) * 2, frequencies_again=True)
    return LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True, position=rotary),
        feed_forward=MLPConfig(vision["intermediate_size"], activation(vision, "hidden_act", "gelu_pytorch_tanh")),
        norms=(Norms(pre=norm),) * 2,
    )


def _by_coordinates(raw: Settings, decoder: StackConfig) -> StackConfig:
    """Let the pairs of the decoder's dimensions turn by time, row and column in turn."""
    text = raw["text_config"]
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
        position = replace(position, sections=tuple(sections), in_turn=True)
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


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.pictures is not None
    patches, size = config.pictures.patches, config.pictures.tower.hidden_size
    shape = (size, patches.channels, patches.frames, patches.size, patches.size)
    yield TensorRule("visual.patch_embed.proj.weight", "pictures.project.weight", shape=shape)
    yield TensorRule("visual.patch_embed.proj.bias", "pictures.project.bias")
    yield TensorRule("visual.pos_embed.weight", "pictures.table")
    for index, layer in enumerate(config.pictures.tower.layers):
        yield from _NAMES.layer_rules(layer, _NAMES.layer.format(index), f"tower.layers.{index}")
    yield from affine("visual.merger.norm", "pictures.merger.norm")
    yield LinearRule("visual.merger.linear_fc1", "pictures.merger.inner")
    yield LinearRule("visual.merger.linear_fc2", "pictures.merger.out")


QWEN3_5 = PictureTable(qwen3_5, rules, mark="visual.patch_embed.proj.weight")
