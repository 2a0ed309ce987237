"""A stream delivers every output once and in order, to slow readers and with a delivery interval too."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from tests.engine.front import async_test, ends_of, ids_of, text_of
from tests.model.texts import bytes_tokenizer
from triptych.model.api.request import (
    FinishReason,
    Request,
    TokenLogprob,
    TokenOutput,
)
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.client.generation_stream import Delivery, GenerationStream
from triptych.model.errors import EngineDeadError

LONG = 30.0  # longer than any test waits
TEXT = "naïve café — ☕ and so on, 日本 too"


class RecordingOwner:
    """Records the calls that a stream makes to its engine client."""

    def __init__(self) -> None:
        self.aborted: list[tuple[str, int | None, FinishReason]] = []
        self.begun: list[str] = []
        self.released: list[str] = []

    def abort(self, model: str, request_id: str, index: int | None, reason: FinishReason) -> None:
        self.aborted.append((request_id, index, reason))

    def started(self, model: str, request_id: str, cached_tokens: int) -> None:
        self.begun.append(request_id)

    def release(self, model: str, request_id: str) -> None:
        self.released.append(request_id)


def open_stream(
    owner: RecordingOwner, *requests: Request, interval: float = 0.0, max_unread_bytes: int = 1 << 20
) -> GenerationStream:
    return GenerationStream(owner, requests, bytes_tokenizer(), max_unread_bytes, Delivery(interval))


def make_request(request_id: str = "r", **params: object) -> Request:
    return Request(request_id, "m", (1,), SamplingParams(max_tokens=1000, **params))  # type: ignore[arg-type]


def token(token_id: int, request_id: str = "r", index: int = 0, **more: object) -> TokenOutput:
    return TokenOutput(request_id, index, [token_id], **more)  # type: ignore[arg-type]


def steps(ids: Sequence[int], **key: object) -> list[TokenOutput]:
    """Return one output per token; the last one ends the sequence."""
    outputs = [token(token_id, **key) for token_id in ids]  # type: ignore[arg-type]
    outputs[-1].finish_reason = FinishReason.LENGTH
    return outputs


async def waits(stream: GenerationStream) -> bool:
    """Whether a read would wait."""
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    if reading.done():
        return False
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return True


IDS = bytes_tokenizer().encode(TEXT, add_special_tokens=False).ids


@async_test
async def test_fast_reader_gets_each_step_separately() -> None:
    stream = open_stream(RecordingOwner(), make_request())
    outputs = []
    for output in steps(IDS):
        stream.push(output)
        outputs.append(await anext(stream))
    assert [output.token_ids for output in outputs] == [[i] for i in IDS]
    assert text_of(outputs) == TEXT


@async_test
async def test_slow_reader_gets_buffered_steps_merged_per_sequence() -> None:
    owner = RecordingOwner()
    stream = open_stream(owner, make_request("a", n=2, logprobs=1), make_request("b"))
    first = [TokenLogprob(1, -1.0)]
    for step, token_id in enumerate(IDS):
        logprobs = [TokenLogprob(token_id, -0.5, ((token_id, -0.5),))]
        for index in (0, 1):
            prompt_logprobs = [None, *first] if step == 0 else None
            more = {"logprobs": list(logprobs), "prompt_logprobs": prompt_logprobs, "cached_tokens": 3 * (step == 0)}
            stream.push(token(token_id, "a", index, scheduled_time=float(step), **more))
        stream.push(token(token_id, "b", scheduled_time=None if step else 7.0))
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
    assert sorted(owner.released) == ["a", "b"]


@async_test
async def test_delivered_outputs_do_not_count_as_unread() -> None:
    owner = RecordingOwner()
    stream = open_stream(owner, make_request(), max_unread_bytes=1000)
    for token_id in IDS * 5:
        for _ in range(4):  # each counts a little more than 200 bytes
            stream.push(token(token_id))
        await anext(stream)
    assert not owner.aborted
    for _ in range(5):
        stream.push(token(IDS[0]))
    assert owner.aborted == [("r", None, FinishReason.CANCELLED)]


@async_test
async def test_interval_delays_all_outputs_but_the_first_and_last() -> None:
    stream = open_stream(RecordingOwner(), make_request(), interval=LONG)
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
async def test_delivered_output_is_not_merged_with_later_ones_before_it_is_read() -> None:
    stream = open_stream(RecordingOwner(), make_request(), interval=LONG)
    for token_id in IDS[:3]:
        stream.push(token(token_id))
    assert (await anext(stream)).token_ids == [IDS[0]]
    assert await waits(stream)


@async_test
async def test_interval_delivers_on_time_without_further_outputs() -> None:
    stream = open_stream(RecordingOwner(), make_request(), interval=0.1)
    began = time.monotonic()
    stream.push(token(IDS[0]))
    await anext(stream)
    for token_id in IDS[1:4]:
        stream.push(token(token_id))
    assert (await anext(stream)).token_ids == list(IDS[1:4])
    assert 0.09 < time.monotonic() - began < 20
    for token_id in IDS[4:7]:
        await asyncio.sleep(0.12)
        stream.push(token(token_id))  # the interval since the last delivery has passed
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(5):  # event loop iterations without a wait
            await asyncio.sleep(0)
        assert reading.done() and reading.result().token_ids == [token_id]


@async_test
async def test_first_token_of_each_sequence_is_not_delayed() -> None:
    stream = open_stream(RecordingOwner(), make_request(n=2), interval=LONG)
    stream.push(token(IDS[0], index=0))
    await anext(stream)
    stream.push(token(IDS[1], index=0))
    assert await waits(stream)
    stream.push(token(IDS[0], index=1))
    assert [(await anext(stream)).index for _ in range(2)] == [0, 1]


@async_test
async def test_stop_string_ends_the_sequence_without_waiting_for_the_interval() -> None:
    owner = RecordingOwner()
    stream = open_stream(owner, make_request(stop=("café",)), interval=LONG)
    ids = iter(IDS)
    stream.push(token(next(ids)))
    outputs = [await anext(stream)]
    for token_id in ids:
        stream.push(token(token_id))
        if owner.aborted:
            break
    outputs += [output async for output in stream]
    assert owner.aborted == [("r", 0, FinishReason.STOP)]
    assert text_of(outputs) == TEXT[: TEXT.index("café")]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, "café")
    assert next(ids, None) is not None  # the stop string ended it before the last token


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
@async_test
async def test_early_end_delivers_buffered_outputs(reason: FinishReason) -> None:
    owner = RecordingOwner()
    stream = open_stream(owner, make_request(), interval=LONG)
    for token_id in IDS[:6]:
        stream.push(token(token_id))
    stream.end(reason, abort_engine=True)
    outputs = [output async for output in stream]
    assert ids_of(outputs, "r") == list(IDS[:6])
    assert ends_of(outputs) == {("r", 0): reason}
    assert text_of(outputs) == bytes_tokenizer().decode(IDS[:6])


@async_test
async def test_lost_engine_delivers_buffered_outputs_then_raises() -> None:
    stream = open_stream(RecordingOwner(), make_request(), interval=LONG)
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
async def test_outputs_are_the_same_at_any_reading_speed(interval: float, stop: tuple[str, ...]) -> None:
    expected = TEXT[: TEXT.index("so on")] if stop else TEXT
    rng = random.Random(0)
    for _ in range(30):
        owner = RecordingOwner()
        stream = open_stream(owner, make_request(n=2, stop=stop), interval=interval)
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
        assert owner.released == ["r"]
