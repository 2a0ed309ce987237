"""Sharing of sandbox processes between the applications of one test process, one after the other.

Starting a process takes half a second of CPU time, and most tests make an application. A process
that is free when its application closes answers the next application's requests.
"""

from __future__ import annotations

import socket
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from triptych.service.sandbox.process_pool import Worker

Kept = tuple[subprocess.Popen[bytes], socket.socket]


@contextmanager
def shared_sandboxes() -> Iterator[Callable[[], None]]:
    """Keep the processes of workers that are closed, until the end of the block; yields what ends them earlier."""
    kept: defaultdict[Any, list[Kept]] = defaultdict(list)
    started = Worker._started

    def kind(worker: Worker) -> Any:
        return tuple(worker._command), tuple(sorted(worker._environment.items()))

    def close(self: Worker) -> None:
        if self._process is not None and self._channel is not None and self._process.poll() is None:
            kept[kind(self)].append((self._process, self._channel))
            self._process = self._channel = None
        self._kill()

    def take(self: Worker) -> socket.socket:
        if self._process is None and kept[kind(self)]:
            self._process, self._channel = kept[kind(self)].pop()
        return started(self)

    def end() -> None:
        for processes in kept.values():
            while processes:
                process, channel = processes.pop()
                channel.close()
                process.kill()
                process.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "close", close)
        patch.setattr(Worker, "_started", take)
        yield end
    end()
