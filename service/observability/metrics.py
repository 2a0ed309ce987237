"""Prometheus metrics. Each application has one `Metrics` object with its own registry.

If `PROMETHEUS_MULTIPROC_DIR` is set (`triptych.service.runtimes.ray_serve.environment` sets it for replicas), every
process writes its values to files in that folder, and each process reports the values of all. Counters and histograms
are summed; they include ended processes, because a counter must not decrease. Gauges include running processes only.

Invariants: every request to a model's route counts once as received, then once as rejected (by reason) or accepted. An
accepted request counts once in `triptych_requests_total`, by its outcome. Labels are names of loaded models and fixed
words, never a prompt, an id or a key. A request that is rejected before its model is known has the model "".
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Generic, Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    multiprocess,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from triptych.model.api.request import FinishReason, Timings
from triptych.model.api.stats import EngineStats, ModelInfo, StepStats
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import SERVER_FAULTS
from triptych.service.core.models import Task
from triptych.service.core.request_context import RequestContext
from triptych.service.observability.metric_parts import (
    MULTIPROCESS_FOLDER,
    TokenTally,
    lora_families,
    make_folder,
    ready_elsewhere,
    vllm_families,
)

disable_created_metrics()  # these times would be a fifth of all series, and have no use

_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")  # W3C Trace Context

_UPDATE_SECONDS = 1.0

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# Of latencies that have objectives: ten bounds a decade (ISO 3, R10), so that a percentile is found within some 10 %.
_R10 = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
_FINE_SECONDS = (0.0005, *(float(f"{value}e{power}") for power in range(-3, 2) for value in _R10), 100.0, 200.0, 600.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})  # a client may send any other word
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_LENGTHS = (*_SIZES, 32_768, 65_536, 131_072)

F = TypeVar("F", Counter, Histogram)


class Metrics:
    """Counters and histograms that the application and the engines update, and gauges that are set at each scrape."""

    def __init__(self, *, vllm_names: bool = False, max_loras: int | None = None) -> None:
        """`vllm_names`: also export the metrics under vLLM's names. Raises `ConfigError`."""
        make_folder()
        self.registry = CollectorRegistry()
        # `process_*` of this process; of one among several replicas they would take turns.
        self._process = None if MULTIPROCESS_FOLDER in os.environ else ProcessCollector(registry=None)
        self._vllm_names = vllm_names
        self._max_loras = max_loras
        self.loading_adapters: set[str] = set()
        self._gauges: list[Gauge] = []
        self._at_load: list[Callable[[str], None]] = []
        self._tallies: dict[str, TokenTally] = {}  # by model
        self._seen: dict[tuple[str, str], int] = {}  # engines' counters at the last update
        self._served: set[str] = set()  # models that were loaded here
        self._elsewhere = (-math.inf, False)  # when another replica was looked for, and whether one is ready
        self._make_counters()
        self._make_histograms()
        self._make_gauges()

    # Events of a request

    def received(self, context: RequestContext) -> None:
        """Count a request to a model's route."""
        self._received.labels(context.task or "").inc()

    def replied(self, route: str, method: str, status: int) -> None:
        """Count a reply by its route, "" for none, and status; 499 if the client left before there was one."""
        self._http.labels(route, method if method in _METHODS else "other", str(status or 499)).inc()

    def proxied(self, model: str, seconds: float) -> None:
        """Record the time that a request was in HAProxy before the service got it."""
        self._proxy.labels(model).observe(seconds)

    def rejected(self, context: RequestContext, reason: str) -> None:
        """Count a request that was refused."""
        self._rejections.labels(context.model, reason).inc()

    def is_ready_elsewhere(self) -> bool:
        """Return whether another replica of this machine accepts requests, as it was a second ago."""
        now = time.monotonic()
        if now > self._elsewhere[0] + _UPDATE_SECONDS:
            self._elsewhere = (now, MULTIPROCESS_FOLDER in os.environ and ready_elsewhere(self._served))
        return self._elsewhere[1]

    def accepted(self, context: RequestContext) -> None:
        """Count a request that an engine accepted, and its prompt tokens."""
        self._accepted.labels(context.model, context.task or "").inc()
        self._prompt_tokens.labels(context.model).inc(context.tokens_in)
        self._prompt_lengths.labels(context.model).observe(context.tokens_in)

    def ended(self, context: RequestContext, outcome: FinishReason, timings: Timings, has_output: bool) -> None:
        """Count an accepted request that ended. Without an output its queue and prefill times have no meaning."""
        model = context.model
        if model in self._tallies:
            self._tallies[model].flush()
        self._requests.labels(model, context.task or "", outcome.value).inc()
        seen = _exemplar(context)
        self._e2e.labels(model, context.task or "").observe(timings.total_ms / 1000, seen)
        if not has_output:
            return
        self._queue_time.labels(model).observe(timings.queue_ms / 1000)
        self._prefill.labels(model).observe(timings.prefill_ms / 1000)
        if context.task == "generate":
            self._ttft.labels(model).observe(timings.ttft_ms / 1000, seen)
            self._decode.labels(model).observe(timings.decode_ms / 1000)
            self._output_lengths.labels(model).observe(context.tokens_out)

    def generated(self, model: str) -> TokenTally:
        """Return the tally of the tokens that `model` generates; it is flushed at a request's end and at a scrape."""
        if model not in self._tallies:
            self._tallies[model] = TokenTally(self._generation_tokens.labels(model), self._inter_token.labels(model))
        return self._tallies[model]

    def tokenized(self, model: str, seconds: float) -> None:
        """Record the time that tokenisation took."""
        self._tokenize.labels(model).observe(seconds)

    def key_file_failed(self, setting: str) -> None:
        """Count a key file, that of a setting, which has changed and cannot be read."""
        self._key_files.labels(setting).inc()

    # The engines

    def loaded(self, info: ModelInfo, version: str, tasks: Iterable[Task], restarts: int) -> None:
        """Set the gauges of a loaded model that do not change; earlier `restarts` of the engine do not count for it."""
        self._served.add(info.name)
        self._replicas.labels(info.name).set(1)
        self._load_seconds.labels(info.name).set(info.load_seconds)
        self._memory.labels(info.name).set(info.memory_bytes)
        self._fallbacks.labels(info.name).set(len(info.fallbacks))
        self._build_info.labels(info.name, version, info.form, info.dtype, info.attention_backend).set(1)
        self._seen[info.name, "restarts"] = restarts
        self._initialize_counters(info.name, tasks)
        for begin in self._at_load:
            begin(info.name)

    def at_load(self, begin: Callable[[str], None]) -> None:
        """Call `begin` with the name of each model that is loaded from now on, to export its counters as 0."""
        self._at_load.append(begin)

    def load_ended(self, model: str, outcome: Literal["loaded", "failed", "cancelled"], seconds: float) -> None:
        """Count a load on demand; `seconds` since the order, including the wait for other loads."""
        self._loads.labels(model, outcome).inc()
        if outcome == "loaded":
            self._load_times.labels(model).observe(seconds)

    def unloaded(self, model: str, reason: str) -> None:
        """Count an unload, and set the model's gauges to 0; `render` omits them while no process serves the model."""
        self._unloads.labels(model, reason).inc()
        for gauge in self._gauges:
            for sample in next(iter(gauge.collect())).samples:
                if sample.labels["model"] == model:
                    gauge.labels(**sample.labels).set(0)
        for key in [key for key in self._seen if key[0] == model]:
            del self._seen[key]

    # The cache of results

    def cache_lookups(self, model: str, *, kept: int, in_flight: int, computed: int) -> None:
        """Count the inputs of a request by the source of their results."""
        for source, count in (("kept", kept), ("in_flight", in_flight), ("computed", computed)):
            self._cache_lookups.labels(model, source).inc(count)

    def cache_size(self, model: str, size: int) -> None:
        """Set the bytes of a model's cached results."""
        self._cache_bytes.labels(model).set(size)

    def _initialize_counters(self, model: str, tasks: Iterable[Task]) -> None:
        """Export the counters of the service level objectives as 0, for each task of a model.

        Prometheus' `rate()` misses increases before the first scrape of a series, so the first failures of an engine
        would not count against the error budget.
        """
        for reason in SERVER_FAULTS:
            self._rejections.labels("", reason)
            self._rejections.labels(model, reason)
        for task in tasks:
            self._received.labels(task)
            self._e2e.labels(model, task)
            for outcome in FinishReason:
                self._requests.labels(model, task, outcome.value)
            if task is Task.GENERATE:
                self._ttft.labels(model)
                self._inter_token.labels(model)

    def step(self, stats: StepStats) -> None:
        self._step_seconds.labels(stats.model, stats.kind).observe(stats.seconds)
        if stats.kind == "encode":
            self._encode_tokens.labels(stats.model).observe(stats.num_tokens)
            return
        self._batch_tokens.labels(stats.model).observe(stats.num_tokens)
        self._batch_sequences.labels(stats.model).observe(stats.num_sequences)

    def render(self, client: EngineClient, accept: str = "") -> tuple[bytes, str]:
        """Return the text for a scrape, with the current state of the engines, and its content type.

        `accept` is the header of that name: OpenMetrics, which has exemplars, is sent to those that ask for it.
        """
        self.update_engines(client)
        # Ray may write its own metrics into the shared folder; they are omitted.
        families = [one for one in self._collector().collect() if one.name.startswith("triptych_")]
        _drop_unloaded(families)
        if self._process is not None:
            families += self._process.collect()
        if self._vllm_names:
            families += vllm_families(families, client.models)
            families += lora_families(client.stats().values(), self._max_loras, self.loading_adapters)
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # of a version that is no number
            encode, content_type = choose_encoder("")
        return encode(_Families(families)), content_type

    async def update_forever(self, client: EngineClient) -> None:
        """Update the gauges every second if other processes report this one's values."""
        while MULTIPROCESS_FOLDER in os.environ:
            self.update_engines(client)
            await asyncio.sleep(_UPDATE_SECONDS)

    def _collector(self) -> Collector:
        """Return this process's registry, or a collector of all processes that share the folder."""
        folder = os.environ.get(MULTIPROCESS_FOLDER)
        if folder is None:
            return self.registry
        for pid in {int(file.stem.rpartition("_")[2]) for file in Path(folder).glob("gauge_live*.db")}:
            if not Path(f"/proc/{pid}").exists():
                multiprocess.mark_process_dead(pid, folder)
        return multiprocess.MultiProcessCollector(None, folder)

    def update_engines(self, client: EngineClient) -> None:
        """Set the gauges to the current state of all engines."""
        for tally in self._tallies.values():
            tally.flush()
        health = client.health()
        for name, demand in client.demand().items():
            self._saturation.labels(name).set(demand.saturation)
            self._waiting_tokens.labels(name).set(demand.waiting_tokens)
            self._queue_seconds.labels(name).set(demand.wait_seconds)
            self._ready.labels(name).set(health.ready)
            self._live.labels(name).set(health.live)
            self._add(self._restarts, name, "restarts", client.restarts)
        for stats in client.stats().values():
            if stats.adapter_of:
                self._lora_running.labels(stats.model).set(stats.running)
                self._lora_waiting.labels(stats.model).set(stats.waiting)
            else:
                self._engine(stats)
        for info in client.models.values():
            if info.adapter_of:
                self._lora_memory.labels(info.name).set(info.memory_bytes)

    def _engine(self, stats: EngineStats) -> None:
        self._running.labels(stats.model).set(stats.running)
        self._waiting.labels(stats.model).set(stats.waiting)
        self._blocks.labels(stats.model, "free").set(stats.free_blocks - stats.cached_blocks)
        self._blocks.labels(stats.model, "cached").set(stats.cached_blocks)
        self._blocks.labels(stats.model, "used").set(stats.used_blocks)
        self._kv_usage.labels(stats.model).set(stats.used_blocks / stats.total_blocks if stats.total_blocks else 0)
        for window, usage in stats.window_usage.items():
            self._kv_window_usage.labels(stats.model, str(window)).set(usage)
        if stats.total_states:
            self._states.labels(stats.model, "free").set(stats.free_states - stats.cached_states)
            self._states.labels(stats.model, "cached").set(stats.cached_states)
            self._states.labels(stats.model, "used").set(stats.total_states - stats.free_states)
        self._add(self._preemptions, stats.model, "preemptions", stats.preemptions)
        self._add(self._prefix_queries, stats.model, "prefix_queries", stats.prefix_queries)
        self._add(self._prefix_hits, stats.model, "prefix_hits", stats.prefix_hits)
        self._add(self._drafts, stats.model, "drafts", stats.drafts)
        self._add(self._draft_tokens, stats.model, "draft_tokens", stats.draft_tokens)
        self._add(self._accepted_tokens, stats.model, "accepted_tokens", stats.accepted_tokens)
        self._add(self._model_draft_tokens, stats.model, "model_draft_tokens", stats.model_draft_tokens)
        self._add(self._model_accepted_tokens, stats.model, "model_accepted_tokens", stats.model_accepted_tokens)
        self._add(self._pictures, stats.model, "pictures", stats.pictures)
        self._add(self._picture_tokens, stats.model, "picture_tokens", stats.picture_tokens)

    def _add(self, counter: _CachedFamily[Counter], model: str, name: str, value: int) -> None:
        """Add the increase of an engine's counter since the last update; a new engine counts from 0."""
        seen = self._seen.get((model, name), 0)
        counter.labels(model).inc(value - seen if value >= seen else value)
        self._seen[model, name] = value

    # Definitions

    def counter(self, name: str, text: str, *labels: str) -> _CachedFamily[Counter]:
        return _CachedFamily(Counter(f"triptych_{name}", text, labels, registry=self.registry))

    def histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS
    ) -> _CachedFamily[Histogram]:
        found = Histogram(f"triptych_{name}", text, ("model", *labels), registry=self.registry, buckets=buckets)
        return _CachedFamily(found)

    def _gauge(self, name: str, text: str, *labels: str, over_replicas: Literal["sum", "max"] = "sum") -> Gauge:
        mode: Literal["livesum", "livemax"] = "livesum" if over_replicas == "sum" else "livemax"
        made = Gauge(f"triptych_{name}", text, ("model", *labels), registry=self.registry, multiprocess_mode=mode)
        self._gauges.append(made)
        return made

    def _make_counters(self) -> None:
        self._received = self.counter("requests_received_total", "Requests received on the routes of a task.", "task")
        self._http = self.counter("http_requests_total", "Replies, by route and status.", "route", "method", "status")
        self._key_files = self.counter(
            "key_file_errors_total", "Changes of a key file that could not be read.", "setting"
        )
        for setting in ("api_key_file", "admin_key_file"):
            self._key_files.labels(setting)
        self._accepted = self.counter("requests_accepted_total", "Requests accepted by an engine.", "model", "task")
        self._rejections = self.counter("rejections_total", "Requests rejected, by reason.", "model", "reason")
        self._requests = self.counter(
            "requests_total", "Accepted requests that ended, by outcome.", "model", "task", "outcome"
        )
        self._prompt_tokens = self.counter(
            "prompt_tokens_total", "Prompt and input tokens of accepted requests.", "model"
        )
        self._generation_tokens = self.counter("generation_tokens_total", "Generated tokens.", "model")
        self._prefix_queries = self.counter(
            "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", "model"
        )
        self._prefix_hits = self.counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "model")
        self._drafts = self.counter(
            "spec_decode_num_drafts_total", "Steps of a sequence that verified draft tokens.", "model"
        )
        self._draft_tokens = self.counter("spec_decode_num_draft_tokens_total", "Draft tokens proposed.", "model")
        self._accepted_tokens = self.counter("spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", "model")
        self._model_draft_tokens = self.counter(
            "spec_decode_num_model_draft_tokens_total", "Draft tokens proposed by a draft model.", "model"
        )
        self._model_accepted_tokens = self.counter(
            "spec_decode_num_model_accepted_tokens_total", "Draft tokens of a draft model that were accepted.", "model"
        )
        self._preemptions = self.counter(
            "preemptions_total", "Sequences preempted because no KV block was free.", "model"
        )
        self._pictures = self.counter(
            "pictures_encoded_total",
            "Pictures in prompts that were encoded; those of cached prefixes are not again.",
            "model",
        )
        self._picture_tokens = self.counter(
            "picture_tokens_encoded_total", "Tokens of the pictures that were encoded.", "model"
        )
        self._restarts = self.counter("engine_restarts_total", "Restarts of failed engines.", "model")
        self._cache_lookups = self.counter(
            "embed_cache_inputs_total",
            "Inputs of /encode by the source of their results: kept, in_flight (an equal input's), computed.",
            *("model", "source"),
        )
        self._loads = self.counter("model_loads_total", "Loads of models on demand, by outcome.", "model", "outcome")
        self._unloads = self.counter(
            "model_unloads_total",
            "Unloads of models: by request, when idle, evicted for another, or because the folder is gone or changed.",
            *("model", "reason"),
        )

    def _make_histograms(self) -> None:
        self._ttft = self.histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token.",
            buckets=_FINE_SECONDS,
        )
        self._inter_token = self.histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a sequence.", buckets=_FINE_SECONDS
        )
        self._e2e = self.histogram(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end.",
            "task",
            buckets=_FINE_SECONDS,
        )
        self._proxy = self.histogram(
            "proxy_seconds",
            "Seconds from a request's head at HAProxy until the service got it; with Ray's HAProxy only.",
        )
        self._queue_time = self.histogram(
            "request_queue_time_seconds", "Seconds from a request's arrival until it was first scheduled."
        )
        self._load_times = self.histogram(
            "model_load_time_seconds", "Seconds from the order to load a model on demand until it was loaded."
        )
        self._tokenize = self.histogram("tokenize_seconds", "Seconds spent on tokenising a request's texts.")
        self._prefill = self.histogram("prefill_seconds", "Seconds from first being scheduled to the first output.")
        self._decode = self.histogram("decode_seconds", "Seconds from the first token to the end.")
        self._prompt_lengths = self.histogram(
            "request_prompt_tokens", "Prompt or input tokens of an accepted request.", buckets=_LENGTHS
        )
        self._output_lengths = self.histogram(
            "request_generation_tokens", "Tokens that a request generated.", buckets=_LENGTHS
        )
        self._step_seconds = self.histogram("step_seconds", "Seconds of an engine step, by kind.", "kind")
        self._batch_tokens = self.histogram("batch_tokens", "Tokens in the batch of a generation step.", buckets=_SIZES)
        self._batch_sequences = self.histogram(
            "batch_sequences", "Sequences in the batch of a generation step.", buckets=_SIZES
        )
        self._encode_tokens = self.histogram(
            "encode_batch_tokens", "Tokens in the batch of an encode step.", buckets=_SIZES
        )

    def _make_gauges(self) -> None:
        self._running = self._gauge("requests_running", "Sequences that are running.")
        self._waiting = self._gauge("requests_waiting", "Requests waiting in an engine's queue.")
        self._lora_running = self._gauge("lora_requests_running", "Requests of a LoRA adapter that are running.")
        self._lora_waiting = self._gauge("lora_requests_waiting", "Requests of a LoRA adapter without an output yet.")
        self._lora_memory = self._gauge("lora_memory_bytes", "Bytes of a LoRA adapter's matrices.", over_replicas="max")
        self._waiting_tokens = self._gauge(
            "tokens_waiting", "Prompt and input tokens of requests that have no output yet."
        )
        self._queue_seconds = self._gauge(
            "queue_wait_seconds", "Estimated seconds until a new request's first step.", over_replicas="max"
        )
        self._kv_usage = self._gauge(
            "kv_cache_usage_ratio", "Used share of the KV cache's blocks.", over_replicas="max"
        )
        self._kv_window_usage = self._gauge(
            "kv_window_usage_ratio",
            "Used share of the KV blocks for layers with a window.",
            "window",
            over_replicas="max",
        )
        self._blocks = self._gauge("kv_blocks", "Blocks of the KV cache, by state.", "state")
        self._states = self._gauge("state_slots", "Slots for the states of recurrent layers, by state.", "state")
        self._saturation = self._gauge(
            "saturation_ratio", "Running and waiting work over capacity.", over_replicas="max"
        )
        self._replicas = self._gauge("replicas", "Replicas that serve the model.")
        self._ready = self._gauge("engine_ready", "Engines that accept requests.")
        self._live = self._gauge(
            "engine_live", "Engines that run or are being restarted; hung and abandoned ones do not count."
        )
        self._load_seconds = self._gauge("model_load_seconds", "Seconds that loading took.", over_replicas="max")
        self._cache_bytes = self._gauge("embed_cache_bytes", "Bytes of cached results of /encode.")
        self._memory = self._gauge("model_memory_bytes", "Bytes of a model's weights and KV cache.")
        self._fallbacks = self._gauge(
            "slow_fallbacks",
            "Parts of a model that run slower here than they could, as in /info.",
            over_replicas="max",
        )
        labels = ("version", "form", "dtype", "attention")
        self._build_info = self._gauge(
            "build_info", "Version and configuration of a model, in labels; always 1.", *labels, over_replicas="max"
        )


def _exemplar(context: RequestContext) -> dict[str, str] | None:
    """Return the id of the request's trace, which links a bucket to it; None if the client sent none.

    Processes that share their metrics in files have no exemplars.
    """
    if not context.traceparent or MULTIPROCESS_FOLDER in os.environ:
        return None
    found = _TRACE.match(context.traceparent)
    return {"trace_id": found[1]} if found else None


def _drop_unloaded(families: Iterable[Metric]) -> None:
    """Remove the gauges of models that no process serves; counters and histograms must not disappear."""
    families = list(families)
    replicas = [sample for one in families if one.name == "triptych_replicas" for sample in one.samples]
    served = {sample.labels["model"] for sample in replicas if sample.value} | {None}  # None: a gauge of no model
    for family in families:
        if family.type == "gauge":
            family.samples = [sample for sample in family.samples if sample.labels.get("model") in served]


class _CachedFamily(Generic[F]):
    """A metric family that caches its metric for each combination of labels: the library's look-up takes a lock."""

    def __init__(self, family: F) -> None:
        self.labels: Callable[..., F] = cache(family.labels)


class _Families(Collector):
    """A collector of given metric families, as `generate_latest` expects it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
