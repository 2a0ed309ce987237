"""A pool of processes for tasks that a client can make expensive; a process that takes too long is killed.

Each process works on one task at a time. `triptych.service.sandbox.worker_main` confines it and describes its messages.
The next task starts a new process in place of a killed one. Replies of a process are checked like any untrusted input.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar

import pydantic_core

from triptych.model.system import python_child
from triptych.service.sandbox.worker_main import LENGTH, STATUS

T = TypeVar("T")
W = TypeVar("W", bound="Worker")

NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})
_BYTES_FOLLOW = b"\0"  # separates JSON, which never contains it, from bytes
_PART = 1 << 20  # bytes received at a time
_START_SECONDS = 20.0
_REPLY_BYTES = 64 << 20  # maximum of a reply
_GRACE_SECONDS = 0.5  # after the time limit, until a worker that its alarm has not ended is killed
_QUEUE_SECONDS = 5.0  # maximum wait for a free worker


class WorkerError(Exception):
    """A task has no result. `kind` is the `error` of the worker's reply, or start, time, busy or crashed."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """One process, started on first use. Not thread-safe."""

    def __init__(
        self,
        seconds: float,
        module: str,
        *arguments: str,
        variables: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        """Run `module` with only its import path and `variables` in its environment."""
        self._seconds = seconds
        self._command = python_child.command(module, *arguments)
        self._environment = {**python_child.import_path(), **variables}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply, within the worker's time limit; raises `WorkerError`."""
        return self._reply(self._exchange(self._request(request)))

    def ask_with_bytes(self, request: Mapping[str, Any], data: bytes, most: int = 0) -> tuple[Any, memoryview]:
        """Send a request with bytes, and return the reply with its bytes. Raises `WorkerError`.

        The reply may have `most` bytes in addition to `_REPLY_BYTES`.
        """
        answer = self._exchange(b"".join((self._request(request), _BYTES_FOLLOW, data)), most + _REPLY_BYTES)
        end = answer.find(_BYTES_FOLLOW)
        reply = self._reply(answer[: end if end >= 0 else None])
        return reply, memoryview(answer)[end + 1 if end >= 0 else len(answer) :]

    def close(self) -> None:
        """End the process; a later request starts another."""
        self._kill()

    def _kill(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _request(self, request: Mapping[str, Any]) -> bytes:
        # For many numbers json.dumps takes eight times as long, and holds the GIL.
        return pydantic_core.to_json({**request, "seconds": self._seconds}, inf_nan_mode="constants")

    def _reply(self, answer: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(answer)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict):
            self._kill()
            raise WorkerError("crashed", "its process gave no answer")
        if "error" in reply:
            raise WorkerError(str(reply["error"]), str(reply.get("message", "")))
        return reply

    def _exchange(self, request: bytes, most: int = _REPLY_BYTES) -> bytes:
        try:
            channel = self._started()
        except OSError:
            self._kill()
            raise WorkerError("start", "its process did not start") from None
        end = time.monotonic() + self._seconds + _GRACE_SECONDS
        try:
            return self._answer(channel, request, end, most)
        except OSError as error:  # includes TimeoutError
            raise self._failure(timed_out=isinstance(error, TimeoutError)) from None

    def _failure(self, *, timed_out: bool) -> WorkerError:
        """Kill the process, and return the error that explains its missing answer."""
        timed_out = timed_out or self._ended_by_alarm()
        self._kill()
        return self._slow() if timed_out else WorkerError("crashed", "its process ended")

    def _slow(self) -> WorkerError:
        return WorkerError("time", f"more than {self._seconds:g} s")

    def _answer(self, channel: socket.socket, request: bytes, end: float, most: int) -> bytes:
        """Send the request over `channel` and return its answer, of at most `most` bytes; raises `OSError`."""
        channel.settimeout(self._seconds + _GRACE_SECONDS)
        channel.sendall(LENGTH.pack(len(request)))
        channel.sendall(request)
        size = LENGTH.unpack(_receive(channel, LENGTH.size, end))[0]
        if size > most:
            raise ConnectionResetError
        return _receive(channel, size, end)

    def _ended_by_alarm(self) -> bool:
        try:
            return self._process is not None and self._process.wait(_GRACE_SECONDS) == -signal.SIGALRM
        except subprocess.TimeoutExpired:
            return False

    def _started(self) -> socket.socket:
        if (
            self._channel is not None
            and self._process is not None
            and self._process.poll() is None
            and not _has_more(self._channel)
        ):
            return self._channel
        self._kill()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                self._command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=self._environment,
            )
        _receive(self._channel, 1, time.monotonic() + _START_SECONDS)
        return self._channel


class ForkingWorker(Worker):
    """A process that forks for each request, and answers it over a new socket."""

    def _answer(self, channel: socket.socket, request: bytes, end: float, most: int) -> bytes:
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                channel.settimeout(_GRACE_SECONDS)
                socket.send_fds(channel, [b"T"], [theirs.fileno()])
            answer = super()._answer(mine, request, end, most)
        self._receive_status(end)
        return answer

    def _failure(self, *, timed_out: bool) -> WorkerError:
        """Return the error that explains the missing answer; kill the process only if its fork has not ended."""
        try:
            status = None if timed_out else self._receive_status(time.monotonic() + _GRACE_SECONDS)
        except OSError:
            status = None
        if status is None:
            return super()._failure(timed_out=timed_out)
        return self._slow() if status == -signal.SIGALRM else WorkerError("crashed", "its process ended")

    def _receive_status(self, end: float) -> int:
        """Receive how the process of the last request ended; raises `OSError`."""
        assert self._channel is not None
        return int(STATUS.unpack(_receive(self._channel, STATUS.size, end))[0])


def _has_more(channel: socket.socket) -> bool:
    """Whether a process has sent something unrequested, or has closed its side."""
    channel.settimeout(0.0)
    try:
        channel.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _receive(channel: socket.socket, size: int, end: float) -> bytes:
    """Receive `size` bytes until the time `end`; raises `OSError`."""
    data = bytearray()
    while len(data) < size:
        channel.settimeout(max(end - time.monotonic(), 0.001))
        part = channel.recv(min(size - len(data), _PART))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


class WorkerPool(Generic[W]):
    """Runs several tasks at once outside the event loop, each within `seconds`."""

    def __init__(self, make: Callable[[], W], seconds: float, workers: int, name: str) -> None:
        self._seconds = seconds
        self._size = workers
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self._workers: LifoQueue[W] = LifoQueue()  # last in, first out: a light load uses few processes
        for _ in range(workers):
            self._workers.put(make())

    async def run(self, task: Callable[[W], T]) -> T:
        """Run `task` with a free worker and return its result; raises `WorkerError`, `busy` if none became free."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, thread_name_prefix=self._name)
        work = self._threads.submit(self._run, task)
        try:
            async with asyncio.timeout(_QUEUE_SECONDS + self._seconds):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise WorkerError("busy", "all workers are busy") from None

    def close(self) -> None:
        """Wait for running tasks and end all processes; a later `run` starts new ones."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        for worker in list(self._workers.queue):
            worker.close()

    def _run(self, task: Callable[[W], T]) -> T:
        worker = self._workers.get()
        try:
            return task(worker)
        finally:
            self._workers.put(worker)
