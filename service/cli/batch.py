"""The command `triptych batch`: runs a file of requests offline, without a server.

It runs the service's own batches over a folder next to the output, so the same command goes on after an interruption.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from triptych.model.errors import ConfigError
from triptych.service.app import Application
from triptych.service.batches.lines import read_lines
from triptych.service.batches.objects import ENDPOINTS
from triptych.service.batches.records import DAY_SECONDS, RETENTION_SECONDS, Batch, now
from triptych.service.batches.state import Batches
from triptych.service.batches.store import new_id
from triptych.service.observability import logs
from triptych.service.runtimes.assembly import build_app
from triptych.service.settings.resolve import resolve_config

_POLL_SECONDS = 0.2
_LINE_SECONDS = 10.0  # between lines of progress where there is no terminal
_BAR = 30  # characters
_NO_LIMIT = 1 << 50
_MAX_FIRST = 1 << 26  # bytes of the first line


class _Url(msgspec.Struct):
    url: str


def run(file: Path, models: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any], output: Path) -> int:
    """Write the replies to the requests of `file` to `output`, and failures next to it. Return the exit code.

    Raises `ConfigError`, `EngineDeadError`.
    """
    endpoint = _endpoint(file)
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {output} does not exist")
    for made in (output, _errors_of(output)):
        if made.exists() and made.samefile(file):
            raise ConfigError(f"--output {output}: {made} is the file of requests, which would be overwritten")
    state = output.with_name(f"{output.name}.state")
    config = resolve_config(
        models, {**settings, "runtime": "local", "state_dir": str(state.absolute()), "max_state_bytes": _NO_LIMIT}
    )
    logs.setup("plain")
    logging.getLogger().setLevel(logging.WARNING)
    try:
        batch = asyncio.run(_run(build_app(config), file, endpoint, output))
    except KeyboardInterrupt:
        print(f"\ntriptych: stopped; the same command goes on ({state} has what is done)", file=sys.stderr)
        raise
    if batch.status == "failed":
        for error in batch.errors:
            place = f"line {error['line']}: " if error["line"] else ""
            print(f"triptych: {file}: {place}{error['message']} ({error['code']})", file=sys.stderr)
    shutil.rmtree(state)
    return int(batch.status == "failed" or batch.failed > 0)


def _endpoint(file: Path) -> str:
    """Return the route that the first line names. Raises `ConfigError`."""
    _, first = next(read_lines(file, _MAX_FIRST), (0, b""))
    try:
        found = msgspec.json.decode(first, type=_Url).url
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(
            f"{file}: expected a JSON object with custom_id, method, url and body in each line; the first line is none"
        ) from None
    if found not in ENDPOINTS:
        raise ConfigError(
            f"{file}: url of the first line: found {found[:80]!r}, expected one of {', '.join(ENDPOINTS)}"
        )
    return found


async def _run(app: Application, file: Path, endpoint: str, output: Path) -> Batch:
    batches = app.state.batches
    assert isinstance(batches, Batches)
    digest = await asyncio.to_thread(_digest, file)
    async with app.router.lifespan_context(app):
        batch_id = await _begun(batches, digest, file) or await _begin(batches, file, endpoint, digest)
        progress = _Progress()
        while (batch := await _state(batches, batch_id)).is_active:
            progress.show(batch)
            await asyncio.sleep(_POLL_SECONDS)
        progress.show(batch, ended=True)
        for file_id, path in ((batch.output_file_id, output), (batch.error_file_id, _errors_of(output))):
            if file_id is not None:
                await asyncio.to_thread(shutil.copyfile, batches.store.path_of(file_id), path)
            elif batch.status != "failed":  # what an earlier run has left is not of this one
                path.open("wb").close() if path == output else path.unlink(missing_ok=True)
    return batch


def _errors_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors")


async def _begun(batches: Batches, digest: str, file: Path) -> str | None:
    """Return the batch of an earlier run of the same file. Raises `ConfigError` if it was another file."""
    found = await batches.store.run(lambda tables: tables.batches("", None, 1))
    if found and found[0].metadata != {"sha256": digest}:
        raise ConfigError(
            f"{batches.store.files.parent} has replies to another file, or to {file} before it changed; delete that "
            "folder, or choose another output"
        )
    return found[0].id if found else None


async def _begin(batches: Batches, file: Path, endpoint: str, digest: str) -> str:
    upload = batches.store.new_upload()
    await asyncio.to_thread(_copy, file, upload)
    time_ = now()
    batch = Batch(new_id("batch_"), "", endpoint, "", "", time_, time_ + 365 * DAY_SECONDS, metadata={"sha256": digest})

    def add(tables: Any) -> None:
        batch.input_file_id = tables.add_file(upload, "", file.name, "batch", RETENTION_SECONDS).id
        tables.add_batch(batch, 1)

    await batches.store.run(add)
    batches.runner.notice()
    return batch.id


def _copy(file: Path, to: Path) -> None:
    shutil.copyfile(file, to)
    with to.open("rb") as stream:
        os.fsync(stream.fileno())


async def _state(batches: Batches, batch_id: str) -> Batch:
    found = await batches.store.run(lambda tables: tables.batch("", batch_id))
    assert found is not None
    return found


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _Progress:
    """Shows how far a batch is: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: int | None = None  # lines that were done at the start
        self._shown = 0.0

    def show(self, batch: Batch, *, ended: bool = False) -> None:
        done, seconds = batch.completed + batch.failed, time.monotonic() - self._began
        if self._first is None and batch.total:
            self._first = done
        rate = (done - (self._first or 0)) / seconds if seconds else 0.0
        text = (
            f"{done}/{batch.total} lines, {batch.failed} failed, {rate:.1f}/s, {batch.usage.output_tokens} tokens out"
        )
        if sys.stderr.isatty():
            filled = _BAR * done // max(1, batch.total)
            bar = "#" * filled + "." * (_BAR - filled)
            print(f"\r[{bar}] {text}  ", end="\n" if ended else "", file=sys.stderr, flush=True)
        elif ended or time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            print(f"triptych: {batch.status}: {text}", file=sys.stderr, flush=True)
