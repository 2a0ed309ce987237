"""The metrics under vLLM's names, for gateways, autoscalers and load generators that scrape those.

Only metrics with the same meaning are exported; the label `model` becomes `model_name`. Source: `docs.vllm.ai`,
"Production Metrics".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from model.api.stats import ModelInfo

_NAMES = {  # ours without prefix: theirs
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


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {"model_name" if key == "model" else key: value for key, value in sample.labels.items()}
        renamed.add_sample(sample.name.replace(family.name, name, 1), labels, sample.value)
    return renamed


def _successes(family: Metric) -> Metric:
    """Count generations that ended by vLLM's reasons, of which one may stand for several outcomes."""
    counts: dict[tuple[str, str], float] = {}
    for sample in family.samples:
        if sample.name.endswith("_total") and sample.labels["task"] == "generate":
            key = (sample.labels["model"], _FINISHED[sample.labels["outcome"]])
            counts[key] = counts.get(key, 0.0) + sample.value
    found = Metric("vllm:request_success", "Generations that ended.", "counter")
    for (model, reason), count in counts.items():
        found.add_sample("vllm:request_success_total", {"model_name": model, "finished_reason": reason}, count)
    return found
