"""The thread transport runs the engine loop in a thread of this process, for tests and tools.

It uses the same frames as `ProcessTransport`, which the service uses.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable

from triptych.model.api.messages import Commands, Events
from triptych.model.engine.loop import EngineLoop


class ThreadTransport:
    """The front's end of the connection to an engine loop in a thread; `_Channel` is the loop's end."""

    pid = os.getpid()

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Commands] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()

        def call(function: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(function, *arguments)

        def run() -> None:
            EngineLoop(_Channel(self._inbox, lambda events: call(on_events, events))).run()
            call(on_lost, "the engine thread ended")

        self._thread = threading.Thread(target=run, name="engine-loop", daemon=True)
        self._thread.start()

    def send(self, commands: Commands) -> None:
        self._inbox.put(commands)

    def kill(self) -> bool:
        """Return False: a thread cannot be ended from outside."""
        return False

    async def close(self) -> None:
        self._inbox.put(Commands(close=True))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)


class _Channel:
    def __init__(self, inbox: queue.SimpleQueue[Commands], deliver: Callable[[Events], None]) -> None:
        self._inbox = inbox
        self.send = deliver

    def receive(self, timeout: float) -> Commands | None:
        try:
            return self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
        except queue.Empty:
            return None
