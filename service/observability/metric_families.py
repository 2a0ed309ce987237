"""The metric families of an application: their names, labels and buckets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from triptych.service.observability.metric_parts import make_folder

disable_created_metrics()  # these times would be a fifth of all series, and have no use

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# Of latencies that have objectives: ten bounds a decade (ISO 3, R10), so that a percentile is found within some 10 %.
_R10 = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
FINE_SECONDS = (0.0005, *(float(f"{value}e{power}") for power in range(-3, 2) for value in _R10), 100.0, 200.0, 600.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_LENGTHS = (*_SIZES, 32_768, 65_536, 131_072)

F = TypeVar("F", Counter, Histogram)


class MetricFamilies:
    """All families, in a registry of their own; `counter` and `histogram` make more of them."""

    def __init__(self) -> None:
        """Raises `ConfigError` if the folder that processes share cannot be made."""
        make_folder()
        self.registry = CollectorRegistry()
        self._gauges: list[Gauge] = []
        self._make_counters()
        self._make_histograms()
        self._make_gauges()

    def counter(self, name: str, text: str, *labels: str) -> CachedFamily[Counter]:
        return CachedFamily(Counter(f"triptych_{name}", text, labels, registry=self.registry))

    def histogram(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS
    ) -> CachedFamily[Histogram]:
        found = Histogram(f"triptych_{name}", text, ("model", *labels), registry=self.registry, buckets=buckets)
        return CachedFamily(found)

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
            buckets=FINE_SECONDS,
        )
        self._inter_token = self.histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a sequence.", buckets=FINE_SECONDS
        )
        self._e2e = self.histogram(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end.",
            "task",
            buckets=FINE_SECONDS,
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


class CachedFamily(Generic[F]):
    """A metric family that caches its metric for each combination of labels: the library's look-up takes a lock."""

    def __init__(self, family: F) -> None:
        self.labels: Callable[..., F] = cache(family.labels)
