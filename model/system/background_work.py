"""Work in parts, for a thread that has something more urgent to do between them. Stdlib only.

Work is a generator. It yields None where a part ends, which should be after milliseconds, and a `Call` where it waits
for a file, a process or a device. `finish` runs work to its end; `triptych.model.engine.background_jobs` runs it
between steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Call(Generic[Result]):
    """A call that the work waits for. Run it here, or in a thread of its own."""

    def __init__(self, call: Callable[[], Result], stop: Callable[[], object], *, idle: bool, computes: bool) -> None:
        self.computes = computes  # so that it needs a share of the processors
        self.stop = stop  # makes the call end soon, if it can
        self._call = call
        self._idle = idle
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Run it in a thread."""
        threading.Thread(target=self._run_in_thread, daemon=True).start()

    def run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error
        self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def result(self) -> Result:
        """Return what an ended call has returned, or raise what it has raised."""
        if self._error is not None:
            raise self._error
        return self._results.pop()

    def _run_in_thread(self) -> None:
        if self._idle:
            with suppress(OSError):
                os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        self.run()


Work = Generator[Call[Any] | None, None, Result]


def in_thread(
    call: Callable[[], Result],
    stop: Callable[[], object] = lambda: None,
    *,
    idle: bool = False,
    computes: bool = False,
) -> Work[Result]:
    """Return what `call` returns.

    `stop` makes it end soon. `computes`: another process computes meanwhile, and is to have a share of the processors.
    `idle`: its thread yields to all others; it must not hold the interpreter's lock, which others would wait for.
    """
    started = Call(call, stop, idle=idle, computes=computes)
    yield started
    return started.result()


def finish(work: Work[Result]) -> Result:
    """Run work to its end, in this thread."""
    try:
        while True:
            call = next(work)
            if call is not None:
                call.run()
    except StopIteration as end:
        result: Result = end.value
        return result
