"""The CPUs of a replica: replicas on one machine divide them, and each computes on its own. Imports no Ray."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from triptych.model.system import cpu_sets
from triptych.model.system.cpu_threads import (
    VARIABLE,
    cpu_quota,
    given_threads,
    threads_of,
    usable_cpus,
    usable_sockets,
)
from triptych.service.settings.serve_config import ServeConfig

logger = logging.getLogger("triptych.ray")


def with_threads(config: ServeConfig, environment: Mapping[str, str], *, on_gpus: bool) -> ServeConfig:
    """Return the configuration with the threads of each replica, for a service whose replicas share this machine.

    `threads` and OMP_NUM_THREADS are those of one replica. Without them, all replicas that may run divide the CPUs.
    """
    count = sum(one.scaling.max_replicas for one in config.applications)
    changes: dict[str, Any] = {}
    if config.settings.cpu_binding == "auto" and (count == 1 or on_gpus):
        changes["cpu_binding"] = "off"
    given = given_threads(environment)
    if config.settings.threads is None and (count > 1 or given):
        changes["threads"] = given or max(1, usable_cpus() // count)
        if not on_gpus and (reason := _no_help(count)):
            logger.warning("%d replicas compute with %d thread(s) each. %s", count, changes["threads"], reason)
    groups = tuple(replace(one, settings=replace(one.settings, **changes)) for one in config.groups)
    return replace(config, settings=replace(config.settings, **changes), groups=groups)


def _no_help(count: int) -> str:
    """Return why this number of replicas does not make this machine faster; empty if it may."""
    cpus, sockets = usable_cpus(), usable_sockets()
    if count > cpus:
        return f"There are {cpus} CPU(s), so that replicas wait for each other; at most {cpus} can compute at a time"
    if count > max(sockets, 1) and count > 1:
        return (
            f"They share the memory of {sockets} socket(s), which a single replica uses as fast, and each has its own "
            "batch and cache; they help if one must be replaced while others serve. --replicas auto starts one a socket"
        )
    return ""


def threads_of_replica(settings_threads: int | None, assigned_cpus: float, environment: Mapping[str, str]) -> int:
    """Return the threads of a replica to which Ray assigned these CPUs.

    Ray sets OMP_NUM_THREADS to the assigned CPUs, and to 1 if there are none, where the worker's environment does not
    set it. So 1 is not taken for the operator's choice.
    """
    if settings_threads is not None:
        return settings_threads
    if assigned_cpus > 0:
        return max(1, int(assigned_cpus))
    return threads_of(environment if environment.get(VARIABLE) != "1" else {})


def bind(binding: str, threads: int) -> list[socket.socket]:
    """Name the CPUs of this replica's engine in this process's environment; return what holds the claim to them.

    Where a quota limits the CPUs, other containers may be on any of them, so the system chooses.
    """
    cpu_sets.bind_each_thread(binding == "threads")
    allowed, quota = os.sched_getaffinity(0), cpu_quota()
    if binding == "off" or threads >= len(allowed) or (quota is not None and quota < len(allowed)):
        return []
    cpus, held = cpu_sets.claim(threads, allowed)
    if not cpus:
        logger.warning("other replicas compute on the CPUs of this machine; this one has none of its own")
        return []
    os.environ[cpu_sets.VARIABLE] = cpu_sets.shown(cpus)
    logger.info("computes on the CPUs %s", os.environ[cpu_sets.VARIABLE])
    return held
