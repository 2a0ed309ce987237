"""Commands of the GPU benchmark, and the cases that they consist of. Uses only the standard library at run time.

A case does one thing and returns figures. If it raises, its row says that it failed, and the next case runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.bench.gpu.figures import Figures

if TYPE_CHECKING:
    from lab.bench.gpu.machine import Bench

COMMANDS = {  # name: what it measures; the module of that name has a function `cases(bench)`
    "check": "versions, one launch for each dtype, kernels, the engine against the CPU, memcheck",
    "sweep": "matrix products and attention tiles: the chosen ones against others",
    "quick_tiles": "attention tiles: the chosen ones against those before, in 25 s",
    "workloads": "whole workloads, each with a profile of its steps",
    "headline": "everything that check does in parallel processes, then the main workloads: five minutes",
    "prepare": "compile what the workloads launch",
    "tests": "pytest -m gpu over the kernels",
    "peer": "transformers' continuous batching on the same work",
}


@dataclass(frozen=True, slots=True)
class Case:
    """Measures or checks one thing."""

    name: str
    run: Callable[[Bench], Figures]
    seconds: float = 5.0  # on an H200 with nothing compiled; with less time left it is skipped


def cases_of(commands: list[str], bench: Bench) -> list[Case]:
    """Return the cases of all commands, in order."""
    modules = [importlib.import_module(f"lab.bench.gpu.{name}") for name in commands]
    return [case for module in modules for case in module.cases(bench)]
