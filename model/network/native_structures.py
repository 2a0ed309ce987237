"""Parts of layers as C reads them: feed-forwards and experts, relative positions, recurrent layers and their states."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import pointer
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from triptych.model.cache.kv_cache import StateCache
from triptych.model.config.attention import AttentionConfig, DisentangledConfig, GatedDeltaConfig
from triptych.model.config.layer import ExpertsConfig, MLPConfig
from triptych.model.config.stack import StackConfig
from triptych.model.linear.base import Linear
from triptych.model.linear.native import PANEL_WIDTH, NativeLinear, packed_bytes, packed_linear, packed_matrix
from triptych.model.native.library import ACTIVATIONS, CLAMPED_SILU, KINDS, Kind, Library
from triptych.model.native.structures import (
    DeltaLayer,
    Expert,
    ExpertsLayer,
    LayerStates,
    MLPLayer,
    Norm,
    PackedMatrix,
    RelativePositions,
)
from triptych.model.network.bounds import Bounds
from triptych.model.network.delta_net import GatedDeltaNet
from triptych.model.network.disentangled import DisentangledBias
from triptych.model.network.feed_forward import MLP, Experts

if TYPE_CHECKING:
    from triptych.model.network.layer import Layer
    from triptych.model.network.stack import Stack


# -- Feed-forwards as C reads them: one MLP, or a router and experts.

Sizes = Callable[[int, int], PackedMatrix]  # a matrix `[n, k]` without data
Norms = Callable[[nn.Module], Norm]  # a module's norm as C reads it


def feed_forward_structure(config: MLPConfig | ExpertsConfig) -> MLPLayer:
    """A feed-forward without weights."""
    unit = config.mlp if isinstance(config, ExpertsConfig) else config
    layer = MLPLayer(gated=unit.gated, activation=ACTIVATIONS[unit.activation])
    if unit.clamp is not None:
        layer.activation, layer.limit, layer.gain = CLAMPED_SILU, unit.clamp.limit, unit.clamp.gain
    return layer


def fill_feed_forward(layer: MLPLayer, module: MLP | Experts, norm: Norms, keep: Callable[[Tensor], int]) -> None:
    """Give it the packed matrices of a module; `keep` keeps a float32 array alive and tells where it is."""
    if isinstance(module, MLP):
        layer.up, layer.down = packed_matrix(module.up), packed_matrix(module.down)
        fill_bounds(layer.up, module.up_bounds, keep)
        fill_bounds(layer.down, module.down_bounds, keep)
        return
    config, shared, gate = module.config, module.shared, module.shared_gate
    experts = [Expert(_expert_matrix(module.up, i), _expert_matrix(module.down, i)) for i in range(config.count)]
    if shared is not None and config.own_norms is None:
        experts.append(Expert(packed_matrix(shared.up), packed_matrix(shared.down)))
    given = PackedMatrix() if gate is None else packed_matrix(gate)
    mixture = _experts_layer(config, packed_matrix(module.router), experts, given)
    if module.scales is not None:
        mixture.scales = keep(module.scales)
    if shared is not None and config.own_norms is not None:
        layer.up, layer.down = packed_matrix(shared.up), packed_matrix(shared.down)
        mixture.norms.pre, mixture.norms.output = norm(module.norms.pre), norm(module.norms.output)
        mixture.mlp_norms.pre = norm(module.shared_norms.pre)
        mixture.mlp_norms.output = norm(module.shared_norms.output)
        mixture.router_norm = norm(module.router_norm)
        mixture.router_norm.weight = keep(module.router_norm.get_parameter("weight") * config.router_scale)
    layer.experts = pointer(mixture)


def fill_bounds(matrix: PackedMatrix, bounds: Bounds | None, keep: Callable[[Tensor], int]) -> None:
    """Give a matrix the bounds of its inputs and outputs, if it has any; all of its parts read within the same ones."""
    if bounds is not None:
        inputs = torch.tensor(bounds.inputs[0])
        padding = torch.zeros(2, -matrix.n % PANEL_WIDTH)
        outputs = torch.cat([bounds.of_outputs().float(), padding], dim=1)
        matrix.bounds = keep(torch.cat([inputs, outputs.flatten()]))


def plan_feed_forward(layer: MLPLayer, config: MLPConfig | ExpertsConfig, hidden: int, sizes: Sizes) -> None:
    """Give it matrices that have sizes and no data."""
    if isinstance(config, MLPConfig):
        layer.up, layer.down = _plan_mlp(config, hidden, sizes)
        return
    experts = [Expert(*_plan_mlp(config.mlp, hidden, sizes))] * config.count
    if config.shared is not None and config.own_norms is not None:
        layer.up, layer.down = _plan_mlp(config.shared, hidden, sizes)
    elif config.shared is not None:
        experts.append(Expert(*_plan_mlp(config.shared, hidden, sizes)))
    router = PackedMatrix(int(Kind.F32), config.count, hidden)
    layer.experts = pointer(_experts_layer(config, router, experts, PackedMatrix()))


def _plan_mlp(config: MLPConfig, hidden: int, sizes: Sizes) -> tuple[PackedMatrix, PackedMatrix]:
    inner = config.intermediate_size
    return sizes(inner * (2 if config.gated else 1), hidden), sizes(hidden, inner)


def _experts_layer(
    config: ExpertsConfig, router: PackedMatrix, experts: list[Expert], shared_gate: PackedMatrix
) -> ExpertsLayer:
    return ExpertsLayer(
        count=config.count,
        active=config.per_token,
        of_chosen=config.renormalised,
        router=router,
        experts=(Expert * len(experts))(*experts),
        has_shared=config.shared is not None and config.own_norms is None,
        shared_gate=shared_gate,
    )


def _expert_matrix(linear: Linear, expert: int) -> PackedMatrix:
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"{linear.spec.name} is not packed: C has no matrix of it")
    return linear.expert_matrix(expert)


# -- Relative positions of a stack's layers as C reads them: packed keys and queries, one row a head and distance. They
# depend on the weights alone, so they are made once for segments up to some length, and again, twice as long or more,
# when a longer segment comes.

_LEAST = 64  # keys of a segment; C wants a multiple of 32


class NativePositions:
    """The relative positions of the layers that have them, in the order of `of_layer`'s calls."""

    def __init__(self, stack: Stack, library: Library, dtype: torch.dtype) -> None:
        """`dtype` is what the stack's attention multiplies."""
        self._stack, self._library, self._dtype = stack, library, dtype
        self._layers: list[Layer] = []
        self._packed: list[NativeLinear] = []  # what the structures point into
        self._reach = 0
        self._structures: ctypes.Array[RelativePositions] | None = None

    def of_layer(self, layer: Layer) -> int:
        """Return the place that this layer's relative positions will have among all."""
        self._layers.append(layer)
        return len(self._layers) - 1

    def __bool__(self) -> bool:
        return bool(self._layers)

    def structures(self, longest: int) -> ctypes.Array[RelativePositions]:
        """Return the structure of each layer, for segments of up to `longest` keys."""
        if self._structures is None or self._reach < longest:
            self._reach, self._structures, self._packed = _reach_of(longest), None, []
            structures = (RelativePositions * len(self._layers))()
            for place, layer in enumerate(self._layers):
                structures[place].reach = self._reach
                self._pack(layer, structures[place])
            self._structures = structures
        return self._structures

    def _pack(self, layer: Layer, into: RelativePositions) -> None:
        assert isinstance(layer.relative, DisentangledBias) and self._stack.relative is not None
        vectors = layer.relative.vectors(self._stack.relative(), layer.attn.qkv)
        for side, rows in zip(("keys", "queries"), vectors.by_reach(self._reach), strict=True):
            if rows is not None:
                by_head = rows.transpose(0, 1).flatten(0, 1)  # [H * 2 reach, D]
                packed = packed_linear(self._library, by_head, kind=_kind(layer.config.attention, self._dtype))
                setattr(into, side, packed.matrix)
                self._packed.append(packed)


def relative_bytes(config: StackConfig, dtype: torch.dtype, longest: int) -> int:
    """Return the bytes of a stack's relative positions for segments of up to `longest` keys."""
    total = 0
    for layer in config.distinct_layers:
        mixer = layer.mixer
        if isinstance(mixer, AttentionConfig) and isinstance(position := mixer.position, DisentangledConfig):
            sides = position.content_to_position + position.position_to_content
            rows = mixer.num_heads * 2 * _reach_of(longest)
            total += sides * packed_bytes(_kind(mixer, dtype), rows, mixer.head_dim)
    return total


def _reach_of(longest: int) -> int:
    return max(_LEAST, 1 << (longest - 1).bit_length())


def _kind(config: AttentionConfig, dtype: torch.dtype) -> Kind:
    """Return the number format of the products of an encoder's attention: bfloat16 needs an even `head_dim`."""
    return Kind.F32 if config.head_dim % 2 else KINDS[dtype]


# -- Recurrent layers as C reads them, and their states.


def delta_structure(config: GatedDeltaConfig) -> DeltaLayer:
    """A recurrence without weights."""
    return DeltaLayer(
        key_heads=config.num_key_heads,
        value_heads=config.num_value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        kernel=config.kernel,
    )


def fill_delta(layer: DeltaLayer, module: GatedDeltaNet, norm: Norms, keep: Callable[[Tensor], int]) -> None:
    """Give it what a module has but for the norms around it; `keep` keeps a float32 array and tells where it is."""
    layer.input, layer.gates = packed_matrix(module.input), packed_matrix(module.gates)
    layer.output, layer.norm = packed_matrix(module.out), norm(module.norm)
    layer.taps = keep(module.convolution.T)  # [kernel, channels]
    layer.decay, layer.dt_bias = keep(module.decay.float().exp()), keep(module.dt_bias)


def plan_delta(layer: DeltaLayer, config: GatedDeltaConfig, hidden: int, sizes: Sizes) -> None:
    """Give it matrices that have sizes and no data."""
    layer.input = sizes(config.channels + config.value_size, hidden)
    layer.gates = PackedMatrix(int(Kind.F32), 2 * config.num_value_heads, hidden)
    layer.output = sizes(hidden, config.value_size)


def layer_states(states: StateCache) -> LayerStates:
    """One layer's states by slots."""
    return LayerStates(states.recurrent.data_ptr(), states.convolution.data_ptr())
