"""The towers that read pictures for LLaVA, Gemma 3, Mistral 3 and Idefics 3: those of CLIP, SigLIP and Pixtral.

Each is a stack of layers over patches. What makes rows of the language model from its outputs differs: two products
(LLaVA), a mean and one product (Gemma 3), blocks of patches (Mistral 3, Idefics 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.pictures import GridPositions, MergerConfig, PatchConfig, PicturesConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.clip import vision_layer, vision_side
from triptych.model.families.table.helpers import activation, affine, axial_rotary, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import LinearRule, Rule, TensorRule
from triptych.model.families.table.stored_names import StoredNames
from triptych.model.families.table.text_part import PictureTable

_CLIP, _SIGLIP, _PIXTRAL = "clip_vision_model", "siglip_vision_model", "pixtral"
_NOT_COMPUTED = ("projection_dim", "vision_use_head", "num_image_tokens", "vocab_size", "size", "use_base_siglip")
# The towers of folders that say nothing of theirs.
_USUAL = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14)
_OF_LLAVA = dict(_USUAL, image_size=336)
_OF_MISTRAL = dict(_USUAL, image_size=1540, head_dim=64, hidden_act="gelu")


def llava(raw: Settings, text: ModelConfig) -> ModelConfig:
    raw = raw.otherwise(**raw.class_defaults())
    vision = _vision(raw, _CLIP, _OF_LLAVA)
    kind, strategy = vision.get("model_type"), raw.get("vision_feature_select_strategy", "default")
    if strategy != ("default" if kind == _CLIP else "full"):
        raise ConfigError(f"vision_feature_select_strategy = {shown(strategy)} is not served for a {kind}")
    return _with_pictures(raw, text, vision, _tower(raw, vision), _two_products(raw, text))


def mistral3(raw: Settings, text: ModelConfig) -> ModelConfig:
    raw = raw.otherwise(**raw.class_defaults())
    vision = _vision(raw, _PIXTRAL, _OF_MISTRAL)
    patches, tower = _tower(raw, vision)
    norm = text.decoder_stack.final_norm
    assert norm is not None
    merger = replace(_two_products(raw, text), norm=NormConfig(NormKind.RMS, norm.eps), folds=True)
    patches = replace(patches, merge=raw["spatial_merge_size"])
    return _with_pictures(raw, text, vision, (patches, tower), merger)


def gemma3(raw: Settings, text: ModelConfig) -> ModelConfig:
    raw = raw.otherwise(**raw.class_defaults())
    vision = _vision(raw, _SIGLIP)
    patches, tower = _tower(raw, vision, whole=True)
    assert patches.grid is not None
    side = isqrt(raw["mm_tokens_per_image"])
    if side < 1 or patches.grid % side or side**2 != raw["mm_tokens_per_image"]:
        raise ConfigError(
            f"mm_tokens_per_image = {raw['mm_tokens_per_image']} divides no square of {patches.grid} patches a side"
        )
    norm = NormConfig(NormKind.RMS, vision["layer_norm_eps"], unit_offset=True)
    merger = MergerConfig(norm, mean=True, norm_last=True, bias=False)
    patches = replace(patches, merge=patches.grid // side)
    return _with_pictures(raw, text, vision, (patches, tower), merger, both_ways=True)


def idefics3(raw: Settings, text: ModelConfig) -> ModelConfig:
    raw = raw.otherwise(**raw.class_defaults())
    vision = _vision(raw, f"{raw['model_type']}_vision")
    patches, tower = _tower(raw, vision, whole=True)
    patches = replace(patches, merge=raw["scale_factor"], positions=GridPositions.NEAREST)
    return _with_pictures(raw, text, vision, (patches, tower), MergerConfig(None, bias=False))


def _vision(raw: Settings, kind: str, usual: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of the tower, with the defaults of its class; `usual` ones where there are none."""
    vision = raw.part("vision_config", raw.get("vision_config") or usual or {}, kind)
    vision = vision.otherwise(model_type=kind, **vision.class_defaults())
    for key in _NOT_COMPUTED:
        vision.get(key)
    return vision


def _tower(raw: Settings, vision: Settings, *, whole: bool = False) -> tuple[PatchConfig, StackConfig]:
    """Return the patches and the layers up to the one that is read; the `whole` tower has its last norm too."""
    count = vision["num_hidden_layers"]
    layer = count if whole else raw.get("vision_feature_layer", -2)  # counted from the embeddings on
    if type(layer) is not int or not 0 < (layers := layer if layer >= 0 else count + 1 + layer) <= count:
        raise ConfigError(f"vision_feature_layer must be the number of one of {count} layers, found {shown(layer)}")
    kind, size, patch = vision["model_type"], vision["hidden_size"], vision_side(vision, "patch_size", 16)
    if kind == _PIXTRAL:
        vision_side(vision, "image_size", 1024)
        norm = NormConfig(NormKind.RMS, 1e-5)
        patches = PatchConfig(patch, channels=vision["num_channels"], bias=False)
        return patches, StackConfig(repeat(_pixtral_layer(vision, norm), layers), size, causal=False, embed_norm=norm)
    side = vision_side(vision, "image_size", 224) // patch
    block = vision_layer(vision, "gelu_pytorch_tanh", 1e-6)
    before = block.norms[0].pre
    patches = PatchConfig(
        patch,
        channels=vision["num_channels"],
        bias=kind != _CLIP,
        grid=side,
        positions=GridPositions.FIXED,
        first=kind == _CLIP,
    )
    stack = StackConfig(repeat(block, layers), size, causal=False)
    if kind == _CLIP:
        return patches, replace(stack, embed_norm=before)
    if kind not in (_SIGLIP, "idefics3_vision", "smolvlm_vision"):
        raise ConfigError(f"vision_config.model_type {shown(kind)} is not served")
    return patches, replace(stack, final_norm=before if whole else None)


def _pixtral_layer(vision: Settings, norm: NormConfig) -> LayerConfig:
    heads = vision["num_attention_heads"]
    dim = vision.get("head_dim") or split_width(vision["hidden_size"], heads)
    rotary = axial_rotary(vision, dim, vision.get("rope_theta", 10_000.0), in_turn=True)
    return LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, position=rotary),
        feed_forward=MLPConfig(
            vision["intermediate_size"], activation(vision, "hidden_act", "gelu"), gated=True, bias=False
        ),
        norms=(Norms(pre=norm),) * 2,
    )


def _two_products(raw: Settings, text: ModelConfig) -> MergerConfig:
    act = activation(raw, "projector_hidden_act", "gelu")
    return MergerConfig(None, act, text.decoder_stack.hidden_size, bias=raw.get("multimodal_projector_bias", True))


def _with_pictures(
    raw: Settings,
    text: ModelConfig,
    vision: Settings,
    tower: tuple[PatchConfig, StackConfig],
    merger: MergerConfig,
    *,
    both_ways: bool = False,
) -> ModelConfig:
    vision.refuse_unread()
    token = raw.get("image_token_id", raw.get("image_token_index"))  # by the class, one is another name of the other
    if type(token) is not int:
        raise ConfigError(f"image_token_id must be a token, found {shown(token)}")
    return replace(text, pictures=PicturesConfig(token, *tower, merger, both_ways))


# -- The tensors of each. `tokens` are patches, `types` the vector before them.

_OF_CLIP = StoredNames(
    layer="encoder.layers.{}",
    attention=tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")),
    norms=("layer_norm1", "layer_norm2"),
    mlp=("mlp.fc1", "mlp.fc2"),
    tokens="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    types="embeddings.class_embedding",
    embed_norm="pre_layrnorm",
    final_norm="post_layernorm",
)
_OF_PIXTRAL = StoredNames(
    layer="transformer.layers.{}",
    attention=tuple(f"attention.{part}_proj" for part in "qkvo"),
    norms=("attention_norm", "ffn_norm"),
    mlp=tuple(f"feed_forward.{part}_proj" for part in ("gate", "up", "down")),
    tokens="patch_conv",
    embed_norm="ln_pre",
)


def _tower_rules(config: ModelConfig, here: str) -> Iterator[Rule]:
    assert config.pictures is not None
    patches, tower = config.pictures.patches, config.pictures.tower
    names = _OF_PIXTRAL if patches.grid is None else _OF_CLIP
    shape = (tower.hidden_size, patches.channels, patches.size, patches.size)
    yield TensorRule(f"{here}.{names.tokens}.weight", "pictures.project.weight", shape=shape)
    if patches.bias:
        yield TensorRule(f"{here}.{names.tokens}.bias", "pictures.project.bias")
    if patches.grid is not None:
        yield TensorRule(f"{here}.{names.positions}", "pictures.table")
    if patches.first:
        yield TensorRule(f"{here}.{names.types}", "pictures.first")
    for norm, name, target in (
        (tower.embed_norm, names.embed_norm, "tower.embed_norm"),
        (tower.final_norm, names.final_norm, "tower.final_norm"),
    ):
        if norm is not None:
            yield from affine(f"{here}.{name}", target, bias=norm.kind is NormKind.LAYER)
    for index, layer in enumerate(tower.layers):
        stored = f"{here}.{names.layer.format(index)}"
        yield from names.layer_rules(layer, stored, f"tower.layers.{index}")


def _projector_rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.pictures is not None
    yield from _tower_rules(config, "vision_tower")
    merger, here = config.pictures.merger, "multi_modal_projector"
    if merger.mean:
        yield TensorRule(f"{here}.mm_input_projection_weight", "pictures.merger.out.weight", transpose=True)
        yield TensorRule(f"{here}.mm_soft_emb_norm.weight", "pictures.merger.norm.weight")
        return
    if merger.norm is not None:
        yield TensorRule(f"{here}.norm.weight", "pictures.merger.norm.weight")
        yield LinearRule(f"{here}.patch_merger.merging_layer", "pictures.merger.fold", bias=False)
    yield LinearRule(f"{here}.linear_1", "pictures.merger.inner", merger.bias)
    yield LinearRule(f"{here}.linear_2", "pictures.merger.out", merger.bias)


def _connector_rules(config: ModelConfig) -> Iterator[Rule]:
    yield from _tower_rules(config, "vision_model")
    yield LinearRule("connector.modality_projection.proj", "pictures.merger.out", bias=False)


def _table(config: Callable[[Settings, ModelConfig], ModelConfig], mark: str = "linear_1.weight") -> PictureTable:
    return PictureTable(config, _projector_rules, f"multi_modal_projector.{mark}")


LLAVA, MISTRAL3, GEMMA3 = _table(llava), _table(mistral3), _table(gemma3, "mm_input_projection_weight")
IDEFICS3 = PictureTable(idefics3, _connector_rules, "connector.modality_projection.proj.weight")
