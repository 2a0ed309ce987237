"""The command `triptych models`: lists, loads and unloads the models of a running service over HTTP."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from triptych.model.errors import ConfigError, EngineError
from triptych.service.cli.service_client import checked_url, error_message

_COLUMNS = ("name", "state", "memory", "replicas", "idle", "from", "reason")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Raises `ConfigError` for a usage error, `EngineError` if the service refuses or is down."""
    if arguments.action == "list":
        _print_table(_ask(arguments, "/models", None)["models"])
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
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(checked_url(arguments.url) + path, data, headers)
    try:
        with urllib.request.urlopen(request) as reply:
            found: dict[str, Any] = json.load(reply)
            return found
    except urllib.error.HTTPError as error:
        raise EngineError(f"{error.code}: {error_message(error)}") from None
    except (OSError, ValueError) as error:
        raise EngineError(f"{arguments.url} does not answer: {getattr(error, 'reason', error)}") from None


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
