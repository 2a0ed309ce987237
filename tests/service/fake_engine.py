"""A scripted `EngineClient` for tests of HTTP semantics, which loads no model and computes nothing.

Each sequence emits the script's token ids, one per output, with their text from the real detokenizer. It ends as in a
real engine: by a stop id or string, `max_tokens`, deadline or cancellation. Embeddings are a fixed function of the ids.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import (
    EncodeOutput,
    EncodeRequest,
    EncodeTask,
    FinishReason,
    Request,
    TokenLogprob,
    TokenOutput,
)
from triptych.model.api.stats import Demand, EngineStats, Health, ModelInfo, StepStats
from triptych.model.errors import ConfigError, EngineDeadError, EngineGoneError, ModelNotLoadedError, QueueFullError
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer

_CRASH = "/usr/lib/secret 0xdeadbeef canary"  # text of an exception that must reach no client and no log


@dataclass
class Script:
    """The behaviour of the fake engine, which tests change between requests."""

    token_ids: Sequence[int] = (1,)  # emitted repeatedly
    end_id: int | None = None  # token that ends an output, in addition to stop ids
    answer: Callable[[Request], Sequence[int]] | None = None  # tokens for a request, instead of `token_ids`
    logprob: float = -0.5  # of every emitted token
    no_speech_prob: float = 0.0  # of every window of audio
    delay_s: float = 0.0  # before every output
    queue_full: str | None = None  # refuse all requests for this reason
    retry_after_s: float = 2.5
    dead: bool = False  # refuse all requests: the engine has ended
    die_after: int | None = None  # number of outputs before an EngineDeadError
    error_after: int | None = None  # number of tokens before a sequence ends with ERROR
    crash_after: int | None = None  # number of outputs before an unexpected exception
    live: bool = True
    ready: bool = True
    reason: str = ""
    load_delay_s: float = 0.0  # of every `load`
    load_error: Exception | None = None  # raised by every `load`, after the delay
    unload_delay_s: float = 0.0  # of every `unload`, in addition to the time of running requests


@dataclass
class _Sequence:
    request: Request
    index: int
    detokenizer: Detokenizer | None
    emitted: int = 0


class FakeEngineClient:
    """An `EngineClient` that records requests (`submitted`, `encoded`) and those that ended early (`aborted`).

    It has `models` from the start; `load` adds models of `loadable`. `loaded` and `unloaded` record these calls.
    """

    def __init__(
        self,
        models: Sequence[ModelInfo],
        tokenizers: Mapping[str, Tokenizer | None] | None = None,
        script: Script | None = None,
        loadable: Sequence[ModelInfo] = (),
    ) -> None:
        self._from_start = {info.name: info for info in models}
        self._loadable = {info.name: info for info in (*models, *loadable)}
        self._changing: set[str] = set()  # names of models that are being loaded or unloaded
        self._model_of: dict[str, str] = {}  # of every request
        self.loaded: list[ModelSpec] = []
        self.unloaded: list[str] = []
        self._tokenizers = dict(tokenizers or {})
        self.script = script or Script()
        self.models: dict[str, ModelInfo] = {}
        self.restarts = 0
        self.submitted: list[Request] = []
        self.encoded: list[EncodeRequest] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.cancelled: set[str] = set()
        self._closed = False
        self._observers: list[Callable[[StepStats], None]] = []

    async def start(self) -> None:
        self.models = dict(self._from_start)
        self._closed = False

    async def close(self) -> None:
        self._closed = True

    async def load(self, spec: ModelSpec, tokenizer: Tokenizer | None) -> ModelInfo:
        self._check_alive()
        if spec.name in self.models or spec.name in self._changing:
            raise ConfigError(f"a model named {spec.name} is there already")
        self._changing.add(spec.name)
        try:
            await asyncio.sleep(self.script.load_delay_s)
            if self.script.load_error is not None:
                raise self.script.load_error
            if spec.name not in self._loadable:
                raise ConfigError(f"{spec.path} holds no model")
        finally:
            self._changing.discard(spec.name)
        self.loaded.append(spec)
        self._tokenizers[spec.name] = tokenizer
        self.models[spec.name] = self._loadable[spec.name]
        return self.models[spec.name]

    async def unload(self, name: str, *, drain_seconds: float = 0.0) -> None:
        if self.models.pop(name, None) is None:
            raise ModelNotLoadedError(f"no model named {name} is loaded")
        self._changing.add(name)
        deadline = time.monotonic() + drain_seconds
        while self._requests_of(name) and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        self.cancelled |= self._requests_of(name)
        await asyncio.sleep(self.script.unload_delay_s)
        self._changing.discard(name)
        self.unloaded.append(name)

    def _requests_of(self, model: str) -> set[str]:
        return {request_id for request_id in self.running if self._model_of[request_id] == model}

    def check_room(self, model: str, sequences: int = 1, tenant: str = "") -> None:
        self._admit(model)

    def submit(self, requests: Sequence[Request]) -> FakeStream:
        """Return a stream that can also be read in callbacks, like the real engine's."""
        self._admit(requests[0].model)
        self.submitted.extend(requests)
        self.running.update(request.request_id for request in requests)
        self._model_of |= {request.request_id: request.model for request in requests}
        return FakeStream(self, [one for request in requests for one in self._sequences(request)])

    async def encode(self, requests: Sequence[EncodeRequest]) -> list[EncodeOutput]:
        self._admit(requests[0].model)
        self.encoded.extend(requests)
        ids = [request.request_id for request in requests]
        self.running.update(ids)
        self._model_of |= dict.fromkeys(ids, requests[0].model)
        try:
            if self.script.die_after is not None:
                raise EngineDeadError("scripted death")
            scheduled = time.monotonic()
            await self._work(sum(request.source.num_positions for request in requests), "encode", requests[0].model)
            return [self._vectors(request, scheduled) for request in requests]
        except asyncio.CancelledError:
            self.aborted.extend(ids)
            raise
        finally:
            self.running.difference_update(ids)

    def cancel(self, request_id: str) -> bool:
        if request_id not in self.running:
            return False
        self.cancelled.add(request_id)
        return True

    def health(self) -> Health:
        dead = self.script.dead or self._closed
        return Health(self.script.live and not dead, self.script.ready and not dead, self.script.reason)

    def resident_memory(self) -> int:
        return 0

    def stats(self) -> dict[str, EngineStats]:
        return {
            name: EngineStats(
                name, running=len(self.running), free_blocks=info.num_blocks, total_blocks=info.num_blocks
            )
            for name, info in self.models.items()
        }

    def num_running(self, model: str) -> int:
        return len(self.running)

    def demand(self) -> dict[str, Demand]:
        return {name: Demand(len(self.running) / info.max_num_seqs, 0) for name, info in self.models.items()}

    def on_step(self, observe: Callable[[StepStats], None]) -> None:
        self._observers.append(observe)

    def _check_alive(self) -> None:
        if self.script.dead or self._closed:
            raise EngineGoneError("scripted death")

    def _admit(self, model: str) -> None:
        self._check_alive()
        if model not in self.models:
            raise ModelNotLoadedError(f"no model named {model} is loaded")
        if self.script.queue_full is not None:
            raise QueueFullError(self.script.queue_full, self.script.retry_after_s)

    def _sequences(self, request: Request) -> list[_Sequence]:
        tokenizer = self._tokenizers.get(request.model)

        return [
            _Sequence(request, index, Detokenizer.of(tokenizer, request.params) if tokenizer is not None else None)
            for index in range(request.params.n)
        ]

    async def _work(self, tokens: int, kind: str, model: str) -> None:
        await asyncio.sleep(self.script.delay_s)
        for observe in self._observers:
            observe(StepStats(model, kind, self.script.delay_s, tokens, 1))

    def _vectors(self, request: EncodeRequest, scheduled: float) -> EncodeOutput:
        if request.request_id in self.cancelled:
            return EncodeOutput(request.request_id, finish_reason=FinishReason.CANCELLED)
        if self.script.error_after is not None:
            return EncodeOutput(request.request_id, finish_reason=FinishReason.ERROR)
        if request.deadline is not None and time.monotonic() > request.deadline:
            return EncodeOutput(request.request_id, finish_reason=FinishReason.DEADLINE)
        size = request.dimensions or self._loadable[request.model].embedding_size
        rows = [[(token + column) / 8 for column in range(size)] for token in request.source.token_ids]
        if request.task is EncodeTask.TOKENS:
            flat = [value for row in rows for value in row]
            return EncodeOutput(request.request_id, _pack(flat), (len(rows), size), scheduled)
        if request.spans:
            flat = [value for start, end in request.spans for value in _mean(rows[start:end])]
            return EncodeOutput(request.request_id, _pack(flat), (len(request.spans), size), scheduled)
        pooled = _mean(rows)
        return EncodeOutput(request.request_id, _pack(pooled), (size,), scheduled)


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


class FakeStream:
    """The outputs of one `submit`, one token of each sequence in turn."""

    def __init__(self, client: FakeEngineClient, sequences: list[_Sequence]) -> None:
        self._client = client
        self._live = sequences
        self._closed = False
        self._outputs = self._run()
        self._readable: list[TokenOutput] = []  # outputs for a listener, at most one
        self._taken = asyncio.Event()
        self._failure: Exception | None = None
        self._feeding: asyncio.Task[None] | None = None

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TokenOutput:
        return await self._outputs.__anext__()

    def listen(self, listener: Callable[[], None]) -> None:
        self._feeding = asyncio.create_task(self._feed(listener))

    def take(self) -> Sequence[TokenOutput]:
        if self._failure is not None:
            raise self._failure
        taken, self._readable = self._readable, []
        self._taken.set()
        return taken

    async def _feed(self, listener: Callable[[], None]) -> None:
        """Make each output after the previous one was taken."""
        try:
            async for output in self._outputs:
                self._readable.append(output)
                self._taken.clear()
                listener()
                await self._taken.wait()
        except Exception as error:
            self._failure = error
            listener()

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._feeding is not None:
            self._feeding.cancel()
            await asyncio.gather(self._feeding, return_exceptions=True)
        await self._outputs.aclose()
        unfinished = {sequence.request.request_id for sequence in self._live}
        self._client.aborted.extend(sorted(unfinished))
        self._client.running -= unfinished

    async def _run(self) -> AsyncGenerator[TokenOutput, None]:
        scheduled = time.monotonic()
        outputs = 0
        while self._live:
            for sequence in list(self._live):
                await self._client._work(1, "generate", sequence.request.model)
                self._fail(outputs)
                output = self._next(sequence)
                output.scheduled_time = scheduled
                outputs += 1
                if output.finish_reason is not None:
                    self._end(sequence)
                yield output

    def _fail(self, outputs: int) -> None:
        script = self._client.script
        if script.die_after is not None and outputs >= script.die_after:
            raise EngineDeadError("scripted death")
        if script.crash_after is not None and outputs >= script.crash_after:
            raise RuntimeError(_CRASH)

    def _end(self, sequence: _Sequence) -> None:
        self._live.remove(sequence)
        if all(other.request is not sequence.request for other in self._live):
            self._client.running.discard(sequence.request.request_id)

    def _next(self, sequence: _Sequence) -> TokenOutput:
        request, params = sequence.request, sequence.request.params
        output = TokenOutput(request.request_id, sequence.index)
        if request.request_id in self._client.cancelled:
            return self._finish(sequence, output, FinishReason.CANCELLED)
        if request.deadline is not None and time.monotonic() > request.deadline:
            return self._finish(sequence, output, FinishReason.DEADLINE)
        script = self._client.script
        if script.error_after is not None and sequence.emitted >= script.error_after:
            output.error = "scripted"
            return self._finish(sequence, output, FinishReason.ERROR)
        ids = script.token_ids if script.answer is None else script.answer(request)
        token = ids[sequence.emitted % len(ids)]
        output.token_ids.append(token)
        self._logprobs(sequence, output, token)
        sequence.emitted += 1
        if token == script.end_id or token in params.stop_token_ids:
            output.stop_reason = token
            return self._finish(sequence, output, FinishReason.STOP)
        if sequence.emitted == params.max_tokens:
            return self._finish(sequence, output, FinishReason.LENGTH)
        return self._detokenize(sequence, output)

    def _logprobs(self, sequence: _Sequence, output: TokenOutput, token: int) -> None:
        params, script = sequence.request.params, self._client.script
        if params.logprobs is not None:
            output.logprobs = [_logprob(token, params.logprobs)]
        if params.cumulative_logprob:
            output.cumulative_logprob = script.logprob * (sequence.emitted + 1)
        if params.probe is not None and sequence.emitted == 0:
            likely = math.log(max(script.no_speech_prob, 1e-30))
            output.probe_logprobs = [likely] * len(params.probe.token_ids)
        aligned = sequence.request.alignment
        if aligned is not None:  # each token has the same number of positions
            output.alignment = [5 * at for at in range(aligned.end - aligned.first)]
        if params.prompt_logprobs is not None and sequence.emitted == 0:
            given = sequence.request.prompt_token_ids
            output.prompt_logprobs = [None, *(_logprob(one, params.prompt_logprobs) for one in given[1:])]

    def _finish(self, sequence: _Sequence, output: TokenOutput, reason: FinishReason) -> TokenOutput:
        output.finish_reason = reason
        return self._detokenize(sequence, output)

    def _detokenize(self, sequence: _Sequence, output: TokenOutput) -> TokenOutput:
        if sequence.detokenizer is not None:
            sequence.detokenizer.fill(output)
        return output


def _pack(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _logprob(token: int, alternatives: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, tuple((token + step, -0.5 - step) for step in range(alternatives)))
