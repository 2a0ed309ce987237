"""The command `triptych ps`: the models of a running service, their memory, and what they compute now."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from triptych.service.cli.run import DEFAULT_URL
from triptych.service.cli.service_client import ServiceClient, checked_url

_SAMPLE = re.compile(r'triptych_(?P<name>\w+)\{[^}]*\bmodel="(?P<model>[^"]*)"[^}]*\} (?P<value>\S+)')
_GAUGES = {  # key of a row, by the metric's name
    "model_memory_bytes": "memory_bytes",
    "requests_running": "running",
    "requests_waiting": "waiting",
    "kv_cache_usage_ratio": "kv_cache_used",
}
_COLUMNS = ("NAME", "FORM", "STATE", "PARAMETERS", "MEMORY", "CONTEXT", "DEVICE", "RUNNING", "WAITING", "KV CACHE")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `EngineError` if no service answers."""
    url = checked_url(arguments.url or os.environ.get("TRIPTYCH_URL", "") or DEFAULT_URL)
    client = ServiceClient(url, arguments.api_key or os.environ.get("TRIPTYCH_API_KEY", ""))
    info = client.info()
    found = rows({one["name"]: one for one in info["models"]}, client.metrics())
    resident = info.get("resident_bytes", 0)
    if arguments.json:
        print(json.dumps({"url": url, "resident_bytes": resident, "models": found}))
        return 0
    table = [_COLUMNS, *map(_shown, found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    if resident:
        print(f"In memory now: {resident / 1e6:,.0f} MB. A KV cache takes its memory as it is used.")
    return 0


def rows(models: Mapping[str, Mapping[str, Any]], metrics: str) -> list[dict[str, Any]]:
    """Join what /info and /metrics say of each model. What a model that is not loaded lacks is None."""
    gauges: dict[tuple[str, str], float] = {}
    for match in _SAMPLE.finditer(metrics):
        gauges[match["model"], match["name"]] = float(match["value"])
    keys = ("form", "state", "parameters", "max_model_len", "device")
    return [
        {
            "name": name,
            **{key: model.get(key) for key in keys},
            **{key: gauges.get((name, gauge)) for gauge, key in _GAUGES.items()},
        }
        for name, model in models.items()
    ]


def _shown(row: Mapping[str, Any]) -> tuple[str, ...]:
    def number(key: str, scale: float = 1.0, unit: str = "", digits: int = 0) -> str:
        return "-" if row[key] is None else f"{row[key] / scale:,.{digits}f}{unit}"

    return (
        row["name"],
        row["form"] or "-",
        row["state"] or "loaded",
        number("parameters", 1e6, " M", 1),
        number("memory_bytes", 1e6, " MB"),
        number("max_model_len"),
        row["device"] or "-",
        number("running"),
        number("waiting"),
        number("kv_cache_used", 0.01, "%"),
    )
