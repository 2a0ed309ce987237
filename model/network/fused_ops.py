"""The small steps between products. On a GPU each is one Triton kernel, elsewhere torch computes it as it stands here.

A decode step on a GPU is hundreds of launches that each move little; what can be one of them should be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from triptych.model.config.attention import RopeScaling, RotaryConfig
from triptych.model.config.layer import Activation
from triptych.model.network.activations import ACTIVATIONS
from triptych.model.network.norms import OffsetRMSNorm
from triptych.model.network.positions import rotary_frequencies, rotate, turns
from triptych.model.system import fallbacks

P = ParamSpec("P")
R = TypeVar("R")

STEPS: set[str] = set()  # names of all kernels
broken: set[str] = set()  # names of kernels that failed, which torch replaces in this process


def fused(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compute a function of rows by its kernel `name` of `triptych.model.network.fused_kernels` where its first
    argument is on a GPU; go on with torch if that fails."""

    STEPS.add(name)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if name in broken or not on_gpu(args[0]):
                return function(*args, **kwargs)
            try:
                found = getattr(_kernels(), name)(*args, **kwargs)
            except Exception as error:  # Triton is missing; a compiler's own, OutOfResources, a full disk
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                use_torch(name, error)
                found = NotImplemented
            return function(*args, **kwargs) if found is NotImplemented else found

        return call

    return decorate


@cache
def _kernels() -> ModuleType:
    from triptych.model.network import fused_kernels  # which imports Triton

    return fused_kernels


def use_torch(name: str, error: Exception) -> None:
    """Compute a step by torch from now on, as its kernel is broken."""
    if name not in broken:
        broken.add(name)
        fallbacks.note(f"{name} runs in several kernels, as its own does not work", error)


def on_gpu(tensor: Any) -> bool:
    """Return whether Triton's kernels compute for a tensor; none of them has gradients."""
    return bool(tensor.is_cuda) and not tensor.requires_grad


@fused("add_rms")
def _add_rms(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, functional.rms_norm(total, weight.shape, weight, eps)


@fused("add_layer")
def _add_layer(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, functional.layer_norm(total, total.shape[-1:], weight, bias, eps)


@fused("add_offset_rms")
def _add_offset_rms(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, _rms(total, gain, eps)


@fused("norm_add_norm")
def _norm_add_norm(
    x: Tensor, y: Tensor, output_gain: Tensor, output_eps: float, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + _rms(y, output_gain, output_eps)
    return total, _rms(total, gain, eps)


def _rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return the norm of `OffsetRMSNorm`, with a float32 gain."""
    return functional.rms_norm(x.float(), gain.shape, gain, eps).to(x.dtype)


def add_norm(x: Tensor, y: Tensor, norm: nn.Module, output: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """`x + output(y)` and its norm, `[T, d]` each; no `output` norm is the identity."""
    if isinstance(norm, OffsetRMSNorm):
        if isinstance(output, OffsetRMSNorm):
            return _norm_add_norm(x, y, output.gain, output.eps, norm.gain, norm.eps)
        if output is None:
            return _add_offset_rms(x, y, norm.gain, norm.eps)
    y = output(y) if output is not None else y
    if type(norm) is nn.RMSNorm and norm.eps is not None:
        return _add_rms(x, y, norm.weight, norm.eps)
    if type(norm) is nn.LayerNorm:
        return _add_layer(x, y, norm.weight, norm.bias, norm.eps)
    total = x + y
    return total, norm(total)


@fused("gated")
def gated(hidden: Tensor, activation: Activation) -> Tensor:
    """`act(gate) * up` of `[gate; up]`: `[T, 2 f]` to `[T, f]`."""
    gate, up = hidden.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


@fused("sigmoid_gated")
def sigmoid_gated(rows: Tensor, gate: Tensor) -> Tensor:
    """`rows * sigmoid(gate)`, `[T, n]` each."""
    return rows * gate.sigmoid()


@fused("clamped")
def clamped(hidden: Tensor, limit: float, gain: float) -> Tensor:
    """`triptych.model.config.layer.GateClamp` of `[gate; up]`: `[T, 2 f]` to `[T, f]`."""
    gate, up = hidden.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1.0) * gate * torch.sigmoid(gain * gate)


@fused("weighted_sums")
def weighted_sums(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Each token's weighted sum `[T, d]` of its rows: of rows `[R, d]` those at `places` `[T, k]`, times weights.

    Each is added to those before it, in float32: a sum over a dimension may be taken in another order for more tokens.
    """
    total = rows[places[:, 0]].float() * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total = total + rows[places[:, rank]].float() * weights[:, rank : rank + 1]
    return total.to(rows.dtype)


@fused("rotate_both")
def rotate_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Queries and keys `[T, heads, D]` turned by their positions."""
    return rotate(q, (cos, sin), interleaved=interleaved), rotate(k, (cos, sin), interleaved=interleaved)


_turns = fused("turns")(turns)


def rotary_tables(
    config: RotaryConfig, positions: Tensor, dtype: torch.dtype, contexts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[T, 1, R]` of positions `[T]`, for `triptych.model.network.positions.rotate`.

    `contexts` `[T]` are the tokens that the rows' keys are turned for, which LongRoPE asks for.
    """
    frequencies, factor = rotary_frequencies(config, positions.device), config.attention_factor
    if config.scaling is not RopeScaling.LONGROPE:
        return _turns(positions, frequencies, factor, dtype, config.interleaved)
    assert contexts is not None
    long = contexts > config.original_max_positions
    frequencies = frequencies[long.long()]  # [T, R / 2]
    if config.long_attention_factor is None:
        return _turns(positions, frequencies, factor, dtype, config.interleaved)
    cos, sin = _turns(positions, frequencies, 1.0, torch.float32, config.interleaved)
    factors = torch.where(long, config.long_attention_factor, factor)[:, None, None]
    return (cos * factors).to(dtype), (sin * factors).to(dtype)
