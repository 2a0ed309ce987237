"""A client that sends bytes as they are, and reads replies one after the other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

_SECONDS = 20.0
_BETWEEN_SEGMENTS = 0.01
_BETWEEN_BYTES = 0.001


@dataclass
class Reply:
    """One reply, with its interim replies left out."""

    status: int
    version: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    ended_by: str = "length"  # or "chunks", "close"

    def header(self, name: bytes) -> bytes | None:
        return next((value for given, value in self.headers if given.lower() == name), None)

    @property
    def closes(self) -> bool:
        """Whether it says that the connection is closed after it."""
        return b"close" in (self.header(b"connection") or b"").lower()


@dataclass
class Client:
    """One connection."""

    port: int
    interim: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.port), _SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._read = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, segments: Iterable[bytes]) -> None:
        for at, segment in enumerate(segments):
            if at:
                time.sleep(_BETWEEN_BYTES if len(segment) == 1 else _BETWEEN_SEGMENTS)
            try:
                self.socket.sendall(segment)
            except OSError:  # the server has closed
                return

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reply(self, method: bytes = b"GET") -> Reply | None:
        """Return the next reply; None at the end of the connection."""
        while True:
            head = self._until(b"\r\n\r\n")
            if head is None:
                return None
            first, *lines = head[:-4].split(b"\r\n")
            version, status = first.split(b" ", 2)[:2]
            assert version.startswith(b"HTTP/"), head
            if int(status) >= 200:
                break
            self.interim.append(int(status))
        headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        reply = Reply(int(status), version, headers)
        self._read_body(reply, method)
        return reply

    def is_at_end(self) -> bool:
        """Whether the server has closed and sends nothing more."""
        return not self._read and not self._more()

    def _read_body(self, reply: Reply, method: bytes) -> None:
        if method == b"HEAD" or reply.status in (204, 304):
            return
        length = reply.header(b"content-length")
        if reply.header(b"transfer-encoding") is not None:
            assert length is None and reply.header(b"transfer-encoding") == b"chunked"
            reply.ended_by = "chunks"
            while True:
                size = int(self._must(b"\r\n")[:-2], 16)
                data = self._exactly(size + 2)
                assert data.endswith(b"\r\n")
                if not size:
                    return
                reply.body += data[:-2]
        elif length is not None:
            reply.body = self._exactly(int(length))
        else:
            reply.ended_by = "close"
            while self._more():
                pass
            reply.body, self._read = self._read, b""

    def _more(self) -> bool:
        try:
            data = self.socket.recv(65_536)
        except ConnectionError:
            return False
        self._read += data
        return bool(data)

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._read:
            if not self._more():
                assert not self._read, f"a broken reply: {self._read!r}"
                return None
        at = self._read.index(mark) + len(mark)
        found, self._read = self._read[:at], self._read[at:]
        return found

    def _must(self, mark: bytes) -> bytes:
        found = self._until(mark)
        assert found is not None
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._read) < size:
            assert self._more(), "the reply ends early"
        found, self._read = self._read[:size], self._read[size:]
        return found
