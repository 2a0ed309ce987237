"""The relay lets several front processes use one engine loop, of which one process, the hub, has the connection.

The hub's own `AsyncEngine` starts the loop, loads and unloads models, and restarts a lost loop; it has no requests.
Those of the clients pass through here as they were encoded: of a request the relay reads its id and model, of an output
its id, which tells whose it is. Nothing is done for a token by itself but that and a copy of its bytes.

    client -- requests, aborts, ids that have ended -->  Relay  -- Commands -->  loop
           <-- outputs, one frame for all of a step --          <-- Events ----

Invariants: an output goes to the client that sent the request, or nowhere if that has ended it; a client that goes
leaves no request in the engine; no request from before a loss of the loop (its `epoch`) reaches the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from model.api.messages import Abort, Commands, Events
from model.api.request import FinishReason
from model.api.stats import ModelInfo
from model.client.async_engine import Transport


@dataclass(slots=True)
class RelayedEvents(Events):
    """`Events` with outputs as they came."""

    tokens: list[msgspec.Raw] = field(default_factory=list)  # type: ignore[assignment]
    encoded: list[msgspec.Raw] = field(default_factory=list)  # type: ignore[assignment]


@dataclass(slots=True)
class RelayedCommands:
    """A frame of requests from a client, which becomes `Commands` for the loop."""

    generate: list[msgspec.Raw] = field(default_factory=list)
    encode: list[msgspec.Raw] = field(default_factory=list)
    abort: list[Abort] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.generate or self.encode or self.abort)


class _Request(msgspec.Struct):
    """What the relay reads of a request."""

    request_id: str
    model: str


class _Output(msgspec.Struct):
    """What the relay reads of an output."""

    request_id: str


_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_output = msgspec.msgpack.Decoder(_Output).decode


class Receiver(Protocol):
    """Sends a client what comes from the loop."""

    def deliver(self, tokens: Sequence[msgspec.Raw], encoded: Sequence[msgspec.Raw]) -> None:
        """Outputs of the client's requests, of one step."""

    def loaded(self, info: ModelInfo) -> None:
        """A model is loaded, again if the loop was lost."""

    def dropped(self, model: str) -> None:
        """A model is about to be unloaded: its requests end now."""

    def ready(self, epoch: int) -> None:
        """The loop takes requests that are sent with this epoch."""

    def lost(self, reason: str) -> None:
        """The loop has gone, and every request with it."""


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """A request that has not ended."""

    request_id: str
    model: str
    generates: bool


class RelayClient:
    """One client of a relay and its requests that have not ended."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.requests: dict[str, RelayedRequest] = {}  # by id
        self.tokens: list[msgspec.Raw] = []  # of the step that is being delivered
        self.encoded: list[msgspec.Raw] = []


class Relay:
    """Splits the outputs of the loop by client, and joins the clients' requests."""

    def __init__(self) -> None:
        self.epoch = 0  # counts the loops that were started
        self.is_ready = False
        self._loop: Transport | None = None
        self._clients: dict[RelayClient, None] = {}
        self._owners: dict[str, RelayClient] = {}  # by id of each request

    def transport(self, inner: Transport) -> RelayTransport:
        """Return what the hub's `AsyncEngine` uses in place of `inner`, which must decode to `RelayedEvents`."""
        return RelayTransport(self, inner)

    # -- clients

    def join(self, receiver: Receiver) -> RelayClient:
        """Add a client, which is told at once if the loop is ready."""
        client = RelayClient(receiver)
        self._clients[client] = None
        if self.is_ready:
            receiver.ready(self.epoch)
        return client

    def leave(self, client: RelayClient) -> list[RelayedRequest]:
        """Abort all requests of a client that has gone, and return them."""
        self._clients.pop(client, None)
        lost = list(client.requests.values())
        self._forget(client, list(client.requests))
        if lost and self._loop is not None:
            aborts = [Abort(one.model, one.request_id, None, FinishReason.CANCELLED) for one in lost]
            self._loop.send(Commands(abort=aborts))
        return lost

    def take(self, client: RelayClient, epoch: int, commands: RelayedCommands, ended: Sequence[str]) -> None:
        """Pass on a client's requests and aborts; outputs of those that have `ended` are wanted no more."""
        if commands and epoch == self.epoch and self._loop is not None and self.is_ready:
            for raws, generates in ((commands.generate, True), (commands.encode, False)):
                for raw in raws:
                    request = _decode_request(raw)
                    made = RelayedRequest(request.request_id, request.model, generates)
                    client.requests[request.request_id] = made
                    self._owners[request.request_id] = client
            self._loop.send(commands)  # type: ignore[arg-type]  # it has some of the fields of Commands
        self._forget(client, ended)

    def _forget(self, client: RelayClient, requests: Sequence[str]) -> None:
        for request in requests:
            if client.requests.pop(request, None) is not None:
                del self._owners[request]

    # -- the loop

    def _started(self, loop: Transport) -> None:
        self._loop = loop
        self.epoch += 1

    def _receive(self, events: Events) -> None:
        """Hand out the outputs; what remains in `events` is the hub's."""
        touched: set[RelayClient] = set()
        tokens: Sequence[Any] = events.tokens  # raw, as `RelayedEvents` has them
        encoded: Sequence[Any] = events.encoded
        for raw in tokens:
            if (owner := self._owners.get(_decode_output(raw).request_id)) is not None:
                owner.tokens.append(raw)
                touched.add(owner)
        for raw in encoded:
            if (owner := self._owners.get(_decode_output(raw).request_id)) is not None:
                owner.encoded.append(raw)
                touched.add(owner)
        events.tokens, events.encoded = [], []
        for client in touched:
            client.receiver.deliver(client.tokens, client.encoded)
            client.tokens, client.encoded = [], []
        for info in events.loaded:
            for client in self._clients:
                client.receiver.loaded(info)

    def _dropped(self, model: str) -> None:
        for client in self._clients:
            client.receiver.dropped(model)

    def _set_ready(self) -> None:
        self.is_ready = True
        for client in self._clients:
            client.receiver.ready(self.epoch)

    def _lost(self, reason: str) -> None:
        """Fail the requests of all clients; idempotent until the next loop is started."""
        self._loop = None
        if not self.is_ready:
            return
        self.is_ready = False
        self._owners.clear()
        for client in self._clients:
            client.requests.clear()
            client.receiver.lost(reason)


class RelayTransport:
    """A transport that gives the clients' outputs to them, and the rest to the hub's `AsyncEngine`."""

    def __init__(self, relay: Relay, inner: Transport) -> None:
        self._relay = relay
        self._inner = inner

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        def receive(events: Events) -> None:
            self._relay._receive(events)
            on_events(events)
            if events.failure is not None:
                self._relay._lost(events.failure)
            elif events.ready:
                self._relay._set_ready()

        def lost(reason: str) -> None:
            self._relay._lost(reason)
            on_lost(reason)

        await self._inner.start(receive, lost)
        self._relay._started(self._inner)

    def send(self, commands: Commands) -> None:
        for model in commands.unload:
            self._relay._dropped(model)
        self._inner.send(commands)

    def kill(self) -> bool:
        self._relay._lost("the engine gives no sign")
        return self._inner.kill()

    async def close(self) -> None:
        self._relay._lost("the engine is shut down")
        await self._inner.close()
