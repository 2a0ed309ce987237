"""Runs checks in child processes, so that a kernel that crashes or never ends is only found to be broken."""

from __future__ import annotations

import json
import logging
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from triptych.model.kernel_check.check import Check
from triptych.model.kernel_check.child import MEMORY
from triptych.model.kernel_check.codec import encode
from triptych.model.system.child_process import ConnectedChild, FrameSocket, describe_exit
from triptych.model.system.kernel_faults import TRITON

CHILD = "triptych.model.kernel_check.child"
_START_SECONDS = 180.0  # to import torch and make a device context
_CHECK_SECONDS = 120.0  # to compile and run one check, on a slow machine
_END_SECONDS = 10.0
_MOST_PROCESSES = 8
_MOST_HANGS = 2

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What checks have found."""

    passed: list[Check] = field(default_factory=list)
    failed: dict[Check, str] = field(default_factory=dict)  # with the reason
    seconds: dict[Check, float] = field(default_factory=dict)  # that each took
    unchecked: str = ""  # why other kernels were not checked; they are used as they are


class Checker:
    """Runs checks on one device, in as many processes as are needed."""

    def __init__(
        self,
        device: torch.device,
        *,
        child: str = CHILD,
        start_seconds: float = _START_SECONDS,
        check_seconds: float = _CHECK_SECONDS,
    ) -> None:
        """`child` is the module of the process."""
        self._device = device
        self._module = child
        self._start_seconds = start_seconds
        self._check_seconds = check_seconds
        self._child: ConnectedChild | None = None
        self._stopped = False
        self._hangs = 0

    def stop(self) -> None:
        """Make `run` end soon."""
        self._stopped = True
        child = self._child
        if child is not None:
            child.process.kill()

    def run(self, checks: Sequence[Check]) -> Outcome:
        """Run the checks in order. If the first finds that nothing can be launched, the others fail with its reason."""
        outcome, left = Outcome(), list(checks)
        for _ in range(_MOST_PROCESSES):
            if not left or self._stopped or self._hangs == _MOST_HANGS:
                break
            left = self._run_some(left, outcome)
            if outcome.unchecked:
                return outcome
            broken = next((why for check, why in outcome.failed.items() if check.part == TRITON), None)
            if broken is not None:
                outcome.failed |= dict.fromkeys(left, broken)
                return outcome
        if left and self._stopped:
            outcome.unchecked = "the check was stopped"
        elif left:
            ended = f"{_MOST_HANGS} others hung" if self._hangs == _MOST_HANGS else f"{_MOST_PROCESSES} others crashed"
            outcome.failed |= dict.fromkeys(left, f"it was not checked, as {ended}")
        return outcome

    def _run_some(self, checks: Sequence[Check], outcome: Outcome) -> list[Check]:
        """Run checks until one breaks its process; return the rest."""
        child = self._child = ConnectedChild(self._module)
        try:
            child.connection.settimeout(self._start_seconds)
            reason = self._started(child, checks)
            if reason:
                outcome.unchecked = reason
                return []
            child.connection.settimeout(self._check_seconds)
            for at, check in enumerate(checks):
                began = time.monotonic()
                answer = self._answer(child)
                reason, outcome.seconds[check] = answer["reason"], time.monotonic() - began
                if reason == MEMORY:
                    outcome.unchecked = reason
                    return []
                if reason:
                    outcome.failed[check] = reason
                else:
                    outcome.passed.append(check)
                if answer["last"] or (reason and check.part == TRITON):
                    return list(checks[at + 1 :])
            return []
        finally:
            self._child = None
            child.close()

    def _started(self, child: ConnectedChild, checks: Sequence[Check]) -> str:
        """Send the checks; return why the process cannot run them, empty if it is ready."""
        frames = _frames(child)
        try:
            frames.send(str(self._device).encode())
            frames.send(encode(checks))
            ready: str = json.loads(frames.receive())["ready"]
        except TimeoutError:
            return f"the process that checks kernels was not ready after {self._start_seconds:.0f} s"
        except (EOFError, OSError):
            return f"the process that checks kernels ended {_end_of(child)}"
        return ready

    def _answer(self, child: ConnectedChild) -> dict[str, Any]:
        """Return the answer to the next check; of a process that has ended or hangs one for it."""
        try:
            answer: dict[str, Any] = json.loads(_frames(child).receive())
        except TimeoutError:
            self._hangs += 1
            return {"reason": f"it was not done after {self._check_seconds:.0f} s", "last": True}
        except (EOFError, OSError):
            return {"reason": f"its process ended {_end_of(child)}", "last": True}
        return answer


def _frames(child: ConnectedChild) -> FrameSocket:
    return FrameSocket(child.connection)


def _end_of(child: ConnectedChild) -> str:
    try:
        return describe_exit(child.process.wait(_END_SECONDS))
    except subprocess.TimeoutExpired:
        return "its connection"
