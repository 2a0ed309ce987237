"""The command `triptych serve`: runs the configured runtime, and prints a banner once the service is ready."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.system.child_process import ConnectedChild
from triptych.model.system.stacks import print_stacks_on_signal
from triptych.service.cli.banner import banner
from triptych.service.lifecycle.state import version
from triptych.service.observability import logs
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.serve_config import OnReady, Ready, ServeConfig
from triptych.service.settings.sources import FileSettings

logger = logging.getLogger("triptych")


def serve(
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    groups: Mapping[str, FileSettings] | None = None,
    engine: ConnectedChild | None = None,
    note: str = "",
) -> int:
    """Serve models (name -> `path` and engine settings) and groups of models until a signal; return the exit code.

    `engine` is an engine process for the local runtime that has already been started. `note` is told first.
    """
    began = time.monotonic()
    all_json = settings.get("log_format") == "json"
    if all_json:
        logs.setup("json")
    if note:
        _print(f"triptych: {note}", all_json=all_json)
    try:
        config = resolve_config(models, settings, groups)
        tell = partial(_print, all_json=all_json)

        def on_ready(ready: Ready) -> None:
            tell(banner(ready, config, time.monotonic() - began))

        tell(f"triptych {version()}: loading {', '.join(models) or 'no model yet'} ({config.runtime} runtime)")
        return run(config, on_ready, engine)
    except EngineDeadError as error:
        _print(f"triptych: {error}", all_json=all_json, level=logging.ERROR)
        return 1
    except ConfigError as error:
        if not all_json:
            raise
        _print(f"triptych: {error}", all_json=True, level=logging.ERROR)
        return 2


def run(config: ServeConfig, on_ready: OnReady, engine: ConnectedChild | None = None) -> int:
    """Serve with the runtime that `config` names until a signal, and return the exit code.

    Calls `on_ready` when the first request can be served. Raises `ConfigError`, or `EngineDeadError` if loading fails.
    """
    logs.setup(config.settings.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    print_stacks_on_signal(of_descendants=True)
    from triptych.service.runtimes.assembly import pin_models

    config = pin_models(config)
    if config.runtime == "local":
        from triptych.service.runtimes.local import run_local

        return run_local(config, on_ready, engine)
    from triptych.service.runtimes.ray_serve import environment

    with environment.prepared(config) as folder:
        try:
            from triptych.service.runtimes.ray_serve.deployment import (
                run_ray,  # reads the environment when it is imported
            )
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--runtime ray: the package {error.name} is not installed; pip install 'triptych[ray]', "
                "or use --runtime local"
            ) from None
        return run_ray(config, folder, on_ready)


def _print(text: str, *, all_json: bool, level: int = logging.INFO) -> None:
    """Print a text, or log it where every line must be JSON (`log_format` is json)."""
    if all_json:
        logger.log(level, text.strip())
        return
    with suppress(OSError):  # stderr may be a file on a full disk, which must not stop the service
        print(text, file=sys.stderr, flush=True)
