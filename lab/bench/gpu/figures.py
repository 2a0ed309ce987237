"""The answer of a case of the GPU benchmark, and the exceptions that replace it. Uses only the standard library."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]  # by name; "ok": False marks a result that is wrong

LOST = 75  # exit code of a child process whose CUDA context is unusable: the next process may go on


class Stop(Exception):
    """Ends the whole run: no later figure would be valid on this machine. The message is the reason."""


class NotRecorded(Exception):
    """A model's figures would say nothing of the GPU path: another attention computes, or steps are not recorded."""


class Skip(Exception):
    """Skips a case that cannot run here. The message is the reason."""
