"""The engine loop in a child process: length-prefixed msgpack frames over a socket pair, typed at both ends, no pickle.

    front (asyncio)  -- Commands -->  child: EngineLoop
                     <-- Events ----  one frame a round of steps

The child, `python -m model.engine FD`, ends when its socket closes: none outlives its front, however
that ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import Callable

import msgspec

from model.api.messages import Commands, Events
from model.system.child_process import (
    HEADER,
    describe_exit,
    start_child,
)

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0  # a child that was told to close gets so long


class ProcessTransport:
    """The front's end: starts the child and turns its frames into calls on the event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        """Start the child; `on_lost` is called once with a reason when it is gone without having been closed."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._process = start_child("model.engine", theirs.fileno(), descriptors=[theirs.fileno()])
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, on_events, on_lost))

    def send(self, commands: Commands) -> None:
        assert self._writer is not None
        frame = self._encoder.encode(commands)
        self._writer.write(HEADER.pack(len(frame)) + frame)

    def kill(self) -> bool:
        if self._process is not None:
            self._process.kill()
        return self._process is not None

    async def close(self) -> None:
        """End the child: asked first, killed if it does not answer."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()  # the end of file is the request to end
        process = self._process
        if process is not None and process.poll() is None:
            try:
                await asyncio.to_thread(process.wait, _CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)

    async def _read(
        self, reader: asyncio.StreamReader, on_events: Callable[[Events], None], on_lost: Callable[[str], None]
    ) -> None:
        decoder = msgspec.msgpack.Decoder(Events)
        try:
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                on_events(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._process is not None
            code = await asyncio.to_thread(self._process.wait)
            on_lost(f"the engine process ended {describe_exit(code)}")
        except Exception as error:  # nothing more would be read, and everybody would wait
            logger.exception("what the engine said could not be delivered")
            on_lost(f"what the engine said could not be delivered: {type(error).__name__}")
