"""Recurrent layers as C reads them, and their states."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from model.cache.states import StateCache
from model.config.layer import GatedDeltaConfig
from model.linear.native import packed_matrix
from model.native.library import Kind
from model.native.structures import DeltaLayer, LayerStates, PackedMatrix
from model.network.delta_net import GatedDeltaNet
from model.network.native_experts import Norms, Sizes


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
