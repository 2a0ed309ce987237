"""What a reader gets of a stream: everything once and in order, however late it reads and however it is held back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from model.api.request import (
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from model.client.generation_stream import GenerationStream
from model.errors import EngineDeadError
from tests.engine.front import async_test, ends_of, ids_of, text_of
from tests.model.texts import bytes_tokenizer

LONG = 30.0  # an interval that no test waits for
TEXT = "naïve café — ☕ and so on, 日本 too"


class Keeper:
    """Remembers what a stream asks of its engine."""

    def __init__(self) -> None:
        self.aborted: list[tuple[str, int | None, FinishReason]] = []
        self.forgotten: list[str] = []

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None:
        self.aborted.append((request_id, index, reason))

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def opened(
    keeper: Keeper, *requests: Request, interval: float = 0.0, max_unread_bytes: int = 1 << 20
) -> GenerationStream:
    return GenerationStream(keeper, requests, bytes_tokenizer(), max_unread_bytes, interval)


def asked(request_id: str = "r", **params: object) -> Request:
    return Request(request_id, "m", (1,), SamplingParams(max_tokens=1000, **params))  # type: ignore[arg-type]


def token(token_id: int, request_id: str = "r", index: int = 0, **more: object) -> TokenOutput:
    return TokenOutput(request_id, index, [token_id], **more)  # type: ignore[arg-type]


def steps(ids: Sequence[int], **key: object) -> list[TokenOutput]:
    """One output a token, the last of them the sequence's."""
    outputs = [token(token_id, **key) for token_id in ids]  # type: ignore[arg-type]
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


async def waits(stream: GenerationStream) -> bool:
    """Whether there is nothing to be read now."""
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    if reading.done():
        return False
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return True


IDS = bytes_tokenizer().encode(TEXT, add_special_tokens=False).ids


@async_test
async def test_a_reader_that_keeps_up_gets_each_step() -> None:
    stream = opened(Keeper(), asked())
    outputs = []
    for output in steps(IDS):
        stream.push(output)
        outputs.append(await anext(stream))
    assert [output.token_ids for output in outputs] == [[i] for i in IDS]
    assert text_of(outputs) == TEXT


@async_test
async def test_a_reader_that_is_behind_gets_what_waits_as_one_output_of_each_sequence() -> None:
    keeper = Keeper()
    stream = opened(keeper, asked("a", n=2, logprobs=1), asked("b"))
    first = [TokenLogprob(1, -1.0)]
    for place, token_id in enumerate(IDS):
        logprobs = [TokenLogprob(token_id, -0.5, ((token_id, -0.5),))]
        for index in (0, 1):
            prompt_logprobs = [None, *first] if place == 0 else None
            more = {"logprobs": list(logprobs), "prompt_logprobs": prompt_logprobs, "cached_tokens": 3 * (place == 0)}
            stream.push(token(token_id, "a", index, scheduled_time=float(place), **more))
        stream.push(token(token_id, "b", scheduled_time=None if place else 7.0))
    for key in (("a", 0), ("a", 1), ("b", 0)):
        stream.push(TokenOutput(*key, finish_reason=FinishReason.STOP, stop_reason=5 if key[1] else None))
    outputs = [output async for output in stream]
    assert [(one.request_id, one.index) for one in outputs] == [("a", 0), ("a", 1), ("b", 0)]
    for one in outputs:
        assert tuple(one.token_ids) == IDS
        assert one.finish_reason is FinishReason.STOP
    a0, a1, b = outputs
    assert a0.text == b.text == TEXT
    assert a1.stop_reason == 5
    assert a0.logprobs is not None and [one.token_id for one in a0.logprobs] == list(IDS)
    assert (a0.prompt_logprobs, b.prompt_logprobs) == ([None, *first], None)
    assert (a0.cached_tokens, a0.scheduled_time, b.scheduled_time) == (3, 0.0, 7.0)
    assert sorted(keeper.forgotten) == ["a", "b"]


@async_test
async def test_what_was_read_counts_no_longer() -> None:
    keeper = Keeper()
    stream = opened(keeper, asked(), max_unread_bytes=1000)
    for token_id in IDS * 5:
        for _ in range(4):  # each counts for a little more than 200
            stream.push(token(token_id))
        await anext(stream)
    assert not keeper.aborted
    for _ in range(5):
        stream.push(token(IDS[0]))
    assert keeper.aborted == [("r", None, FinishReason.CANCELLED)]


@async_test
async def test_an_interval_holds_back_all_but_the_first_and_the_last() -> None:
    stream = opened(Keeper(), asked(), interval=LONG)
    outputs = steps(IDS)
    stream.push(outputs[0])
    assert (await anext(stream)).token_ids == [IDS[0]]
    for output in outputs[1:-1]:
        stream.push(output)
        assert await waits(stream)
    stream.push(outputs[-1])
    rest = await anext(stream)
    assert (tuple(rest.token_ids), rest.finish_reason) == (IDS[1:], FinishReason.LENGTH)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@async_test
async def test_what_was_let_go_is_not_held_again_by_what_came_before_it_was_read() -> None:
    stream = opened(Keeper(), asked(), interval=LONG)
    for token_id in IDS[:3]:
        stream.push(token(token_id))
    assert (await anext(stream)).token_ids == [IDS[0]]
    assert await waits(stream)


@async_test
async def test_what_is_held_comes_when_its_time_has_even_if_the_engine_pauses() -> None:
    stream = opened(Keeper(), asked(), interval=0.1)
    began = time.monotonic()
    stream.push(token(IDS[0]))
    await anext(stream)
    for token_id in IDS[1:4]:
        stream.push(token(token_id))
    assert (await anext(stream)).token_ids == list(IDS[1:4])
    assert 0.09 < time.monotonic() - began < 20
    for token_id in IDS[4:7]:
        await asyncio.sleep(0.12)
        stream.push(token(token_id))  # the last ones were given out longer ago
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(5):  # turns of the loop, and no time
            await asyncio.sleep(0)
        assert reading.done() and reading.result().token_ids == [token_id]


@async_test
async def test_the_first_token_of_each_sequence_is_held_back_by_no_other() -> None:
    stream = opened(Keeper(), asked(n=2), interval=LONG)
    stream.push(token(IDS[0], index=0))
    await anext(stream)
    stream.push(token(IDS[1], index=0))
    assert await waits(stream)
    stream.push(token(IDS[0], index=1))
    assert [(await anext(stream)).index for _ in range(2)] == [0, 1]


@async_test
async def test_a_stop_string_ends_the_sequence_at_once_whatever_is_held() -> None:
    keeper = Keeper()
    stream = opened(keeper, asked(stop=("café",)), interval=LONG)
    ids = iter(IDS)
    stream.push(token(next(ids)))
    outputs = [await anext(stream)]
    for token_id in ids:
        stream.push(token(token_id))
        if keeper.aborted:
            break
    outputs += [output async for output in stream]
    assert keeper.aborted == [("r", 0, FinishReason.STOP)]
    assert text_of(outputs) == TEXT[: TEXT.index("café")]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, "café")
    assert next(ids, None) is not None  # it was not the end that did it


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
@async_test
async def test_an_early_end_gives_out_what_is_held(reason: FinishReason) -> None:
    keeper = Keeper()
    stream = opened(keeper, asked(), interval=LONG)
    for token_id in IDS[:6]:
        stream.push(token(token_id))
    stream.end(reason, tell_engine=True)
    outputs = [output async for output in stream]
    assert ids_of(outputs, "r") == list(IDS[:6])
    assert ends_of(outputs) == {("r", 0): reason}
    assert text_of(outputs) == bytes_tokenizer().decode(IDS[:6])


@async_test
async def test_a_lost_engine_fails_the_reader_behind_what_is_held() -> None:
    stream = opened(Keeper(), asked(), interval=LONG)
    stream.push(token(IDS[0]))
    await anext(stream)
    stream.push(token(IDS[1]))
    assert await waits(stream)
    stream.fail(EngineDeadError("gone"))
    assert (await anext(stream)).token_ids == [IDS[1]]
    with pytest.raises(EngineDeadError):
        await anext(stream)


@pytest.mark.parametrize("interval", [0.0, 0.003])
@pytest.mark.parametrize("stop", [(), ("日本", "so on")])
@async_test
async def test_at_any_pace_the_outputs_join_to_the_same(interval: float, stop: tuple[str, ...]) -> None:
    expected = TEXT[: TEXT.index("so on")] if stop else TEXT
    rng = random.Random(0)
    for _ in range(30):
        keeper = Keeper()
        stream = opened(keeper, asked(n=2, stop=stop), interval=interval)
        outputs: list[TokenOutput] = []

        async def read(stream: GenerationStream = stream, outputs: list[TokenOutput] = outputs) -> None:
            async for output in stream:
                outputs.append(output)
                await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))

        reading = asyncio.create_task(read())
        for pair in zip(steps(IDS, index=0), steps(IDS, index=1), strict=True):
            for output in pair:
                stream.push(output)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0, 0.001)))
        await reading
        for index in (0, 1):
            mine = [output for output in outputs if output.index == index]
            assert text_of(mine) == expected
            assert (tuple(ids_of(mine, "r", index)) == IDS) is not bool(stop)
        assert set(ends_of(outputs).values()) == {FinishReason.STOP if stop else FinishReason.LENGTH}
        assert keeper.forgotten == ["r"]
