"""The engine loop in a child process: length-prefixed msgpack frames over a socket pair, typed at both ends, no pickle.

    front (asyncio)  -- Commands -->  child: EngineLoop
                     <-- Events ----  one frame a round of steps

The child, `python -m model.client.process_transport FD`, ends when its socket closes: none outlives its front, however
that ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import select
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from model.api.messages import Commands, Events
from model.system.child_process import (
    HEADER,
    FrameSocket,
    describe_exit,
    ignore_signals,
    start_child,
)

logger = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000  # between collections; nearly all of a step's are gone without one
_CLOSE_SECONDS = 5.0  # a child that was told to close gets so long


class SocketChannel:
    """The child's end: blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._frames = FrameSocket(connection)
        self._readable = select.poll()  # select itself knows only descriptors below 1024
        self._readable.register(connection, select.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Commands)

    def receive(self, timeout: float) -> Commands | None:
        return self._decoder.decode(self._frames.receive()) if self._readable.poll(timeout * 1000) else None

    def send(self, events: Events) -> None:
        self._frames.send(self._encoder.encode(events))


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
        self._process = start_child("model.client.process_transport", theirs.fileno(), descriptors=[theirs.fileno()])
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


def settle() -> None:
    """Leave what is there once the models are loaded out of later collections of garbage.

    One that goes through all libraries' objects takes 140 ms, in the middle of somebody's stream.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def main() -> None:
    """The child's life: everything it is told comes over the socket."""
    ignore_signals()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    from model.engine.loop import EngineLoop  # torch is imported only in the child

    with socket.socket(fileno=int(sys.argv[1])) as connection:
        EngineLoop(SocketChannel(connection), settle).run()


if __name__ == "__main__":
    main()
