"""A Ray session on this machine: its start, its essential processes, and its end. Imports Ray.

`triptych.service.runtimes.ray_serve.environment` must prepare the environment before this module is imported.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import ray
from ray import serve
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray.job_config import JobConfig

from triptych.model.errors import EngineDeadError
from triptych.service.runtimes.ray_serve.main_process import MainSignals, adopt_orphans, end_descendants

_POLL_SECONDS = 1.0  # between checks of Ray's processes
_EXIT_SECONDS = 2.0  # for Ray's processes to exit
_OBJECT_STORE_BYTES = 80 << 20  # about Ray's minimum: the service stores no objects
RAYLET = PROCESS_TYPE_RAYLET

logger = logging.getLogger("triptych.ray")


@contextmanager
def ray_session(folder: Path, signals: MainSignals) -> Iterator[None]:
    """Start a Ray session on this machine, and end it with the block; other sessions are not affected."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        with signals.blocked():
            _init_ray(folder)
        yield
    finally:
        signals.ignore()
        adopt_orphans()
        with redirect_stdout(io.StringIO()):  # Ray kills its controller, and prints that it is dead
            _end_ray()
        _end_remaining_processes(_EXIT_SECONDS)


def _init_ray(folder: Path) -> None:
    """Raises `EngineDeadError` if Ray does not start, as on a machine that is too busy."""
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            job_config=_job_config(),
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray's own timeout has no class of its own
        said = str(error).strip() or type(error).__name__
        raise EngineDeadError(f"Ray did not start: {said.splitlines()[0]}") from None


class _NoPaths(list[str]):
    """A list that stays empty: Ray adds the working directory, where workers would find a user's `model.py` first."""

    def extend(self, paths: Iterable[str]) -> None:
        pass


def _job_config() -> JobConfig:
    """Return the settings of a job whose workers import from `PYTHONPATH` only."""
    job = JobConfig()
    job._py_driver_sys_path = _NoPaths()
    return job


def _end_ray() -> None:
    if dead_ray_process():  # otherwise Serve would wait half a minute for its controller, which waits too
        _end_remaining_processes(0.0)
    try:
        if ray.is_initialized() and not dead_ray_process():  # otherwise Serve would start Ray to shut it down
            serve.shutdown()
    finally:
        ray.shutdown()


def _end_remaining_processes(grace_s: float) -> None:
    left = end_descendants(grace_s)
    if left:
        logger.warning("killed processes that Ray has left running: %s", ", ".join(left))


def dead_ray_process() -> str:
    """Return the essential Ray process that has ended; empty: none. Ray itself notices a minute later, undrained."""
    node = ray._private.worker._global_node
    if node is None:
        return ""
    alive = {kind for kind, _ in node.live_processes()}
    return next((kind for kind in (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET) if kind not in alive), "")


def wait_for_ray_failure() -> None:
    """Return when an essential process of Ray has ended."""
    while not (dead := dead_ray_process()):
        time.sleep(_POLL_SECONDS)
    logger.error("Ray's %s has ended; the service stops", dead)
