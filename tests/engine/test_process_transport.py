"""The engine process gives the results of a thread, is supervised and restarted, and leaves no process running."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import uvloop

from tests.engine.front import async_test, collect, idle, ids_of, served, until
from tests.engine.support import mixed, request, running
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import prompt, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import Abort, Commands, Events, ModelSpec
from triptych.model.api.request import EncodeRequest, FinishReason, SourceKind, audio_source, token_source
from triptych.model.api.stats import Demand
from triptych.model.client import async_engine
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.client.process_transport import ProcessTransport
from triptych.model.engine import __main__ as engine_main
from triptych.model.engine.__main__ import SocketChannel
from triptych.model.errors import EngineDeadError
from triptych.model.system.child_process import ENGINE, HEADER, ConnectedChild, FrameSocket

ROOT = Path(__file__).parents[2]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@async_test
async def test_child_equals_thread_and_is_restarted_after_its_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.5,))
    requests = mixed("llama-gqa", 6, logprobs=2, prompt_logprobs=1, temperature=0.5)
    direct = running("llama-gqa")
    for one in requests:
        direct.engine.add(one)
    direct.run()
    async with served("llama-gqa", "bert", transport=ProcessTransport) as engine:
        outputs = await collect(engine.submit(requests))
        (vector,) = await engine.encode([EncodeRequest("e", "bert", token_source(prompt(5)))])
        for one in requests:
            assert ids_of(outputs, one.request_id) == direct.ids(one.request_id)
        assert vector.shape == (32,)
        assert sum(len(o.prompt_logprobs or ()) for o in outputs) == sum(len(r.prompt_token_ids) for r in requests)
        await until(lambda: idle(engine))

        transport = engine.transport
        assert isinstance(transport, ProcessTransport)
        first = transport.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # so that nothing finishes before the kill
        streams = [engine.submit([request("llama-gqa", f"lost-{i}", 5)]) for i in range(3)]
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        began = time.monotonic()
        failures = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert time.monotonic() - began < 20.0  # well before it would count as hanging
        assert [str(failure) for failure in failures] == ["the engine process ended by signal SIGKILL"] * 3
        assert not engine.health().ready
        assert engine.restarts == 0
        with pytest.raises(EngineDeadError):
            engine.submit([request("llama-gqa", "refused", 5)])

        await until(lambda: engine.health().ready, 60.0)
        assert engine.restarts == 1
        assert engine.demand()["llama-gqa"] == Demand(0.0, 0)
        outputs = await collect(engine.submit([request("llama-gqa", "again", 5)]))
        assert len(ids_of(outputs, "again")) == 12
        transport = engine.transport
        assert isinstance(transport, ProcessTransport)
        second = transport.pid
    assert second is not None
    assert second != first
    assert not is_alive(second)


@async_test
async def test_child_that_hangs_or_sends_what_cannot_be_delivered_is_replaced_but_not_for_time_the_front_slept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.1,))
    async with served("llama-gqa", transport=ProcessTransport, stall_seconds=3.0) as engine:
        transport = engine.transport
        assert isinstance(transport, ProcessTransport) and transport.pid is not None
        await asyncio.sleep(0.1)
        os.kill(transport.pid, signal.SIGSTOP)  # the front sleeps too, as in a paused container
        time.sleep(4.0)
        os.kill(transport.pid, signal.SIGCONT)
        await asyncio.sleep(1.5)
        assert (engine.health().ready, engine.restarts) == (True, 0)

        health, close = [], transport.close

        async def closed() -> None:
            health.append(engine.health())  # the health until the child has ended
            await close()

        monkeypatch.setattr(transport, "close", closed)
        await collect(engine.submit([request("llama-gqa", "a-sign", 1, max_tokens=1)]))
        os.kill(transport.pid, signal.SIGSTOP)
        began = time.monotonic()
        (failure,) = await asyncio.gather(
            collect(engine.submit([request("llama-gqa", "stuck", 5)])), return_exceptions=True
        )
        assert re.fullmatch(r"the engine has given no sign for \d+ s", str(failure))
        assert 1.5 < time.monotonic() - began < 20.0
        await until(lambda: bool(health))
        assert not health[0].live
        await until(lambda: engine.health().ready, 60.0)
        assert engine.health().live and engine.restarts == 1
        assert not is_alive(transport.pid)
        outputs = await collect(engine.submit([request("llama-gqa", "again", 5)]))
        assert len(ids_of(outputs, "again")) == 12
        await _lose_a_frame(engine, monkeypatch)
        await until(lambda: engine.health().ready, 60.0)
        assert engine.restarts == 2
        assert len(ids_of(await collect(engine.submit([request("llama-gqa", "b", 5)])), "b")) == 12


async def _lose_a_frame(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: object) -> None:
        monkeypatch.setattr(engine, "_observers", [])
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "_observers", [fails])
    (failure,) = await asyncio.gather(collect(engine.submit([request("llama-gqa", "a", 5)])), return_exceptions=True)
    assert str(failure) == "a frame of the engine could not be delivered: ZeroDivisionError"


class Refusing(ThreadTransport):
    """A transport whose second start fails because the system has no descriptors left."""

    made = 0

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        Refusing.made += 1
        if Refusing.made == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        self.lose = on_lost
        await super().start(on_events, on_lost)


@async_test
async def test_failed_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.01,))
    monkeypatch.setattr(Refusing, "made", 0)
    async with served("llama-gqa", transport=Refusing) as engine:
        transport = engine.transport
        assert isinstance(transport, Refusing)
        transport.lose("an accident")
        await until(lambda: engine.restarts == 2 and engine.health().ready, 60.0)
        assert len(ids_of(await collect(engine.submit([request("llama-gqa", "a", 5)])), "a")) == 12


class Silent(ThreadTransport):
    """A transport whose second loop never sends an event."""

    made = 0

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        Silent.made += 1
        self.lose = on_lost
        if Silent.made != 2:
            await super().start(on_events, on_lost)


@async_test
async def test_an_engine_that_hangs_while_it_starts_again_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.2,))
    monkeypatch.setattr(async_engine, "_LEAST_START_SECONDS", 0.2)
    monkeypatch.setattr(Silent, "made", 0)
    async with served("llama-gqa", transport=Silent) as engine:
        transport = engine.transport
        assert isinstance(transport, Silent)
        transport.lose("an accident")
        await until(lambda: "did not start within" in engine.health().reason)
        assert engine.health().live
        await until(lambda: engine.health().ready)
        assert len(ids_of(await collect(engine.submit([request("llama-gqa", "a", 5)])), "a")) == 12


def test_audio_is_whole_and_known_again_behind_the_socket() -> None:
    features = bytes(range(4 * 2 * 3))
    source = audio_source(features, (2, 3), 2)
    sent = msgspec.msgpack.encode(Commands(encode=[EncodeRequest("a", "m", source)]))
    (arrived,) = msgspec.msgpack.decode(sent, type=Commands).encode
    assert arrived.source == source
    assert (source.kind, source.shape, source.num_positions) == (SourceKind.AUDIO, (2, 3), 2)
    others = (audio_source(features, (3, 2), 2), audio_source(features[::-1], (2, 3), 2), token_source((2, 3)))
    assert len({one.digest for one in (source, *others)}) == 4
    with pytest.raises(ValueError, match="2 x 4 take 32 bytes, found 24"):
        audio_source(features, (2, 4), 2)


def test_socket_descriptor_above_1023_works() -> None:
    """Check a descriptor that a front with many connections would get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    ours, theirs = socket.socketpair()
    try:
        with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 1030)) as high:
            channel = SocketChannel(high)
            assert channel.receive(0.0) is None
            FrameSocket(ours).send(msgspec.msgpack.encode(Commands(close=True)))
            assert channel.receive(10.0) == Commands(close=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_commands_to_a_child_that_has_just_gone_raise_nothing() -> None:
    """Check commands sent before the child's end is known: uvloop raises where asyncio is silent."""
    child, lost = ConnectedChild.__new__(ConnectedChild), list[str]()
    child.connection, other = socket.socketpair()
    child.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    async def send() -> None:
        transport = ProcessTransport(child)
        await transport.start(lambda _: None, lost.append)
        other.close()
        try:
            for number in range(5):
                transport.send(Commands(abort=[Abort("m", f"r{number}", None, FinishReason.CANCELLED)]))
                await asyncio.sleep(0.01)
            assert lost == []
        finally:
            child.process.kill()
        await until(lambda: bool(lost))
        await transport.close()

    uvloop.run(send())
    assert lost == ["the engine process ended by signal SIGKILL"]


@async_test
async def test_a_child_that_was_started_before_is_taken() -> None:
    child = ConnectedChild(ENGINE)
    try:
        transport = ProcessTransport(child)
        await transport.start(lambda events: None, lambda reason: None)
        assert transport.pid == child.process.pid
        assert child.process.poll() is None
    finally:
        child.close()
        assert child.process.poll() is not None
        await transport.close()


def test_garbage_collection_in_the_child_skips_loaded_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's default
    ready: list[int] = []
    monkeypatch.setattr(sys, "argv", ["process", str(theirs.detach())])
    monkeypatch.setattr(engine_main, "ignore_signals", lambda: None)
    send = SocketChannel.send

    def sends(self: SocketChannel, events: Events) -> None:
        if events.ready:
            ready.append(gc.get_freeze_count())
            frames.send(msgspec.msgpack.encode(Commands(close=True)))
        send(self, events)

    monkeypatch.setattr(SocketChannel, "send", sends)
    spec = ModelSpec("bert", str(saved("bert").path), EngineConfig(device="cpu", dtype="float32"))
    frames = FrameSocket(ours)
    before = gc.get_freeze_count()
    try:
        frames.send(msgspec.msgpack.encode(Commands(start=[spec])))
        engine_main.main()
        assert gc.isenabled() and gc.get_threshold()[0] > 700
        assert len(ready) == 1 and ready[0] > before + 10_000
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        ours.close()


def test_a_large_frame_is_received_without_copies() -> None:
    """Streams wait while the engine reads pictures; there were two copies more."""
    size = 8 << 20
    sent = HEADER.pack(size) + bytes(size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=(sent,))
        sender.start()
        tracemalloc.start()
        try:
            frame = FrameSocket(theirs).receive()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            sender.join()
    assert len(frame) == size and peak < 1.2 * size


@pytest.mark.parametrize("size", [10, 4 << 20])
def test_the_head_of_a_large_frame_is_written_apart(size: int) -> None:
    transport, written = ProcessTransport(), list[bytes]()
    transport._writer = SimpleNamespace(is_closing=lambda: False, write=written.append)  # type: ignore[assignment]
    commands = Commands(unload=["x" * size])
    transport.send(commands)
    frame = msgspec.msgpack.encode(commands)
    assert b"".join(written) == HEADER.pack(len(frame)) + frame
    assert len(written) == (1 if size == 10 else 2)


PARENT = """
import asyncio, sys
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.api.engine_config import EngineConfig
from triptych.model.client.process_transport import ProcessTransport
from triptych.model.api.messages import ModelSpec

async def main():
    config = EngineConfig(kv_cache_memory=4 << 20, device="cpu", dtype="float32")
    engine = AsyncEngine([ModelSpec("m", sys.argv[1], config)], ProcessTransport, {})
    await engine.start()
    print(engine.transport.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(saved("llama").path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.02)
