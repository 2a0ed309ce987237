"""The number of GPUs that a replica requests, and the autoscaling policy of the replicas. Imports no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from model.api.engine_config import EngineConfig
from model.errors import ConfigError

# -- The number of GPUs that a replica requests from Ray. All ranks of a model are processes of one replica, so their
# GPUs must be on one machine, which Ray guarantees for an actor. Ray numbers the GPUs of a replica from 0
# (`CUDA_VISIBLE_DEVICES`). A replica whose models have one rank each requests none: it sees all GPUs of its machine and
# shares them with other replicas.


def gpus_of_replica(engines: Iterable[EngineConfig], cluster_gpus: float) -> int:
    """Return the number of GPUs that the models of a replica need; `device: auto` is a GPU if the cluster has any."""
    on_gpus = [engine for engine in engines if _uses_gpu(engine, cluster_gpus)]
    if all(engine.tensor_parallel_size == 1 for engine in on_gpus):
        return 0
    return max(_first_gpu(engine) + engine.tensor_parallel_size for engine in on_gpus)


def check_gpus(wanted: int, cluster_gpus: float) -> None:
    """Raise `ConfigError` if the cluster has too few GPUs, because Ray would wait for them forever."""
    if wanted > cluster_gpus:
        raise ConfigError(
            f"tensor_parallel_size: all replicas together need {wanted} GPUs, this machine has {cluster_gpus:g}; "
            "lower it, or replicas, or set device to cpu"
        )


def _uses_gpu(engine: EngineConfig, cluster_gpus: float) -> bool:
    return engine.device.startswith("cuda") or (engine.device == "auto" and cluster_gpus > 0)


def _first_gpu(engine: EngineConfig) -> int:
    index = engine.device.partition(":")[2]
    return int(index) if index.isdigit() else 0


# -- The autoscaling policy of the replicas, which runs in Ray Serve's controller. Each replica reports its saturation:
# running and waiting work over its capacity, in sequences or in tokens of KV cache, whichever is higher
# (`AsyncEngine.demand`). The sum over replicas is the load in units of full replicas.

SATURATION = "saturation"


class AutoscalingContext(Protocol):
    """The fields of `ray.serve.config.AutoscalingContext` that the policy reads."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class SaturationPolicy:
    """A policy that brings the mean saturation of replicas to `target`; Serve applies bounds and delays."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the desired number of replicas, and an empty state."""
        reported = (context.aggregated_metrics or {}).get(SATURATION, {})
        if not reported:
            return context.target_num_replicas, {}
        return sum(reported.values()) / self._target, {}
