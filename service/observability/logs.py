"""The logging configuration: plain lines on a terminal, JSON lines otherwise, each with the request's id.

`access` writes one line for each HTTP request. No line contains prompts, outputs or keys. Exceptions are logged as type
and frames without their text, which may quote a client's data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from triptych.model.api.stats import StepStats
from triptych.model.system.log_lines import JsonLines, is_json
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.request_context import RequestContext, current
from triptych.service.settings.service_settings import LogFormat

_access = logging.getLogger("triptych.access")
_QUIET = frozenset({"/livez", "/readyz", "/health", "/metrics"})  # polled, so only their failures are logged
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def setup(log_format: LogFormat = "auto", *, stream: TextIO | None = None, replica: str = "") -> None:
    """Send all log lines to `stream` (stderr) in one format, and disable uvicorn's own access log.

    Lines of JSON name the `replica`.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(replica) if is_json(log_format, stream) else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True
    # No line shows these, so do not look them up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def access(context: RequestContext, method: str, path: str) -> None:
    """Log one request. The path is the client's: it is shortened, and quoted if it is not printable ASCII."""
    if (path in _QUIET and context.status < 400) or not _access.isEnabledFor(logging.INFO):
        return
    shown = path if len(path) <= 100 else path[:97] + "..."
    if not (shown.isascii() and shown.isprintable()):
        shown = ascii(shown)
    method, milliseconds = method[:16], round((time.monotonic() - context.started) * 1000, 1)
    outcome = context.outcome or context.rejection
    text = f"{method} {shown} {context.status} {milliseconds} ms"
    if context.proxy_s is not None:
        text += f" after {context.proxy_s * 1000:.1f} ms in HAProxy"
    if context.tenant.name:
        text += f" by {context.tenant.name}"
    if context.model:
        text += f" {context.model} {context.tokens_in} in {context.tokens_out} out {outcome}"
        if context.images:
            text += f", {context.images} images"
    phases, parts = context.phases_ms, {}
    if phases is not None:
        text += " (queue {:.1f}, prefill {:.1f}, decode {:.1f} ms; {} cached, {} running)".format(
            *phases, context.cached_tokens, context.running
        )
        parts = dict(zip(("queue_ms", "prefill_ms", "decode_ms"), phases, strict=True))
        parts |= {"tokens_cached": context.cached_tokens, "running": context.running}
    record = logging.LogRecord(_access.name, logging.INFO, __file__, 0, text, (), None)  # faster: finds no caller
    record.fields = {
        "method": method,
        "path": shown,
        "status": context.status,
        "ms": milliseconds,
        "model": context.model,
        "tokens_in": context.tokens_in,
        "tokens_out": context.tokens_out,
        "outcome": outcome,
        **({"proxy_ms": round(context.proxy_s * 1000, 1)} if context.proxy_s is not None else {}),
        **({"images": context.images} if context.images else {}),
        **({"tenant": context.tenant.name} if context.tenant.name else {}),
        **parts,
    }
    _access.handle(record)


class _SafeFormatter(logging.Formatter):
    """Formats an exception as its frames and type, without its text."""

    def formatException(self, ei: _ExcInfo) -> str:
        kind, _, tb = ei
        return "".join(traceback.format_tb(tb)) + (kind.__name__ if kind is not None else "")


class PlainFormatter(_SafeFormatter):
    """Formats a record as a line such as `12:00:00 INFO triptych.access [id] POST /generate 200 12.3 ms`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(request)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        context = current()
        record.request = f"[{context.request_id}] " if context is not None else ""
        return super().format(record)


class JsonFormatter(_SafeFormatter, JsonLines):
    """Formats a record as `JsonLines` does, with the id of its request, and the replica if there are several."""

    def __init__(self, replica: str = "") -> None:
        JsonLines.__init__(self)
        self._own = {"replica": replica} if replica else {}

    def fields(self) -> dict[str, object]:
        context = current()
        return {**self._own} if context is None else {"request_id": context.request_id, **self._own}


# -- A named pipe that carries the stderr of Ray's workers to this process, which prints it. Ray itself prints its
# workers' output only with a prefix on every line, which is then not JSON. Lines of up to 4096 bytes arrive whole even
# if several processes write.

_STDERR = 2


@contextmanager
def printing(path: Path) -> Iterator[None]:
    """Create the pipe at `path`, and copy its content to this process's stderr until the block ends."""
    os.mkfifo(path, 0o600)
    # Also opened for writing, so that the pipe does not end when a writer closes it.
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
    """Make the pipe at `path` the stderr of this process and of its children."""
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
        with suppress(OSError):  # on a full disk lines are lost; a full pipe would block all writers
            while data:
                data = data[os.write(_STDERR, data) :]
        if ended in ready:
            return


# -- A log line of activity every ten seconds while the engines work; none while they are idle.

INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class ActivityLog:
    """Logs the work of the engines since its last line."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tokens: Counter[str] = Counter()
        self._began = time.monotonic()
        client.on_step(self._observe)

    def _observe(self, step: StepStats) -> None:
        self._tokens[step.model] += step.num_tokens

    async def report(self) -> None:
        """Log every `INTERVAL_S` until cancelled at shutdown."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if line := self.line(time.monotonic()):
                logger.info(line)

    def line(self, now: float) -> str:
        """Return the state of each busy model and its tokens a second since the last line; empty if all were idle."""
        seconds, self._began = max(now - self._began, 1e-9), now
        parts = []
        for name, stats in self._client.stats().items():
            if not (self._tokens[name] or stats.running or stats.waiting):
                continue
            text = f"{name}: {stats.running} running, {stats.waiting} waiting"
            if stats.total_blocks:
                text += f", KV {stats.used_blocks / stats.total_blocks:.0%}"
            if stats.prefix_queries:
                text += f", prefix hits {stats.prefix_hits / stats.prefix_queries:.0%}"
            parts.append(f"{text}, {self._tokens[name] / seconds:.0f} tokens/s")
        self._tokens.clear()
        return "; ".join(parts)
