"""Child processes that compute, and the length-prefixed frames that go to and from them over a socket pair."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable

HEADER = struct.Struct("<I")  # the bytes of the frame behind it
# Threads that wait for each other spin so often (tens of microseconds), then sleep. GCC's default is milliseconds: on a
# box that several engines share, each then burns the time that the one it waits for needs.
SPIN_COUNT = "2000"


class FrameSocket:
    """A blocking end of a socket pair; raises `EOFError` where the other end is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def fileno(self) -> int:
        return self.connection.fileno()

    def receive(self) -> bytes:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(size)

    def send(self, frame: bytes) -> None:
        try:
            self.connection.sendall(HEADER.pack(len(frame)) + frame)
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the other end closed the socket") from None

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.connection.recv(size - len(parts))
            except ConnectionResetError:
                part = b""
            if not part:
                raise EOFError("the other end closed the socket")
            parts += part
        return bytes(parts)


def engine_environment() -> dict[str, str]:
    """Of a process that computes; read when torch loads, so it must be there from the start."""
    environment = dict(os.environ)
    # Ray sets this to its own idea of the replica's share; the engine decides on its threads itself.
    environment.pop("OMP_NUM_THREADS", None)
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return environment


def start_child(module: str, *arguments: int, descriptors: Iterable[int]) -> subprocess.Popen[bytes]:
    """`python -m module arguments`, importing what this process can import and inheriting `descriptors` alone."""
    environment = engine_environment()
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        pass_fds=tuple(descriptors),
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def ignore_signals() -> None:
    """Ctrl-C in a terminal reaches the whole group, and so do some supervisors' signals: the front decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def describe_exit(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
