"""Engines with random weights of published shapes, and requests to them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.bench.batches import window
from lab.bench.gpu.figures import Figures, NotRecorded
from lab.bench.gpu.fp8 import in_fp8, need_fp8
from lab.bench.gpu.integers import bytes_of_weights, in_integers, need_integers
from lab.bench.gpu.machine import Bench
from lab.bench.gpu.timers import Timers, Where
from lab.bench.models import config_of, random_model
from lab.bench.roofline import Costs, Roofline
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import Pooling, Request, Source, TokenOutput, audio_source, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.stats import StepStats
from triptych.model.attention.selection import Selection, select_backend, select_layers
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.engine import builder, generate_builder
from triptych.model.engine.builder import LoadedModel
from triptych.model.engine.execution.cuda_graphs import DECODE_STEPS
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.step_pacer import MIN_GPU_TOKENS, MIN_TOKENS, StepPacer, StepWork
from triptych.model.linear.integers import IntegerLinear
from triptych.model.network.transformer import Transformer
from triptych.model.system import background_work

Step = Callable[[], tuple[list[TokenOutput], StepStats | None]]
GREEDY = SamplingParams(ignore_eos=True)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """Holds a loaded model and the times of loading."""

    loaded: LoadedModel
    model: Transformer
    seconds: Figures  # of weights, of all else, and of that: recording graphs, warming up

    @property
    def engine(self) -> GenerateEngine:
        assert self.loaded.generate is not None
        return self.loaded.generate

    @property
    def runner(self) -> ModelRunner:
        assert isinstance(self.engine.runner, ModelRunner)
        return self.engine.runner

    def roofline(self, bench: Bench, kv_bytes: float | None = None) -> Roofline:
        """Return the roofline of the model on this machine, with `kv_bytes` per element of the KV cache."""
        costs, width = Costs.of(self.model.config), float(self.model.dtype.itemsize)
        weights = width
        if (quantization := self.model.linear.quantization) != "none":
            layers, head = bytes_of_weights(quantization)
            head = head if isinstance(self.model.head, IntegerLinear) else width  # a tied one stays as it is
            weights = (layers * costs.decoder + head * costs.head) / (costs.decoder + costs.head)
        elif self.model.linear.fp8 is not None:  # one byte in the layers; the head as it is
            weights = (costs.decoder + width * costs.head) / (costs.decoder + costs.head)
        return Roofline(costs, bench.ceilings, weights, width if kv_bytes is None else kv_bytes)

    def request(
        self, number: object, prompt: Sequence[int], params: SamplingParams, *, streams: bool = False
    ) -> Request:
        start = self.model.config.decoder_start_token_id
        ids, source = tuple(prompt), None
        if self.model.config.encoder is not None and start is not None:
            ids, source = (start,), self._source(ids)
        name = self.loaded.info.name
        now = time.monotonic()
        return Request(str(number), name, ids, params, source, arrival_time=now, streams=streams)

    def _source(self, ids: tuple[int, ...]) -> Source:
        """Return these ids; of a model that reads sound the window that they stand for, which has its one length."""
        if (audio := self.model.config.audio) is None:
            return token_source(ids)
        frames = window((*ids, *(0,) * audio.num_positions)[: audio.num_positions], audio.num_mel_bins)
        return audio_source(frames.tobytes(), (len(frames), frames.shape[1]), audio.num_positions)

    def prompt(self, rng: random.Random, count: int) -> tuple[int, ...]:
        """Return ids from the upper half of the vocabulary, which has no special tokens."""
        most = self.model.config.embedding.vocab_size
        return tuple(rng.randrange(most // 2, most) for _ in range(count))


def load(
    bench: Bench,
    raw: dict[str, Any],
    *,
    seqs: int,
    context: int,
    tokens: int = 8192,
    name: str = "model",
    backend: str = "auto",
    prefix_caching: bool = False,
    **settings: Any,
) -> BenchModel:
    """Load a model of a raw config.json with random weights; raises `NotRecorded` if a GPU's steps are not recorded."""
    began = time.perf_counter()
    if settings.get("kv_cache_dtype") == "fp8":
        need_fp8(bench)
        backend = backend if bench.cuda else "sdpa"  # the C kernels read no such pages
    found = select_backend(bench.device, bench.dtype, backend)
    selection = select_layers(found, config_of(raw), bench.dtype, bench.dtype)
    model = random_model(raw, selection.backend, bench.dtype, bench.device)
    if settings.get("quantization") == "fp8":
        need_fp8(bench)
        model = in_fp8(model)
    elif "quantization" in settings:
        need_integers(bench)
        model = in_integers(model, settings["quantization"])
    bench.wait()
    weights = time.perf_counter() - began
    config = EngineConfig(
        device=str(bench.device),
        max_num_seqs=seqs,
        max_model_len=context,
        max_num_batched_tokens=max(tokens, seqs),
        prefix_caching=prefix_caching,
        **settings,
    )
    ready = build_engines(name, model, selection, config)
    ready.seconds["weights_s"] = weights
    if bench.cuda and config.cuda_graphs:
        require_graphs(ready)
    return ready


def build_engines(name: str, model: Transformer, selection: Selection, config: EngineConfig) -> BenchModel:
    """Build the engines of a network, timing the recording of graphs and the warm-up."""
    sentences = SentenceSettings(pooling=(Pooling.MEAN,))
    checkpoint = Checkpoint(Path(name), model.config, (), str(model.dtype).removeprefix("torch."), sentences=sentences)
    began, timers = time.perf_counter(), Timers()
    parts: list[Where] = [
        (generate_builder, "pool_memory", "pool_memory_s"),
        (builder, "recording", "recorded_batches_s"),
        (generate_builder, "recording", "recorded_s"),
        (builder, "warm_up", "warm_up_s"),
    ]
    with timers.on(*parts):
        loaded = background_work.finish(builder.assembling(ModelSpec(name, name, config), checkpoint, model, selection))
    seconds = {**{name: 0.0 for _, _, name in parts}, **timers.seconds, "assemble_s": time.perf_counter() - began}
    return BenchModel(loaded, model, seconds)


def require_graphs(ready: BenchModel) -> None:
    """Raise `NotRecorded` if attention is not Triton's, or decode steps or batches to encode are not CUDA graphs."""
    info = ready.loaded.info
    if info.attention_backend != "triton":
        raise NotRecorded(f"attention is not Triton's: {info.attention_reason}")
    for way in info.fallbacks:
        if way.startswith("batches to encode"):
            raise NotRecorded(f"{info.name}: {way}")
    if ready.loaded.generate is not None and ready.runner.graphs is None:
        why = ready.runner.unrecorded.get(DECODE_STEPS) or "no reason is given"
        raise NotRecorded(f"decode steps of {info.name} were not recorded as CUDA graphs: {why}")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Holds one request: numbers of input and output tokens."""

    prompt: tuple[int, ...]
    wanted: int


@dataclass(slots=True)
class BatchResult:
    """Holds the results of a batch of requests."""

    seconds: float = 0.0
    decode_steps: list[float] = field(default_factory=list)  # seconds of steps that only decode
    times: dict[str, list[float]] = field(default_factory=dict)  # when each request's tokens arrived
    outputs: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)  # of beam searches

    @property
    def decode_ms(self) -> float:
        return 1e3 * statistics.median(self.decode_steps) if self.decode_steps else 0.0


def bench_requests(ready: BenchModel, lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[BenchRequest]:
    """Make requests of (input tokens, output tokens)."""
    rng = random.Random(seed)
    return [BenchRequest(ready.prompt(rng, count), wanted) for count, wanted in lengths]


def add(
    ready: BenchModel, wanted: Sequence[BenchRequest], params: SamplingParams | Sequence[SamplingParams] = GREEDY
) -> None:
    """Add requests of exact lengths to the engine, each with its own seed."""
    each = [params] * len(wanted) if isinstance(params, SamplingParams) else params
    for number, (ask, own) in enumerate(zip(wanted, each, strict=True)):
        own = replace(own, max_tokens=ask.wanted, seed=number)
        ready.engine.add(ready.request(number, ask.prompt, own))


class Paced:
    """Steps an engine as the service does, with a pacer that limits the prompt tokens of a step."""

    def __init__(self, ready: BenchModel, *, cuda: bool) -> None:
        self._engine = ready.engine
        self._key = (ready.engine.name, "generate")
        self._pacer = StepPacer(min_chunk_tokens=MIN_GPU_TOKENS if cuda else MIN_TOKENS)

    def step(self) -> tuple[list[TokenOutput], StepStats | None]:
        turn = self._pacer.next({self._key: self._engine.demand()})
        outputs, stats = self._engine.finish_pending() if turn is None else self._engine.step(turn.budget)
        if stats is not None:
            prompts = stats.num_tokens - stats.num_decodes - stats.num_whole_tokens
            work = StepWork(stats.seconds, stats.num_decodes, prompts, stats.num_whole_tokens)
            self._pacer.observe(self._key, work)
        return outputs, stats


def finish(ready: BenchModel, between: Callable[[float], None] | None = None, step: Step | None = None) -> BatchResult:
    """Step until all requests have ended; `between` is called after each step with the time, and may add requests.

    `step` replaces the default step, which computes as much as fits and delays decoding sequences.
    """
    engine, done = ready.engine, BatchResult()
    step = step or engine.step
    began = last = time.perf_counter()
    while engine.has_work:
        if between is not None:
            between(time.perf_counter() - began)
        outputs, stats = step()
        now = time.perf_counter()
        if stats is not None and stats.num_tokens == stats.num_sequences:
            done.decode_steps.append(now - last)
        last = now
        for output in outputs:
            done.times.setdefault(output.request_id, []).extend([now - began] * len(output.token_ids))
            done.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.score is not None:
                done.scores[output.request_id] = output.score
            done.logprobs.setdefault(output.request_id, []).extend(one.logprob for one in output.logprobs or [])
    done.seconds = last - began
    return done


def warm(ready: BenchModel, most: int) -> None:
    """Warm up what the engine's own warm-up does not: kernels of these lengths, and memory."""
    add(ready, bench_requests(ready, [(most, 4)] * 2 + [(9, 3)], seed=1))
    finish(ready)


def decode_roofline(
    ready: BenchModel, bench: Bench, lengths: Sequence[tuple[int, int]], kv_bytes: float | None = None
) -> float:
    """Seconds that requests of these lengths take an ideal engine: prompts and sources without the head, then steps
    that read each weight once and all keys."""
    roofline = ready.roofline(bench, kv_bytes)
    costs, source = roofline.costs, ready.model.config.encoder is not None
    read = sum(count for count, _ in lengths)
    flops = 2.0 * read * ((costs.encoder + costs.cross) if source else costs.decoder)
    seconds = flops / bench.ceilings.flops_per_second
    for at in range(max(wanted for _, wanted in lengths)):
        alive = [count + at for count, wanted in lengths if wanted > at]
        seconds += roofline.step(len(alive), alive)
    return seconds
