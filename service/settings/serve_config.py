"""The complete description of a service: models, settings, runtime and replicas, as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from triptych.model.api.messages import ModelSpec
from triptych.model.api.stats import ModelInfo
from triptych.model.errors import ConfigError
from triptych.service.settings.service_settings import ServiceSettings

# -- The number of replicas under Ray Serve, and how fast it changes.


_LEAST_SHARE = 0.01
_MOST_GPUS = 1024


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds of the number of replicas; between them the autoscaler keeps the mean load near `target`."""

    min_replicas: int = 1
    max_replicas: int = 1
    target: float = 0.7  # running and waiting work of a replica, over what it can run at once
    up_delay_s: float = 5.0  # how long more replicas must be needed before any is added
    down_delay_s: float = 120.0  # how long fewer must be needed before any is removed
    surge: bool = False  # whether a redeploy starts a new replica before it stops the old one
    gpus_per_replica: float | None = None  # below 1: replicas share a GPU; None: one for each rank of their models

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            found = f"{self.min_replicas}-{self.max_replicas}"
            raise ConfigError(f"replicas must be N or MIN-MAX with 1 <= MIN <= MAX, found {found}")
        if not 0 < self.target <= 1:
            raise ConfigError(f"scale_target must be above 0 and at most 1, found {self.target}")
        if not (0 <= self.up_delay_s < math.inf and 0 <= self.down_delay_s < math.inf):
            raise ConfigError("scale_up_delay and scale_down_delay must be finite and not negative")
        gpus = self.gpus_per_replica
        if gpus is not None and not (_LEAST_SHARE <= gpus < 1 or (1 <= gpus <= _MOST_GPUS and gpus == int(gpus))):
            raise ConfigError(
                f"gpus_per_replica must be a share of a GPU ({_LEAST_SHARE} to 1) or a whole number of GPUs (at most "
                f"{_MOST_GPUS}), found {gpus:g}"
            )


_PROXY_TIMEOUT_MARGIN = 60.0  # seconds that a reverse proxy waits longer than the service itself


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The whole configuration of a service, which Ray's replicas receive unchanged. Raises `ConfigError`."""

    models: tuple[ModelSpec, ...]
    settings: ServiceSettings = field(default_factory=ServiceSettings)
    runtime: Literal["ray", "local"] = "ray"
    scaling: Scaling = field(default_factory=Scaling)
    name: str = "triptych"  # of the Ray Serve application
    route: str = "/"  # path prefix of all routes
    groups: tuple[ServeConfig, ...] = ()  # further applications, each with its own models and replicas
    haproxy: bool = True  # under Ray: use Serve's HAProxy ingress if the binary is found, else Serve's own proxy

    def __post_init__(self) -> None:
        if not self.models and not self.settings.models.models_dir:
            raise ConfigError("there is no model to serve")
        if self.scaling.max_replicas > 1 and self.runtime == "local":
            found = self.scaling.max_replicas
            raise ConfigError(f"replicas must be 1 with the local runtime, found {found}; use --runtime ray")
        if self.scaling.gpus_per_replica is not None and self.runtime == "local":
            raise ConfigError(
                "gpus_per_replica needs --runtime ray; with the local runtime device and tensor_parallel_size choose "
                "the GPUs, and gpu_memory_utilization the memory"
            )
        if self.groups and self.runtime == "local":
            raise ConfigError("groups of models need --runtime ray")
        routes = [one.route for one in self.applications]
        names = [model.name for one in self.applications for model in one.models]
        for what, values in (("groups of models have the route", routes), ("models are named", names)):
            for value in values:
                if values.count(value) > 1:
                    raise ConfigError(f"two {what} {value}")

    @property
    def applications(self) -> tuple[ServeConfig, ...]:
        """This application, then those of its groups."""
        return self, *self.groups

    @property
    def models_elsewhere(self) -> dict[str, str]:
        """The route of each model that another application serves."""
        return {model.name: group.route for group in self.groups for model in group.models}

    @property
    def proxy_timeout_s(self) -> float:
        """Seconds after which reverse proxies give up on a request: later than the service itself does."""
        return self.settings.limits.request_timeout_s + _PROXY_TIMEOUT_MARGIN


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What a model can do, as the banner shows it."""

    abilities: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()  # the paths of their examples
    example: str = ""  # a command that shows the first ability


@dataclass(frozen=True, slots=True)
class Ready:
    """A service that has become ready to answer requests."""

    url: str
    ingress: str  # the HTTP server, for the banner
    models: Mapping[str, ModelInfo]
    uses: Mapping[str, ModelUse] = field(default_factory=dict)  # by the names of models


OnReady = Callable[[Ready], None]
