"""Several front processes over one engine loop: whose an output is, and what is counted for all. No torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec
import pytest

from model.api.engine_config import EngineConfig
from model.api.messages import Abort, Commands, Events, ModelSpec
from model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request, SamplingParams, TokenOutput
from model.api.source import token_source
from model.api.stats import ModelInfo
from model.client.admission import Admission
from model.client.counts import SharedTable
from model.client.relay import Relay, RelayClient, RelayedCommands, RelayedEvents
from model.client.relayed_engine import RelayedEngine
from model.errors import QueueFullError
from tests.engine.front import async_test


class Loop:
    """The loop's end of the connection; it decodes what it is sent as the loop does."""

    def __init__(self) -> None:
        self.commands: list[Commands] = []
        self.killed = False

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        self.on_events, self.on_lost = on_events, on_lost

    def send(self, commands: Commands) -> None:
        self.commands.append(msgspec.msgpack.decode(msgspec.msgpack.encode(commands), type=Commands))

    def kill(self) -> bool:
        self.killed = True
        return True

    async def close(self) -> None:
        self.commands.append(Commands(close=True))

    def emit(self, *tokens: str, encoded: Sequence[str] = (), ready: bool = False) -> None:
        events = Events([TokenOutput(one, 0, [7]) for one in tokens], [EncodeOutput(one) for one in encoded])
        events.ready = ready
        self.on_events(msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=RelayedEvents))


class Client:
    """Records what the relay tells it."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.told: list[object] = []

    def deliver(self, tokens: Sequence[msgspec.Raw], encoded: Sequence[msgspec.Raw]) -> None:
        outputs = [msgspec.msgpack.decode(raw, type=TokenOutput).request_id for raw in tokens]
        self.steps.append(outputs + [msgspec.msgpack.decode(raw, type=EncodeOutput).request_id for raw in encoded])

    def loaded(self, info: ModelInfo) -> None:
        self.told.append(info)

    def dropped(self, model: str) -> None:
        self.told.append(("dropped", model))

    def ready(self, epoch: int) -> None:
        self.told.append(("ready", epoch))

    def lost(self, reason: str) -> None:
        self.told.append(("lost", reason))


class Site:
    """A relay with a loop that is ready and two clients."""

    def __init__(self) -> None:
        self.relay, self.own, self.lost = Relay(), list[Events](), list[str]()
        self.receivers = [Client(), Client()]
        self.clients: list[RelayClient] = []

    async def start(self) -> Loop:
        self.loop = Loop()
        self.transport = self.relay.transport(self.loop)
        await self.transport.start(self.own.append, self.lost.append)
        self.clients = self.clients or [self.relay.join(one) for one in self.receivers]
        self.loop.emit(ready=True)
        return self.loop

    def ask(self, client: int, *ids: str, encode: Sequence[str] = (), epoch: int = 1) -> None:
        made = [Request(one, "m", (1, 2), SamplingParams()) for one in ids]
        inputs = [EncodeRequest(one, "e", token_source((1,))) for one in encode]
        commands = RelayedCommands([raw(one) for one in made], [raw(one) for one in inputs])
        self.relay.take(self.clients[client], epoch, commands, ())


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


@async_test
async def test_each_client_gets_the_outputs_of_its_requests_in_one_piece_a_step() -> None:
    site = Site()
    loop = await site.start()
    site.ask(0, "a", "b", encode=["v"])
    site.ask(1, "c")
    assert [one.request_id for frame in loop.commands for one in frame.generate] == ["a", "b", "c"]
    assert loop.commands[0].generate[0] == Request("a", "m", (1, 2), SamplingParams())
    loop.emit("a", "c", "b", "stranger", encoded=["v"])
    loop.emit("b")
    assert [one.steps for one in site.receivers] == [[["a", "b", "v"], ["b"]], [["c"]]]
    assert not any(events.tokens or events.encoded for events in site.own), "the hub has no requests"
    site.relay.take(site.clients[0], 1, RelayedCommands(abort=[Abort("m", "a", None, FinishReason.STOP)]), ["a"])
    assert loop.commands[-1].abort == [Abort("m", "a", None, FinishReason.STOP)]
    loop.emit("a", "b")
    assert site.receivers[0].steps[-1] == ["b"]


@async_test
async def test_the_requests_of_a_client_that_goes_are_aborted_and_no_others() -> None:
    site = Site()
    loop = await site.start()
    site.ask(0, "a", "b", encode=["v"])
    site.ask(1, "c")
    site.relay.take(site.clients[0], 1, RelayedCommands(), ["b"])
    lost = site.relay.leave(site.clients[0])
    assert [(one.request_id, one.model, one.generates) for one in lost] == [("a", "m", True), ("v", "e", False)]
    assert [(one.request_id, one.reason) for one in loop.commands[-1].abort] == [
        ("a", FinishReason.CANCELLED),
        ("v", FinishReason.CANCELLED),
    ]
    loop.emit("a", "c")
    assert [one.steps for one in site.receivers] == [[], [["c"]]]


@async_test
@pytest.mark.parametrize("how", ["lost", "failure", "killed", "closed"])
async def test_all_clients_are_told_once_of_a_lost_loop_and_nothing_old_reaches_the_next(how: str) -> None:
    site = Site()
    first = await site.start()
    site.ask(0, "a")
    if how == "lost":
        first.on_lost("it ended")
        assert site.lost == ["it ended"]
    elif how == "failure":
        first.on_events(RelayedEvents(failure="it broke"))
    elif how == "killed":
        assert site.transport.kill()
    await site.transport.close()
    for receiver in site.receivers:
        assert [told[0] for told in receiver.told] == ["ready", "lost"]  # type: ignore[index]
    site.ask(0, "between")
    second = await site.start()
    site.ask(0, "late", epoch=1)
    site.ask(0, "new", epoch=2)
    second.emit("a", "late", "new")
    assert [one.request_id for frame in second.commands for one in frame.generate] == ["new"]
    assert (site.receivers[0].steps, site.receivers[0].told[-1]) == ([["new"]], ("ready", 2))
    assert not any(frame.abort for frame in second.commands)


@async_test
async def test_clients_hear_of_an_unload_before_the_loop_does() -> None:
    site = Site()
    loop = await site.start()
    site.transport.send(Commands(unload=["m"]))
    assert all(one.told[-1] == ("dropped", "m") for one in site.receivers)
    assert loop.commands[-1].unload == ["m"]
    late = Client()
    site.relay.join(late)
    assert late.told == [("ready", 1)]


# -- counts of several processes

_LIMITS = EngineConfig(max_num_seqs=30, max_queued_requests=20, max_queued_tokens=10_000)
_CHILD = """
import sys
from model.api.engine_config import EngineConfig
from model.client.admission import Admission
from model.client.counts import SharedTable
from model.errors import QueueFullError
counts = SharedTable(4, int(sys.argv[2]), int(sys.argv[1])).counts(0)
bound = Admission(EngineConfig(max_num_seqs=30, max_queued_requests=20, max_queued_tokens=10_000), counts)
admitted = 0
sys.stdin.readline()
for turn in range(3000):
    try:
        bound.admit({f"r{turn}": 1})
        admitted += 1
        assert counts.sequences <= 50, counts.sequences
        if turn < 2000:
            bound.release(f"r{turn}")
            admitted -= 1
    except QueueFullError:
        pass
print(admitted)
"""


def admission(table: SharedTable, descriptor: int | None = None, column: int = 0) -> Admission:
    mine = table if descriptor is None else SharedTable(4, column, descriptor)
    return Admission(_LIMITS, mine.counts(table.row_of("m")))


def test_processes_that_admit_at_once_never_exceed_the_limit_together() -> None:
    table = SharedTable(4, 0)
    row = table.counts(table.row_of("m"))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(table.descriptor), str(column)],
            pass_fds=[table.descriptor],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for column in (1, 2, 3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    admitted = [int(child.communicate(timeout=60)[0]) for child in children]
    assert sum(admitted) == row.sequences == 50
    for column in (1, 2, 3):  # they have ended, and their requests with them
        table.clear(column)
    assert (row.sequences, row.waiting_tokens) == (0, 0)


def test_counts_and_rates_are_those_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("model.client.counts.time.monotonic", lambda: now[0])
    table = SharedTable(4, 0)
    first, second = (admission(table, os.dup(table.descriptor), column) for column in (1, 2))
    hub = admission(table)
    for i in range(25):
        first.admit({f"a{i}": 10})
        second.admit({f"b{i}": 10})
    assert hub.waiting_tokens == first.waiting_tokens == 500
    with pytest.raises(QueueFullError, match="queue_requests"):
        second.check_room()
    for i in range(10):
        now[0] += 1.0
        first.release(f"a{i}")
        second.release(f"b{i}")
    first.mark_started("a10")
    assert (hub.waiting_tokens, first.has_requests, hub.has_requests) == (290, True, False)
    for i in range(20):
        first.admit({f"c{i}": 1})
    with pytest.raises(QueueFullError) as refused:
        second.admit({"x": 1}, sequences={"x": 4})
    assert refused.value.retry_after_s == pytest.approx(4 / 2, rel=0.2), "two end in a second"
    table.clear(1)
    second.admit({"x": 1}, sequences={"x": 4})


@async_test
async def test_a_model_that_is_dropped_counts_its_requests_no_longer() -> None:
    """Its row stays, and counts for the model that is loaded next under its name."""
    table, ended = SharedTable(2, 1), list[str]()
    row = table.counts(table.row_of("m"))
    engine = RelayedEngine(lambda _: None, ended.append, lambda name: table.counts(table.row_of(name)))
    await engine.start()
    engine.adopt(ModelSpec("m", "/nowhere", _LIMITS), None, None)
    engine.ready()
    stream = engine.submit([Request("a", "m", (1, 2), SamplingParams())])
    encoded = asyncio.create_task(engine.encode([EncodeRequest("v", "m", token_source((1,)))]))
    await asyncio.sleep(0)
    assert (row.sequences, row.waiting_tokens) == (2, 3)
    engine.drop("m")
    assert [output.finish_reason async for output in stream] == [FinishReason.CANCELLED]
    assert [output.finish_reason for output in await encoded] == [FinishReason.CANCELLED]
    assert (row.sequences, row.waiting_tokens, sorted(ended)) == (0, 0, ["a", "v"])
    await engine.close()


@async_test
async def test_the_end_of_a_request_is_told_after_the_request() -> None:
    told: list[object] = []
    table = SharedTable(2, 1)
    engine = RelayedEngine(
        lambda commands: told.extend(("sent", one.request_id) for one in commands.generate),
        lambda request_id: told.append(("ended", request_id)),
        lambda name: table.counts(table.row_of(name)),
    )
    await engine.start()
    engine.adopt(ModelSpec("m", "/nowhere", _LIMITS), None, None)
    engine.ready()
    stream = engine.submit([Request("a", "m", (1, 2), SamplingParams())])
    await stream.aclose()
    await asyncio.sleep(0)
    assert told == [("sent", "a"), ("ended", "a")]
    await engine.close()
