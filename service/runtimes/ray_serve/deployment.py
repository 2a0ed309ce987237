"""The Ray Serve deployment, whose replicas run the application. This module, `session` and `siblings` import Ray.

A replica serves HTTP to Serve's HAProxy or proxy, and runs its engines in a child process.
`triptych.service.runtimes.ray_serve.environment` must prepare the environment before this module is imported.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, HTTPOptions, ProxyLocation
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.model.api.stats import ModelInfo
from triptych.model.errors import ConfigError, EngineDeadError
from triptych.model.system.cpu_threads import set_threads
from triptych.model.system.stacks import print_stacks_on_signal
from triptych.service.core.models import Models
from triptych.service.core.request_context import IN_PROXY, SENDS_ON
from triptych.service.core.response_store import StoredResponse
from triptych.service.http.route_prefix import unprefixed
from triptych.service.lifecycle.state import service_of
from triptych.service.observability import logs
from triptych.service.runtimes.assembly import (
    base_url,
    build_app,
    build_models,
    check_metrics_port,
    listening,
    tune_garbage_collector,
    uses_of,
)
from triptych.service.runtimes.ray_serve.config_file import DEPLOYMENT, config_of_application
from triptych.service.runtimes.ray_serve.haproxy import RETRIED_STATUS, ROUTES, TIMES, retried, seconds_in_proxy
from triptych.service.runtimes.ray_serve.main_process import MainSignals, time_limit
from triptych.service.runtimes.ray_serve.replica_cpus import bind, threads_of_replica, with_threads
from triptych.service.runtimes.ray_serve.replica_gpus import check_gpus, gpus_of_replica, resources, with_own_gpus
from triptych.service.runtimes.ray_serve.replica_scaling import SATURATION
from triptych.service.runtimes.ray_serve.replicated_fleet import Command, CommandResult, ReplicatedFleet
from triptych.service.runtimes.ray_serve.session import RAYLET, dead_ray_process, ray_session, wait_for_ray_failure
from triptych.service.runtimes.ray_serve.siblings import Siblings, replica_id
from triptych.service.sandbox import confinement
from triptych.service.settings.serve_config import ModelUse, OnReady, Ready, Scaling, ServeConfig
from triptych.service.tenants.usage import Found, Question

_LOG_PIPE = "log"  # file name of the pipe for the replicas' stderr, in the session's folder
_SPARE_REQUESTS = 256  # in addition to the engines' queues: health, metrics, requests that the service will refuse
_STOP_MARGIN = 15.0  # seconds between the end of the drain and a forced stop
_CONTROL_SECONDS = 30.0  # for a call to the replicas
_LOOKUP_SECONDS = 5.0  # for finding the replicas
_LATER_REQUESTS = 1 << 16  # if models may be loaded on demand: more than all their queues hold

logger = logging.getLogger("triptych.ray")


@serve.ingress()
class Replica:
    """One copy of the application. It starts when its models are loaded, and fails to start if that fails."""

    def __init__(self, config: ServeConfig, log: str | None = None) -> None:
        """`log`: the named pipe that becomes stderr (`triptych.service.observability.logs`)."""
        if log is not None:
            logs.adopt(Path(log))
        print_stacks_on_signal()
        stream = os.fdopen(os.dup(2), "w", buffering=1)
        logs.setup(config.settings.log_format, stream=stream, replica=replica_id())
        config = _on_own_gpus(config)
        assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
        threads = threads_of_replica(config.settings.threads, assigned, os.environ)
        set_threads(threads)
        self._cpus = bind(config.settings.cpu_binding, threads)  # as long as this process lives
        self._app = build_app(config, replicas=Siblings(config))
        self._service = service_of(self._app)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the models and return the application; Serve calls this once."""
        lifespan = self._app.router.lifespan_context(self._app)
        await lifespan.__aenter__()
        tune_garbage_collector()
        return _Mounted(self._app, lifespan)

    async def check_health(self) -> None:
        """Raise if the step loop makes no progress; Serve then replaces the replica."""
        self._service.check_live()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the saturation of the busiest model, which `SaturationPolicy` reads."""
        demand = self._service.client.demand()
        return {SATURATION: max((one.saturation for one in demand.values()), default=0.0)}

    async def models(self) -> dict[str, ModelInfo]:
        """Describe the loaded models."""
        return dict(self._service.client.models)

    async def cancel(self, request_id: str, caller: str) -> int:
        """Cancel a request on this replica, unless it is the caller; return how many ended."""
        if caller == replica_id():
            return 0
        return self._service.jobs.cancel(request_id)

    async def stored(self, wanted: tuple[str, str], caller: str) -> StoredResponse | None:
        """Return the response of a tenant and an id that this replica keeps."""
        return None if caller == replica_id() else self._service.responses.get(*wanted)

    async def usage(self, question: Question, caller: str) -> Found | None:
        """Return what this replica knows of usage."""
        return None if caller == replica_id() else await self._service.tenants.usage.find(question)

    async def forget(self, dropped: tuple[str, str], caller: str) -> int:
        """Drop the stored response of a tenant and an id; return how many were kept."""
        return 0 if caller == replica_id() else int(self._service.responses.drop(*dropped))

    async def follow(self, command: Command, caller: str) -> CommandResult | None:
        """Execute the command of another replica; None if this replica is the caller."""
        fleet = self._service.fleet
        if caller == replica_id() or not isinstance(fleet, ReplicatedFleet):
            return None
        return await fleet.follow(command)

    async def drain(self) -> None:
        """Refuse new requests, and return when running requests have ended or their time is over."""
        await self._service.drain()


def _on_own_gpus(config: ServeConfig) -> ServeConfig:
    """Hide all GPUs but those that Ray gave this replica, as Ray does not if it gave none. Raises `ConfigError`."""
    context = ray.get_runtime_context()
    gpu_ids = context.get_accelerator_ids().get("GPU", [])
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)  # for the engine process
    return with_own_gpus(config, gpu_ids, context.get_assigned_resources().get("GPU", 0.0))


class _Mounted:
    """An application whose lifespan has already begun, because Serve would hide the reason if that failed."""

    def __init__(self, app: ASGIApp, lifespan: AbstractAsyncContextManager[Any]) -> None:
        self._app = app
        self._lifespan = lifespan
        self._is_retried = os.environ.get(ROUTES) == "1"
        self._is_timed = os.environ.get(TIMES) == "1"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope = {**unprefixed(scope), IN_PROXY: seconds_in_proxy(scope) if self._is_timed else None}
            if self._is_retried:
                scope, send = {**scope, SENDS_ON: RETRIED_STATUS}, retried(send)
            await self._app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._lifespan.__aexit__(None, None, None)
        await send({"type": "lifespan.shutdown.complete"})


def application(arguments: dict[str, Any]) -> serve.Application:
    """Build the application for `serve run`, `serve deploy` and KubeRay's RayService, which import this function.

    `arguments` have the content of a file for `triptych serve --config`, without the settings that the cluster decides;
    `triptych serve-config` writes them. Only replicas read the folders of models. Raises `ConfigError`.
    """
    config = config_of_application(arguments)
    return _deployment(config).bind(config)


def run_ray(config: ServeConfig, folder: Path, on_ready: OnReady) -> int:
    """Serve in a new Ray session until a signal, and return the exit code.

    Raises `ConfigError`, or `EngineDeadError` if loading fails.
    """
    # Reading the folders raises for a bad one before Ray starts.
    read = [(one.route.rstrip("/"), build_models(one)) for one in config.applications]
    confinement.hide_process()
    config = _with_port_and_log_format(config)
    signals = MainSignals()
    signals.install()
    handles: list[DeploymentHandle[Any]] = []
    try:
        with logs.printing(folder / _LOG_PIPE), ray_session(folder, signals):
            try:
                _deploy(config, folder)
                models: dict[str, ModelInfo] = {}
                handles += _handles(config)
                for replicas in handles:
                    models |= replicas.broadcast("models").results(timeout_s=_CONTROL_SECONDS)[0]
                on_ready(Ready(_url(config), _ingress(), models, _uses(config, read)))
                wait_for_ray_failure()
                raise SystemExit(1)
            except SystemExit:  # also before `on_ready`, because replicas serve requests earlier
                signals.drained = _drain(config, handles)
                raise
    except SystemExit as stopped:
        return signals.exit_code(stopped)


def _handles(config: ServeConfig) -> list[DeploymentHandle[Any]]:
    """Return a handle to the replicas of each application; raises Serve's error if one does not run yet."""
    handles = [serve.get_app_handle(one.name) for one in config.applications]
    for handle in handles:
        if not handle.is_initialized:  # Serve caches handles
            handle._init(_run_router_in_separate_loop=True)  # because this process has no event loop
    return handles


def _drain(config: ServeConfig, handles: Sequence[DeploymentHandle[Any]]) -> bool:
    """Drain every replica and return whether all have drained. `handles` is empty if they are not known yet."""
    dead = dead_ray_process()
    if dead == RAYLET or (dead and not handles):  # the raylet runs replicas, the GCS finds them
        return False
    logger.info("draining")
    settings = config.settings
    timeout = settings.drain_timeout_s + settings.limits.stream_stall_s + _STOP_MARGIN
    try:
        if not handles:
            with time_limit(_LOOKUP_SECONDS):  # Serve would wait forever if Ray has ended
                handles = _handles(config)
        for drained in [replicas.broadcast("drain") for replicas in handles]:
            drained.results(timeout_s=timeout)
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("a replica did not drain: %s", type(error).__name__)
        return False
    return True


def _deploy(config: ServeConfig, folder: Path) -> None:
    """Start Serve and the replicas of each application; raises a replica's `ConfigError` or `EngineDeadError`."""
    gpus = _cluster_gpus()
    check_gpus(config.applications, gpus)
    config = with_threads(config, os.environ, on_gpus=any(gpus_of_replica(one, gpus) for one in config.applications))
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    _start_serve(config, quiet)
    targets = [
        serve.RunTarget(_deployment(one).bind(one, str(folder / _LOG_PIPE)), one.name, one.route, logging_config=quiet)
        for one in config.applications
    ]
    try:
        serve.run_many(targets)
    except RuntimeError as error:
        raise _cause(error) from None


def _start_serve(config: ServeConfig, quiet: LoggingConfig) -> None:
    """Start Serve's controller and its proxy.

    On a busy machine the proxy may take longer than Ray's limit of 60 s, and still goes on starting. Then a second call
    uses the running controller and waits for the proxy again.
    """
    options = HTTPOptions(
        host=config.settings.host,
        port=config.settings.port,
        request_timeout_s=config.proxy_timeout_s,
        keep_alive_timeout_s=config.settings.limits.idle_connection_s,
    )
    start = partial(serve.start, proxy_location=ProxyLocation.HeadOnly, http_options=options, logging_config=quiet)
    try:
        start()
    except TimeoutError as error:
        logger.warning("%s Waiting for it once more.", error)
        start()


def _deployment(config: ServeConfig) -> serve.Deployment:
    """Build the deployment. Serve's limits are above the service's, so that the service refuses, with a reason."""
    limits = [spec.engine.largest_limits() for spec in config.models]
    requests = sum(one.max_num_seqs + one.max_queued_requests for one in limits) + _SPARE_REQUESTS
    if config.settings.has_admin or config.settings.models.models_dir or config.settings.models.lora_dirs:
        requests += _LATER_REQUESTS
    decorate: Callable[[Any], serve.Deployment] = serve.deployment(
        name=DEPLOYMENT,
        **_scaling(config.scaling),
        ray_actor_options={"num_cpus": 0, **resources(gpus_of_replica(config, _cluster_gpus()))},
        max_ongoing_requests=requests,
        max_queued_requests=_SPARE_REQUESTS,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=5),
        graceful_shutdown_timeout_s=math.ceil(config.settings.drain_timeout_s + _STOP_MARGIN),
        health_check_period_s=5,
        health_check_timeout_s=10,
        max_constructor_retry_count=1,
        max_surge_percent=100 if config.scaling.surge else 0,
    )
    return decorate(Replica)


def _cluster_gpus() -> float:
    """Return the number of GPUs of the cluster; 0 if this process is not connected to one."""
    return ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0


def _scaling(scaling: Scaling) -> dict[str, Any]:
    """Return Serve's options for a fixed number of replicas, or for autoscaling."""
    if scaling.min_replicas == scaling.max_replicas:
        return {"num_replicas": scaling.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="triptych.service.runtimes.ray_serve.replica_scaling:SaturationPolicy",
        policy_kwargs={"target": scaling.target},
    )
    autoscaling = AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.up_delay_s,
        downscale_delay_s=scaling.down_delay_s,
        look_back_period_s=max(2.0, min(scaling.up_delay_s, 30.0)),
        metrics_interval_s=1.0,
        policy=policy,
    )
    return {"autoscaling_config": autoscaling}


def _with_port_and_log_format(config: ServeConfig) -> ServeConfig:
    """Set the port, if it is 0, and the log format, if it is auto: only this process has the terminal."""
    with listening(config.settings) as listener:
        port = listener.getsockname()[1]
    check_metrics_port(config.settings)
    log_format = config.settings.log_format
    if log_format == "auto":
        log_format = "plain" if sys.stderr.isatty() else "json"

    def filled(one: ServeConfig) -> ServeConfig:
        return replace(one, settings=replace(one.settings, port=port, log_format=log_format))

    return replace(filled(config), groups=tuple(map(filled, config.groups)))


def _uses(config: ServeConfig, read: list[tuple[str, Models]]) -> dict[str, ModelUse]:
    """Return what the models of all applications can do; `read` has each application's route and models."""
    found: dict[str, ModelUse] = {}
    for route, models in read:
        found |= uses_of(models, _url(config) + route, with_key=config.settings.asks_for_key)
    return found


def _url(config: ServeConfig) -> str:
    return base_url(config.settings.host, config.settings.port)


def _ingress() -> str:
    haproxy = os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    return f"Ray {ray.__version__} Serve, {'HAProxy' if haproxy else 'its own proxy'}"


def _cause(error: RuntimeError) -> Exception:
    """Find the exception that a replica raised at its start, in the messages that Serve keeps."""
    deployments = (one for app in serve.status().applications.values() for one in app.deployments.values())
    text = "\n".join([str(error), *(one.message for one in deployments)])
    found = re.search(r"\b(ConfigError|EngineDeadError): (.+)", text)
    if found is None:
        return EngineDeadError(f"Ray Serve could not start the service: {text.strip().splitlines()[-1]}")
    return ConfigError(found[2]) if found[1] == "ConfigError" else EngineDeadError(found[2])
