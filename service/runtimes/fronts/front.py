"""The hub's view of one worker process: its link, its requests, what it holds, and its connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import time
from collections.abc import Sequence

import msgspec

from model.api.stats import Health, ModelInfo
from model.client.relay import Relay, RelayClient
from model.system.child_process import describe_exit, start_child
from service.lifecycle.model_slots import Slot
from service.runtimes.fronts import messages as m
from service.runtimes.fronts.link import Link

_MODULE = "service.runtimes.fronts.worker"
_MAX_UNSENT = 64 << 20  # bytes for a worker that does not read

logger = logging.getLogger("triptych.front")


class Front:
    """A worker that runs. It implements `model.client.relay.Receiver`."""

    def __init__(self, number: int, counts: int) -> None:
        """Start the process; `counts` is the descriptor of the shared counts."""
        self.number = number
        self.seen = time.monotonic()
        own, other = socket.socketpair()
        self._connections, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections.setblocking(False)
        with other, others:
            descriptors = (other.fileno(), others.fileno(), counts)
            self.process: subprocess.Popen[bytes] = start_child(_MODULE, *descriptors, descriptors=descriptors)
        self._socket = own
        self.link: Link | None = None
        self.client: RelayClient | None = None
        self.listening = False
        self.serving = asyncio.Event()
        self.drained = asyncio.Event()
        self.gone = asyncio.Event()
        self.report = m.Report(0, 0, 0, 0)
        self.holds: dict[int, asyncio.Task[None]] = {}  # questions that are being answered
        self._held: dict[int, tuple[Slot, int]] = {}  # by adoption: the model, and how many requests hold it
        self._given = 0  # connections

    async def connect(self, hello: m.Hello, relay: Relay) -> None:
        """Say what is served; from now on messages can be sent."""
        self.link = await Link.over(self._socket, m.ToHub)
        self.link.send(hello)
        self.client = relay.join(self)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; a worker that reads none for long is ended."""
        if self.link is None or self.gone.is_set():
            return
        self.link.send(message)
        if self.link.unsent_bytes > _MAX_UNSENT:
            self.kill("reads nothing")

    def kill(self, reason: str) -> None:
        logger.error("front process %d %s: it is ended", self.number, reason)
        self.process.kill()

    async def wait(self) -> str:
        """Return how the process ended, once it has, and close what led to it."""
        code = await asyncio.to_thread(self.process.wait)
        self.gone.set()
        self._connections.close()
        if self.link is not None:
            self.link.close()
        return describe_exit(code)

    # -- what the relay tells

    def deliver(self, tokens: Sequence[msgspec.Raw], encoded: Sequence[msgspec.Raw]) -> None:
        self.send(m.RawOutputs(list(tokens), list(encoded)))

    def loaded(self, info: ModelInfo) -> None:
        self.send(m.EngineLoaded(info))

    def dropped(self, model: str) -> None:
        self.send(m.EngineDropped(model))

    def ready(self, epoch: int) -> None:
        self.send(m.EngineReady(epoch))

    def lost(self, reason: str) -> None:
        self.send(m.EngineLost(reason))

    def health(self, health: Health) -> None:
        self.send(m.EngineHealth(health))

    # -- models that its requests hold

    def hold(self, adoption: int, slot: Slot, change: int) -> None:
        """Count requests that began (or, below 0, ceased) to hold a model."""
        if change > 0:
            slot.acquire(change)
        elif change < 0:
            slot.release(-change)
        self.count(adoption, slot, change)

    def count(self, adoption: int, slot: Slot, change: int) -> None:
        """Count requests that the slot counts already."""
        _, held = self._held.get(adoption, (slot, 0))
        self._held[adoption] = (slot, held + change)
        if not held + change:
            del self._held[adoption]

    def let_go(self) -> None:
        """Give back whatever its requests held: they have gone with it."""
        for slot, held in self._held.values():
            slot.release(held)
        self._held.clear()

    # -- connections

    @property
    def open_connections(self) -> int:
        """The connections that are open, counting those as open that it has not reported yet."""
        return self.report.open + self._given - self.report.accepted

    def give(self, connection: socket.socket) -> bool:
        """Hand over a connection; False if it cannot take one now."""
        try:
            socket.send_fds(self._connections, [b"c"], [connection.fileno()])
        except OSError:
            return False
        self._given += 1
        return True
