"""Background jobs load and free models beside the steps of others. They give way to the loop's rounds of steps.

Jobs run one after the other, so a model is planned against the memory that is free when its turn comes. A load that
fails raises nothing in the loop: its result is a `LoadFailure`, and what it had is freed.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import torch

from model.api.messages import FailureKind, LoadFailure, ModelSpec
from model.engine.builder import LoadedModel, load
from model.errors import ConfigError, EngineDeadError, MemoryShortageError
from model.system.background_work import GivenUpError, give_way, giving_way_to, wait_for
from model.system.host_memory import return_free_memory

SHARE = 0.6  # of the seconds of a round of steps, which a job may take after it
_MIN_SECONDS, _MAX_SECONDS = 2e-4, 0.25  # of a job's turn
_IDLE_SECONDS = 5e-3  # of its turn while there are no steps
_WAIT_SECONDS = 2e-3  # between looks whether what a job waits for has come, while there are no steps

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


class LoadJob:
    """Loads one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.name = spec.name
        self.spec = spec
        self.given_up = False
        self._result: LoadedModel | LoadFailure | None = None

    def take_result(self) -> LoadedModel | LoadFailure | None:
        """Return what came of it, once; None: it was given up. The job does not keep it."""
        result, self._result = self._result, None
        return result

    def run(self) -> None:
        try:
            give_way()
            self._result = load(self.spec)
            give_way()
        except GivenUpError:
            logger.info("%s is not loaded: it was given up", self.name)
            if isinstance(self._result, LoadedModel):
                self._result.close()
            self._result = None
        except Exception as error:
            self._result = load_failure(self.name, error)
            traceback.clear_frames(error.__traceback__)  # of what was loaded; a log handler may keep the traceback
        if not isinstance(self._result, LoadedModel):
            return_free_memory()


class FreeJob:
    """Ends what was started for a model, and frees it."""

    def __init__(self, model: LoadedModel) -> None:
        self.name = model.info.name
        self._models = [model]

    def run(self) -> None:
        wait_for(self._free)  # for processes, and for the system, which takes the memory back

    def _free(self) -> None:
        try:
            self._models.pop().close()
        except Exception:
            logger.exception("the model %s could not be freed properly", self.name)
        return_free_memory()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


Job = LoadJob | FreeJob


class BackgroundJobs:
    """Runs jobs in their order; each gives way to `serve` (`Owner`)."""

    def __init__(self, serve: Callable[[float], float | None]) -> None:
        """`serve` runs a round of steps, or waits for commands for the seconds that it is given.

        It returns the seconds that steps took; None: there was nothing to do. No job goes on after it has raised.
        """
        self._serve = serve
        self._num_threads = torch.get_num_threads()
        # Parts of a job are too short for several threads, which would wait for each other. Where there is a GPU they
        # stay: what torch's compiler makes is for one number of threads, and warm-up is to compile for steps.
        self._job_threads = self._num_threads if torch.cuda.is_available() else 1
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._until = 0.0  # when the job's turn ends
        self._fault: BaseException | None = None  # of what the job gave way to

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def give_up(self, name: str) -> bool:
        """Stop loading a model; False if it is neither loaded nor waits. Its job ends as others do."""
        jobs = self._waiting if self._running is None else (self._running, *self._waiting)
        for job in jobs:
            if isinstance(job, LoadJob) and job.name == name:
                job.given_up = True
                return True
        return False

    def run(self) -> Iterator[Job]:
        """Run the jobs that wait, and yield each when it has ended. Raises what `serve` raises."""
        while self._waiting:
            self._running, self._until = self._waiting.popleft(), 0.0
            try:
                with giving_way_to(self), _threads(self._job_threads):
                    self._running.run()
            except GivenUpError:
                pass
            ended, self._running = self._running, None
            if self._fault is not None:
                raise self._fault
            yield ended

    def close(self) -> None:
        """Free what waits for it."""
        for job in self._waiting:
            if isinstance(job, FreeJob):
                job.run()

    def give_way(self) -> None:
        """Serve if the job's turn is over, and begin its next one."""
        if time.monotonic() >= self._until:
            self._round(0.0)

    def wait_for(self, call: Callable[[], _Result]) -> _Result:
        """Serve until `call` has ended in a thread of its own; return what it returns."""
        found = Future[_Result]()
        threading.Thread(target=_complete, args=(found, call), daemon=True).start()
        while not found.done():
            self._round(_WAIT_SECONDS)
        return found.result()

    def _round(self, timeout: float) -> None:
        if self._fault is not None:
            raise GivenUpError
        try:
            with giving_way_to(None), _threads(self._num_threads):
                seconds = self._serve(timeout)
        except BaseException as error:  # not the job's, which it would take for its own
            self._fault = error
            raise GivenUpError from None
        turn = _IDLE_SECONDS if seconds is None else min(max(SHARE * seconds, _MIN_SECONDS), _MAX_SECONDS)
        self._until = time.monotonic() + turn
        if isinstance(self._running, LoadJob) and self._running.given_up:
            raise GivenUpError


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _complete(found: Future[_Result], call: Callable[[], _Result]) -> None:
    try:
        found.set_result(call())
    except BaseException as error:
        found.set_exception(error)


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
