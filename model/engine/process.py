"""The engine loop in a child process: length-prefixed msgpack frames over a socket pair, typed at both ends, no pickle.

    front (asyncio)  -- Commands -->  child: EngineLoop
                     <-- Events ----  one frame a round of steps

The child, `python -m model.engine.process FD`, ends when its socket closes: none outlives its front, however that
ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

import msgspec

from model.engine.protocol import Commands, Events

_HEADER = struct.Struct("<I")
# Threads that wait for each other spin so often (tens of microseconds), then sleep. GCC's default is milliseconds: on a
# box that several engines share, each then burns the time that the one it waits for needs.
SPIN_COUNT = "2000"
_CLOSE_SECONDS = 5.0  # a child that was told to close gets so long


class SocketChannel:
    """The child's end: blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Commands)

    def receive(self, timeout: float) -> Commands | None:
        readable, _, _ = select.select([self._socket], [], [], timeout)
        if not readable:
            return None
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        return self._decoder.decode(self._read(size))

    def send(self, events: Events) -> None:
        frame = self._encoder.encode(events)
        try:
            self._socket.sendall(_HEADER.pack(len(frame)) + frame)
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the front closed the socket") from None

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise EOFError("the front closed the socket")
            parts += part
        return bytes(parts)


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
        self._process = _start_child(theirs)
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader, on_events, on_lost))

    def send(self, commands: Commands) -> None:
        assert self._writer is not None
        frame = self._encoder.encode(commands)
        self._writer.write(_HEADER.pack(len(frame)) + frame)

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
                (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                on_events(decoder.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._process is not None
            code = await asyncio.to_thread(self._process.wait)
            on_lost(f"the engine process ended {_describe_exit(code)}")


def engine_environment() -> dict[str, str]:
    """Of a process that computes; read when torch loads, so it must be there from the start."""
    environment = dict(os.environ)
    # Ray sets this to its own idea of the replica's share; the engine decides on its threads itself.
    environment.pop("OMP_NUM_THREADS", None)
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return environment


def _start_child(connection: socket.socket) -> subprocess.Popen[bytes]:
    environment = engine_environment()
    paths = [path for path in sys.path if path]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.Popen(
        [sys.executable, "-m", "model.engine.process", str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
    )


def _describe_exit(code: int) -> str:
    return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def main() -> None:
    """The child's life: everything it is told comes over the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the front decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    from model.engine.loop import EngineLoop  # torch is imported only in the child

    EngineLoop(SocketChannel(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    main()
