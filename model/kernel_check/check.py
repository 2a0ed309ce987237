"""What a check of a kernel is: small problems of the shapes that a model has, compared with torch in float32.

A check is data, so that it can be sent to another process and remembered. `part` names what torch computes instead if
the check fails (`model.system.kernel_faults`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from model.kernel_check.product_problems import difference

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


def compare(what: str, found: Tensor, expected: Tensor, bound: float) -> None:
    """Raise `WrongNumbersError` if an error is above `bound` times the largest expected value, or not a number."""
    worst = difference(found, expected)
    if not worst <= bound:
        off = "are not numbers" if worst == float("inf") else f"are off by {worst:.2g} of the largest"
        raise WrongNumbersError(f"the numbers of {what} {off}, at most {bound:.2g} is rounding")
