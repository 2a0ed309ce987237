"""Builds the application with its engines, and the common parts of all runtimes: listening socket, exit codes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from starlette.types import Lifespan

from triptych.model.checkpoint import hub, hub_names
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.client.process_transport import ProcessTransport
from triptych.model.errors import ConfigError
from triptych.model.system.child_process import ConnectedChild
from triptych.service.app import Application, create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.lifecycle.fleet import Replicas
from triptych.service.observability.metric_parts import MULTIPROCESS_FOLDER
from triptych.service.planning.capabilities import capabilities
from triptych.service.runtimes.http_server import MonitoringApp, http_server
from triptych.service.runtimes.model_reader import FolderReader, read_adapted, read_model
from triptych.service.sandbox import confinement
from triptych.service.settings.serve_config import ModelUse, ServeConfig
from triptych.service.settings.service_settings import ServiceSettings

_GC_THRESHOLD = 5_000  # new objects after which the garbage collector runs


def build_models(config: ServeConfig) -> Models:
    """Read the folders of all models without their weights; download models of the Hub first. Raises `ConfigError`."""
    config = with_folders(config)
    return Models(read_models(config), config.models_elsewhere)


def read_models(config: ServeConfig) -> list[ServedModel]:
    """Read the folders of the models given at the start.

    Raises `ConfigError`, also for a draft model that no model can use.
    """
    settings = config.settings
    models = [read_model(spec, settings.limits.max_beams) for spec in config.models if spec.adapter_of is None]
    by_name = {model.name: model for model in models}
    adapters = [read_adapted(spec, by_name[spec.adapter_of]) for spec in config.models if spec.adapter_of is not None]
    most = settings.models.max_loras
    models += [replace(one, loaded=most is None or place < most) for place, one in enumerate(adapters)]
    others = settings.models.models_dir or settings.has_admin or config.models_elsewhere or config.route != "/"
    shared = [model for model in models if model.engine.draft_model is not None and model.engine.draft_model_shared]
    if shared and len(shared) == len(models) and not others and not any(map(_is_decoder_only, models)):
        forms = ", ".join(f"{model.name} is {model.checkpoint.config.form}" for model in models)
        raise ConfigError(f"draft_model: no model is decoder-only, so it would draft for none: {forms}")
    return models


def _is_decoder_only(model: ServedModel) -> bool:
    return model.checkpoint.config.form == "decoder-only"


def uses_of(models: Models, url: str, *, with_key: bool) -> dict[str, ModelUse]:
    """Return what each loaded model can do, with a command to try it at `url`."""
    found = {}
    for served in models.loaded:
        able = capabilities(served)
        routes = tuple(one.path for one in able)
        example = able[0].curl(url, with_key=with_key) if able else ""
        found[served.name] = ModelUse(tuple(one.name for one in able), routes, example)
    return found


def build_app(
    config: ServeConfig, engine: ConnectedChild | None = None, replicas: Replicas | None = None
) -> Application:
    """Build the application; its lifespan starts the engines in a child process. Raises `ConfigError`.

    `engine` is the first child process, if it has already been started. `replicas` reaches the other replicas.
    """
    confinement.hide_process()  # it holds keys and clients' data
    started = [engine] if engine is not None else []
    config = with_folders(config)
    models = build_models(config)
    tokenizers = {model.name: model.tokenizer for model in models.loaded}
    client = AsyncEngine(
        [spec for spec in config.models if models.served(spec.name) is not None],
        lambda: ProcessTransport(started.pop() if started else None),
        tokenizers,
        stall_seconds=config.settings.stall_timeout_s,
        max_unread_bytes=config.settings.limits.stream_unread_bytes,
        stream_interval=config.settings.stream_interval_s,
    )
    reader = FolderReader(
        config.settings.models.max_download, config.settings.log_format, config.settings.limits.max_beams
    )
    app = create_app(client, models, config.settings, reader, replicas=replicas)
    if config.settings.metrics_port:
        app.router.lifespan_context = _with_monitoring(app.router.lifespan_context, config.settings)
    return app


def _with_monitoring(lifespan: Lifespan[Application], settings: ServiceSettings) -> Lifespan[Application]:
    """Return a lifespan that also answers on `metrics_port`, from before the models load until the end."""

    @asynccontextmanager
    async def both(app: Application) -> AsyncIterator[Mapping[str, Any]]:
        replicas = MULTIPROCESS_FOLDER in os.environ  # whose metrics are added: any of them may answer
        with _listener(settings.host, settings.metrics_port, "--metrics-port", is_shared=replicas) as listener:
            async with http_server(MonitoringApp(app), [listener], settings.limits), lifespan(app) as state:
                yield state or {}

    return both


def tune_garbage_collector() -> None:
    """Exempt all present objects from garbage collection, and collect new ones less often. Call it after loading.

    Traversing the objects of all libraries took a fifth of this process's time at 64 streams. Reference counts free the
    objects of requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


@contextmanager
def listening(settings: ServiceSettings) -> Iterator[socket.socket]:
    """Bind a socket to the configured address (port 0: any free one). Raises `ConfigError` if that fails."""
    with _listener(settings.host, settings.port, "--port") as listener:
        yield listener


def check_metrics_port(settings: ServiceSettings) -> None:
    """Raise `ConfigError` if the metrics port is taken. The replicas of a service share it, and so could others."""
    if settings.metrics_port:
        with _listener(settings.host, settings.metrics_port, "--metrics-port"):
            pass


@contextmanager
def _listener(host: str, port: int, option: str, *, is_shared: bool = False) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=2048, reuse_port=is_shared, dualstack_ipv6=both
        )
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        advice = f"; choose another with {option}" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}{advice}") from None
    with listener:
        yield listener


def base_url(host: str, port: int) -> str:
    """Return the URL of the service for clients on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def exit_code(number: int, *, drained: bool) -> int:
    """Return 0 if the service drained after a SIGTERM, as supervisors expect; else 128 + the signal's number."""
    return 0 if drained and number == signal.SIGTERM else 128 + number


def pin_models(config: ServeConfig) -> ServeConfig:
    """Replace revisions of Hub models by commits, so that every replica serves the same files.

    Downloads missing files. Raises `ConfigError`.
    """
    pinned = _replace_hub_paths(config, hub.pinned)
    return replace(pinned, groups=tuple(map(pin_models, config.groups)))


def with_folders(config: ServeConfig) -> ServeConfig:
    """Replace the paths of Hub models by their folders in this machine's cache."""
    return _replace_hub_paths(config, hub.local_folder)


def _replace_hub_paths(config: ServeConfig, resolve: Callable[..., object]) -> ServeConfig:
    """Replace the path of each Hub model by what `resolve(path, pickle=...)` returns."""
    models = tuple(
        replace(spec, path=str(resolve(spec.path, pickle=spec.engine.pickle)))
        if hub_names.is_hub_name(spec.path)
        else spec
        for spec in config.models
    )
    return replace(config, models=models)
