"""Workers that render chat templates: one process for each rendering under way, killed when it takes too long.

Why processes stands in `service.chat_worker`. A worker that was killed is replaced by the next rendering; while some
are stuck, others go on.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import LifoQueue
from typing import Any

_WORKER = Path(__file__).with_name("chat_worker.py")
_LENGTH = struct.Struct(">I")
_START_SECONDS = 20.0
_GRACE_SECONDS = 0.5  # after which a worker that should have ended itself is killed
_WORKERS = 4
_WAIT_SECONDS = 5.0


class RenderError(Exception):
    """No text came of a template. `kind`: raised (by the template itself), syntax, failed, memory, length, time, busy
    or crashed.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RenderWorker:
    """One process, started when it is needed. Not for two threads at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        """The text, of at most `limit` characters; raises `RenderError`."""
        request = {"template": template, "variables": variables, "limit": limit, "seconds": self._seconds}
        reply = json.loads(self._exchange(json.dumps(request).encode()))
        if "text" in reply:
            return str(reply["text"])
        raise RenderError(reply["error"], reply["message"])

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _exchange(self, request: bytes) -> bytes:
        try:
            channel = self._started()
            end = time.monotonic() + self._seconds + _GRACE_SECONDS
            channel.settimeout(self._seconds + _GRACE_SECONDS)
            channel.sendall(_LENGTH.pack(len(request)) + request)
            size = _LENGTH.unpack(_take(channel, _LENGTH.size, end))[0]
            return _take(channel, size, end)
        except OSError as error:  # a timeout is one
            timed_out = isinstance(error, TimeoutError) or self._ended_by_alarm()
            self.close()
            if timed_out:
                raise RenderError("time", f"more than {self._seconds:g} s") from None
            raise RenderError("crashed", "its process ended") from None

    def _ended_by_alarm(self) -> bool:
        try:
            return self._process is not None and self._process.wait(_GRACE_SECONDS) == -signal.SIGALRM
        except subprocess.TimeoutExpired:
            return False

    def _started(self) -> socket.socket:
        if self._channel is not None and self._process is not None and self._process.poll() is None:
            return self._channel
        self.close()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            )
        _take(self._channel, 1, time.monotonic() + _START_SECONDS)
        return self._channel


def _take(channel: socket.socket, size: int, end: float) -> bytes:
    """So many bytes before `end`; raises `OSError`."""
    data = bytearray()
    while len(data) < size:
        channel.settimeout(max(end - time.monotonic(), 0.001))
        part = channel.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


class RenderPool:
    """Renders off the event loop, several at a time; each within `seconds`."""

    def __init__(self, seconds: float, workers: int = _WORKERS) -> None:
        self._seconds = seconds
        self._size = workers
        self._threads: ThreadPoolExecutor | None = None
        self._workers: LifoQueue[RenderWorker] = (
            LifoQueue()
        )  # those just used first: few processes where few are needed
        for _ in range(workers):
            self._workers.put(RenderWorker(seconds))

    async def render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        """As `RenderWorker.render`; `busy` when no worker was free in time."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._size, thread_name_prefix="triptych-chat")
        work = self._threads.submit(self._render, template, variables, limit)
        try:
            async with asyncio.timeout(_WAIT_SECONDS + self._seconds):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise RenderError("busy", "all workers are busy") from None

    def close(self) -> None:
        """Wait for what renders and end all processes; a later `render` starts new ones."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        for worker in list(self._workers.queue):
            worker.close()

    def _render(self, template: str, variables: Mapping[str, Any], limit: int) -> str:
        worker = self._workers.get()
        try:
            return worker.render(template, variables, limit)
        finally:
            self._workers.put(worker)
