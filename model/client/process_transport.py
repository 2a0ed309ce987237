"""Runs the engine loop in a child process; front and engine exchange msgpack frames over a socket pair.

Frames are length-prefixed and decoded into types at both ends; nothing is pickled.

    front (asyncio)  -- Commands -->  child: EngineLoop
                     <-- Events ----  one frame a round of steps

The child, `python -m triptych.model.engine FD`, ends when its socket closes, so it never outlives the front.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable

import msgspec

from triptych.model.api.messages import Commands, Events
from triptych.model.system.child_process import ENGINE, HEADER, ConnectedChild, describe_exit

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0  # for the child to end by itself
_COPIED_BYTES = 1 << 20  # a larger frame (pictures, audio) is written separately from its head, to save a copy


class ProcessTransport:
    """Starts the engine process and turns its frames into calls on the front's event loop."""

    def __init__(self, child: ConnectedChild | None = None) -> None:
        """`child` is an engine process that was started earlier and has received no command yet."""
        self._child = child
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._read_task: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        """Start the child; `on_lost` is called once, with a reason, if it ends before `close`."""
        child = self._child or ConnectedChild(ENGINE)
        child.connection.setblocking(False)
        self._process = child.process
        reader, self._writer = await asyncio.open_connection(sock=child.connection)
        self._read_task = asyncio.create_task(self._read(reader, on_events, on_lost))

    def send(self, commands: Commands) -> None:
        """Send a frame without waiting. A frame to a child that has ended is lost; `on_lost` is called soon."""
        assert self._writer is not None
        if self._writer.is_closing():  # uvloop would raise
            return
        frame = self._encoder.encode(commands)
        head = HEADER.pack(len(frame))
        if len(frame) > _COPIED_BYTES:
            self._writer.write(head)
            self._writer.write(frame)
        else:
            self._writer.write(head + frame)

    def kill(self) -> bool:
        if self._process is not None:
            self._process.kill()
        return self._process is not None

    async def close(self) -> None:
        """End the child: close its socket, then kill it if it does not end within `_CLOSE_SECONDS`."""
        if self._read_task is not None:
            self._read_task.cancel()
        if self._writer is not None:
            self._writer.close()  # the child ends at the end of file
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
        except Exception as error:  # nothing more is read after this, so all requests must fail now
            logger.exception("a frame of the engine could not be delivered")
            on_lost(f"a frame of the engine could not be delivered: {type(error).__name__}")
