"""Prometheus metrics. Each application has one `Metrics` object with its own registry.

If `PROMETHEUS_MULTIPROC_DIR` is set (`triptych.service.runtimes.ray_serve.environment` sets it for replicas), every
process writes its values to files in that folder, and each process reports the values of all. Counters and histograms
are summed; they include ended processes, because a counter must not decrease. Gauges include running processes only.

Invariants: every request to a model's route counts once as received, then once as rejected (by reason) or accepted. An
accepted request counts once in `triptych_requests_total`, by its outcome. Labels are names of loaded models and fixed
words, never a prompt, an id or a key. A request that is rejected before its model is known has the model "". One
that HAProxy sends on to another replica counts at both, at the first one as rejected (`sent_on`).
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from prometheus_client import (
    Counter,
    Metric,
    ProcessCollector,
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
from triptych.service.observability.metric_families import CachedFamily, MetricFamilies
from triptych.service.observability.metric_parts import (
    MULTIPROCESS_FOLDER,
    TokenTally,
    lora_families,
    ready_elsewhere,
    vllm_families,
)

_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")  # W3C Trace Context

_UPDATE_SECONDS = 1.0

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})  # a client may send any other word


class Metrics(MetricFamilies):
    """Counters and histograms that the application and the engines update, and gauges that are set at each scrape."""

    def __init__(self, *, vllm_names: bool = False, max_loras: int | None = None) -> None:
        """`vllm_names`: also export the metrics under vLLM's names. Raises `ConfigError`."""
        super().__init__()
        # `process_*` of this process; of one among several replicas they would take turns.
        self._process = None if MULTIPROCESS_FOLDER in os.environ else ProcessCollector(registry=None)
        self._vllm_names = vllm_names
        self._max_loras = max_loras
        self.loading_adapters: set[str] = set()
        self._at_load: list[Callable[[str], None]] = []
        self._tallies: dict[str, TokenTally] = {}  # by model
        self._seen: dict[tuple[str, str], int] = {}  # engines' counters at the last update
        self._starts = 0  # of engines after the first one, at the last update
        self._served: set[str] = set()  # models that were loaded here
        self._elsewhere = (-math.inf, False)  # when another replica was looked for, and whether one is ready

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
        """Count an unload, and set the model's gauges to 0; `scrape` omits them while no process serves the model."""
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

    async def scrape(self, client: EngineClient, accept: str = "") -> tuple[bytes, str]:
        """Return the text for a scrape, with the current state of the engines, and its content type.

        `accept` is the header of that name: OpenMetrics, which has exemplars, is sent to those that ask for it.
        A thread makes the text: with 20 models and four replicas it takes 0.2 s, in which streams would stop.
        """
        self.update_engines(client)
        state = (dict(client.models), list(client.stats().values()), sorted(self.loading_adapters))
        return await asyncio.to_thread(self._text, *state, accept)

    def _text(
        self, models: Mapping[str, ModelInfo], stats: Sequence[EngineStats], loading: Sequence[str], accept: str
    ) -> tuple[bytes, str]:
        # Ray may write its own metrics into the shared folder; they are omitted.
        families = [one for one in self._collector().collect() if one.name.startswith("triptych_")]
        _drop_unloaded(families)
        if self._process is not None:
            families += self._process.collect()
        if self._vllm_names:
            families += vllm_families(families, models)
            families += lora_families(stats, self._max_loras, loading)
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
                with suppress(FileNotFoundError):  # another process was faster
                    multiprocess.mark_process_dead(pid, folder)
        return multiprocess.MultiProcessCollector(None, folder)

    def update_engines(self, client: EngineClient) -> None:
        """Set the gauges to the current state of all engines."""
        for tally in self._tallies.values():
            tally.flush()
        self._notice_restart(client.restarts)
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

    def _notice_restart(self, restarts: int) -> None:
        """Let all counters of a new engine count from 0, also those that have passed the last engine's already."""
        if restarts != self._starts:
            self._starts = restarts
            self._seen = {key: value for key, value in self._seen.items() if key[1] == "restarts"}

    def _add(self, counter: CachedFamily[Counter], model: str, name: str, value: int) -> None:
        """Add the increase of an engine's counter since the last update; one that is lower was begun again."""
        seen = self._seen.get((model, name), 0)
        counter.labels(model).inc(value - seen if value >= seen else value)
        self._seen[model, name] = value


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


class _Families(Collector):
    """A collector of given metric families, as `generate_latest` expects it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
