"""A named pipe that carries the stderr of Ray's workers to this process, which prints it.

Ray writes its workers' output to files, and prints it only with a prefix on every line, which is then not JSON. Lines
of up to 4096 bytes arrive whole even if several processes write.
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
    """Create the pipe at `path` and copy what is written to it to this process's stderr until the block ends."""
    os.mkfifo(path, 0o600)
    # Opened for writing too, so that the pipe does not end when a writer closes it.
    pipe = os.open(path, os.O_RDWR)
    ended, end = os.pipe()  # signals the end; the log pipe cannot, as any byte may be written to it
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
    """Make the pipe at `path` the stderr of this process and of those that it starts."""
    pipe = os.open(path, os.O_WRONLY)
    os.dup2(pipe, _STDERR)
    os.close(pipe)


def _copy(pipe: int, ended: int) -> None:
    """Copy the content of `pipe` to stderr until the other end of `ended` is closed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread handles signals
    either = select.poll()
    either.register(pipe, select.POLLIN)
    either.register(ended, select.POLLHUP)
    while True:
        ready = {descriptor for descriptor, _ in either.poll()}
        data = os.read(pipe, 1 << 16) if pipe in ready else b""  # the capacity of a pipe
        with suppress(OSError):  # with a full disk, lines are lost; a full pipe would block all writers
            while data:
                data = data[os.write(_STDERR, data) :]
        if ended in ready:
            return
