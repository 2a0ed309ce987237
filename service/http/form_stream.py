"""Forms with one large file (multipart/form-data, RFC 7578), whose content goes to the disk as it comes.

Memory holds a part of the file of bounded size. The rules are those of `triptych.service.http.multipart`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.types import Receive

from triptych.service.core.errors import client_gone, invalid
from triptych.service.http.multipart import MAX_HEAD, MAX_PARTS, MAX_TEXT, broken, read_head, text_of

_PIECE = 1 << 20  # bytes that are written at a time
_MAX_PREAMBLE = 4_096
InThread = Callable[[Callable[[], None]], Awaitable[None]]


@dataclass(slots=True)
class StreamedForm:
    """The texts of a form in their order, and the names of its file's field and of its file."""

    texts: list[tuple[str, str]]
    file_field: str | None = None
    file_name: str = ""


async def read_form_to(path: Path, receive: Receive, boundary: bytes, in_thread: InThread) -> StreamedForm:
    """Read a form; write its file to `path`, which must not exist, and sync it.

    Raises a 400 for a form that is not valid or has several files, a 499 if the client disconnects, and `OSError`.
    The caller removes the file after an error.
    """
    reader = _Reader(boundary)
    with path.open("xb", buffering=0) as file:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise client_gone()
            reader.feed(message.get("body", b""))
            more = message.get("more_body", False)
            if len(reader.content) >= _PIECE or (not more and reader.content):
                content, reader.content = reader.content, bytearray()
                await _finished(in_thread(lambda content=content: _write(file.fileno(), content)))  # type: ignore[misc]
            if not more:
                break
        await _finished(in_thread(lambda: os.fsync(file.fileno())))
    return reader.finish()


async def _finished(work: Awaitable[None]) -> None:
    """Wait for the work of a thread; a caller who is cancelled waits too: the thread writes to the open descriptor."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # it may be cancelled more than once
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # it was seen
        raise


def _write(descriptor: int, content: bytearray) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class _Reader:
    """Divides the bytes of a form into parts as they come; `content` has bytes of the file to be written."""

    def __init__(self, boundary: bytes) -> None:
        self.content = bytearray()
        self._form = StreamedForm([])
        self._border = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first boundary needs no line break before it
        self._parts = 0
        self._text_name: str | None = None
        self._text = bytearray()
        self._steps = self._run()
        self._complete = False
        next(self._steps)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body; raises a 400."""
        self._buffer += data
        if not self._complete:
            next(self._steps)
        else:
            self._buffer.clear()  # an epilogue

    def finish(self) -> StreamedForm:
        """Return the form; raises a 400 if the body ended too early."""
        if not self._complete:
            raise broken("a part does not end" if self._parts else "its boundary is not in it")
        return self._form

    def _run(self) -> Iterator[None]:
        """Read what has come, and yield for more."""
        while (at := self._buffer.find(self._border)) < 0:
            if len(self._buffer) > _MAX_PREAMBLE:
                raise broken("its boundary is not in it")
            yield
        del self._buffer[: at + len(self._border)]
        while True:
            while len(self._buffer) < 2:
                yield
            if self._buffer.startswith(b"--"):
                self._complete = True
                self._buffer.clear()
                yield
                return
            yield from self._head()
            yield from self._data()

    def _head(self) -> Iterator[None]:
        """Read the rest of a boundary's line and the headers of a part."""
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > 256:
                raise broken("a boundary is followed by something else")
            yield
        if self._buffer[:end].strip(b" \t"):
            raise broken("a boundary is followed by something else")
        del self._buffer[:end]  # the line break stays: without headers it begins the empty line
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD:
                raise broken("a part does not end")
            yield
        self._begin(bytes(self._buffer[2:end]) if end else b"")
        del self._buffer[: end + 4]

    def _begin(self, head: bytes) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise broken(f"it has more than {MAX_PARTS} parts")
        name, file_name = read_head(head)
        if file_name is None:
            self._text_name = name
            return
        self._text_name = None
        if self._form.file_field is not None:
            raise invalid("the form has several files; send one", name[:64])
        self._form.file_field, self._form.file_name = name, file_name

    def _data(self) -> Iterator[None]:
        """Read the content of a part until the next boundary, which is removed."""
        while (at := self._buffer.find(self._border)) < 0:
            safe = len(self._buffer) - len(self._border) + 1
            if safe > 0:
                self._take(safe)
            yield
        self._take(at)
        del self._buffer[: len(self._border)]
        if self._text_name is not None:
            self._form.texts.append((self._text_name, text_of(self._text_name, bytes(self._text))))
            self._text.clear()

    def _take(self, size: int) -> None:
        """Move bytes of the buffer to the part that is being read."""
        to = self.content if self._text_name is None else self._text
        to += self._buffer[:size]
        del self._buffer[:size]
        if len(self._text) > MAX_TEXT:
            text_of(self._text_name or "", bytes(self._text))
