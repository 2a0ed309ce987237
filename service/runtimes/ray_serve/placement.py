"""How many GPUs a replica asks Ray for. Imports no Ray.

All ranks of a model are processes of one replica, so its GPUs must be of one machine: an actor's always are. Ray shows
the replica, and whatever that starts, the GPUs that it was given (`CUDA_VISIBLE_DEVICES`), counted from 0. A replica
whose models have one rank each asks for none, sees every GPU of its machine and shares them with other replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

from model.api.engine_config import EngineConfig
from model.errors import ConfigError


def gpus_of_replica(engines: Iterable[EngineConfig], cluster_gpus: float) -> int:
    """Of all its models, which share them; `device: auto` means GPUs where the cluster has any."""
    placed = [engine for engine in engines if _on_gpus(engine, cluster_gpus)]
    if all(engine.tensor_parallel_size == 1 for engine in placed):
        return 0
    return max(_first(engine) + engine.tensor_parallel_size for engine in placed)


def check_gpus(wanted: int, cluster_gpus: float) -> None:
    """Raise `ConfigError` where Ray would wait for ever: on a machine that gets no more GPUs than it has."""
    if wanted > cluster_gpus:
        raise ConfigError(
            f"tensor_parallel_size: the replicas need {wanted} GPUs between them, this machine has {cluster_gpus:g}; "
            "lower it, or replicas, or set device to cpu"
        )


def _on_gpus(engine: EngineConfig, cluster_gpus: float) -> bool:
    return engine.device.startswith("cuda") or (engine.device == "auto" and cluster_gpus > 0)


def _first(engine: EngineConfig) -> int:
    index = engine.device.partition(":")[2]
    return int(index) if index.isdigit() else 0
