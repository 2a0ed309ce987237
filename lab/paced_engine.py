"""An engine process that computes nothing: `python -m lab.paced_engine FD` sends tokens at a set pace.

It speaks the frames of `python -m triptych.model.engine`, so that everything in front of the engine is measured as it
is, on any machine, at the rate of any accelerator. In each step every running sequence gets one token: those of its
prompt, repeated. `PACE` in the environment is "TOKENS_PER_S STREAMS", or with a third number, the token that all
sequences get, where each must have a text: a step takes STREAMS / TOKENS_PER_S seconds, also
with fewer sequences. A step that begins late shortens the next one, as where steps are launched ahead, but none beyond
that: an engine that cannot send in time loses throughput.

Sequences end at `max_tokens`, a stop id, their deadline or an abort. An input to encode gets its vector, which is the
number 1, in the next step. Beams, grammars and log-probabilities of the prompt end with `FinishReason.ERROR`, as do
other results of encoding; no model can be loaded later.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from triptych.model.api.messages import Abort, Commands, Events, FailureKind, LoadFailure, ModelSpec
from triptych.model.api.request import (
    EncodeOutput,
    EncodeRequest,
    EncodeTask,
    FinishReason,
    Request,
    TokenLogprob,
    TokenOutput,
)
from triptych.model.api.stats import EngineStats, ModelInfo, StepStats
from triptych.model.system.child_process import FrameSocket, ignore_signals

PACE = "LAB_PACE"
MODULE = "lab.paced_engine"
_CONTEXT = 1 << 16  # tokens of each sequence at most
_HEARTBEAT_S = 1.0


@dataclass(slots=True)
class _Sequence:
    request: Request
    index: int
    emitted: int = 0


class PacedEngine:
    """Takes commands and returns the events of each step; `run` connects it to a front."""

    def __init__(self, tokens_per_s: float, streams: int, token: int | None = None) -> None:
        self.step_s = streams / tokens_per_s
        self._token = token
        self._models: list[str] = []
        self._sequences: list[_Sequence] = []
        self._inputs: list[EncodeRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._inputs)

    def apply(self, commands: Commands) -> Events:
        """Return what is known at once: models, and sequences that end without a step."""
        events = Events()
        for spec in commands.start or ():
            self._models.append(spec.name)
            events.loaded.append(_info(spec))
        events.ready = commands.start is not None
        for request in commands.generate:
            sequences = [_Sequence(request, index) for index in range(request.params.n)]
            if _is_plain(request):
                self._sequences += sequences
            else:
                events.tokens += [_end(sequence, FinishReason.ERROR) for sequence in sequences]
        self._inputs += commands.encode
        for abort in commands.abort:
            events.tokens += self._aborted(abort)
            kept = [one for one in self._inputs if one.request_id != abort.request_id]
            if len(kept) < len(self._inputs):
                self._inputs = kept
                events.encoded.append(EncodeOutput(abort.request_id, finish_reason=abort.reason))
        text = "the paced engine loads no model"
        events.load_failures += [LoadFailure(spec.name, FailureKind.CONFIG, text) for spec in commands.load]
        events.unloaded += commands.unload
        events.stats = self._stats()
        return events

    def step(self, now: float) -> Events:
        """Return a token of each sequence, and the vector of each input."""
        encoded, self._inputs = [_vector(one, now) for one in self._inputs], []
        tokens = [_next(sequence, now, self._token) for sequence in self._sequences]
        stepped = [
            StepStats(name, "generate", self.step_s, len(tokens), len(tokens), num_decodes=len(tokens))
            for name in self._models[:1]
        ]
        ended = [output.finish_reason is not None for output in tokens]
        if any(ended):
            self._sequences = [one for one, end in zip(self._sequences, ended, strict=True) if not end]
        return Events(tokens=tokens, encoded=encoded, steps=stepped, stats=self._stats())

    def _aborted(self, abort: Abort) -> Iterator[TokenOutput]:
        left = []
        for one in self._sequences:
            if one.request.request_id == abort.request_id and abort.index in (None, one.index):
                yield _end(one, abort.reason)
            else:
                left.append(one)
        self._sequences = left

    def _stats(self) -> list[EngineStats]:
        return [EngineStats(name, running=len(self._sequences), total_blocks=_CONTEXT) for name in self._models]


def _vector(request: EncodeRequest, now: float) -> EncodeOutput:
    if request.task not in (EncodeTask.EMBEDDING, EncodeTask.SCORES, EncodeTask.LOGITS):
        return EncodeOutput(request.request_id, finish_reason=FinishReason.ERROR)
    return EncodeOutput(request.request_id, struct.pack("<f", 1.0), (1,), scheduled_time=now)


def _is_plain(request: Request) -> bool:
    params = request.params
    return params.num_beams == 1 and not params.grammar and params.prompt_logprobs is None


def _next(sequence: _Sequence, now: float, fixed: int | None) -> TokenOutput:
    request, params = sequence.request, sequence.request.params
    if request.deadline is not None and now > request.deadline:
        return _end(sequence, FinishReason.DEADLINE)
    tokens = request.prompt_token_ids
    token = tokens[sequence.emitted % len(tokens)] if fixed is None else fixed
    output = TokenOutput(request.request_id, sequence.index, [token])
    if params.logprobs is not None:
        output.logprobs = [TokenLogprob(token, -0.5, tuple((token, -0.5) for _ in range(params.logprobs)))]
    if not sequence.emitted:
        output.scheduled_time = now
    sequence.emitted += 1
    if token in params.stop_token_ids and sequence.emitted > params.min_tokens:
        output.finish_reason, output.stop_reason = FinishReason.STOP, token
    elif sequence.emitted == params.max_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output


def _end(sequence: _Sequence, reason: FinishReason) -> TokenOutput:
    return TokenOutput(sequence.request.request_id, sequence.index, finish_reason=reason)


def _info(spec: ModelSpec) -> ModelInfo:
    """Describe the model by its folder alone; the limits admit any number of streams."""
    config = msgspec.json.decode((Path(spec.path) / "config.json").read_bytes())
    limits = spec.engine.largest_limits()
    return ModelInfo(
        name=spec.name,
        form="encoder-decoder" if config.get("is_encoder_decoder") else "decoder-only",
        model_type=str(config.get("model_type", "")),
        parameters=0,
        weight_bytes=0,
        dtype="float32",
        dtype_reason="it computes nothing",
        device="cpu",
        attention_backend="none",
        attention_reason="it computes nothing",
        max_model_len=_CONTEXT,
        max_model_len_reason="it computes nothing",
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_queued_requests=limits.max_queued_requests,
        max_queued_tokens=limits.max_queued_tokens,
        max_queue_seconds=limits.max_queue_seconds,
        block_size=16,
        num_blocks=_CONTEXT,
        kv_bytes_per_token=1,
        embedding_size=1,
        load_seconds=0.0,
    )


def run(connection: socket.socket, engine: PacedEngine) -> None:
    """Serve until the front closes the connection."""
    frames, encode = FrameSocket(connection), msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(Commands).decode
    readable = select.poll()
    readable.register(connection, select.POLLIN)
    due = 0.0  # of the next step
    while True:
        now = time.monotonic()
        wait_s = max(0.0, due - now) if engine.has_work else _HEARTBEAT_S
        if readable.poll(1e3 * wait_s):
            commands = decode(frames.receive())
            if commands.close:
                return
            if not engine.has_work:
                due = time.monotonic() + engine.step_s
            frames.send(encode(engine.apply(commands)))
            continue
        now = time.monotonic()
        if not engine.has_work:
            frames.send(encode(engine.apply(Commands())))
        elif now >= due:
            due = max(due, now - engine.step_s) + engine.step_s
            frames.send(encode(engine.step(now)))


def main() -> None:
    ignore_signals()
    rate, streams, *token = os.environ[PACE].split()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            run(connection, PacedEngine(float(rate), int(streams), *map(int, token)))
        except EOFError:
            return


if __name__ == "__main__":
    main()
