"""One stderr for processes that a foreign supervisor starts: they write into a named pipe, whose reader prints.

Ray keeps its workers' output in files and can only show it with a prefix on every line, which is then no longer JSON.
Lines of up to 4096 bytes arrive whole, whoever else writes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STDERR = 2


@contextmanager
def printing(path: Path) -> Iterator[None]:
    """Make the pipe at `path`; what is written into it appears on this process's stderr until the block ends."""
    os.mkfifo(path, 0o600)
    # Reading and writing: the pipe then never ends because a writer left.
    pipe = os.open(path, os.O_RDWR)
    ended, end = os.pipe()  # beside it, as what is written into it may be anything
    thread = threading.Thread(target=_copy, args=(pipe, ended), name="log-pipe", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join(timeout=5)
        os.close(ended)
        os.close(pipe)


def adopt(path: Path) -> None:
    """Make the pipe at `path` this process's stderr, and that of the processes it starts."""
    pipe = os.open(path, os.O_WRONLY)
    os.dup2(pipe, _STDERR)
    os.close(pipe)


def _copy(pipe: int, ended: int) -> None:
    """Print what comes out of `pipe` until the other end of `ended` is closed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
    either = select.poll()
    either.register(pipe, select.POLLIN)
    either.register(ended, select.POLLHUP)
    while True:
        ready = {descriptor for descriptor, _ in either.poll()}
        data = os.read(pipe, 1 << 16) if pipe in ready else b""  # all that a pipe holds
        with suppress(OSError):  # what a full disk does not take is lost; a pipe that nobody empties would stop all
            while data:
                data = data[os.write(_STDERR, data) :]
        if ended in ready:
            return
