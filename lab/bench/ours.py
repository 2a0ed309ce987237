"""Triptych's engine, as the benchmark drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lab.bench.batches import NO_TIMESTAMPS, BenchRequest, Ids, Workload, picture, window
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import (
    EncodeRequest,
    FinishReason,
    Pooling,
    Request,
    Source,
    SourceKind,
    audio_source,
    image_source,
    token_source,
)
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.engine.builder import LoadedModel, load
from triptych.model.engine.generate_engine import GenerateEngine


@dataclass(slots=True)
class Run:
    """Holds the times of a workload."""

    seconds: float
    first_token_seconds: list[float] = field(default_factory=list)  # of each request, from the start


class Ours:
    """Runs one model."""

    name = "triptych"

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.loaded: LoadedModel = load(ModelSpec("bench", str(path), config))
        model = read_checkpoint(path).config
        start = model.decoder_start_token_id
        info = self.loaded.info
        self.info = {"form": info.form, "dtype": info.dtype, "vocab_size": model.embedding.vocab_size}
        self._audio, self._image = model.audio, model.image
        self._start = () if start is None else (start,) if self._audio is None else (start, NO_TIMESTAMPS)

    def run(self, workload: Workload) -> Run:
        """Submit all requests, and step until all have ended."""
        if not workload.output_tokens:
            return self._encode(workload)
        engine = self._engine
        for number, ask in enumerate(workload.asks):
            engine.add(self._request(number, ask, workload.beams, workload.temperature))
        first: dict[str, float] = {}
        began = time.perf_counter()
        while engine.has_work:
            outputs, _ = engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                first.setdefault(output.request_id, now)
        return Run(time.perf_counter() - began, sorted(first.values()))

    def step_seconds(self, batches: list[int], context: int, steps: int) -> dict[int, list[float]]:
        """Return the seconds of each of `steps` steps in which `batch` sequences of at least `context` tokens decode.

        Prompts are computed once: the largest batch is timed first, then sequences are removed. A batch that is larger
        than the engine's largest is left out.
        """
        batches = [batch for batch in batches if batch <= self.loaded.info.max_num_seqs]
        engine = self._engine
        ids = tuple(100 + i % 900 for i in range(context))
        for number in range(max(batches)):
            ask = BenchRequest((number + 100, *ids[1:]), self.loaded.info.max_model_len - context)
            engine.add(self._request(number, ask, 1))
        found: dict[int, list[float]] = {}
        running = max(batches)
        for batch in sorted(batches, reverse=True):
            for number in range(batch, running):
                engine.abort(str(number), None, FinishReason.CANCELLED)
            running, seconds = batch, found.setdefault(batch, [])
            while len(seconds) < steps:
                began = time.perf_counter()
                _, stats = engine.step()
                if stats is not None and stats.num_tokens == stats.num_sequences == batch:
                    seconds.append(time.perf_counter() - began)
        for number in range(running):
            engine.abort(str(number), None, FinishReason.CANCELLED)
        return found

    @property
    def _engine(self) -> GenerateEngine:
        assert self.loaded.generate is not None
        return self.loaded.generate

    def embed(self, texts: Sequence[Ids]) -> list[list[float]]:
        """Return the mean of the last hidden states of each text, or the vector of each picture."""
        engine, found = self.loaded.encode, {}
        for number, ids in enumerate(texts):
            source, now = self._source(ids), time.monotonic()
            pooling = Pooling.MEAN if source.kind is SourceKind.TOKENS else None
            engine.add(EncodeRequest(str(number), "bench", source, pooling=pooling, arrival_time=now))
        while engine.has_work:
            found.update({output.request_id: output.data for output in engine.step()[0]})
        return [np.frombuffer(found[str(number)], np.float32).tolist() for number in range(len(texts))]

    def _encode(self, workload: Workload) -> Run:
        engine = self.loaded.encode
        for number, ask in enumerate(workload.asks):
            engine.add(EncodeRequest(str(number), "bench", self._source(ask.ids), arrival_time=time.monotonic()))
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
        return Run(time.perf_counter() - began)

    def _source(self, ids: Ids) -> Source:
        if self._image is not None:
            pixels = picture(ids, self._image.size)
            return image_source(pixels.tobytes(), (3, *pixels.shape[1:]), self._image.num_tokens)
        if self._audio is None:
            return token_source(ids)
        frames = window(ids, self._audio.num_mel_bins)
        return audio_source(frames.tobytes(), (len(frames), frames.shape[1]), len(ids))

    def _request(self, number: int, ask: BenchRequest, beams: int, temperature: float = 0.0) -> Request:
        """Return a request with its own seed, so that equal prompts diverge with sampling."""
        params = SamplingParams(
            max_tokens=ask.output_tokens, ignore_eos=True, num_beams=beams, temperature=temperature, seed=number
        )
        prompt, source = (self._start, self._source(ask.ids)) if self._start else (ask.ids, None)
        return Request(str(number), "bench", prompt, params, source, arrival_time=time.monotonic())
