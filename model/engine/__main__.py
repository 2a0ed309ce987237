"""The engine process: `python -m model.engine FD` computes what comes over the socket FD."""

from __future__ import annotations

import gc
import logging
import select
import socket
import sys

import msgspec

from model.api.messages import Commands, Events
from model.engine.loop import EngineLoop
from model.system.child_process import FrameSocket, ignore_signals

_YOUNG_OBJECTS = 10_000  # between collections; nearly all of a step's are gone without one


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
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        EngineLoop(SocketChannel(connection), settle).run()


if __name__ == "__main__":
    main()
