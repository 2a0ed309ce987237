"""Inputs of an `encode` call beyond its share are held back: the queue stays short, other calls get their turn."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.engine.front import Brake, async_test, idle, served, until
from tests.model.checkpoints import prompt
from triptych.model.api.request import EncodeRequest, FinishReason, token_source
from triptych.model.client import admission as admission_module
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.errors import EngineDeadError, QueueFullError

LLAMA = "llama-gqa"
SMALL = dict(max_num_seqs=4, max_num_batched_tokens=16, max_queued_requests=8, max_queued_tokens=64)


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(monkeypatch)


def inputs(count: int, name: str, length: int = 4, deadline: float | None = None) -> list[EncodeRequest]:
    source = token_source(prompt(length))
    return [EncodeRequest(f"{name}{at}", LLAMA, source, deadline=deadline) for at in range(count)]


def counts(engine: AsyncEngine) -> tuple[int, int, int]:
    """Return the queue's sequences and tokens, and the tokens held back."""
    found = engine._table[LLAMA].admission
    return found._num_inputs, found.waiting_tokens, found._held_tokens


@async_test
async def test_a_small_call_overtakes_the_rest_of_a_large_one(brake: Brake) -> None:
    async with served(LLAMA, **SMALL) as engine:
        brake.seconds = 0.01
        large = asyncio.create_task(engine.encode(inputs(60, "large")))
        await until(lambda: brake.passes >= 3)
        began = brake.passes
        [small] = await engine.encode(inputs(1, "small"))
        assert small.finish_reason is FinishReason.STOP
        assert brake.passes - began <= 4 and not large.done()
        found = await large
        assert [one.request_id for one in found] == [f"large{at}" for at in range(60)]
        assert {one.finish_reason for one in found} == {FinishReason.STOP}
        assert counts(engine) == (0, 0, 0)


@async_test
async def test_a_large_call_takes_the_room_of_a_few_inputs(brake: Brake) -> None:
    async with served(LLAMA, **SMALL) as engine:
        brake.ready = lambda: False
        large = [asyncio.create_task(engine.encode(inputs(500, f"large{at}-"))) for at in range(3)]
        await asyncio.sleep(0.05)
        sequences, waiting, held = counts(engine)
        assert sequences <= 12 and waiting <= 64 and held + waiting == 3 * 500 * 4
        assert engine.demand()[LLAMA].waiting_tokens == 6000
        small = asyncio.create_task(engine.encode(inputs(1, "small")))
        await asyncio.sleep(0.01)
        assert not small.done()
        brake.ready = lambda: True
        await asyncio.gather(*large, small)
        await until(lambda: idle(engine))
        assert counts(engine) == (0, 0, 0)


@async_test
async def test_an_input_longer_than_a_share_is_computed(brake: Brake) -> None:
    async with served(LLAMA, **SMALL) as engine:
        found = await engine.encode(inputs(3, "long", length=60))
        assert {one.finish_reason for one in found} == {FinishReason.STOP}


@async_test
async def test_held_inputs_can_be_cancelled_one_by_one_and_together(brake: Brake) -> None:
    async with served(LLAMA, **SMALL) as engine:
        brake.ready = lambda: False
        task = asyncio.create_task(engine.encode(inputs(50, "a")))
        await asyncio.sleep(0.02)
        assert engine.cancel("a40") and not engine.cancel("a50")
        brake.ready = lambda: True
        found = await task
        assert [at for at, one in enumerate(found) if one.finish_reason is FinishReason.CANCELLED] == [40]
        assert counts(engine) == (0, 0, 0)
        brake.ready = lambda: False
        task = asyncio.create_task(engine.encode(inputs(50, "b")))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counts(engine) == (0, 0, 0)
        brake.ready = lambda: True
        await until(lambda: idle(engine))


@async_test
async def test_held_inputs_end_at_their_deadline(brake: Brake) -> None:
    async with served(LLAMA, **SMALL) as engine:
        brake.seconds = 0.05
        found = await engine.encode(inputs(400, "late", deadline=time.monotonic() + 0.3))
        reasons = [one.finish_reason for one in found]
        assert reasons[0] is FinishReason.STOP and reasons[-1] is FinishReason.DEADLINE
        assert counts(engine) == (0, 0, 0)


@async_test
async def test_held_inputs_fail_with_the_engine_and_end_with_their_model(brake: Brake) -> None:
    async with served(LLAMA, **SMALL) as engine:
        brake.ready = lambda: False
        task = asyncio.create_task(engine.encode(inputs(50, "a")))
        await asyncio.sleep(0.02)
        unload = asyncio.create_task(engine.unload(LLAMA))
        await asyncio.sleep(0.02)
        brake.ready = lambda: True
        assert {one.finish_reason for one in await task} <= {FinishReason.CANCELLED, FinishReason.STOP}
        await unload
    async with served(LLAMA, **SMALL) as engine:
        brake.ready = lambda: False
        task = asyncio.create_task(engine.encode(inputs(50, "a")))
        await asyncio.sleep(0.02)
        brake.ready = lambda: True
        await engine.close()
        with pytest.raises(EngineDeadError):
            await task


@async_test
async def test_what_is_held_is_bounded(brake: Brake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "_MAX_HELD_TOKENS", 100)
    async with served(LLAMA, **SMALL) as engine:
        brake.ready = lambda: False
        task = asyncio.create_task(engine.encode(inputs(50, "a")))
        await asyncio.sleep(0.02)
        with pytest.raises(QueueFullError, match="queue_tokens"):
            await engine.encode(inputs(50, "b"))
        small = asyncio.create_task(engine.encode(inputs(2, "c")))
        brake.ready = lambda: True
        await asyncio.gather(task, small)
