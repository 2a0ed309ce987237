"""The port of several front processes: the hub accepts connections and gives each to the worker that has the fewest."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from service.runtimes.fronts.front import Front

_ACCEPTED = 64  # connections in one turn of the event loop
_PAUSE_SECONDS = 0.02  # where no worker can take one, or there is no descriptor for it
_LOG_SECONDS = 1.0  # between lines that say so: it is tried again after each pause

logger = logging.getLogger("triptych.front")


class ConnectionGiver:
    """Accepts connections while a worker can take them; until then they wait in the system's queue."""

    def __init__(self, fronts: Callable[[], Sequence[Front]]) -> None:
        self._fronts = fronts
        self._listener: socket.socket | None = None
        self._reading = False
        self._turn = 0
        self._untaken: socket.socket | None = None
        self._logged = -_LOG_SECONDS  # when a failure was

    def start(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self.resume()

    def stop(self) -> None:
        """Accept no more."""
        self._pause()
        self._listener = None
        if self._untaken is not None:
            self._untaken.close()

    def resume(self) -> None:
        """Accept again, after a worker has come or a pause."""
        if self._listener is not None and not self._reading and any(front.listening for front in self._fronts()):
            self._reading = True
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        if self._reading and self._listener is not None:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTED):
            try:
                connection = self._untaken or self._listener.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                self._log(error)
                break
            self._untaken = None
            if not self._give(connection):
                self._untaken = connection
                break
            connection.close()
        else:
            return
        self._pause()
        asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self.resume)

    def _log(self, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._logged + _LOG_SECONDS:
            self._logged = now
            logger.error("a connection could not be accepted: %s", error.strerror)

    def _give(self, connection: socket.socket) -> bool:
        """Give a connection to the worker with the fewest; among equals to each in turn."""
        self._turn += 1
        fronts = [front for front in self._fronts() if front.listening]
        at = self._turn % len(fronts) if fronts else 0
        return any(front.give(connection) for front in sorted(fronts[at:] + fronts[:at], key=_connections))


def _connections(front: Front) -> int:
    return front.open_connections
