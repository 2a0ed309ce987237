"""Streams of one frame of the engine are handled together: one callback for all, then their writes in a row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.support import byte_tokenizer, info, until
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import Commands, Events, ModelSpec
from triptych.model.api.request import FinishReason, Request, TokenOutput
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.client.generation_stream import GenerationStream
from triptych.model.errors import EngineDeadError
from triptych.service.core.write_batch import WriteBatch
from triptych.service.http import sse
from triptych.service.http.json_replies import DataEvents
from triptych.service.http.sse import EventTemplate, marked

STREAMS = 256


class ScriptedTransport:
    """An engine loop whose frames the test sends."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        self.send_events, self.lose = on_events, on_lost

    def send(self, commands: Commands) -> None:
        self.asked += commands.generate
        if commands.start is not None:
            loaded = info("gen", "decoder-only", max_num_seqs=STREAMS)
            self.send_events(Events(loaded=[loaded], ready=True))

    def kill(self) -> bool:
        return False

    async def close(self) -> None:
        return None


class CountingLoop:
    """Counts the callbacks that are scheduled."""

    def __init__(self) -> None:
        self.scheduled = 0
        loop: Any = asyncio.get_running_loop()
        call_soon, call_at = loop.call_soon, loop.call_at

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def count(*given: Any, **named: Any) -> Any:
                self.scheduled += 1
                return call(*given, **named)

            return count

        loop.call_soon, loop.call_at = counted(call_soon), counted(call_at)


class Reader:
    """Takes what a stream has, and writes it through a batch, as `EventStream` does."""

    def __init__(self, stream: GenerationStream, writes: WriteBatch, order: list[str]) -> None:
        self.taken: list[TokenOutput] = []
        self.failed = False
        self.written = 0
        self._stream, self._writes, self._order = stream, writes, order
        stream.listen(self._read)

    def _read(self) -> None:
        self._order.append("read")
        try:
            self.taken += self._stream.take()
        except EngineDeadError:
            self.failed = True
        self._writes.add(self._write, b"event")

    def _write(self, data: bytes) -> None:
        self._order.append("write")
        self.written += 1


async def _opened(interval: float) -> tuple[AsyncEngine, ScriptedTransport, list[Reader], list[str]]:
    transport, writes, order = ScriptedTransport(), WriteBatch(), list[str]()
    spec = ModelSpec("gen", "/nowhere", EngineConfig(device="cpu", max_num_seqs=STREAMS))
    engine = AsyncEngine([spec], lambda: transport, {"gen": byte_tokenizer()}, stream_interval=interval)
    await engine.start()
    params = SamplingParams(max_tokens=100)
    streams = [engine.submit([Request(str(number), "gen", (1,), params)]) for number in range(STREAMS)]
    await asyncio.sleep(0)
    assert len(transport.asked) == STREAMS
    readers = [Reader(stream, writes, order) for stream in streams]
    await asyncio.sleep(0)
    return engine, transport, readers, order


def frame(token: int, **more: Any) -> Events:
    return Events(tokens=[TokenOutput(str(number), 0, [token], **more) for number in range(STREAMS)])


async def _settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def test_a_frame_of_many_streams_takes_two_callbacks_and_a_write_each() -> None:
    async def run() -> None:
        engine, transport, readers, order = await _opened(0.0)
        loop = CountingLoop()
        transport.send_events(frame(70))
        assert loop.scheduled == 1
        await _settle()
        assert loop.scheduled <= 2 + 4  # delivery and writes; the others are those of `_settle`
        assert order == ["read"] * STREAMS + ["write"] * STREAMS
        assert {reader.written for reader in readers} == {1}
        order.clear()
        transport.send_events(frame(71))  # two frames that have arrived together are one event
        transport.send_events(frame(72, finish_reason=FinishReason.LENGTH))
        await _settle()
        assert order == ["read"] * STREAMS + ["write"] * STREAMS
        assert all([one.token_ids for one in reader.taken] == [[70], [71, 72]] for reader in readers)
        await engine.close()

    asyncio.run(run())


def test_streams_with_an_interval_share_its_timers() -> None:
    async def run() -> None:
        engine, transport, readers, _ = await _opened(0.2)
        transport.send_events(frame(70))
        await _settle()
        loop = CountingLoop()
        for token in (71, 72, 73):
            transport.send_events(frame(token))
        assert loop.scheduled <= 2  # of the ticks that 256 deliveries fall into
        await until(lambda: all(len(reader.taken) == 2 for reader in readers))
        assert all([one.token_ids for one in reader.taken] == [[70], [71, 72, 73]] for reader in readers)
        await engine.close()

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_bounded() -> None:
    async def run() -> None:
        engine, transport, readers, _ = await _opened(0.0)
        for reader in readers[1:]:
            await reader._stream.aclose()
        stream = engine._streams["0"]
        stream.listen(lambda: None)
        tokens = 0
        while "0" in engine._streams:
            transport.send_events(Events(tokens=[TokenOutput("0", 0, [70])]))
            tokens += 1
            assert tokens < 10_000
        [whole] = stream.take()
        assert (len(whole.token_ids), whole.finish_reason) == (tokens, FinishReason.CANCELLED)
        await engine.close()

    asyncio.run(run())


def test_a_lost_engine_is_told_after_the_outputs_that_came_with_the_loss() -> None:
    async def run() -> None:
        engine, transport, readers, _ = await _opened(0.0)
        transport.send_events(frame(70))
        transport.lose("it ended")
        await _settle()
        assert all([one.token_ids for one in reader.taken] == [[70]] for reader in readers)
        assert all(reader.failed for reader in readers)
        await engine.close()

    asyncio.run(run())


def test_the_end_of_a_stream_overtakes_nothing() -> None:
    """What was given to the batch just when the client read again is written before the end, which is not batched."""

    class Paused:
        """An end of a stream, its reader and its connection, as `EventStream` uses them."""

        paused = True

        def __init__(self) -> None:
            self.pieces = [(b"first", True), (b"end", False)]
            self.written: list[bytes] = []
            self.resumed = asyncio.Event()
            self.write = self.written.append

        def listen(self, listener: Callable[[], None]) -> None:
            self.call = listener

        def take(self, stream: object) -> tuple[bytes, bool]:
            return self.pieces.pop(0)

        async def drain(self) -> None:
            await self.resumed.wait()

    async def run() -> None:
        fake: Any = Paused()
        response = sse.EventStream(fake, fake, fake, WriteBatch())

        async def send() -> None:
            await response._write_in_callbacks(fake, fake, fake)
            fake.written.append(response._end)

        task = asyncio.create_task(send())
        await asyncio.sleep(0)
        fake.call()
        await _settle()
        fake.paused = False
        asyncio.get_running_loop().call_soon(fake.call)
        fake.resumed.set()
        await task
        assert fake.written == [b"first", b"end"]

    asyncio.run(run())


def test_a_stream_that_breaks_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("broken")

    async def run() -> None:
        engine, transport, readers, _ = await _opened(0.0)
        engine._streams["3"].listen(broken)
        writes, written = WriteBatch(), list[bytes]()
        writes.add(broken, b"")
        writes.add(written.append, b"whole")
        transport.send_events(frame(70))
        await _settle()
        assert [len(reader.taken) for reader in readers] == [number != 3 for number in range(STREAMS)]
        assert written == [b"whole"]
        await engine.close()

    asyncio.run(run())
    assert {record.message for record in caplog.records if record.exc_info} == {
        "a piece of a stream could not be written",
        "a stream could not be delivered",
    }


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("text", ['"quoted" \\ and\nlines', "naïve ☕ 日本 \u2028", "plain"])
def test_an_event_from_a_template_is_as_any_other(text: str, with_ids: bool) -> None:
    def render(output: TokenOutput) -> bytes:
        ids = {"token_ids": output.token_ids} if with_ids else {}
        return DataEvents().frame(
            {"id": "a", "choices": [{"index": 0, "text": output.text, **ids, "finish_reason": None}]}
        )

    output = TokenOutput("r", 0, [5, 70], text=text)
    template = EventTemplate.of(render(marked(output)))
    assert template is not None and template.fill(output) == render(output)


@pytest.mark.parametrize("shown", [b"data: {}\n\n", b'{"text": "\xee\x80\x80text\xee\x80\x80", "again": TEXT}'])
def test_events_without_one_text_have_no_template(shown: bytes) -> None:
    text = b'"\xee\x80\x80text\xee\x80\x80"'
    assert EventTemplate.of(shown.replace(b"TEXT", text)) is None
