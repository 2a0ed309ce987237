"""The service under Ray Serve: one deployment, whose replica is the application itself. The only file that imports Ray.

Tokens leave by the replica's own HTTP reply, through Serve's HAProxy or its proxy; the engines are a child process of
the replica. `service.runtimes.ray_serve.environment` must have prepared the environment before this module is imported.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from model.api.stats import ModelInfo
from model.errors import ConfigError, EngineDeadError
from service.http.route_prefix import unprefixed
from service.lifecycle.state import service_of
from service.observability import log_pipe, logs
from service.runtimes.local import (
    KEEP_ALIVE_SECONDS,
    OnReady,
    Ready,
    ServeConfig,
    base_url,
    build_app,
    build_registry,
    listening,
    settle,
)
from service.runtimes.ray_serve.autoscaling_policy import SATURATION, Scaling
from service.runtimes.ray_serve.config_file import DEPLOYMENT, chosen
from service.runtimes.ray_serve.descendants import adopt_orphans, end_descendants
from service.runtimes.ray_serve.environment import request_timeout_s
from service.runtimes.ray_serve.main_signals import MainSignals, within
from service.runtimes.ray_serve.placement import check_gpus, gpus_of_replica

_LOG = "log"  # the replicas' stderr, in the session's folder
_SPARE_REQUESTS = 256  # beyond what the engines queue: health, metrics, requests that will be refused
_STOP_MARGIN = 15.0
_LOOK_SECONDS = 1.0  # between two looks at Ray's processes
_END_SECONDS = 2.0  # for processes that Ray has told to end
_CONTROL_SECONDS = 30.0  # for a question to the replicas
_FIND_SECONDS = 5.0  # for finding them
_CANCEL_SECONDS = 5.0  # a replica that hangs must not hold the answer to who cancels
_STORE_BYTES = 80 << 20  # nothing of ours goes through Ray's object store; this is about its minimum

logger = logging.getLogger("triptych.ray")


@serve.ingress()
class Replica:
    """One replica. It counts as ready when its models are loaded; a failure to load them fails its start."""

    def __init__(self, config: ServeConfig, log: str | None = None) -> None:
        """`log`: the named pipe that is to be stderr (`service.observability.log_pipe`)."""
        if log is not None:
            log_pipe.adopt(Path(log))
        logs.setup(config.settings.log_format, stream=os.fdopen(os.dup(2), "w", buffering=1))
        self._app = build_app(config)
        self._service = service_of(self._app)
        self._service.cancel_elsewhere = self._cancel_elsewhere
        self._siblings: DeploymentHandle[Any] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        lifespan = self._app.router.lifespan_context(self._app)
        await lifespan.__aenter__()
        settle()
        return _Mounted(self._app, lifespan)

    async def check_health(self) -> None:
        """Raises when the step loop does not move; Serve then replaces the replica."""
        self._service.check_live()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `service.runtimes.ray_serve.autoscaling_policy` reads, from the fullest model."""
        return {SATURATION: max(one.saturation for one in self._service.client.demand().values())}

    async def models(self) -> dict[str, ModelInfo]:
        return dict(self._service.client.models)

    async def cancel(self, request_id: str, asked_by: str) -> int:
        """`Jobs.cancel`, unless it is this replica that asks all."""
        if asked_by == _replica_id():
            return 0
        return self._service.jobs.cancel(request_id)

    async def _cancel_elsewhere(self, request_id: str) -> int:
        """For `Service.cancel`: a request is known to one replica, and its DELETE comes to any."""
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                if self._siblings is None:
                    self._siblings = await asyncio.to_thread(serve.get_app_handle, serve.get_replica_context().app_name)
                asked = self._siblings.broadcast("cancel", request_id, _replica_id())
                answers = await asked.results_async(return_exceptions=True)
        except (RayError, RayServeException) as error:
            raise TimeoutError from error
        ended = sum(answer for answer in answers if isinstance(answer, int))
        if not ended and not all(isinstance(answer, int) for answer in answers):
            raise TimeoutError
        return ended

    async def drain(self) -> None:
        """Refuse new work, and return when what runs has ended or run out of time."""
        await self._service.drain()


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


class _Mounted:
    """The application with its lifespan already begun: Serve would hide why one fails to begin."""

    def __init__(self, app: ASGIApp, lifespan: AbstractAsyncContextManager[Any]) -> None:
        self._app = app
        self._lifespan = lifespan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(unprefixed(scope), receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._lifespan.__aexit__(None, None, None)
        await send({"type": "lifespan.shutdown.complete"})


def application(arguments: dict[str, Any]) -> serve.Application:
    """What `serve run`, `serve deploy` and KubeRay's RayService make of the import path of this function.

    `arguments` are what a file for `triptych serve --config` holds, less what the cluster decides; `triptych
    serve-config` writes them. Folders of models are only read where replicas run. Raises `ConfigError`.
    """
    config = chosen(arguments)
    return _deployment(config).bind(config)


def run_ray(config: ServeConfig, folder: Path, on_ready: OnReady) -> int:
    """Serve on a Ray of its own until a signal; as `service.runtimes.local.run`, which is how to call it."""
    for one in (config, *config.groups):
        build_registry(one)  # what is wrong with a folder is said before Ray starts
    config = _resolved(config)
    signals = MainSignals()
    signals.take()
    handles: list[DeploymentHandle[Any]] = []
    try:
        with log_pipe.printing(folder / _LOG), _session(folder, signals):
            try:
                _deploy(config, folder)
                models: dict[str, ModelInfo] = {}
                handles += _handles(config)
                for replicas in handles:
                    models |= replicas.broadcast("models").results(timeout_s=_CONTROL_SECONDS)[0]
                on_ready(Ready(_url(config), _ingress(), models))
                _wait_for_loss()
                raise SystemExit(1)
            except SystemExit:  # even before we hear that replicas are ready: they answer earlier
                signals.drained = _drain(config, handles)
                raise
    except SystemExit as stopped:
        return signals.exit_code(stopped)


def _handles(config: ServeConfig) -> list[DeploymentHandle[Any]]:
    """For questions to the replicas of each application; raises what Serve raises for one that does not run yet."""
    handles = [serve.get_app_handle(one.name) for one in (config, *config.groups)]
    for handle in handles:
        if not handle.is_initialized:  # Serve keeps them
            handle._init(_run_router_in_separate_loop=True)  # this process has no event loop for it
    return handles


def _wait_for_loss() -> None:
    """Return when the service cannot go on."""
    while not (lost := _lost()):
        time.sleep(_LOOK_SECONDS)
    logger.error("Ray's %s has ended, and so does the service", lost)


def _drain(config: ServeConfig, handles: Sequence[DeploymentHandle[Any]]) -> bool:
    """Let every replica drain; whether all did. `handles`: `_handles`, if they are known by now."""
    lost = _lost()
    if lost == PROCESS_TYPE_RAYLET or (lost and not handles):  # replicas end with the one, and the other finds them
        return False
    logger.info("draining")
    settings = config.settings
    timeout = settings.drain_timeout_s + settings.limits.stream_stall_s + _STOP_MARGIN
    try:
        if not handles:
            with within(_FIND_SECONDS):  # Serve waits for ever for a Ray that has ended meanwhile
                handles = _handles(config)
        for drained in [replicas.broadcast("drain") for replicas in handles]:
            drained.results(timeout_s=timeout)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("a replica did not drain: %s", type(error).__name__)
        return False
    return True


def _deploy(config: ServeConfig, folder: Path) -> None:
    """Start Serve and the replicas of each application; raises `ConfigError` and what a replica's loading raised."""
    check_gpus(sum(one.scaling.least * _gpus(one) for one in (config, *config.groups)), _cluster_gpus())
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    options = HTTPOptions(
        host=config.settings.host,
        port=config.settings.port,
        request_timeout_s=request_timeout_s(config),
        keep_alive_timeout_s=KEEP_ALIVE_SECONDS,
    )
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=options, logging_config=quiet)
    targets = [
        serve.RunTarget(_deployment(one).bind(one, str(folder / _LOG)), one.name, one.route, logging_config=quiet)
        for one in (config, *config.groups)
    ]
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        raise _cause(error) from None


def _deployment(config: ServeConfig) -> serve.Deployment:
    """The limits that Serve enforces lie beyond those of the service, which answers first and says why."""
    limits = [spec.engine.largest_limits() for spec in config.models]
    gpus = _gpus(config)
    decorate: Callable[[Any], serve.Deployment] = serve.deployment(
        name=DEPLOYMENT,
        **_scaling(config.scaling),
        ray_actor_options={"num_cpus": 0, **({"num_gpus": gpus} if gpus else {})},
        max_ongoing_requests=sum(one.max_num_seqs + one.max_queued_requests for one in limits) + _SPARE_REQUESTS,
        max_queued_requests=_SPARE_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=5),
        graceful_shutdown_timeout_s=math.ceil(config.settings.drain_timeout_s + _STOP_MARGIN),
        health_check_period_s=5,
        health_check_timeout_s=10,
        max_constructor_retry_count=1,
        max_surge_percent=100 if config.scaling.surge else 0,
    )
    return decorate(Replica)


def _gpus(config: ServeConfig) -> int:
    """Of one replica."""
    return gpus_of_replica([spec.engine for spec in config.models], _cluster_gpus())


def _cluster_gpus() -> float:
    """0 where there is no cluster yet to ask."""
    return ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0


def _scaling(scaling: Scaling) -> dict[str, Any]:
    if scaling.least == scaling.most:
        return {"num_replicas": scaling.least}
    policy = AutoscalingPolicy(
        policy_function="service.runtimes.ray_serve.autoscaling_policy:SaturationPolicy",
        policy_kwargs={"target": scaling.target},
    )
    autoscaling = AutoscalingConfig(
        min_replicas=scaling.least,
        max_replicas=scaling.most,
        upscale_delay_s=scaling.up_delay_s,
        downscale_delay_s=scaling.down_delay_s,
        look_back_period_s=max(2.0, min(scaling.up_delay_s, 30.0)),
        metrics_interval_s=1.0,
        policy=policy,
    )
    return {"autoscaling_config": autoscaling}


@contextmanager
def _session(folder: Path, signals: MainSignals) -> Iterator[None]:
    """A Ray of our own on this machine; other sessions are neither joined nor touched."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        with signals.held():
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_STORE_BYTES,
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )
        yield
    finally:
        signals.ignore()
        adopt_orphans()
        with redirect_stdout(io.StringIO()):  # Ray prints that its controller, which it killed, is dead
            _end_ray()
        _end_rest(_END_SECONDS)


def _end_ray() -> None:
    if _lost():  # Serve would wait half a minute for a controller that waits itself
        _end_rest(0.0)
    try:
        if ray.is_initialized() and not _lost():  # Serve would start a Ray to have one to shut down
            serve.shutdown()
    finally:
        ray.shutdown()


def _end_rest(grace_s: float) -> None:
    left = end_descendants(grace_s)
    if left:
        logger.warning("ended what Ray had left: %s", ", ".join(left))


def _lost() -> str:
    """Which process of Ray's that nothing goes on without has ended; empty: all live. Ray itself would give up a minute
    later, undrained.
    """
    node = ray._private.worker._global_node
    if node is None:
        return ""
    alive = {kind for kind, _ in node.live_processes()}
    return next((kind for kind in (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET) if kind not in alive), "")


def _resolved(config: ServeConfig) -> ServeConfig:
    """With what only this process can decide: a port that is free, and whether a person reads its stderr."""
    with listening(config.settings) as listener:
        port = listener.getsockname()[1]
    log_format = config.settings.log_format
    if log_format == "auto":
        log_format = "plain" if sys.stderr.isatty() else "json"
    settings = replace(config.settings, port=port, log_format=log_format)
    groups = tuple(replace(group, settings=settings) for group in config.groups)
    return replace(config, settings=settings, groups=groups)


def _url(config: ServeConfig) -> str:
    return base_url(config.settings.host, config.settings.port)


def _ingress() -> str:
    haproxy = os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    return f"Ray {ray.__version__} Serve, {'HAProxy' if haproxy else 'its own proxy'}"


def _cause(error: RuntimeError) -> Exception:
    """What a replica raised while it started, out of the text that Serve keeps of it."""
    deployments = (one for app in serve.status().applications.values() for one in app.deployments.values())
    text = "\n".join([str(error), *(one.message for one in deployments)])
    found = re.search(r"\b(ConfigError|EngineDeadError): (.+)", text)
    if found is None:
        return EngineDeadError(f"Ray Serve could not start the service: {text.strip().splitlines()[-1]}")
    return ConfigError(found[2]) if found[1] == "ConfigError" else EngineDeadError(found[2])
