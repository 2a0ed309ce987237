"""What a check of a kernel is: small problems of the shapes that a model has, compared with torch in float32.

A check is data, so that it can be sent to another process and remembered. `part` names what torch computes instead if
the check fails (`triptych.model.system.kernel_faults`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from triptych.model.kernel_check.product_problems import difference
from triptych.model.system.kernel_faults import TRITON

Result = TypeVar("Result")

# The largest error relative to the largest value: twice what rounding makes of outputs, or more.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}


class WrongNumbersError(Exception):
    """A kernel's result is not that of torch."""


class Check(Protocol):
    """A check of one kernel: it raises whatever shows that the kernel is broken."""

    @property
    def part(self) -> str:
        """What torch computes instead."""

    def run(self, device: torch.device) -> None:
        """Compare the kernel with torch; raises `WrongNumbersError`, and what compiling and launching raise."""


def repeated(launch: Callable[[], Result], device: torch.device) -> Iterator[Result]:
    """Yield the results of launches: on a GPU of three, as the first two are Triton's and later ones are held."""
    for _ in range(3 if device.type == "cuda" else 1):
        yield launch()


def compare(what: str, found: Tensor, expected: Tensor, bound: float) -> None:
    """Raise `WrongNumbersError` if an error is above `bound` times the largest expected value, or not a number."""
    worst = difference(found, expected)
    if not worst <= bound:
        off = "are not numbers" if worst == float("inf") else f"are off by {worst:.2g} of the largest"
        raise WrongNumbersError(f"the numbers of {what} {off}, at most {bound:.2g} is rounding")


@dataclass(frozen=True, slots=True)
class LaunchCheck:
    """Compiles and launches the smallest kernel. If this fails, no other kernel is tried."""

    @property
    def part(self) -> str:
        return TRITON

    def run(self, device: torch.device) -> None:
        from triptych.model.kernel_check.triton_launch import try_launch

        if not try_launch(device):
            raise WrongNumbersError("the smallest kernel computes wrong numbers")
