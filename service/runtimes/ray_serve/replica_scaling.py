"""How many GPUs a replica requests, and the policy by which Serve's controller scales the replicas. Imports no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from model.api.engine_config import EngineConfig
from model.errors import ConfigError

# -- The number of GPUs that a replica requests from Ray. Imports no Ray. All ranks of a model are processes of one
# replica, so their GPUs must be on one machine, which Ray guarantees for an actor. Ray numbers the GPUs that a replica
# gets from 0 (`CUDA_VISIBLE_DEVICES`). A replica whose models have one rank each requests none: it sees all GPUs of its
# machine and shares them with other replicas.


def gpus_of_replica(engines: Iterable[EngineConfig], cluster_gpus: float) -> int:
    """Return the GPUs that the models of a replica need together; `device: auto` is a GPU if the cluster has any."""
    on_gpus = [engine for engine in engines if _uses_gpu(engine, cluster_gpus)]
    if all(engine.tensor_parallel_size == 1 for engine in on_gpus):
        return 0
    return max(_first_gpu(engine) + engine.tensor_parallel_size for engine in on_gpus)


def check_gpus(wanted: int, cluster_gpus: float) -> None:
    """Raise `ConfigError` where the cluster has too few GPUs, since Ray would wait for them forever."""
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


# -- The autoscaling policy of the replicas, which runs in Ray Serve's controller. Imports no Ray. Each replica reports
# its saturation: running and waiting work over its capacity, in sequences or in tokens of KV cache, whichever is higher
# (`AsyncEngine.demand`). The sum over replicas is the load in units of full replicas.

SATURATION = "saturation"


class Context(Protocol):
    """Declares what the policy reads of `ray.serve.config.AutoscalingContext`."""

    target_num_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


class SaturationPolicy:
    """Requests as many replicas as bring their mean saturation to `target`; Serve applies bounds and delays."""

    def __init__(self, target: float) -> None:
        self._target = target

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Return the desired number of replicas and the state to keep (none)."""
        reported = (context.aggregated_metrics or {}).get(SATURATION, {})
        if not reported:
            return context.target_num_replicas, {}
        return sum(reported.values()) / self._target, {}
