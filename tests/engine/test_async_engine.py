"""The asynchronous engine with the thread transport: every accepted request ends exactly once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.engine.front import Brake, async_test, collect, ends_of, idle, ids_of, served, text_of, until
from tests.engine.support import mixed, request, running
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import prompt
from tests.model.texts import bytes_tokenizer
from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import EncodeRequest, FinishReason, TokenOutput, token_source
from triptych.model.client import async_engine
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.engine import builder, network_plan
from triptych.model.errors import ConfigError, EngineDeadError, QueueFullError

LLAMA = "llama-gqa"


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(monkeypatch)


def encodings(count: int, length: int, name: str = "e") -> list[EncodeRequest]:
    return [EncodeRequest(f"{name}{i}", LLAMA, token_source(prompt(length))) for i in range(count)]


def endless(request_id: str, **params: object):  # type: ignore[no-untyped-def]
    return request(LLAMA, request_id, 4, max_tokens=90, **params)


@pytest.mark.parametrize("kind", [LLAMA, "marian", "t5-relu"])
@async_test
async def test_streams_give_the_engines_tokens_and_their_text(kind: str) -> None:
    requests, direct = mixed(kind, 6), running(kind)
    for one in requests:
        direct.engine.add(one)
    direct.run()
    async with served(kind) as engine:
        results = await asyncio.gather(*(collect(engine.submit([one])) for one in requests))
        await until(lambda: idle(engine))
    for one, outputs in zip(requests, results, strict=True):
        ids = ids_of(outputs, one.request_id)
        assert ids == direct.ids(one.request_id)
        assert text_of(outputs) == bytes_tokenizer().decode(ids)
        assert ends_of(outputs) == {(one.request_id, 0): FinishReason.LENGTH}


@async_test
async def test_a_stream_merges_requests_and_their_n_sequences() -> None:
    first, second = request(LLAMA, "a", 5, n=3, temperature=1.0), request(LLAMA, "b", 9, max_tokens=3)
    async with served(LLAMA) as engine:
        outputs = await collect(engine.submit([first, second]))
        assert set(ends_of(outputs)) == {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
        await until(lambda: idle(engine))


@async_test
async def test_two_models_share_one_loop() -> None:
    async with served(LLAMA, "bert", "marian") as engine:
        assert {name: info.form for name, info in engine.models.items()} == {
            LLAMA: "decoder-only",
            "bert": "encoder-only",
            "marian": "encoder-decoder",
        }
        llama, marian, vectors = await asyncio.gather(
            collect(engine.submit([request(LLAMA, "a", 5)])),
            collect(engine.submit([request("marian", "b", 5)])),
            engine.encode([EncodeRequest(f"e{i}", "bert", token_source(prompt(3 + i))) for i in range(4)]),
        )
    assert (len(ids_of(llama, "a")), len(ids_of(marian, "b"))) == (12, 12)
    assert [(v.request_id, v.shape, len(v.data)) for v in vectors] == [(f"e{i}", (32,), 128) for i in range(4)]


@async_test
async def test_a_stop_string_ends_the_sequence_in_the_engine_too(brake: Brake) -> None:
    async with served(LLAMA) as engine:
        whole = text_of(await collect(engine.submit([endless("free")])))
        stop = whole[12:15]
        passes, ended = brake.passes, False
        brake.ready = lambda: ended or brake.passes - passes < 30  # the engine waits for the front after 30 passes
        outputs = await collect(engine.submit([endless("stopped", stop=(stop,))]))
        ended = True
        assert text_of(outputs) == whole[: whole.index(stop)]
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)
        await until(lambda: idle(engine))
        assert brake.passes - passes < 40  # of 90


@async_test
async def test_cancel_ends_a_request_once(brake: Brake) -> None:
    brake.seconds = 0.02
    async with served(LLAMA) as engine:
        stream, other = engine.submit([endless("r", n=2)]), engine.submit([request(LLAMA, "other", 5)])
        first = await anext(stream)
        assert engine.cancel("r")
        assert not engine.cancel("r")
        assert not engine.cancel("unknown")
        ends = ends_of([first, *await collect(stream)])
        assert ends == {("r", 0): FinishReason.CANCELLED, ("r", 1): FinishReason.CANCELLED}
        assert ends_of(await collect(other)) == {("other", 0): FinishReason.LENGTH}
        await until(lambda: idle(engine))


@async_test
async def test_closing_a_stream_aborts_within_a_step(brake: Brake) -> None:
    brake.seconds = 0.05
    async with served(LLAMA) as engine:
        stream = engine.submit([endless("r")])
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        await asyncio.sleep(0)  # lets the abort be sent
        passes = brake.passes
        await until(lambda: idle(engine))
        assert brake.passes - passes <= 2


@async_test
async def test_a_stream_closed_before_anything_ran_leaves_nothing_behind() -> None:
    async with served(LLAMA) as engine:
        stream = engine.submit([endless("r")])
        await stream.aclose()
        assert ends_of(await collect(stream)) == {("r", 0): FinishReason.CANCELLED}
        await collect(engine.submit([request(LLAMA, "next", 3)]))
        await until(lambda: idle(engine))


@async_test
async def test_deadlines_pass_while_running_and_while_waiting(brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "_DEADLINE_GRACE", 1e6)  # so that the engine ends them, not the front
    async with served(LLAMA, max_num_seqs=1) as engine:
        begun, now, late = brake.passes, time.monotonic, 0.0
        brake.ready = lambda: late > 0 or brake.passes - begun < 3
        requests = [replace(endless(name), deadline=now() + 20) for name in ("running", "waiting")]
        running_, waiting = (engine.submit([one]) for one in requests)
        first, passes = await anext(running_), brake.passes
        late = 20.0
        monkeypatch.setattr(time, "monotonic", lambda: now() + late)
        results = [[first, *await collect(running_)], await collect(waiting)]
        assert brake.passes - passes <= 3
        assert [ends_of(outputs) for outputs in results] == [
            {("running", 0): FinishReason.DEADLINE},
            {("waiting", 0): FinishReason.DEADLINE},
        ]
        assert ids_of(results[0], "running")
        assert not ids_of(results[1], "waiting")
        await until(lambda: idle(engine))


@async_test
async def test_deadlines_hold_while_the_engine_hangs_and_it_is_not_live(
    brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_DEADLINE_GRACE", 0.05)
    async with served(LLAMA, "bert", stall_seconds=0.3) as engine:
        passes, goes_on = brake.passes, False
        brake.ready = lambda: goes_on
        engine.submit([endless("hangs")])
        await until(lambda: brake.passes > passes)
        soon = time.monotonic() + 0.2
        stream = engine.submit([replace(endless("r"), deadline=soon)])
        encode = asyncio.create_task(
            engine.encode([EncodeRequest("e", "bert", token_source(prompt(3)), deadline=soon)])
        )
        assert ends_of(await collect(stream)) == {("r", 0): FinishReason.DEADLINE}
        (output,) = await encode
        assert output.finish_reason is FinishReason.DEADLINE
        assert time.monotonic() - soon < 20  # the engine hangs until the test releases it
        await until(lambda: not engine.health().live)
        assert not engine.health().ready
        goes_on = True
        await until(lambda: engine.health().ready)


@async_test
async def test_unread_stream_is_cancelled_beyond_max_unread_bytes(brake: Brake) -> None:
    async with served(LLAMA, max_unread_bytes=4096) as engine:
        begun, got = brake.passes, list[TokenOutput]()
        brake.ready = lambda: brake.passes - begun < 8 + len(ids_of(got, "read"))  # the reader keeps up
        unread, read = engine.submit([endless("unread")]), engine.submit([request(LLAMA, "read", 4, max_tokens=40)])
        async for output in read:
            got.append(output)
        await until(lambda: "unread" not in engine._streams)
        outputs = await collect(unread)
        assert ends_of(outputs) == {("unread", 0): FinishReason.CANCELLED}
        assert 4096 / 400 < len(ids_of(outputs, "unread")) < 4096 / 200 + 2  # each token counts as one event
        assert len(outputs) == 1
        assert ends_of(got) == {("read", 0): FinishReason.LENGTH}
        await until(lambda: idle(engine))


@async_test
async def test_all_received_frames_are_applied_before_the_next_step(brake: Brake) -> None:
    brake.seconds = 0.1
    async with served(LLAMA, max_num_seqs=4, max_queued_requests=100, max_queue_seconds=600.0) as engine:
        streams = []
        for at in range(40):
            streams.append(engine.submit([endless(f"r{at}")]))
            await asyncio.sleep(0.001)  # so that each request is sent in its own frame
        stats, passes = engine.stats, brake.passes
        await until(lambda: stats()[LLAMA].running + stats()[LLAMA].waiting == 40)
        assert brake.passes - passes < 20
        for at in range(40):
            engine.cancel(f"r{at}")
            await asyncio.sleep(0.001)
        passes = brake.passes
        await until(lambda: idle(engine))
        assert brake.passes - passes < 20
        assert {reason for one in streams for reason in ends_of(await collect(one)).values()} == {
            FinishReason.CANCELLED
        }


@async_test
async def test_the_queue_is_bounded_by_requests(brake: Brake) -> None:
    brake.seconds = 0.02
    async with served(LLAMA, max_num_seqs=2, max_queued_requests=1) as engine:
        streams = [engine.submit([endless(f"r{i}")]) for i in range(3)]
        with pytest.raises(QueueFullError) as error:
            engine.submit([endless("too-many")])
        assert error.value.reason == "queue_requests"
        assert 0 < error.value.retry_after_s < 60
        engine.cancel("r0")
        streams.append(engine.submit([request(LLAMA, "r3", 3, max_tokens=1)]))
        for stream in streams:
            await stream.aclose()
        await until(lambda: idle(engine))


@async_test
async def test_front_uses_the_limits_of_the_loaded_model(brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    brake.seconds = 0.02
    for module in (builder, network_plan):
        monkeypatch.setattr(module, "batch_limits", lambda engine, device: BatchLimits(2, 512, 1, 4096))
    async with served(LLAMA) as engine:
        assert engine.models[LLAMA].limits == BatchLimits(2, 512, 1, 4096)
        streams = [engine.submit([endless(f"r{i}")]) for i in range(3)]
        with pytest.raises(QueueFullError):
            engine.submit([endless("too-many")])
        for stream in streams:
            await stream.aclose()


@async_test
async def test_the_queue_is_bounded_by_tokens_that_wait(brake: Brake) -> None:
    brake.seconds = 0.02
    async with served(LLAMA, max_num_seqs=1, max_queued_tokens=30) as engine:
        running_ = engine.submit([request(LLAMA, "running", 20, max_tokens=70)])
        await anext(running_)
        waiting = engine.submit([request(LLAMA, "waiting", 31, max_tokens=1)])
        with pytest.raises(QueueFullError) as error:
            engine.submit([request(LLAMA, "too-many", 6)])
        assert error.value.reason == "queue_tokens"
        first = asyncio.create_task(engine.encode(encodings(1, 6, "a")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="queue_tokens"):
            await engine.encode(encodings(1, 6, "b"))
        await asyncio.gather(first, running_.aclose())
        assert ends_of(await collect(waiting)) == {("waiting", 0): FinishReason.LENGTH}
        await collect(engine.submit([request(LLAMA, "now", 6)]))


@async_test
async def test_cancelling_an_encode_leaves_nothing_behind(brake: Brake) -> None:
    async with served(LLAMA, max_num_seqs=1) as engine:
        passes = brake.passes
        brake.ready = lambda: brake.passes <= passes + 1  # the second pass blocks
        task = asyncio.create_task(engine.encode(encodings(5, 3, "a")))
        await until(lambda: not idle(engine))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        brake.ready = lambda: True
        await until(lambda: idle(engine))
        passes = brake.passes
        brake.ready = lambda: brake.passes <= passes + 1
        by_id = asyncio.create_task(engine.encode(encodings(5, 3, "e")))
        await until(lambda: not idle(engine))
        assert engine.cancel("e4")
        brake.ready = lambda: True
        assert [output.finish_reason for output in await by_id] == [*[FinishReason.STOP] * 4, FinishReason.CANCELLED]


@async_test
async def test_closing_the_engine_fails_unfinished_requests() -> None:
    async with served(LLAMA) as engine:
        stream = engine.submit([endless("r")])
        await engine.close()
        with pytest.raises(EngineDeadError):
            await collect(stream)
        with pytest.raises(EngineDeadError):
            engine.submit([endless("late")])


@async_test
async def test_a_folder_that_cannot_be_served_is_a_configuration_error_at_start() -> None:
    engine = AsyncEngine([ModelSpec("x", "/nowhere/x", EngineConfig())], ThreadTransport, {})
    with pytest.raises(ConfigError, match="x: no such folder"):
        await engine.start()
    assert not engine.health().ready
    await engine.close()


@async_test
async def test_steps_and_stats_are_reported() -> None:
    async with served(LLAMA) as engine:
        steps = []  # type: ignore[var-annotated]
        engine.on_step(steps.append)
        await collect(engine.submit([request(LLAMA, "r", 5)]))
        await until(lambda: idle(engine))
        assert [step.num_tokens for step in steps] == [5] + [1] * 11
        assert engine.stats()[LLAMA].total_blocks == engine.models[LLAMA].num_blocks
