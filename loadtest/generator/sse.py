"""A parser of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Chunks may end anywhere: inside a line ending, a character or a field. Only whole lines are decoded, so no character is
split. Comments and unknown fields are ignored; data after the last blank line is no event.
"""

from __future__ import annotations


class EventParser:
    """Parses chunks and returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._after_cr = False  # the next byte belongs to the last line's ending if it is \n
        self._begun = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the `data` of every event that ends in `chunk`, in order, as UTF-8."""
        if self._is_one_event(chunk):
            return [chunk[6:-2]]
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        lines = (self._rest + chunk).splitlines(keepends=True)  # of bytes: \n, \r and \r\n only
        self._rest = b"" if lines[-1][-1:] in b"\r\n" else lines.pop()
        self._after_cr = chunk.endswith(b"\r")
        found: list[bytes] = []
        for line in lines:
            self._line(line.rstrip(b"\r\n"), found)
        return found

    def _is_one_event(self, chunk: bytes) -> bool:
        """Return whether the chunk is exactly one data line and a blank line, as most servers send a token."""
        return (
            self._begun
            and not self._rest
            and not self._data
            and not self._after_cr
            and chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"\n")
            and b"\r" not in chunk
        )

    def _line(self, line: bytes, found: list[bytes]) -> None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            if self._data:
                found.append(b"\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
