"""A stack whose layers run in C: its weights packed, its steps described, one call for all layers.

The network's own modules stay the definition: this reads their parameters, puts packed matrices in the place of theirs,
and gives the same rows up to rounding. What it cannot compute (XLNet's positions, a memory without a cache) the modules
still do, over the same packed matrices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.attention.native import fill_segments, kv_pages, shape_of
from model.cache.paged import KVCache
from model.config.layer import (
    NormKind,
    PositionKind,
)
from model.config.model import StackConfig
from model.errors import ConfigError
from model.linear.native import PackedLinear
from model.native.library import ACTIVATIONS, KINDS, Kind, Library
from model.native.structures import (
    AttentionLayer,
    KVPages,
    Layer,
    MLPLayer,
    Norm,
    RotaryTable,
    ScoreBias,
    Segments,
    SublayerNorms,
)
from model.native.structures import Stack as StackData
from model.native.structures import Step as StepData
from model.network.norms import OffsetRMSNorm

if TYPE_CHECKING:
    from model.network.inputs import CrossInput, StackInput
    from model.network.layer import Block
    from model.network.score_bias import BucketBias
    from model.network.stack import Stack
    from model.network.transformer import Transformer

_NORM_KINDS = {NormKind.LAYER: 1, NormKind.RMS: 2}
_SELF, _CROSS, _NONE = 0, 1, -1  # indices into a step's segments, rotary tables and score biases
_MARGIN = 32  # keys are scored by 16, in bfloat16 by the 32 of a tile's row: the bias is read so far beyond the last


@dataclass(frozen=True, slots=True)
class Packing:
    """How matrices are packed: `kind` INT8 quantises them, None keeps the network's dtype.

    `batch_invariant`: no product is left to torch, whose order of additions depends on the number of rows.
    """

    library: Library
    kind: Kind | None = None
    batch_invariant: bool = False


def pack_model(
    model: Transformer, library: Library, kind: Kind | None = None, *, batch_invariant: bool = False
) -> None:
    """Let the stacks and the head of a loaded model run in C; see `Packing`.

    What was packed while it was loaded stays so. Raises `ConfigError` for a model that is not computed in C throughout.
    """
    packing = Packing(library, kind, batch_invariant)
    pack_linears(model, packing)
    for stack in (model.encoder, model.decoder):
        if stack is not None and NativeStack.supports(stack.config):
            stack.native = NativeStack(stack, library, kind)
    if batch_invariant:
        _pack_projections(model, library)


def pack_linears(model: Transformer, packing: Packing) -> None:
    """Replace the matrices that C multiplies with by packed ones; of a network on the meta device, by room for them."""
    for stack in (model.encoder, model.decoder):
        if stack is not None and NativeStack.supports(stack.config):
            _pack_stack(stack, packing.library, packing.kind)
    head, table = model.head, model.tokens
    if head is not None and table is not None and head.packed is None:
        head.pack(packing.library, table.weight, packing.kind)


def _pack_stack(stack: Stack, library: Library, kind: Kind | None) -> None:
    for owner, name in packable(stack):
        linear = getattr(owner, name)
        if isinstance(linear, nn.Linear):
            setattr(owner, name, PackedLinear(library, linear.weight, linear.bias, kind))


def packable(stack: Stack) -> Iterator[tuple[nn.Module, str]]:
    """The linear layers of a stack that runs in C: the module that has one, and the name that it has there."""
    for block in map(stack.block, range(stack.config.distinct_layers)):
        yield from ((block.attn, "qkv"), (block.attn, "out"), (block.mlp, "up"), (block.mlp, "down"))
        if block.cross is not None:
            yield from ((block.cross, "q"), (block.cross, "kv"), (block.cross, "out"))


def packable_names(model: Transformer) -> set[str]:
    """What `pack_linears` would replace in a network that is not packed, by the names of the modules."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    found = {getattr(*place) for stack in stacks if NativeStack.supports(stack.config) for place in packable(stack)}
    return {name for name, module in model.named_modules() if module in found or module is model.head}


def _pack_projections(model: Transformer, library: Library) -> None:
    """Those of embeddings or patches, which meet the rows of all segments at once."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    if any(stack.native is None for stack in stacks):
        raise ConfigError(f"batch_invariant: the native kernels do not compute {model.config.model_type}")
    for module in list(model.modules()):
        project = getattr(module, "project", None)
        if isinstance(project, nn.Linear):
            module.project = PackedLinear(library, project.weight, project.bias)


class NativeStack:
    """The layers of one stack and its final norm; packs the matrices that are not packed yet."""

    def __init__(self, stack: Stack, library: Library, kind: Kind | None = None) -> None:
        _pack_stack(stack, library, kind)
        self.library = library
        self.stack = stack
        self._kept: list[Tensor] = []
        self._pages: tuple[KVCache, ctypes.Array[KVPages]] | None = None
        self._bias: Tensor | None = None  # [tables, H, width]
        config = stack.config
        self._layers: list[Layer] = []
        for index in range(config.distinct_layers):
            self._layers.append(self._layer(stack.block(index)))
        self._data = stack_structure(config, self._layers)
        self._data.dtype = KINDS[_packed(stack.block(0).mlp, "up").dtype]
        self._data.tiles = library.tiles
        self._data.final = self._norm(stack.final_norm, config)

    @staticmethod
    def supports(config: StackConfig) -> bool:
        position = config.position
        return position.kind is not PositionKind.XLNET_RELATIVE and not position.every_layer

    @staticmethod
    def covers(cache: KVCache | None, cross: CrossInput | None) -> bool:
        """Whether a step's keys are where the C code looks for them."""
        return cross is None or (cross.encoder_output is None and cache is not None)

    def __call__(
        self,
        x: Tensor,  # [T, d] float32, contiguous
        inputs: StackInput,
        cache: KVCache | None,
        cross: CrossInput | None,
        rotary: tuple[Tensor, Tensor] | None,
        layers: range,
    ) -> None:
        """Take `x` through these layers in place, and behind the last one of the stack through its final norm."""
        step = StepData(rows=len(x), first_layer=layers.start, last_layer=layers.stop)
        segments = (Segments * (2 if self.stack.config.cross_attention else 1))()
        step.num_segments, step.segments = len(segments), segments
        kept = [*fill_segments(segments[_SELF], inputs.metadata, cache)]
        if cache is not None:
            step.pages = self._pages_of(cache)
        if cross is not None:
            kept += fill_segments(segments[_CROSS], cross.metadata, cache)
        if rotary is not None:
            kept += (cos := rotary[0].float().contiguous(), sin := rotary[1].float().contiguous())
            step.rotary = (RotaryTable * 1)(RotaryTable(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]))
        if self._tables:
            tables = self._bias_for(max(inputs.metadata.kv_lens))
            biases = (ScoreBias(table.data_ptr(), table.shape[1]) for table in tables)
            step.score_biases = (ScoreBias * len(tables))(*biases)
        self.library.run_stack(self._data, step, x)

    def _layer(self, block: Block) -> Layer:
        config = self.stack.config
        layer = layer_structure(config)
        attn, mlp = layer.self, layer.mlp
        attn.norms = self._norms(block.attn_in, block.attn_out)
        if config.attention.qk_norm:
            attn.q_norm, attn.k_norm = (self._norm(getattr(block.attn, name), config) for name in ("q_norm", "k_norm"))
        attn.input, attn.output = _packed(block.attn, "qkv").matrix, _packed(block.attn, "out").matrix
        if block.bias is not None:  # a table of its own
            attn.score_bias = len(self._layers)
        if block.cross is not None:
            layer.cross.norms = self._norms(block.cross_in, block.cross_out)
            layer.cross.input = _packed(block.cross, "q").matrix
            layer.cross.output = _packed(block.cross, "out").matrix
        mlp.norms = self._norms(block.ffn_in, block.ffn_out)
        mlp.up, mlp.down = _packed(block.mlp, "up").matrix, _packed(block.mlp, "down").matrix
        return layer

    def _norms(self, pre: nn.Module, post: nn.Module) -> SublayerNorms:
        config = self.stack.config
        return SublayerNorms(pre=self._norm(pre, config), post=self._norm(post, config))

    def _norm(self, module: nn.Module, config: StackConfig) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        assert isinstance(module.weight, Tensor)
        gain = module.weight.detach().float()
        self._kept.append((1.0 + gain if isinstance(module, OffsetRMSNorm) else gain).contiguous())
        norm = Norm(kind=_NORM_KINDS[config.norm.kind], eps=config.norm.eps, weight=self._kept[-1].data_ptr())
        shift = getattr(module, "bias", None)
        if shift is not None:
            self._kept.append(shift.detach().float().contiguous())
            norm.bias = self._kept[-1].data_ptr()
        return norm

    def _pages_of(self, cache: KVCache) -> ctypes.Array[KVPages]:
        if self._pages is None or self._pages[0] is not cache:
            self._pages = (cache, (KVPages * len(cache.layers))(*map(kv_pages, cache.layers)))
        return self._pages[1]

    @property
    def _tables(self) -> Sequence[BucketBias]:
        """T5's bias, one for the stack or one a layer; empty for other families."""
        if self.stack.bias is not None:
            return (self.stack.bias,)
        return [bias for bias in self._own_tables() if bias is not None]

    def _own_tables(self) -> Iterator[BucketBias | None]:
        for index in range(self.stack.config.distinct_layers):
            yield self.stack.block(index).bias

    def _bias_for(self, longest: int) -> Tensor:
        """By distance `[tables, H, width]`, `key - query` at `width / 2 + key - query`, for keys up to `longest`."""
        if self._bias is None or self._bias.shape[2] // 2 < longest + _MARGIN:
            half = 1 << (longest + _MARGIN).bit_length()
            distances = torch.arange(-half, half)
            tables = [table.weight[table.bucket(distances)].float().T for table in self._tables]
            self._bias = torch.stack(tables).contiguous()
        return self._bias


def layer_structure(config: StackConfig) -> Layer:
    """A layer without norms and matrices: what it computes, and which of a step's arrays it reads."""
    position = config.position
    attn = AttentionLayer(shape=shape_of(config.attention), segments=_SELF)
    attn.rotary = _NONE if position.rotary is None else 0
    attn.score_bias = 0 if position.kind is PositionKind.T5_BUCKETS else _NONE
    layer = Layer(mlp=MLPLayer(gated=config.mlp.gated, activation=ACTIVATIONS[config.mlp.activation]))
    layer.self, layer.parallel, layer.has_cross = attn, config.parallel, config.cross_attention
    if config.cross_attention:
        layer.cross = AttentionLayer(shape=shape_of(config.attention), segments=_CROSS, rotary=_NONE, score_bias=_NONE)
        layer.cross.shape.window = 0
    return layer


def stack_structure(config: StackConfig, layers: Sequence[Layer]) -> StackData:
    """A stack that runs through these layers in turn, as often as it is deep; they must stay where they are."""
    order = (ctypes.pointer(layers[index % len(layers)]) for index in range(config.num_layers))
    pointers = (ctypes.POINTER(Layer) * config.num_layers)(*order)
    return StackData(hidden=config.hidden_size, num_layers=config.num_layers, layers=pointers)


def _packed(owner: nn.Module, name: str) -> PackedLinear:
    packed = getattr(owner, name)
    assert isinstance(packed, PackedLinear), f"{name} is not packed"
    return packed
