"""Projections whose inputs and outputs stay within bounds that are stored with them (Gemma 4's tower)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triptych.model.linear.base import Linear, Part
from triptych.model.network.inputs import StepContext


class Bounds(nn.Module):
    """The bounds of one projection, `[lowest input, highest input, lowest output, highest output]` of each part.

    Parts of one matrix may have other bounds of their inputs: then it multiplies each part's inputs by itself.
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.widths = [part.outputs for part in parts]
        self.weight = nn.Parameter(torch.empty(4 * len(parts)))
        self._read: tuple[tuple[int, torch.dtype], list[list[float]]] | None = None

    @property
    def inputs(self) -> list[tuple[float, float]]:
        """Return the bounds of each part's inputs."""
        return [(low, high) for low, high, _, _ in self._values()]

    def of_outputs(self) -> Tensor:
        """Return the lowest and the highest value of each output `[2, outputs]`."""
        bounds = self.weight.detach().view(-1, 4)[:, 2:]
        return bounds.repeat_interleave(torch.tensor(self.widths, device=bounds.device), dim=0).T

    def _values(self) -> list[list[float]]:
        """Return the numbers, read from the device once."""
        made_of = (self.weight.data_ptr(), self.weight.dtype)
        if self._read is None or self._read[0] != made_of:
            self._read = made_of, self.weight.detach().float().view(-1, 4).tolist()
        return self._read[1]

    def project(self, linear: Linear, x: Tensor, step: StepContext) -> Tensor:
        """Return `linear` of rows x `[T, inputs]` within the bounds, `[T, outputs]`."""
        values, parts = self._values(), []
        if len({(low, high) for low, high, _, _ in values}) == 1:
            parts = [*step.project(linear, x.clamp(*values[0][:2])).split(self.widths, dim=1)]
        else:
            for place, (low, high, _, _) in enumerate(values):
                parts.append(step.project(linear, x.clamp(low, high)).split(self.widths, dim=1)[place])
        return torch.cat([part.clamp(*bounds[2:]) for part, bounds in zip(parts, values, strict=True)], dim=1)


def reads_alike(module: nn.Module) -> bool:
    """Whether all parts of each bounded projection within a module have the same bounds of their inputs."""
    return all(len(set(one.inputs)) == 1 for one in module.modules() if isinstance(one, Bounds))


def bounds_of(linear: Linear, *, bounded: bool) -> Bounds | None:
    """Return the bounds of a projection, to be filled, if it has any."""
    return Bounds(linear.spec.outputs) if bounded else None


def project(linear: Linear, bounds: Bounds | None, x: Tensor, step: StepContext) -> Tensor:
    """Return `linear` of rows x `[T, inputs]`, within its bounds if it has any."""
    return step.project(linear, x) if bounds is None else bounds.project(linear, x, step)
