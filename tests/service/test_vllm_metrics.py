"""Metrics under vLLM's names: equal to ours, readable by Prometheus, and absent by default."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.service.support import App, make_app, run
from triptych.service.settings.service_settings import ServiceSettings


def scraped(app: App) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    async def work(client: httpx.AsyncClient) -> str:
        for extra in ({}, {"stop": "l"}, {"n": 3}):
            reply = await client.post("/generate", json={"model": "gen", "prompt": "ab", "max_tokens": 4, **extra})
            assert reply.status_code == 200
        await client.post("/encode", json={"input": "w1"})
        return (await client.get("/metrics")).text

    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(run(app, work)):
        for sample in family.samples:
            samples = found.setdefault(sample.name, {})
            labels = frozenset(sample.labels.items())
            assert labels not in samples  # each series once
            samples[labels] = sample.value
    return found


def test_the_figures_are_ours_under_the_other_names() -> None:
    app = make_app(settings=ServiceSettings(vllm_metrics=True))
    found = scraped(app)
    model = ("model_name", "gen")
    ended = {
        frozenset({("model_name", name), ("finished_reason", reason)}): 0
        for name in ("gen", "seq")
        for reason in ("stop", "length", "abort", "error")
    }
    ended[frozenset({model, ("finished_reason", "length")})] = 2
    ended[frozenset({model, ("finished_reason", "stop")})] = 1
    assert found["vllm:request_success_total"] == ended
    assert found["vllm:generation_tokens_total"][frozenset({model})] == 4 + 3 + 12
    info = app.client.models["gen"]
    sizes = {("block_size", str(info.block_size)), ("num_gpu_blocks", str(info.num_blocks))}
    assert found["vllm:cache_config_info"][frozenset({model, *sizes})] == 1
    for theirs, ours in (
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("kv_cache_usage_perc", "kv_cache_usage_ratio"),
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("prefix_cache_hits_total", "prefix_cache_hits_total"),
        ("num_preemptions_total", "preemptions_total"),
        ("spec_decode_num_drafts_total", "spec_decode_num_drafts_total"),
        ("spec_decode_num_draft_tokens_total", "spec_decode_num_draft_tokens_total"),
        ("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_total"),
        ("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_bucket"),
        ("inter_token_latency_seconds_sum", "inter_token_latency_seconds_sum"),
        ("e2e_request_latency_seconds_count", "e2e_request_latency_seconds_count"),
        ("iteration_tokens_total_count", "batch_tokens_count"),
        ("request_prompt_tokens_sum", "request_prompt_tokens_sum"),
        ("request_generation_tokens_bucket", "request_generation_tokens_bucket"),
    ):
        wanted = {
            frozenset(
                ("model_name", value) if key == "model" else (key, value) for key, value in labels if key != "task"
            ): figure
            for labels, figure in found[f"triptych_{ours}"].items()
            if ("task", "encode") not in labels
        }
        assert found[f"vllm:{theirs}"] == wanted, theirs


def test_vllm_names_are_absent_by_default() -> None:
    assert not [name for name in scraped(make_app()) if not name.startswith(("triptych_", "process_"))]
