"""ViT: an image is a sequence of patches; LayerNorm pre-norm, learned positions (Dosovitskiy et al. 2021).

DeiT (Touvron et al. 2021) has a second learned token. DINOv2 (Oquab et al. 2023) scales the channels of what sublayers
add, and stretches its positions to the size of images.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import Activation, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ClassifierInput, EmbeddingConfig, ImageConfig, ModelConfig
from triptych.model.config.stack import PositionConfig, PositionKind, StackConfig
from triptych.model.families import bert
from triptych.model.families.table.heads import classifier, classifier_rules, has_pooler
from triptych.model.families.table.helpers import (
    activation,
    affine,
    ignore_unless,
    refuse_unless,
    repeat,
    split_width,
)
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Family, LinearRule, Rule, TensorRule


def config(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    size, heads = raw["hidden_size"], raw["num_attention_heads"]
    dim = split_width(size, heads)
    image = ImageConfig(raw.get("image_size", 224), raw.get("patch_size", 16), raw.get("num_channels", 3))
    norm = NormConfig(NormKind.LAYER, raw.get("layer_norm_eps", 1e-12))
    layer = LayerConfig(
        mixer=AttentionConfig(heads, heads, dim, dim**-0.5, qkv_bias=bool(raw.get("qkv_bias", True)), out_bias=True),
        feed_forward=MLPConfig(raw["intermediate_size"], activation(raw, "hidden_act", "gelu")),
        norms=(Norms(pre=norm),) * 2,
    )
    encoder = StackConfig(
        layers=repeat(layer, raw["num_hidden_layers"]),
        hidden_size=size,
        causal=False,
        position=PositionConfig(PositionKind.LEARNED, max_positions=image.num_tokens),
        final_norm=norm,
    )
    labels = classifier(raw, names)
    pooler = has_pooler(labels, names, "pooler.dense.weight")
    (refuse_unless if pooler else ignore_unless)(raw, pooler_act="tanh", pooler_output_size=size)
    return ModelConfig(
        model_type=raw["model_type"],
        embedding=EmbeddingConfig(0, size),
        encoder=encoder,
        image=image,
        classifier=labels,
        pooler=pooler,
        max_positions=image.num_tokens,
    )


def deit(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    """Build DeiT; trained with a teacher, it decides by both of its learned tokens."""
    base = config(raw, names)
    assert base.image is not None
    image = replace(base.image, distilled=True)
    position = replace(base.encoder_stack.position, max_positions=image.num_tokens)
    labels = base.classifier
    if ((raw.get("architectures") or [""])[0] or "").endswith("ForImageClassificationWithTeacher"):
        one = classifier(raw.but(architectures=["DeiTForImageClassification"]), None)
        labels = one and replace(one, input=ClassifierInput.FIRST_TWO)
    return replace(
        base,
        image=image,
        encoder=replace(base.encoder_stack, position=position),
        classifier=labels,
        pooler=base.pooler and labels is None,
        max_positions=image.num_tokens,
    )


# Keys of training, and of vectors for other networks.
_UNUSED = (
    *("layerscale_value", "drop_path_rate", "apply_layernorm", "reshape_hidden_states", "use_mask_token"),
    *("out_features", "out_indices", "stage_names", "num_register_tokens"),
)


def dinov2(raw: Settings, names: Collection[str] | None) -> ModelConfig:
    for unused in _UNUSED:
        raw.get(unused)
    size = raw["hidden_size"]
    inner, gated = int(size * raw.get("mlp_ratio", 4)), bool(raw.get("use_swiglu_ffn", False))
    has_registers = raw["model_type"] == "dinov2_with_registers"
    raw = raw.otherwise(intermediate_size=inner, patch_size=16 if has_registers else 14, layer_norm_eps=1e-6)
    base = config(raw, names)
    assert base.image is not None
    stack = base.encoder_stack
    layer = replace(stack.layers[0], channel_scales=True)
    if gated:  # two thirds of the width, as a multiple of 8
        layer = replace(layer, feed_forward=MLPConfig((int(inner * 2 / 3) + 7) // 8 * 8, Activation.SILU, gated=True))
    image = replace(
        base.image,
        grid=base.image.side,
        registers=raw.get("num_register_tokens", 4) if has_registers else 0,
        antialias=has_registers,
    )
    encoder = replace(stack, layers=repeat(layer, stack.num_layers), position=PositionConfig())
    return replace(base, image=image, encoder=encoder, pooler=False, max_positions=image.num_tokens)


_PARTS = ("attention.query", "attention.key", "attention.value", "output.dense")
_NAMES = replace(
    bert.NAMES,
    attention=tuple(f"attention.{part}" for part in _PARTS),
    norms=("layernorm_before", "layernorm_after"),
)
_DINO = replace(_NAMES, norms=("norm1", "norm2"), mlp=("mlp.fc1", "mlp.fc2"))
_GATED_DINO = replace(_DINO, mlp=("mlp.weights_in", "mlp.weights_out"))


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.image is not None
    yield from _embeddings(config.image, config.encoder_stack.hidden_size)
    for i, layer in enumerate(config.encoder_stack.layers):
        here, there, names = f"encoder.layer.{i}", f"encoder.layers.{i}", _NAMES
        if layer.channel_scales:
            names = _GATED_DINO if layer.mlp.gated else _DINO
            yield TensorRule(f"{here}.layer_scale1.lambda1", f"{there}.attn_scale")
            yield TensorRule(f"{here}.layer_scale2.lambda1", f"{there}.mlp_scale")
        yield from names.layer_rules(layer, here, there)
    yield from affine("layernorm", "encoder.final_norm")
    if config.pooler:
        yield LinearRule("pooler.dense", "pooler")
    if config.classifier is not None and config.classifier.input is ClassifierInput.FIRST_TWO:
        yield LinearRule("cls_classifier", "classifier.out")
        yield LinearRule("distillation_classifier", "classifier.second")
    else:
        yield from classifier_rules(config)


def _embeddings(image: ImageConfig, size: int) -> Iterator[Rule]:
    patch = (size, image.channels, image.patch, image.patch)
    yield TensorRule("embeddings.cls_token", "patches.first", shape=(1, 1, size))
    if image.distilled:
        yield TensorRule("embeddings.distillation_token", "patches.distillation", shape=(1, 1, size))
    if image.registers:
        yield TensorRule("embeddings.register_tokens", "patches.registers", shape=(1, image.registers, size))
    yield TensorRule("embeddings.patch_embeddings.projection.weight", "patches.project.weight", shape=patch)
    yield TensorRule("embeddings.patch_embeddings.projection.bias", "patches.project.bias")
    target, rows = "encoder.positions.weight", image.num_tokens
    if image.grid is not None:
        target, rows = "patches.positions", image.grid**2 + 1
    yield TensorRule("embeddings.position_embeddings", target, shape=(1, rows, size))


_PATCHES = ("embeddings.patch_embeddings.projection.weight",)  # in the place of a token table
_MASK = ("embeddings.mask_token",)  # of training
FAMILIES = {
    "vit": Family(config, rules, "vit.", tables=_PATCHES),
    "deit": Family(deit, rules, "deit.", _MASK, tables=_PATCHES),
    "dinov2": Family(dinov2, rules, "dinov2.", _MASK, tables=_PATCHES),
    "dinov2_with_registers": Family(dinov2, rules, "dinov2_with_registers.", _MASK, tables=_PATCHES),
}
