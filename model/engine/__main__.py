"""The engine process: `python -m triptych.model.engine FD` runs the engine loop on the socket FD."""

from __future__ import annotations

import gc
import os
import select
import socket
import sys

import msgspec

from triptych.model.api.messages import Commands, Events
from triptych.model.system.child_process import FrameSocket, ignore_signals
from triptych.model.system.cpu_sets import bind_process
from triptych.model.system.log_lines import log_as_parent
from triptych.model.system.stacks import print_stacks_on_signal

_YOUNG_OBJECTS = 10_000  # between garbage collections; reference counting frees nearly all of a step's objects


class SocketChannel:
    """The engine loop's end of the socket; blocking."""

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


def freeze_objects() -> None:
    """Exempt all objects that exist once the models are loaded from garbage collection.

    A collection over all libraries' objects takes 140 ms, which would delay streams.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.enable()


def main() -> None:
    """Run the engine loop until the front closes the socket."""
    bind_process(os.environ)
    ignore_signals()
    print_stacks_on_signal()
    gc.disable()  # importing makes hardly any garbage, and collections take a quarter of a second of it
    from triptych.model.engine.loop import EngineLoop

    gc.freeze()  # all libraries
    log_as_parent()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        EngineLoop(SocketChannel(connection), freeze_objects).run()


if __name__ == "__main__":
    main()
