"""Start of child processes that compute, and length-prefixed frames over the socket pair to them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
from collections.abc import Iterable

from triptych.model.system import cpu_threads, log_lines, python_child

ENGINE_VARIABLE = "TRIPTYCH_ENGINE_MODULE"  # names another module that speaks the same frames, for measurements
ENGINE = os.environ.get(ENGINE_VARIABLE) or "triptych.model.engine"  # the module of the engine process
HEADER = struct.Struct("<I")  # the size of the frame that follows, in bytes
# OpenMP threads spin this often (tens of microseconds) at a barrier, then sleep. GCC's default is milliseconds, which
# on a machine shared by several engines takes CPU time from the threads that are waited for.
SPIN_COUNT = "2000"
_SHARED_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class FrameSocket:
    """Sends and receives frames over one end of a socket pair, blocking; raises `EOFError` if the other is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def fileno(self) -> int:
        return self.connection.fileno()

    def limit_sends(self, seconds: float) -> None:
        """Make `send` raise `TimeoutError` if the other end reads nothing for `seconds`."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # a timeval
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive(self) -> bytearray:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(size)

    def send(self, frame: bytes) -> None:
        try:
            self.connection.sendall(HEADER.pack(len(frame)) + frame)
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the other end closed the socket") from None
        except BlockingIOError:
            raise TimeoutError("the other end takes nothing") from None

    def _read(self, size: int) -> bytearray:
        data, count = bytearray(size), 0
        free = memoryview(data)  # filled in place: pictures have megabytes, and streams wait meanwhile
        while count < size:
            try:
                received = self.connection.recv_into(free[count:])
            except ConnectionResetError:
                received = 0
            if not received:
                raise EOFError("the other end closed the socket")
            count += received
        return data


def engine_environment() -> dict[str, str]:
    """Return the environment variables of a process that computes; torch reads them when it is imported."""
    environment = dict(os.environ)
    environment[cpu_threads.VARIABLE] = str(cpu_threads.threads_of(environment))
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    environment[log_lines.VARIABLE] = log_lines.child_format()
    return environment


def start_child(module: str, *arguments: int, descriptors: Iterable[int]) -> subprocess.Popen[bytes]:
    """Start `python -m module arguments` with this process's import path; it inherits only these `descriptors`.

    It gets no SIGINT and SIGTERM until it calls `ignore_signals`: Ctrl+C while it imports would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHARED_SIGNALS)  # a child inherits what is blocked
    try:
        return subprocess.Popen(
            python_child.command(module, *map(str, arguments)),
            pass_fds=tuple(descriptors),
            stdin=subprocess.DEVNULL,
            env=engine_environment() | python_child.import_path(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ConnectedChild:
    """A child process that computes, `python -m module FD`, and this process's end of a socket pair to it."""

    def __init__(self, module: str) -> None:
        self.connection, other = socket.socketpair()
        with other:
            self.process = start_child(module, other.fileno(), descriptors=[other.fileno()])

    def close(self) -> None:
        """End the child at once, if it has not ended by itself."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM, which terminals and supervisors send to all processes: the front ends this one."""
    for one in _SHARED_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SHARED_SIGNALS)


def describe_exit(code: int) -> str:
    """Describe a child's exit code or signal, to follow the word "ended"."""
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
