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
from model.config.layer import BucketBiasConfig, LayerConfig, RotaryConfig, XLNetRelativeConfig
from model.config.model import StackConfig
from model.errors import ConfigError
from model.linear.native import PackedLinear
from model.native.library import ACTIVATIONS, KINDS, Kind, Library
from model.native.structures import (
    AttentionLayer,
    KVPages,
    MLPLayer,
    Norm,
    RotaryTable,
    ScoreBias,
    Segments,
    SublayerNorms,
)
from model.native.structures import Layer as LayerData
from model.native.structures import Stack as StackData
from model.native.structures import Step as StepData
from model.network.norms import OffsetRMSNorm

if TYPE_CHECKING:
    from model.network.inputs import CrossInput
    from model.network.layer import Layer
    from model.network.norms import SublayerNorms as NormModules
    from model.network.stack import Stack
    from model.network.step_context import StepContext
    from model.network.transformer import Transformer

_LAYER_NORM, _RMS_NORM = 1, 2
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
        if stack is not None and NativeStack.unsupported(stack.config) is None:
            stack.native = NativeStack(stack, library, kind)
    if batch_invariant:
        _pack_projections(model, library)


def pack_linears(model: Transformer, packing: Packing) -> None:
    """Replace the matrices that C multiplies with by packed ones; of a network on the meta device, by room for them."""
    for stack in (model.encoder, model.decoder):
        if stack is not None and NativeStack.unsupported(stack.config) is None:
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
    for layer in stack.distinct_layers:
        yield from ((layer.attn, "qkv"), (layer.attn, "out"), (layer.mlp, "up"), (layer.mlp, "down"))
        if layer.cross is not None:
            yield from ((layer.cross, "q"), (layer.cross, "kv"), (layer.cross, "out"))


def packable_names(model: Transformer) -> set[str]:
    """What `pack_linears` would replace in a network that is not packed, by the names of the modules."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    found = {
        getattr(*place)
        for stack in stacks
        if NativeStack.unsupported(stack.config) is None
        for place in packable(stack)
    }
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
        self._bias_tables = [] if stack.bias is None else [stack.bias]  # T5's, of the stack or of layers
        self._biases: list[Tensor] = []  # `[H, width]` of each table
        self._layers = [self._layer(layer) for layer in stack.distinct_layers]
        self._data = stack_structure(stack.config, self._layers)
        self._data.dtype = KINDS[_packed(stack.distinct_layers[0].mlp, "up").dtype]
        self._data.tiles = library.tiles
        self._data.final = self._norm(stack.final_norm)

    @staticmethod
    def unsupported(config: StackConfig) -> str | None:
        """Why the stack is not computed in C; None: it is. It is when each of its layers is."""
        if config.position.every_layer:
            return "positions are added before every layer"
        reasons = ((index, unsupported_layer(layer)) for index, layer in enumerate(config.layers))
        return next((f"layer {index} has {reason}" for index, reason in reasons if reason is not None), None)

    @staticmethod
    def covers(cache: KVCache | None, cross: CrossInput | None) -> bool:
        """Whether a step's keys are where the C code looks for them."""
        return cross is None or (cross.encoder_output is None and cache is not None)

    def __call__(
        self,
        x: Tensor,  # [T, d] float32, contiguous
        context: StepContext,
        cache: KVCache | None,
        layers: range,
    ) -> None:
        """Take `x` through these layers in place, and behind the last one of the stack through its final norm."""
        inputs, cross, rotaries = context.inputs, context.cross, self.stack.config.rotaries
        step = StepData(rows=len(x), first_layer=layers.start, last_layer=layers.stop)
        segments = (Segments * (2 if self.stack.config.has_cross_attention else 1))()
        step.num_segments, step.segments = len(segments), segments
        kept = [*fill_segments(segments[_SELF], inputs.metadata, cache)]
        if cache is not None:
            step.pages = self._pages_of(cache)
        if cross is not None:
            kept += fill_segments(segments[_CROSS], cross.metadata, cache)
        if rotaries:
            pairs = [[table.float().contiguous() for table in context.rotary(rotary)] for rotary in rotaries]
            kept += (table for pair in pairs for table in pair)
            tables = (RotaryTable(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in pairs)
            step.rotary = (RotaryTable * len(pairs))(*tables)
        if self._bias_tables:
            self._make_biases(max(inputs.metadata.kv_lens))
            biases = (ScoreBias(bias.data_ptr(), bias.shape[1]) for bias in self._biases)
            step.score_biases = (ScoreBias * len(self._biases))(*biases)
        self.library.run_stack(self._data, step, x)

    def _layer(self, layer: Layer) -> LayerData:
        data = layer_structure(layer.config, self.stack.config)
        attn, mlp = data.self, data.mlp
        attn.norms = self._norms(layer.attn_norms)
        if layer.config.mixer.qk_norm is not None:
            attn.q_norm, attn.k_norm = self._norm(layer.attn.q_norm), self._norm(layer.attn.k_norm)
        attn.input, attn.output = _packed(layer.attn, "qkv").matrix, _packed(layer.attn, "out").matrix
        if layer.bias is not None:  # a table of its own
            attn.score_bias = len(self._bias_tables)
            self._bias_tables.append(layer.bias)
        if layer.cross is not None:
            data.cross.norms = self._norms(layer.cross_norms)
            data.cross.input = _packed(layer.cross, "q").matrix
            data.cross.output = _packed(layer.cross, "out").matrix
        mlp.norms = self._norms(layer.mlp_norms)
        mlp.up, mlp.down = _packed(layer.mlp, "up").matrix, _packed(layer.mlp, "down").matrix
        return data

    def _norms(self, norms: NormModules) -> SublayerNorms:
        return SublayerNorms(self._norm(norms.pre), self._norm(norms.output), self._norm(norms.post))

    def _norm(self, module: nn.Module) -> Norm:
        if isinstance(module, nn.Identity):
            return Norm()
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm | OffsetRMSNorm)
        gain = module.weight.detach().float()
        self._kept.append((1.0 + gain if isinstance(module, OffsetRMSNorm) else gain).contiguous())
        kind = _LAYER_NORM if isinstance(module, nn.LayerNorm) else _RMS_NORM
        norm = Norm(kind=kind, eps=module.eps, weight=self._kept[-1].data_ptr())
        shift = getattr(module, "bias", None)
        if shift is not None:
            self._kept.append(shift.detach().float().contiguous())
            norm.bias = self._kept[-1].data_ptr()
        return norm

    def _pages_of(self, cache: KVCache) -> ctypes.Array[KVPages]:
        if self._pages is None or self._pages[0] is not cache:
            self._pages = (cache, (KVPages * len(cache.layers))(*map(kv_pages, cache.layers)))
        return self._pages[1]

    def _make_biases(self, longest: int) -> None:
        """By distance `[H, width]`, `key - query` at `width / 2 + key - query`, for keys up to `longest`."""
        if self._biases and self._biases[0].shape[1] // 2 >= longest + _MARGIN:
            return
        half = 1 << (longest + _MARGIN).bit_length()
        distances = torch.arange(-half, half)
        self._biases = [table.weight[table.bucket(distances)].float().T.contiguous() for table in self._bias_tables]


def unsupported_layer(layer: LayerConfig) -> str | None:
    """What of a layer is not computed in C; None: nothing."""
    if isinstance(layer.mixer.position, XLNetRelativeConfig):
        return "XLNet's relative positions"
    return None


def layer_structure(config: LayerConfig, stack: StackConfig) -> LayerData:
    """A layer without norms and matrices: what it computes, and which of a step's arrays it reads."""
    attention, mlp, cross = config.mixer, config.feed_forward, config.cross
    attn = AttentionLayer(shape=shape_of(attention), segments=_SELF, rotary=_NONE, score_bias=_NONE)
    if isinstance(attention.position, RotaryConfig):
        attn.rotary = stack.rotaries.index(attention.position)
    if isinstance(attention.position, BucketBiasConfig):
        attn.score_bias = 0  # the table of the stack
    layer = LayerData(mlp=MLPLayer(gated=mlp.gated, activation=ACTIVATIONS[mlp.activation]))
    layer.self, layer.parallel, layer.has_cross = attn, config.parallel, cross is not None
    if cross is not None:
        layer.cross = AttentionLayer(shape=shape_of(cross), segments=_CROSS, rotary=_NONE, score_bias=_NONE)
    return layer


def stack_structure(config: StackConfig, layers: Sequence[LayerData]) -> StackData:
    """A stack over the structures of its distinct layers, which must stay where they are."""
    pointers = (ctypes.POINTER(LayerData) * config.num_layers)(*(ctypes.pointer(layers[i]) for i in config.weights_of))
    return StackData(hidden=config.hidden_size, num_layers=config.num_layers, layers=pointers)


def _packed(owner: nn.Module, name: str) -> PackedLinear:
    packed = getattr(owner, name)
    assert isinstance(packed, PackedLinear), f"{name} is not packed"
    return packed
