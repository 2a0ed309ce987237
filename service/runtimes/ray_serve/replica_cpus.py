"""The threads of a replica: replicas on one machine divide its processors. Imports no Ray."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from triptych.model.system.cpu_threads import VARIABLE, threads_of, usable_cpus
from triptych.service.settings.serve_config import ServeConfig

logger = logging.getLogger("triptych.ray")


def with_threads(config: ServeConfig, environment: Mapping[str, str], *, on_gpus: bool) -> ServeConfig:
    """Return the configuration with the threads of each replica, for a service whose replicas share this machine.

    `threads` and OMP_NUM_THREADS are those of one replica. Without them, all replicas that may run divide the CPUs.
    """
    count = sum(one.scaling.max_replicas for one in config.applications)
    if config.settings.threads is not None or (count == 1 and VARIABLE not in environment):
        return config
    threads = threads_of(environment) if VARIABLE in environment else max(1, usable_cpus() // count)
    if count > 1 and not on_gpus:
        logger.warning(
            "%d replicas share the %d CPUs of this machine, %d thread%s each. More replicas do not make it faster, but "
            "with one for each socket (--replicas auto) each computes in its own memory",
            *(count, usable_cpus(), threads, "s" * (threads > 1)),
        )
    groups = tuple(replace(one, settings=replace(one.settings, threads=threads)) for one in config.groups)
    return replace(config, settings=replace(config.settings, threads=threads), groups=groups)


def threads_of_replica(settings_threads: int | None, assigned_cpus: float, environment: Mapping[str, str]) -> int:
    """Return the threads of a replica to which Ray assigned these CPUs.

    Ray sets OMP_NUM_THREADS to the assigned CPUs, and to 1 if there are none, where the worker's environment does not
    set it. So 1 is not taken for the operator's choice.
    """
    if settings_threads is not None:
        return settings_threads
    if assigned_cpus >= 1:
        return int(assigned_cpus)
    return threads_of(environment if environment.get(VARIABLE) != "1" else {})
