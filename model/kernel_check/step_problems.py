"""The small steps between products over random rows, each with what torch computes for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from triptych.model.config.layer import Activation
from triptych.model.network import fused_ops


@dataclass(frozen=True, slots=True)
class StepProblem:
    """One call of a function of `triptych.model.network.fused_ops`."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def by_kernel(self) -> tuple[Tensor, ...]:
        return _results(self.function(*self.arguments))

    def by_torch(self) -> tuple[Tensor, ...]:
        """Compute by torch, in float32 where a kernel rounds only once."""
        plain, dtype = self.function.__wrapped__, self.arguments[0].dtype  # type: ignore[attr-defined]
        if self.name != "rotation":
            return _results(plain(*self.arguments))
        wide = [one.float() if isinstance(one, Tensor) else one for one in self.arguments]
        return tuple(one.to(dtype) for one in _results(plain(*wide)))

    @property
    def kernel(self) -> str:
        """The kernel's name in `triptych.model.network.fused_kernels`."""
        plain = self.function.__wrapped__  # type: ignore[attr-defined]
        name: str = plain.__name__.removeprefix("_")
        return name

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written at least."""
        given = [one for one in self.arguments if isinstance(one, Tensor)]
        return sum(one.numel() * one.element_size() for one in (*given, *self.by_torch()))


def _results(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def step_problems(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[StepProblem]:
    """Return every step for `rows` rows of `width`."""
    generator = torch.Generator(device).manual_seed(width)

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return (2 * torch.randn(shape, generator=generator, device=device)).to(like)

    x, y, gap = normal(rows, width), normal(rows, width), normal(rows, width + 16)[:, :width]  # rows that lie apart
    gain, bias, wide = normal(width), normal(width), normal(width, like=torch.float32).abs()
    places = torch.randperm(4 * rows, generator=generator, device=device).view(rows, 4)
    positions = torch.arange(rows, device=device) * 777
    frequencies = torch.rand(width, generator=generator, device=device)
    turned = fused_ops._turns.__wrapped__(positions, frequencies[:4], 1.0, dtype, False)  # type: ignore[attr-defined]
    weights = normal(rows, 4, like=torch.float32)
    found: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("rms", fused_ops._add_rms, (x, y, gain, 1e-5)),
        ("layer", fused_ops._add_layer, (x, y, gain, bias, 1e-5)),
        ("layer without bias", fused_ops._add_layer, (x, gap, gain, None, 1e-2)),
        ("layer without gain", fused_ops._add_layer, (x, y, None, None, 1e-5)),
        ("offset rms", fused_ops._add_offset_rms, (x, y, wide, 1e-6)),
        ("two norms", fused_ops._norm_add_norm, (x, y, wide, 1e-6, wide + 1, 1e-5)),
        ("sigmoid of a gate", fused_ops.sigmoid_gated, (x, gap)),
        ("clamped", fused_ops.clamped, (4 * normal(rows, 2 * width), 7.0, 1.702)),
        ("weighted sums", fused_ops.weighted_sums, (normal(4 * rows, width), places, weights)),
        ("rotation", fused_ops.rotate_both, (normal(rows, 4, 16), normal(rows, 2, 16), *turned, False)),
        ("turns", fused_ops._turns, (positions, frequencies, 1.5, dtype, False)),
        ("own turns", fused_ops._turns, (positions, frequencies.expand(rows, -1), 1.0, dtype, True)),
    ]
    found += [(one.value, fused_ops.gated, (2 * normal(rows, 2 * width), one)) for one in Activation]
    places = torch.randint(500, (rows, width), generator=generator, device=device)  # one for each pair
    found.append(("turns by coordinates", fused_ops._turns, (places, frequencies, 1.0, dtype, False)))
    return [StepProblem(*one) for one in found]


def compare_steps(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, names: Collection[str] | None = None
) -> dict[str, float]:
    """Return the largest error of each step, or of `names`, in last digits of the expected number: at most 1 is right.

    In 16 bits up to 5 % of the numbers may differ by the last digit; with more the error is infinity.
    """
    digit = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    errors = {}
    for problem in step_problems(rows, width, dtype, device):
        if names is not None and problem.name not in names:
            continue
        worst = 0.0
        for found, expected in zip(problem.by_kernel(), problem.by_torch(), strict=True):
            if (found.dtype, found.shape) != (expected.dtype, expected.shape):
                worst = float("inf")
                continue
            allowed = digit * expected.float().abs() + min(digit, 1e-5)
            error = ((found.float() - expected.float()).abs() / allowed).max().item()
            often = dtype is not torch.float32 and (found != expected).float().mean().item() > 0.05
            worst = max(worst, error) if error == error and not often else float("inf")
        errors[problem.name] = worst
    return errors
