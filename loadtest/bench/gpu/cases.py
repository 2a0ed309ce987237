"""What a command of the GPU bench is made of. Stdlib only.

A case has a name, does one thing and answers with figures; one that raises is a row that failed, and the next goes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadtest.bench.gpu.machine import Bench

Found = dict[str, Any]  # figures by name; "ok": False says that it was not what it had to be

COMMANDS = {  # name: what it tells; each has `cases(bench)` in the module that is named like it
    "check": "versions, one launch for each dtype, kernels, the engine against the CPU, memcheck",
    "sweep": "products and attention tiles, the chosen ones against others",
    "workloads": "whole workloads, each with a profile of its steps",
    "tests": "pytest -m gpu over the kernels",
    "peer": "the reference library's continuous batching on the same work",
}


LOST = 75  # exit code of a child whose CUDA context is unusable: another process may go on


class Stop(Exception):
    """Nothing that follows would mean anything on this machine; the message is the reason."""


class Skip(Exception):
    """A case that cannot be run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to find out."""

    name: str
    run: Callable[[Bench], Found]
    seconds: float = 5.0  # what it takes on an H200 with nothing compiled: not begun with less left


def cases_of(commands: list[str], bench: Bench) -> list[Case]:
    """All cases of the commands, in order."""
    modules = [importlib.import_module(f"loadtest.bench.gpu.{name}") for name in commands]
    return [case for module in modules for case in module.cases(bench)]
