"""Helpers that run an `AsyncEngine` over tiny checkpoints for the duration of a test."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import saved
from tests.model.texts import bytes_tokenizer
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import FinishReason, TokenOutput
from triptych.model.client.async_engine import AsyncEngine, Transport
from triptych.model.client.generation_stream import GenerationStream
from triptych.model.network.inputs import StackInput
from triptych.model.network.transformer import Transformer

TEST_SECONDS = 300.0  # a test that takes longer hangs, even on a busy machine


def async_test(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run the test on its own event loop, with a time limit."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), TEST_SECONDS))

    return run


@asynccontextmanager
async def served(
    *kinds: str,
    transport: Callable[[], Transport] = ThreadTransport,
    stall_seconds: float = 30.0,
    max_unread_bytes: int = 1 << 20,
    **settings: Any,
) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        **{"kv_cache_memory": 4 << 20, "block_size": 4, "device": "cpu", "dtype": "float32", **settings}
    )
    specs = [ModelSpec(kind, str(saved(kind).path), config) for kind in kinds]
    tokenizers = dict.fromkeys(kinds, bytes_tokenizer())
    engine = AsyncEngine(specs, transport, tokenizers, stall_seconds, max_unread_bytes)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def collect(stream: GenerationStream) -> list[TokenOutput]:
    return [output async for output in stream]


def ids_of(outputs: list[TokenOutput], request_id: str, index: int = 0) -> list[int]:
    return [i for o in outputs if (o.request_id, o.index) == (request_id, index) for i in o.token_ids]


def text_of(outputs: list[TokenOutput]) -> str:
    return "".join(output.text for output in outputs)


def ends_of(outputs: list[TokenOutput]) -> dict[tuple[str, int], FinishReason]:
    ends: dict[tuple[str, int], FinishReason] = {}
    for output in outputs:
        key = (output.request_id, output.index)
        assert key not in ends, f"{key} was heard of after its end"
        if output.finish_reason is not None:
            ends[key] = output.finish_reason
    return ends


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait until the condition holds; return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come true in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def idle(engine: AsyncEngine) -> bool:
    """Whether nothing runs, nothing waits, and every block is free."""
    return all(s.running == s.waiting == s.used_blocks == 0 for s in engine.stats().values())


class Brake:
    """Slows down, blocks or fails decoder passes of this process, and counts them.

    `fails` decides by the token ids of a pass; it returns `failing` by default.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.ready: Callable[[], bool] = lambda: True  # a pass blocks until this holds
        self.failing = False
        self.fails: Callable[[list[int]], bool] = lambda token_ids: self.failing
        self.passes = 0
        decode = Transformer.decode

        def braked(model: Transformer, inputs: StackInput, *arguments: Any) -> Any:
            self.passes += 1
            self._wait()
            if self.fails(inputs.input_ids.tolist()):
                raise RuntimeError("secret detail of the fault")
            time.sleep(self.seconds)
            return decode(model, inputs, *arguments)

        monkeypatch.setattr(Transformer, "decode", braked)

    def _wait(self) -> None:
        end = time.monotonic() + TEST_SECONDS
        while not self.ready():
            assert time.monotonic() < end, "the pass was blocked until the test's time limit"
            time.sleep(0.002)
