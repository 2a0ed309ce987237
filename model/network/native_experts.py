"""Feed-forwards as C reads them: one MLP, or a router and experts."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import pointer

from torch import Tensor, nn

from model.config.layer import ExpertsConfig, MLPConfig
from model.linear.base import Linear
from model.linear.native import NativeLinear, packed_matrix
from model.native.library import ACTIVATIONS, CLAMPED_SILU, Kind
from model.native.structures import Expert, ExpertsLayer, MLPLayer, Norm, PackedMatrix
from model.network.experts import Experts
from model.network.mlp import MLP

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
