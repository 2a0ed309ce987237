"""Parts of the metrics: the metrics under vLLM's names, a tally of tokens, and the folder that processes share."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from prometheus_client import Metric, multiprocess
from prometheus_client.core import GaugeMetricFamily

from triptych.model.api.stats import EngineStats, ModelInfo
from triptych.model.errors import ConfigError

# -- The metrics under vLLM's names, for gateways, autoscalers and load generators that read those. Only metrics with
# the same meaning are exported; the label `model` becomes `model_name`. Source: `docs.vllm.ai`, "Production Metrics".

_NAMES = {  # our name without its prefix: vLLM's names
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),  # also between 0 and 1
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "spec_decode_num_drafts": ("spec_decode_num_drafts",),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens",),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens",),
    "preemptions": ("num_preemptions",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "prefill_seconds": ("request_prefill_time_seconds",),
    "decode_seconds": ("request_decode_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
    "batch_tokens": ("iteration_tokens_total",),
}
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}


def vllm_families(families: Iterable[Metric], models: Mapping[str, ModelInfo]) -> Iterator[Metric]:
    """Convert the service's metric families, and the models' settings, to vLLM's metrics."""
    for family in families:
        ours = family.name.removeprefix("triptych_")
        for theirs in _NAMES.get(ours, ()):
            yield _renamed(family, f"vllm:{theirs}")
        if ours == "requests":
            yield _successes(family)
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "KV blocks of the model.", labels=("model_name", "block_size", "num_gpu_blocks")
    )
    for info in models.values():
        config.add_metric((info.name, str(info.block_size), str(info.num_blocks)), 1)
    yield config


def lora_families(stats: Iterable[EngineStats], most: int | None, loading: Iterable[str]) -> Iterator[Metric]:
    """Say which LoRA adapters have requests, as the endpoint picker of the Gateway API reads it.

    `most` may be in memory at a time (None: any number); those that are loading count as waiting. The value is the
    time, so that of several samples the latest counts.
    """
    adapters, loading = [one for one in stats if one.adapter_of], sorted(loading)
    if not (adapters or loading or most):
        return
    names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    found = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters with requests.", labels=names)
    running = ",".join(one.model for one in adapters if one.running)
    waiting = ",".join([*(one.model for one in adapters if one.waiting), *loading])
    found.add_metric((str(most or len(adapters)), running, waiting), time.time())
    yield found


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if sample.labels.get("task", "generate") != "generate":
            continue  # vLLM's are of generations
        labels = {"model_name" if key == "model" else key: value for key, value in sample.labels.items()}
        labels.pop("task", None)
        renamed.add_sample(sample.name.replace(family.name, name, 1), labels, sample.value)
    return renamed


def _successes(family: Metric) -> Metric:
    """Count ended generations by vLLM's reasons; one reason may stand for several of our outcomes."""
    counts: dict[tuple[str, str], float] = {}
    for sample in family.samples:
        if sample.name.endswith("_total") and sample.labels["task"] == "generate":
            key = (sample.labels["model"], _FINISHED[sample.labels["outcome"]])
            counts[key] = counts.get(key, 0.0) + sample.value
    found = Metric("vllm:request_success", "Generations that ended.", "counter")
    for (model, reason), count in counts.items():
        found.add_sample("vllm:request_success_total", {"model_name": model, "finished_reason": reason}, count)
    return found


# -- A tally of generated tokens, which is added to Prometheus' metrics from time to time.

_MAX_TALLY = 128  # tokens; a process that is killed loses its tally


class TokenTally:
    """Counts the tokens of one model and their inter-token latencies; `flush` adds them to the metrics.

    A counter and a histogram of prometheus_client cost 3 us a token, and more if processes share them in files. So
    tokens are added in bulk: at each `flush`, and as soon as there are `_MAX_TALLY`.
    """

    def __init__(self, tokens: Any, gaps: Any) -> None:
        """`tokens` is a counter, `gaps` a histogram of seconds, both with their labels."""
        self._counter, self._histogram = tokens, gaps
        self._bounds: list[float] = list(gaps._upper_bounds)  # the last one is infinite
        self._tokens = 0
        self._seconds = 0.0
        self._buckets = [0] * len(self._bounds)

    def __call__(self, tokens: int, seconds_each: float | None) -> None:
        """Count `tokens`; `seconds_each` is their mean inter-token latency, None for the first of a sequence."""
        self._tokens += tokens
        if seconds_each is not None:
            self._buckets[bisect.bisect_left(self._bounds, seconds_each)] += tokens
            self._seconds += tokens * seconds_each
        if self._tokens >= _MAX_TALLY:
            self.flush()

    def flush(self) -> None:
        """Add the tally since the last call to the metrics."""
        if not self._tokens:
            return
        self._counter.inc(self._tokens)
        for place, count in enumerate(self._buckets):
            if count:
                self._histogram._buckets[place].inc(count)  # `observe` would add only one value a call
                self._buckets[place] = 0
        self._histogram._sum.inc(self._seconds)
        self._tokens, self._seconds = 0, 0.0


# -- The folder in which several processes share their metrics (`triptych.service.observability.metrics`).
# prometheus_client reads its name from the environment when it is imported.

MULTIPROCESS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"


def ready_elsewhere(models: Collection[str]) -> bool:
    """Return whether another process that shares the folder accepts requests for one of these models."""
    found = []
    for file in Path(os.environ[MULTIPROCESS_FOLDER]).glob("gauge_livesum_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if pid != os.getpid() and Path(f"/proc/{pid}").exists():
            found.append(str(file))
    families = multiprocess.MultiProcessCollector.merge(found)
    samples = (sample for one in families if one.name == "triptych_engine_ready" for sample in one.samples)
    return any(sample.value > 0 and sample.labels["model"] in models for sample in samples)


def make_folder() -> None:
    """Create the folder of shared metrics, if one is configured; raises `ConfigError`."""
    folder = os.environ.get(MULTIPROCESS_FOLDER)
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{MULTIPROCESS_FOLDER} {folder}: {error.strerror}") from None
