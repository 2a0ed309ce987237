"""The pictures of Gemma 4: a tower over patches of any number, with positions of rows and columns.

Of the smaller models the inputs and the outputs of the tower's projections stay within stored bounds. The mean of 3 x 3
patches becomes one row of the decoder. Sounds and films of such folders are not served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind
from triptych.model.config.layer import LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.config.pictures import GridPositions, MergerConfig, PatchConfig, PicturesConfig
from triptych.model.config.stack import StackConfig
from triptych.model.errors import ConfigError, shown
from triptych.model.families.clip import vision_side
from triptych.model.families.gemma import SANDWICH_NORMS
from triptych.model.families.table.helpers import activation, axial_rotary, ignore_unless, repeat
from triptych.model.families.table.raw_config import Settings
from triptych.model.families.table.rules import Interleaved, LinearRule, Rule, TensorRule
from triptych.model.families.table.text_part import PictureTable

_THETA = 100.0
_PAD = 0
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
# A stored projection, its rows where several are fused, and their order where it is another.
Fused = tuple[str, int | None, Interleaved | None]


def config(raw: Settings, text: ModelConfig) -> ModelConfig:
    raw = raw.otherwise(**raw.class_defaults())
    vision = raw.part("vision_config", raw.get("vision_config") or {}, "gemma4_vision")
    vision = vision.otherwise(**vision.class_defaults())
    own = raw.get("text_config") or {}
    size, norm = vision["hidden_size"], NormConfig(NormKind.RMS, vision["rms_norm_eps"])
    merge = vision_side(vision, "pooling_kernel_size", 3)
    patches = PatchConfig(
        vision_side(vision, "patch_size", 16),
        merge=merge,
        bias=False,
        grid=vision_side(vision, "position_embedding_size", 10_240),
        positions=GridPositions.SUMMED,
        channels_last=True,
        centred=True,
    )
    merger = MergerConfig(
        NormConfig(NormKind.RMS, norm.eps, gain=False),
        norm_last=True,
        bias=False,
        mean=True,
        factor=size**0.5,
        standardised=bool(vision["standardize"]),
    )
    seen = own.get("use_bidirectional_attention") == "vision"
    tower = StackConfig(repeat(_layer(vision, norm), vision["num_hidden_layers"]), size, causal=False)
    vision.get("max_position_embeddings")
    ignore_unless(vision, attention_bias=False)
    vision.refuse_unread()
    token, layer_token = raw["image_token_id"], own.get("pad_token_id", _PAD)
    if type(token) is not int or type(layer_token) is not int:
        raise ConfigError(
            f"image_token_id and pad_token_id must be tokens, found {shown(token)} and {shown(layer_token)}"
        )
    if text.decoder_stack.layer_embedding is None:
        layer_token = None
    pictures = PicturesConfig(token, patches, tower, merger, seen, in_windows=seen, layer_token=layer_token)
    return replace(text, pictures=pictures)


def _layer(vision: Settings, norm: NormConfig) -> LayerConfig:
    dim, bounded = vision["head_dim"], bool(vision["use_clipped_linears"])
    rotary = axial_rotary(vision, dim, _THETA)
    heads = vision["num_attention_heads"], vision["num_key_value_heads"]
    attention = AttentionConfig(
        *heads, dim, 1.0, position=rotary, qk_norm=norm, value_norm=NormConfig(NormKind.RMS, norm.eps), bounded=bounded
    )
    act = activation(vision, "hidden_activation", "gelu_pytorch_tanh")
    mlp = MLPConfig(vision["intermediate_size"], act, gated=True, bias=False, bounded=bounded)
    return LayerConfig(attention, mlp, (Norms(pre=norm, output=norm),) * 2)


def rules(config: ModelConfig) -> Iterator[Rule]:
    assert config.pictures is not None
    patches, tower, merger = config.pictures.patches, config.pictures.tower, config.pictures.merger
    embedder = "vision_tower.patch_embedder"
    assert patches.grid is not None
    yield TensorRule(f"{embedder}.input_proj.weight", "pictures.project.weight")
    table = (2, patches.grid, tower.hidden_size)
    yield TensorRule(f"{embedder}.position_embedding_table", "pictures.table", shape=table)
    for index, layer in enumerate(tower.layers):
        yield from _layer_rules(layer, f"vision_tower.encoder.layers.{index}", f"tower.layers.{index}")
    if merger.standardised:
        yield TensorRule("vision_tower.std_bias", "pictures.merger.standard_bias")
        yield TensorRule("vision_tower.std_scale", "pictures.merger.standard_scale")
    yield LinearRule("embed_vision.embedding_projection", "pictures.merger.out", bias=False)


def _layer_rules(layer: LayerConfig, here: str, there: str) -> Iterator[Rule]:
    attention, mlp = layer.attention, layer.mlp
    keys = attention.kv_size
    query, wide = _rows_first(attention.num_heads), mlp.intermediate_size
    key = _rows_first(attention.num_kv_heads)
    yield from _projection(
        f"{here}.self_attn",
        f"{there}.attn.qkv",
        [("q_proj", attention.query_size, query), ("k_proj", keys, key), ("v_proj", keys, None)],
        bounds=attention.bounded,
    )
    yield from _projection(f"{here}.self_attn", f"{there}.attn.out", [("o_proj", None, None)], bounds=attention.bounded)
    for side in "qk":
        gains = f"{here}.self_attn.{side}_norm.weight"
        yield TensorRule(gains, f"{there}.attn.{side}_norm.weight", interleaved=_rows_first(1))
    up: list[Fused] = [("gate_proj", wide, None), ("up_proj", wide, None)]
    yield from _projection(f"{here}.mlp", f"{there}.mlp.up", up, bounds=mlp.bounded)
    yield from _projection(f"{here}.mlp", f"{there}.mlp.down", [("down_proj", None, None)], bounds=mlp.bounded)
    for stored, norm in SANDWICH_NORMS.items():
        yield TensorRule(f"{here}.{stored}.weight", f"{there}.{norm}.weight")


def _projection(here: str, target: str, parts: list[Fused], *, bounds: bool) -> Iterator[Rule]:
    """Yield the rules of stored projections, fused by rows, and of their bounds."""
    start = 0
    for place, (name, size, order) in enumerate(parts):
        rows = None if size is None else (start, start + size)
        yield LinearRule(f"{here}.{name}.linear", target, bias=False, rows=rows, interleaved=order)
        start += size or 0
        for at, bound in enumerate(_BOUNDS if bounds else (), 4 * place):
            yield TensorRule(f"{here}.{name}.{bound}", f"{target}_bounds.weight", rows=(at, at + 1), shape=())


def _rows_first(heads: int) -> Interleaved:
    """Return the order of each head's quarters in which the first and the third turn by row, the others by column.

    As stored the first two turn by column and the last two by row.
    """
    order = tuple(4 * head + quarter for head in range(heads) for quarter in (2, 0, 3, 1))
    return Interleaved(1, (1,) * (4 * heads), order)


GEMMA4 = PictureTable(config, rules, "embed_vision.embedding_projection.weight")
