"""Our figures under the names that vLLM gives them, for gateways, autoscalers and load tools that scrape those.

Only what means the same is shown; the label `model` becomes `model_name`. `docs.vllm.ai`, "Production Metrics".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from model.api.stats import ModelInfo

_NAMES = {  # ours without prefix: theirs
    "requests_running": ("num_requests_running",),
    "requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),  # theirs is a share of 1 too
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "prefix_cache_queries": ("prefix_cache_queries",),
    "prefix_cache_hits": ("prefix_cache_hits",),
    "preemptions": ("num_preemptions",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
    "request_queue_time_seconds": ("request_queue_time_seconds",),
    "prefill_seconds": ("request_prefill_time_seconds",),
    "decode_seconds": ("request_decode_time_seconds",),
    "batch_tokens": ("iteration_tokens_total",),
}
_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}


def vllm_families(families: Iterable[Metric], models: Mapping[str, ModelInfo]) -> Iterator[Metric]:
    """What `families` (all of ours) and the models' settings are in vLLM's terms."""
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


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {"model_name" if key == "model" else key: value for key, value in sample.labels.items()}
        renamed.add_sample(sample.name.replace(family.name, name, 1), labels, sample.value)
    return renamed


def _successes(family: Metric) -> Metric:
    """Generations that ended, by reason: several of our outcomes are one of theirs."""
    counts: dict[tuple[str, str], float] = {}
    for sample in family.samples:
        if sample.name.endswith("_total") and sample.labels["task"] == "generate":
            key = (sample.labels["model"], _FINISHED[sample.labels["outcome"]])
            counts[key] = counts.get(key, 0.0) + sample.value
    found = Metric("vllm:request_success", "Generations that ended.", "counter")
    for (model, reason), count in counts.items():
        found.add_sample("vllm:request_success_total", {"model_name": model, "finished_reason": reason}, count)
    return found
