"""The commands `triptych models` and `triptych ps`: list, load and unload the models of a running service over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from triptych.model.errors import ConfigError
from triptych.service.cli.service_client import ServiceClient, service_url

_COLUMNS = ("name", "state", "memory", "replicas", "idle", "from", "reason")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `ConfigError` for a usage error, `EngineError` if the service refuses or is down."""
    if arguments.action == "list":
        _print_table(_ask(arguments, "/models", None).get("models", []))
        return 0
    if not arguments.name:
        raise ConfigError(f"triptych models {arguments.action} needs a NAME")
    body: dict[str, Any] = {"name": arguments.name, "wait": not arguments.no_wait}
    if arguments.action == "load":
        body |= {"settings": _settings(arguments.set), "pinned": arguments.pin}
        body |= {"path": arguments.path} if arguments.path else {}
    elif arguments.drain is not None:
        body["drain_s"] = arguments.drain
    _print_table([_ask(arguments, f"/models/{arguments.action}", body)])
    return 0


def _settings(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ConfigError(f"--set: expected NAME=VALUE, found {name!r}")
    return {name.replace("-", "_"): value for name, _, value in pairs}


def _ask(arguments: argparse.Namespace, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Send a GET, or a POST of `body`, and return the service's reply."""
    key = arguments.admin_key or os.environ.get("TRIPTYCH_ADMIN_KEYS", "").partition(",")[0].strip()
    return ServiceClient(service_url(arguments.url), key).reply(path, body)


def _print_table(models: list[dict[str, Any]]) -> None:
    rows = [_COLUMNS, *map(_row, models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    return (
        model["name"],
        model["state"] + (" (pinned)" if model["pinned"] and model["state"] == "loaded" else ""),
        f"{model['memory_bytes'] / 1e6:.0f} MB" if model["memory_bytes"] else "",
        ", ".join(f"{count} {state}" for state, count in model["replicas"].items()),
        f"{model['idle_s']:.0f} s",
        model["path"],
        model["reason"],
    )


_SAMPLE = re.compile(r'triptych_(?P<name>\w+)\{[^}]*\bmodel="(?P<model>[^"]*)"[^}]*\} (?P<value>\S+)')
_GAUGES = {  # key of a row, by the metric's name
    "model_memory_bytes": "memory_bytes",
    "requests_running": "running",
    "requests_waiting": "waiting",
    "kv_cache_usage_ratio": "kv_cache_used",
}
_PS_COLUMNS = ("NAME", "FORM", "STATE", "PARAMETERS", "MEMORY", "CONTEXT", "DEVICE", "RUNNING", "WAITING", "KV CACHE")


def ps(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `EngineError` if no service answers."""
    url = service_url(arguments.url)
    client = ServiceClient(url, arguments.api_key or os.environ.get("TRIPTYCH_API_KEY", ""))
    info = client.info()
    found = rows({one["name"]: one for one in info["models"]}, client.metrics())
    resident = info.get("resident_bytes", 0)
    if arguments.json:
        print(json.dumps({"url": url, "resident_bytes": resident, "models": found}))
        return 0
    table = [_PS_COLUMNS, *map(_shown, found)]
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
