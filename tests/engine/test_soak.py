"""Hundreds of mixed requests, a third cancelled at random: none is lost and no block leaks."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from tests.engine.front import async_test, ends_of, idle, ids_of, served, until
from tests.engine.support import request
from tests.model.checkpoints import prompt
from triptych.model.api.request import EncodeRequest, FinishReason, Request, token_source
from triptych.model.client.async_engine import AsyncEngine

AT_ONCE = 24


def generation(kind: str, name: str, chance: random.Random) -> Request:
    shape = chance.choice([{}, {}, {"n": 3}, {"num_beams": 3, "n": 2}, {"temperature": 1.0, "seed": 5}])
    made = request(kind, name, chance.randint(1, 20), chance.randrange(8), max_tokens=chance.randint(2, 10), **shape)
    return replace(made, priority=chance.choice([0, 0, 1]), cache_salt=chance.choice(["", "a"]))


async def generate(engine: AsyncEngine, asked: Request, cancel_after: int | None) -> str:
    """Run one request; return how it ended: completed, cancelled by its id, or dropped by its client."""
    stream = engine.submit([asked])
    outputs = []
    try:
        async for output in stream:
            outputs.append(output)
            if cancel_after is not None and len(outputs) > cancel_after:
                if cancel_after % 2:
                    return "left"
                engine.cancel(asked.request_id)
    finally:
        await stream.aclose()
    ends = ends_of(outputs)
    assert set(ends) == {(asked.request_id, index) for index in range(asked.params.n)}
    if FinishReason.CANCELLED in ends.values():
        return "cancelled"
    for index in range(asked.params.n):
        assert len(ids_of(outputs, asked.request_id, index)) == asked.params.max_tokens
    return "completed"


async def encode(engine: AsyncEngine, asked: EncodeRequest, cancel: bool) -> str:
    task = asyncio.create_task(engine.encode([asked]))
    if cancel:
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return "left"
    [output] = await task
    assert output.finish_reason is FinishReason.STOP
    return "completed"


@pytest.mark.parametrize("requests", [300, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["llama-gqa", "marian"])
@async_test
async def test_a_third_cancelled_at_random_leaves_every_block_free(kind: str, requests: int) -> None:
    chance = random.Random(7)
    seen: dict[str, int] = {}
    places = asyncio.Semaphore(AT_ONCE)

    async def one(engine: AsyncEngine, at: int) -> None:
        async with places:
            cancelled = chance.random() < 1 / 3
            if chance.random() < 0.2:
                end = await encode(
                    engine, EncodeRequest(f"e{at}", kind, token_source(prompt(chance.randint(1, 30)))), cancelled
                )
            else:
                asked = generation(kind, f"g{at}", chance)
                end = await generate(engine, asked, chance.randrange(8) if cancelled else None)
        seen[end] = seen.get(end, 0) + 1

    async with served(kind, max_num_seqs=8, max_queued_requests=100, kv_cache_memory=1 << 18) as engine:
        await asyncio.gather(*(one(engine, at) for at in range(requests)))
        await until(lambda: idle(engine))
        stats = engine.stats()[kind]
        assert stats.free_blocks == stats.total_blocks
        assert sum(seen.values()) == requests
        # How many of each depends on how busy the machine is.
        assert min(seen.get(end, 0) for end in ("completed", "cancelled", "left")) > 0, seen
        assert engine.health().ready
