"""The background loader loads and frees models in a thread of low priority while the engine loop steps the others.

Its jobs run one after the other, so a model is planned against the memory that is free when its turn comes. A load that
fails raises nothing in the loop: its result is a `LoadFailure`, and what it had is freed. Each job has a thread of its
own, with which ends what torch and C keep for a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import deque
from contextlib import suppress

import torch

from model.api.messages import FailureKind, LoadFailure, ModelSpec
from model.engine.builder import LoadedModel, load
from model.errors import ConfigError, EngineDeadError, MemoryShortageError
from model.system.background_work import BackgroundWork, GivenUpError
from model.system.host_memory import return_free_memory

_NICENESS = 19  # the lowest priority

logger = logging.getLogger(__name__)


class LoadJob:
    """Loads one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.given_up = False
        self.result: LoadedModel | LoadFailure | None = None  # once it has ended; None: it was given up
        self._work = BackgroundWork()

    def give_up(self) -> None:
        """Stop at the next tensor, and keep nothing."""
        self.given_up = True
        self._work.give_up()

    def run(self) -> None:
        try:
            with self._work.in_this_thread():
                self._work.check()
                self.result = load(self.spec)
        except GivenUpError:
            logger.info("%s is not loaded: it was given up", self.name)
        except Exception as error:
            self.result = load_failure(self.name, error)
            traceback.clear_frames(error.__traceback__)  # of what was loaded; a log handler may keep the traceback
        if self.given_up and isinstance(self.result, LoadedModel):
            self.result.close()
            self.result = None
        if not isinstance(self.result, LoadedModel):
            return_free_memory()


class FreeJob:
    """Ends what was started for a model, and frees it."""

    def __init__(self, model: LoadedModel) -> None:
        self.name = model.info.name
        self._models = [model]

    def run(self) -> None:
        try:
            self._models.pop().close()
        finally:
            return_free_memory()


Job = LoadJob | FreeJob


class BackgroundLoader:
    """Loads and frees models beside the steps of others, one at a time."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job runs, or has ended and was not taken."""
        return self._running is not None

    def load(self, spec: ModelSpec) -> None:
        """Load a model once the jobs before it are done."""
        self._waiting.append(LoadJob(spec))
        self._start_next()

    def free(self, model: LoadedModel) -> None:
        """Free a model that nothing else refers to, once the jobs before it are done."""
        self._waiting.append(FreeJob(model))
        self._start_next()

    def give_up(self, name: str) -> bool:
        """Stop loading a model; False if it is neither loaded nor waits. The job is taken like others."""
        for job in (self._running, *self._waiting):
            if isinstance(job, LoadJob) and job.name == name:
                job.give_up()
                return True
        return False

    def take(self) -> Job | None:
        """Return a job that has ended, and begin the next one; None while there is none."""
        ended = self._running
        if ended is None or self._thread is None or self._thread.is_alive():
            return None
        self._running = self._thread = None
        self._start_next()
        return ended

    def close(self) -> None:
        """Give up all loads and wait for the thread; what was loaded is closed."""
        for job in (self._running, *self._waiting):
            if isinstance(job, LoadJob):
                job.give_up()
        while self._thread is not None:
            self._thread.join()
            job = self.take()
            if isinstance(job, LoadJob) and isinstance(job.result, LoadedModel):
                job.result.close()

    def _start_next(self) -> None:
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            name = f"{type(self._running).__name__} {self._running.name}"
            self._thread = threading.Thread(target=_run, args=(self._running,), name=name, daemon=True)
            self._thread.start()


def _run(job: Job) -> None:
    """Run a job in this thread, at low priority and on one core."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread and of those that begin from now on, so it is set back
    try:
        job.run()
    except Exception:
        logger.exception("the model %s could not be freed properly", job.name)
    finally:
        torch.set_num_threads(threads)


def load_failure(name: str, error: Exception) -> LoadFailure:
    """Say why a model was not loaded; what an unexpected exception says is for the log only."""
    if isinstance(error, MemoryShortageError):
        return LoadFailure(name, FailureKind.MEMORY, str(error), error.needed_bytes, error.available_bytes)
    if isinstance(error, ConfigError):
        return LoadFailure(name, FailureKind.CONFIG, str(error))
    if isinstance(error, EngineDeadError):  # of the processes of its other ranks
        return LoadFailure(name, FailureKind.ERROR, str(error))
    logger.error("%s could not be loaded", name, exc_info=error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return LoadFailure(name, FailureKind.ERROR, f"out of memory while {name} was loaded")
    return LoadFailure(name, FailureKind.ERROR, f"{type(error).__name__} while {name} was loaded; the log says why")
