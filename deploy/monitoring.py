"""The generator of the Grafana dashboard, from the panels below.

`make monitoring` writes it; a test compares the committed file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parent
RULES = DEPLOY / "prometheus" / "rules.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "triptych.json"

_COLUMNS = 24
_MODEL = 'model=~"$model"'


@dataclass(frozen=True)
class Panel:
    """Describes a panel. `queries` are (legend, PromQL); `bound` draws a threshold."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    kind: str = "timeseries"
    stacked: bool = False
    width: int = 8
    height: int = 7
    bound: float | None = None


def number(title: str, unit: str, query: str, help: str = "", bound: float | None = None) -> Panel:
    """Return a small panel with one number."""
    return Panel(title, unit, (("", query),), help, "stat", width=4, height=4, bound=bound)


def rate(metric: str, by: str = "model", where: str = _MODEL) -> str:
    return f"sum by ({by}) (rate(triptych_{metric}{{{where}}}[$__rate_interval]))"


def increase(metric: str, by: str) -> str:
    return f"sum by ({by}) (increase(triptych_{metric}{{{_MODEL}}}[1h]))"


def quantile(q: float, histogram: str, by: str = "model") -> str:
    """Return the PromQL of a quantile over all instances, with their buckets added."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', f'le, {by}')})"


def percentiles(histogram: str, *quantiles: float) -> tuple[tuple[str, str], ...]:
    return tuple((f"{{{{model}}}} p{q * 100:g}", quantile(q, histogram)) for q in quantiles)


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def state_share(state: str) -> str:
    slots = f"triptych_state_slots{{{_MODEL}"
    return f'sum by (model) ({slots}, state="{state}"}}) / sum by (model) ({slots}}})'


def worst(objective: str) -> str:
    """Return the share that misses an objective, of the model with the largest."""
    return f"max(triptych:{objective}:ratio_rate5m{{{_MODEL}}})"


def now(gauge: str, how: str = "sum") -> str:
    return f"{how} by (model) (triptych_{gauge}{{{_MODEL}}})"


PANELS = (
    # A row of numbers with the overall state.
    number("Targets up", "short", 'sum(up{job="triptych"})', "What Prometheus reaches."),
    number("Requests", "reqps", "sum(rate(triptych_requests_received_total[5m]))"),
    number("Failed by our fault", "percentunit", "max(triptych:errors_of_all:ratio_rate5m)", "Objective: 0.1 %", 0.001),
    number(
        "First tokens over 1 s", "percentunit", worst("slow_first_tokens"), "Of the worst model. Objective: 1 %", 0.01
    ),
    number("Tokens over 100 ms", "percentunit", worst("slow_tokens"), "Of the worst model. Objective: 1 %", 0.01),
    number("Alerts", "short", 'count(ALERTS{alertname=~"Triptych.+", alertstate="firing"}) or vector(0)', bound=1),
    # Requests and their outcomes
    Panel(
        "Requests by outcome",
        "reqps",
        (("{{outcome}}", rate("requests_total", "outcome")),),
        "Accepted requests that ended.",
        stacked=True,
    ),
    Panel(
        "Refused by reason",
        "reqps",
        (("{{reason}}", rate("rejections_total", "reason", 'model=~"$model|"')),),
        "Reasons queue_*: more load than capacity. Without a model: refused before it was known.",
        stacked=True,
    ),
    Panel(
        "Tokens",
        "short",
        (
            ("{{model}} in", rate("prompt_tokens_total")),
            ("{{model}} out", rate("generation_tokens_total")),
        ),
        "Tokens a second.",
    ),
    Panel(
        "Objectives missed, by model",
        "percentunit",
        (
            ("{{model}} failed", f"triptych:errors:ratio_rate5m{{{_MODEL}}}"),
            ("{{model}} first tokens over 1 s", f"triptych:slow_first_tokens:ratio_rate5m{{{_MODEL}}}"),
            ("{{model}} tokens over 100 ms", f"triptych:slow_tokens:ratio_rate5m{{{_MODEL}}}"),
            ("{{model}} encodings over 2.5 s", f"triptych:slow_encodings:ratio_rate5m{{{_MODEL}}}"),
        ),
        "Objectives: 0.1 % failed, 1 % of the others.",
        width=24,
        bound=0.01,
    ),
    # Latencies
    Panel("First token", "s", percentiles("time_to_first_token_seconds", 0.5, 0.95, 0.99), "From arrival.", bound=1),
    Panel("Between tokens", "s", percentiles("inter_token_latency_seconds", 0.5, 0.95, 0.99), bound=0.1),
    Panel(
        "End to end",
        "s",
        tuple(
            (f"{{{{model}}}} {{{{task}}}} p{q * 100:g}", quantile(q, "e2e_request_latency_seconds", "model, task"))
            for q in (0.5, 0.95)
        ),
    ),
    # Queues
    Panel(
        "Waiting and running",
        "short",
        (("{{model}} waiting", now("requests_waiting")), ("{{model}} running", now("requests_running"))),
        width=6,
    ),
    Panel(
        "Time in the queue",
        "s",
        (
            *percentiles("request_queue_time_seconds", 0.5, 0.95),
            ("{{model}} estimated now", now("queue_wait_seconds", "max")),
            ("{{model}} in HAProxy p95", quantile(0.95, "proxy_seconds")),
        ),
        "Of requests that began; of one that comes now, which --max-queue-seconds bounds; and before, in HAProxy.",
        width=6,
    ),
    Panel(
        "KV cache",
        "percentunit",
        (
            ("{{model}} in use", now("kv_cache_usage_ratio", "max")),
            ("{{model}} prefix hits", f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"),
        ),
        "Blocks in use on the fullest instance; share of prompt tokens that were found computed.",
        width=6,
        bound=0.9,
    ),
    Panel(
        "State slots",
        "percentunit",
        (("{{model}} in use", state_share("used")), ("{{model}} snapshots", state_share("cached"))),
        "Of recurrent layers: slots that running sequences have, and snapshots that later prompts may go on from. "
        "Snapshots give way to sequences.",
        width=6,
    ),
    # Engines
    Panel(
        "Batch",
        "short",
        (("{{model}} sequences", mean("batch_sequences")), ("{{model}} tokens", mean("batch_tokens"))),
        "Mean of a generation step.",
    ),
    Panel(
        "Step",
        "s",
        tuple(
            (f"{{{{model}}}} {{{{kind}}}} p{q * 100:g}", quantile(q, "step_seconds", "model, kind"))
            for q in (0.5, 0.95)
        ),
    ),
    Panel(
        "Encode throughput",
        "short",
        (
            ("{{model}} tokens/s", rate("encode_batch_tokens_sum")),
            ("{{model}} tokens a step", mean("encode_batch_tokens")),
        ),
    ),
    # Capacity
    Panel(
        "Saturation",
        "percentunit",
        (
            ("{{model}} asked", now("saturation_ratio", "max")),
            ("{{instance}} computing", rate("step_seconds_sum", "instance")),
        ),
        "What runs and waits over what can run, on the fullest; the share of the time in which an instance computes.",
        bound=1,
    ),
    Panel("Tokens waiting", "short", (("{{model}}", now("tokens_waiting")),), "Of prompts without an output."),
    Panel("Replicas", "short", (("{{model}}", now("replicas")),), "That serve the model, of all instances."),
    # Speech
    Panel(
        "Audio",
        "short",
        (("{{model}}", rate("audio_seconds_total")),),
        "Seconds of audio that are transcribed a second.",
    ),
    Panel(
        "Real-time factor",
        "short",
        percentiles("audio_real_time_factor", 0.5, 0.95),
        "Seconds that a transcription took over those of its audio.",
        bound=1,
    ),
    Panel(
        "Windows of audio",
        "short",
        (("{{model}} {{outcome}}", rate("audio_windows_total", "model, outcome")),),
        "Outputs a second. Many `repeated`: not the model's language, or not speech.",
        stacked=True,
    ),
    # Names of keys; a service without keys has none
    Panel(
        "Tokens by name of key",
        "short",
        (("{{tenant}}", rate("tenant_tokens_total", "tenant", _MODEL + ',kind!="cached"')),),
        "Tokens of prompts and outputs, a second.",
        stacked=True,
    ),
    Panel(
        "Requests by name of key",
        "reqps",
        (("{{tenant}} {{outcome}}", rate("tenant_requests_total", "tenant, outcome", 'model=~"$model|"')),),
        "`rejected`: by a quota, by load, or for their content; Refused by reason has `quota_*`.",
    ),
    Panel(
        "Engine time by name of key",
        "short",
        (("{{tenant}}", rate("tenant_engine_seconds_total", "tenant")),),
        "Requests in the engine, on average.",
        stacked=True,
    ),
    # Failures
    Panel(
        "Preemptions",
        "short",
        (("{{model}}", rate("preemptions_total")),),
        "Sequences put back for want of KV blocks, a second.",
        width=12,
    ),
    Panel(
        "Engines started again",
        "short",
        (("{{instance}}", f"max by (instance) (increase(triptych_engine_restarts_total{{{_MODEL}}}[1h]))"),),
        "After they were lost, in an hour. All models of an instance are loaded again.",
        width=12,
    ),
    # Models that come and go
    Panel(
        "Models loaded and unloaded",
        "short",
        (
            ("{{model}} {{outcome}}", increase("model_loads_total", "model, outcome")),
            ("{{model}} {{reason}}", increase("model_unloads_total", "model, reason")),
        ),
        "While the service ran, in an hour. Many `evicted`: the models in use do not fit into --model-memory together.",
        width=12,
    ),
    Panel(
        "Memory of models",
        "bytes",
        (("{{model}}", now("model_memory_bytes")),),
        "Weights and KV caches of all instances.",
        stacked=True,
        width=12,
    ),
)


def dashboard() -> dict[str, Any]:
    """Return Grafana's model of the dashboard; the same panels give the same JSON."""
    return {
        "uid": "triptych",
        "title": "triptych",
        "schemaVersion": 39,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["triptych"],
        "templating": {"list": [_datasource_variable(), _model_variable()]},
        "panels": [_panel(number, panel, at) for number, (panel, at) in enumerate(_places(), start=1)],
    }


def rendered() -> dict[Path, str]:
    """Return the files that `make monitoring` writes."""
    return {DASHBOARD: json.dumps(dashboard(), indent=1) + "\n"}


def _places() -> list[tuple[Panel, dict[str, int]]]:
    """Place the panels from left to right, in rows."""
    places: list[tuple[Panel, dict[str, int]]] = []
    x = y = 0
    for panel in PANELS:
        if x + panel.width > _COLUMNS:
            x, y = 0, y + places[-1][0].height
        places.append((panel, {"x": x, "y": y, "w": panel.width, "h": panel.height}))
        x += panel.width
    return places


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bound is not None:
        steps.append({"color": "red", "value": panel.bound})
    custom = {
        "fillOpacity": 20 if panel.stacked else 0,
        "stacking": {"mode": "normal" if panel.stacked else "none"},
        "thresholdsStyle": {"mode": "off" if panel.bound is None else "line"},
    }
    defaults = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.help,
        "type": panel.kind,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": at,
        "fieldConfig": {
            "defaults": defaults | ({"custom": custom} if panel.kind == "timeseries" else {}),
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(triptych_build_info, model)", "refId": "model"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    for path, text in rendered().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
