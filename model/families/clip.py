"""CLIP and SigLIP: a stack for texts and one for images, whose vectors are compared (Radford et al. 2021).

CLIP's texts are read from left to right; the first end of a text counts, and an image's classifier token. SigLIP reads
both ways, fills texts up, and pools images by attention (Zhai et al. 2023). SigLIP 2 of fixed sizes is the same type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from math import isqrt
from typing import Any

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import EmbeddingConfig, ImageConfig, JointConfig, ModelConfig, ProbeConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.table.helpers import activation, affine, repeat, split_width
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule
from triptych.model.families.table.stored_names import StoredNames

_FORMER_END = 2  # what CLIP's older files say of the end of a text: it is the largest id there
_OF_TRAINING = ("logit_scale_init_value", "initializer_factor", "projection_dim")


def clip(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    text, vision = (_part(raw, side) for side in ("text", "vision"))
    size = raw.get("projection_dim", 512)
    end = text.get("eos_token_id", 49407)
    vocabulary = text.get("vocab_size", 49408)
    joint = JointConfig(size, exclusive=True, end_id=vocabulary - 1 if end == _FORMER_END else end)
    return _model(raw, text, vision, joint, vocabulary, causal=True)


def siglip(raw: Settings, names: Collection[str] | None, *, any_shape: bool = False) -> ModelConfig:
    text, vision = (_part(raw, side) for side in ("text", "vision"))
    width = vision["hidden_size"]
    size = text.get("projection_size") or text["hidden_size"]
    if not vision.get("vision_use_head", True):
        raise ConfigError("vision_config.vision_use_head = false: images without a head have no vectors like texts'")
    if size != width:
        raise ConfigError(f"vectors of texts have text_config.projection_size = {size} numbers, of images {width}")
    layer = vision_layer(vision, "gelu_pytorch_tanh", 1e-6)
    norm = layer.norms[0].pre
    assert norm is not None
    probe = ProbeConfig(layer.attention, layer.mlp, norm)
    joint = JointConfig(size, exclusive=False, text_bias=True, projects_images=False, probe=probe, padded=True)
    return _model(raw, text, vision, joint, text.get("vocab_size", 32000), causal=False, any_shape=any_shape)


def siglip2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build SigLIP 2 with images of any proportions, whose positions are stretched (Tschannen et al. 2025: NaFlex)."""
    return siglip(raw, names, any_shape=True)


def _part(raw: Settings, side: str) -> Settings:
    """Return the settings of one side, with the defaults of its class."""
    key = f"{side}_config"
    given, over = raw.get(key) or {}, raw.get(f"{key}_dict") or {}  # the second wins in older files
    if not isinstance(given, dict) or not isinstance(over, dict):
        raise ConfigError(f"config.json: {key} must be an object, found {shown(given)}")
    part = raw.part(key, {**given, **over}, f"{raw['model_type']}_{side}_model")
    for name in _OF_TRAINING:
        raw.get(name)
        part.get(name)
    return part.otherwise(**part.class_defaults())


def vision_layer(raw: Settings, act: str, eps: float) -> LayerConfig:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = split_width(size, heads)
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", eps))
    return LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=True, out_bias=True),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", act)),
        norms=(Norms(pre=norm),) * 2,
    )


def _model(
    raw: Settings,
    text: Settings,
    vision: Settings,
    joint: JointConfig,
    vocabulary: int,
    *,
    causal: bool,
    any_shape: bool = False,
) -> ModelConfig:
    act, eps = ("quick_gelu", 1e-5) if joint.exclusive else ("gelu_pytorch_tanh", 1e-6)
    patch = vision_side(vision, "patch_size", 32 if joint.exclusive else 16)
    count = vision["num_patches"] if any_shape else None
    grid = None if count is None else isqrt(count)
    image = ImageConfig(
        vision_side(vision, "image_size", 224) if grid is None else grid * patch,
        patch,
        vision.get("num_channels", 3),
        grid=grid,
        antialias=any_shape,
        most_patches=count,
        class_token=joint.probe is None,
        bias=joint.probe is not None,
    )
    if grid is not None and grid**2 != count:
        raise ConfigError(f"vision_config.num_patches must be those of a square, found {count}")
    longest = text.get("max_position_embeddings", 77 if causal else 64)
    texts = _stack(text, vision_layer(text, act, eps), longest, causal=causal)
    images = _stack(vision, vision_layer(vision, act, eps), image.num_tokens, embed_norm=joint.probe is None)
    if any_shape:
        images = replace(images, position=PositionConfig())
    for part in (text, vision):
        part.get("projection_size")
        part.refuse_unread()
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(vocabulary, texts.hidden_size),
        encoder=None if causal else texts,
        decoder=texts if causal else None,
        image=image,
        vision=images,
        joint=joint,
        max_positions=longest,
        bos_token_id=text.get("bos_token_id"),
        pad_token_id=text.get("pad_token_id", 1),
    )


def _stack(
    raw: Settings, layer: LayerConfig, positions: int, *, causal: bool = False, embed_norm: bool = False
) -> StackConfig:
    norm = layer.norms[0].pre
    return StackConfig(
        layers=repeat(layer, raw["num_hidden_layers"]),
        hidden_size=raw["hidden_size"],
        causal=causal,
        position=PositionConfig(PositionKind.LEARNED, max_positions=positions),
        embed_norm=norm if embed_norm else None,
        final_norm=norm,
    )


def vision_side(raw: Settings, key: str, default: int) -> int:
    """Return the side of a square."""
    value: Any = raw.get(key, default)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"vision_config.{key} must be a number of pixels of a square, found {shown(value)}")
    return value


_NAMES = StoredNames(
    layer="encoder.layers.{}",
    attention=tuple(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")),
    norms=("layer_norm1", "layer_norm2"),
    mlp=("mlp.fc1", "mlp.fc2"),
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.image is not None and config.vision is not None and config.joint is not None
    text, vision = "text_model", "vision_model"
    reads = "encoder" if config.decoder is None else "decoder"
    yield TensorRule(f"{text}.embeddings.token_embedding.weight", "tokens.weight")
    for here, there, stack in ((text, reads, config.text_stack), (vision, "vision", config.vision)):
        added = stack.position.kind is PositionKind.LEARNED
        positions = f"{there}.positions.weight" if added else "patches.positions"
        yield TensorRule(f"{here}.embeddings.position_embedding.weight", positions)
        for index, layer in enumerate(stack.layers):
            yield from _NAMES.layer_rules(layer, f"{here}.{_NAMES.layer.format(index)}", f"{there}.layers.{index}")
    yield from affine(f"{text}.final_layer_norm", f"{reads}.final_norm")
    yield from affine(f"{vision}.post_layernorm", "vision.final_norm")
    patches, image, size = f"{vision}.embeddings.patch_embedding", config.image, config.vision.hidden_size
    shape = None if image.most_patches is not None else (size, image.channels, image.patch, image.patch)
    yield TensorRule(f"{patches}.weight", "patches.project.weight", shape=shape)
    scalar = () if config.joint.exclusive else (1,)
    yield TensorRule("logit_scale", "joint.scale", shape=scalar)
    if config.joint.probe is None:
        yield TensorRule(f"{vision}.embeddings.class_embedding", "patches.first")
        yield from affine(f"{vision}.pre_layrnorm", "vision.embed_norm")
        yield LinearRule("text_projection", "joint.text", bias=False)
        yield LinearRule("visual_projection", "joint.image", bias=False)
        return
    yield TensorRule(f"{patches}.bias", "patches.project.bias")
    yield LinearRule(f"{text}.head", "joint.text")
    yield TensorRule("logit_bias", "joint.bias")
    head = f"{vision}.head"
    yield TensorRule(f"{head}.probe", "joint.probe.query", shape=(1, 1, size))
    for kind, whole in (("weight", (3 * size, size)), ("bias", (3 * size,))):
        stored = f"{head}.attention.in_proj_{kind}"
        yield TensorRule(stored, f"joint.probe.q.{kind}", part=(0, size), shape=whole)
        yield TensorRule(stored, f"joint.probe.kv.{kind}", part=(size, 3 * size), shape=whole)
    yield LinearRule(f"{head}.attention.out_proj", "joint.probe.out")
    yield from affine(f"{head}.layernorm", "joint.probe.norm")
    yield LinearRule(f"{head}.mlp.fc1", "joint.probe.up")
    yield LinearRule(f"{head}.mlp.fc2", "joint.probe.down")


_FAMILY = Family(
    clip,
    rules,
    dropped=("*embeddings.position_ids",),
    tables=("text_model.embeddings.token_embedding.weight",),
)
_SIGLIP = replace(_FAMILY, config=siglip)
FAMILIES = {"clip": _FAMILY, "siglip": _SIGLIP, "siglip2": replace(_SIGLIP, config=siglip2)}
