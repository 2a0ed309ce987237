"""The GPUs of a replica: how many it requests from Ray, whether a machine has that many, and which ones it was given.

All ranks of a model are processes of one replica, so their GPUs must be on one machine, which Ray guarantees for an
actor. A replica sees only its own GPUs, numbered from 0, and its models share them. Imports no Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from triptych.model.api.engine_config import EngineConfig
from triptych.model.errors import ConfigError
from triptych.service.settings.serve_config import ServeConfig

_UNITS = 10_000  # Ray counts ten-thousandths of a GPU


def gpus_of_replica(config: ServeConfig, cluster_gpus: float) -> float:
    """Return the GPUs that each replica requests: `gpus_per_replica`, or one for each rank of its models.

    `device: auto` is a GPU if the cluster has any, or if `gpus_per_replica` is set. Raises `ConfigError`.
    """
    wanted = config.scaling.gpus_per_replica
    needed = _needed(config, cluster_gpus or wanted or 0.0)
    if wanted is None:
        return needed
    if needed == 0:
        raise ConfigError(f"gpus_per_replica {wanted:g}: no model of the replica uses a GPU; set device to cuda")
    if wanted < needed and (wanted >= 1 or needed > 1):
        raise ConfigError(
            f"gpus_per_replica {wanted:g}: its models need {needed} GPUs, by tensor_parallel_size and device; "
            "raise it, or leave it out"
        )
    return wanted


def resources(gpus: float) -> dict[str, Any]:
    """Return what `ray_actor_options` say of the GPUs; Ray takes whole numbers above 1 only as integers."""
    return {"num_gpus": int(gpus) if gpus == int(gpus) else gpus} if gpus else {}


def check_gpus(applications: Sequence[ServeConfig], machine_gpus: float) -> None:
    """Raise `ConfigError` if a machine has too few GPUs for all replicas, because Ray would wait for them forever."""
    needs = [(one, gpus_of_replica(one, machine_gpus)) for one in applications]
    if _fit([gpus for one, gpus in needs for _ in range(one.scaling.max_replicas)], int(machine_gpus)):
        return
    if machine_gpus == 0:
        raise ConfigError("device cuda: Ray finds no GPU on this machine; set device to cpu")
    asked = ", ".join(f"{one.scaling.max_replicas} x {gpus:g} of {one.name}" for one, gpus in needs if gpus)
    raise ConfigError(
        f"replicas: they need more GPUs ({asked}) than the {machine_gpus:g} that Ray finds on this machine; lower "
        "replicas or tensor_parallel_size, let replicas share a GPU (gpus_per_replica 0.5), or set device to cpu"
    )


def with_own_gpus(config: ServeConfig, gpu_ids: Sequence[str], gpus: float) -> ServeConfig:
    """Return the configuration of a replica that Ray gave these GPUs; `gpus` is below 1 if it shares one.

    Raises `ConfigError` if its models need more GPUs.
    """
    needed = _needed(config, len(gpu_ids))
    if needed > len(gpu_ids):
        raise ConfigError(
            f"the models of a replica need {needed} GPUs and Ray gave it {len(gpu_ids)}; set num_gpus: {needed} in "
            "ray_actor_options, or leave ray_actor_options out"
        )
    share = gpus if 0 < gpus < 1 else 1.0
    later = replace(config.settings.models, engine=replace(config.settings.models.engine, gpu_share=share))
    models = tuple(replace(spec, engine=replace(spec.engine, gpu_share=share)) for spec in config.models)
    return replace(config, models=models, settings=replace(config.settings, models=later))


def _needed(config: ServeConfig, cluster_gpus: float) -> int:
    """Return the number of GPUs that the models of a replica use."""
    engines = [(f"model {spec.name}", spec.engine) for spec in config.models]
    if config.settings.models.models_dir:
        engines.append(("models_dir", config.settings.models.engine))
    used = {place: name for name, engine in reversed(engines) for place in _places(engine, cluster_gpus)}
    for place in sorted(used):
        if place and place - 1 not in used:
            raise ConfigError(
                f"{used[place]}: device cuda:{place} leaves GPU {place - 1} of its replica unused; a replica counts "
                "its own GPUs from 0: set device to cuda, and choose the machine's GPUs by CUDA_VISIBLE_DEVICES"
            )
    return len(used)


def _places(engine: EngineConfig, cluster_gpus: float) -> Iterable[int]:
    """Return the numbers of the GPUs that a model uses, one for each rank."""
    kind, _, index = engine.device.partition(":")
    if kind != "cuda" and not (kind == "auto" and cluster_gpus > 0):
        return ()
    first = int(index or 0)
    return range(first, first + engine.tensor_parallel_size)


def _fit(requests: Sequence[float], gpus: int) -> bool:
    """Whether all requests fit: whole GPUs first, then the largest shares, each on the first GPU with room for it."""
    left = gpus - sum(int(one) for one in requests if one >= 1)
    if left < 0:
        return False
    room = [_UNITS] * left
    for share in sorted((round(one * _UNITS) for one in requests if 0 < one < 1), reverse=True):
        place = next((place for place, free in enumerate(room) if free >= share), None)
        if place is None:
            return False
        room[place] -= share
    return True
