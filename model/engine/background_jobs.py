"""Background jobs load and free models between the steps of others.

Jobs run one after the other, so a model is planned against the memory that is free when its turn comes. A load that
fails raises nothing in the loop: its result is a `LoadFailure`, and what it had is freed.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from triptych.model.api.messages import FailureKind, LoadFailure, ModelSpec
from triptych.model.engine.builder import LoadedModel, loading, loading_lora
from triptych.model.errors import ConfigError, EngineDeadError, MemoryShortageError
from triptych.model.system.background_work import Call, Work, in_thread
from triptych.model.system.host_memory import return_free_memory

SHARE = 0.1  # the time of a job's parts, relative to that of the steps between them
_IDLE_SECONDS = 5e-3  # a job's turn while there are no steps
PACKING_SHARE = 0.2  # the time that is left to a packing process, relative to that of the steps
_MAX_PAUSE = 0.5  # seconds between two parts of a job
_MAX_SLEEP = 0.05
_WAIT_SECONDS = 2e-3  # between checks of a call that a job waits for

logger = logging.getLogger(__name__)


class LoadJob:
    """Loads one model, or an adapter for a loaded one."""

    def __init__(self, spec: ModelSpec, loaded: Callable[[str], LoadedModel | None] = lambda _: None) -> None:
        """`loaded` returns the loaded model of a name."""
        self.name = spec.name
        self.spec = spec
        self.given_up = False
        self._loaded = loaded
        self._result: LoadedModel | LoadFailure | None = None

    def take_result(self) -> LoadedModel | LoadFailure | None:
        """Return the result and drop it; None: the load was given up."""
        result, self._result = self._result, None
        if self.given_up and isinstance(result, LoadedModel):
            result.close()
            result = None
        if not isinstance(result, LoadedModel):
            return_free_memory()
        return result

    def run(self) -> Work[None]:
        try:
            if self.spec.adapter_of is not None:
                self._result = yield from loading_lora(self.spec, self._loaded(self.spec.adapter_of))
            else:
                self._result = yield from loading(self.spec, idle=True)
        except Exception as error:
            self._result = load_failure(self.name, error)
            traceback.clear_frames(error.__traceback__)  # of what was loaded; a log handler may keep the traceback


class FreeJob:
    """Ends a model's processes and frees its memory."""

    def __init__(self, model: LoadedModel) -> None:
        self.name = model.info.name
        self.given_up = False
        self._models = [model]

    def run(self) -> Work[None]:
        yield from in_thread(self.free)  # waits for processes, and for the system, which takes the memory back

    def free(self) -> None:
        try:
            self._models.pop().close()
        except Exception:
            logger.exception("the model %s could not be freed properly", self.name)
        return_free_memory()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


Job = LoadJob | FreeJob


class BackgroundJobs:
    """Runs the parts of jobs, one job after the other."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._parts: Work[None] | None = None
        self._call: Call[Any] | None = None  # the call that the running job waits for
        self._credit = 0.0  # seconds that parts may use
        self._last_part = 0.0

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def give_up(self, name: str) -> bool:
        """Stop loading a model; return False if no job loads it."""
        jobs = self._waiting if self._running is None else (self._running, *self._waiting)
        for job in jobs:
            if isinstance(job, LoadJob) and job.name == name and not job.given_up:
                job.given_up = True
                if job is self._running and self._call is not None:
                    self._call.stop()
                return True
        return False

    def timeout(self, most: float) -> float:
        """Return the seconds that the loop may wait for commands before a job needs it, `most` at most."""
        if self._running is None:
            return 0.0 if self._waiting else most
        return min(most, _WAIT_SECONDS) if self._call is not None and not self._call.ended else 0.0

    def run(self, seconds: float | None) -> Iterator[Job]:
        """Run parts after a round with `seconds` of steps, None: without any. Yield each job when it has ended."""
        if seconds and self._call is not None and self._call.computes and not self._call.ended:
            time.sleep(min(PACKING_SHARE * seconds, _MAX_SLEEP))
        began = time.monotonic()
        if seconds is not None:
            self._credit = min(self._credit, 0.0) + SHARE * seconds
            if self._credit <= 0.0 and began - self._last_part < _MAX_PAUSE:
                return
        while (job := self._next_job()) is not None:
            if self._call is not None and not self._call.ended:
                return
            if self._part(job):
                self._running = self._parts = None
                yield job
            self._last_part = now = time.monotonic()
            taken = now - began
            if taken >= (_IDLE_SECONDS if seconds is None else self._credit):
                self._credit = -taken if seconds is None else self._credit - taken
                return

    def close(self) -> None:
        """End the running job, and free the models that wait for it."""
        if self._call is not None:
            self._call.stop()
        for job in self._waiting:
            if isinstance(job, FreeJob):
                job.free()

    def _next_job(self) -> Job | None:
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            self._parts = self._running.run()
        return self._running

    def _part(self, job: Job) -> bool:
        """Run the next part of a job; return whether it was the last one."""
        assert self._parts is not None
        if job.given_up:
            logger.info("%s is not loaded: it was given up", job.name)
            self._parts.close()
            self._call = None
            return True
        try:
            self._call = next(self._parts)
        except StopIteration:
            self._call = None
            return True
        if self._call is not None:
            self._call.start()
        return False


def load_failure(name: str, error: Exception) -> LoadFailure:
    """Return why a model was not loaded; the text of an unexpected exception is only logged."""
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
