"""One end of the connection between the hub and a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from model.system.child_process import HEADER


class Link:
    """Sends and receives messages in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, messages: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages)

    @classmethod
    async def over(cls, connection: socket.socket, messages: Any) -> Link:
        """Return a link over a connected socket; `messages` is the type of what comes from the other end."""
        connection.setblocking(False)
        return cls(*await asyncio.open_connection(sock=connection), messages)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message without waiting; one to an end that has gone is lost."""
        if self._writer.is_closing():  # uvloop would raise
            return
        frame = self._encoder.encode(message)
        with suppress(RuntimeError, OSError):  # it has gone just now
            self._writer.write(HEADER.pack(len(frame)) + frame)

    @property
    def unsent_bytes(self) -> int:
        return 0 if self._writer.is_closing() else self._writer.transport.get_write_buffer_size()

    async def receive(self) -> AsyncIterator[Any]:
        """Yield messages until the other end has gone."""
        try:
            while True:
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                yield self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()


class Asked:
    """Questions of this end, by number, that wait for the other's answer."""

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    def begin(self) -> tuple[int, asyncio.Future[Any]]:
        """Return the number for a question, and its answer."""
        self._next += 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        return self._next, future

    def answer(self, number: int, value: Any) -> bool:
        """Give the answer to who waits for it; False if nobody does."""
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return False
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
        return True

    def give_up(self, number: int) -> None:
        self._waiting.pop(number, None)

    def fail(self, error: Exception) -> None:
        """End all waiting."""
        for number in list(self._waiting):
            self.answer(number, error)
