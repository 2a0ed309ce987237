"""What is known of each model: where it comes from, whether it is loaded, who uses it, and why it failed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum

from model.api.messages import ModelSpec
from service.core.errors import ApiError, unavailable
from service.core.models_folder import Stamp
from service.core.request_context import RequestContext

MAX_FAILED = 100  # failed loads of names that nothing else knows, which are listed


class State(StrEnum):
    """Whether a model can be used. One that is available is loaded when a request names it."""

    LOADED = "loaded"
    LOADING = "loading"
    UNLOADING = "unloading"
    AVAILABLE = "available"
    UNLOADED = "unloaded"  # by request, though given at the start: it stays so until it is loaded by request
    FAILED = "failed"


class Origin(StrEnum):
    """Who named a model."""

    START = "start"  # the command line or the configuration file
    MODELS_DIR = "models-dir"
    REQUEST = "request"  # POST /models/load


@dataclass(eq=False, slots=True)
class Slot:
    """Follows one model by its name, from the moment it is known."""

    spec: ModelSpec  # its path is as it was given: a folder, or a name on the Hub
    origin: Origin
    pinned: bool
    state: State
    given_path: str | None = None  # as an operator named it
    stamp: Stamp = ()  # of the files that `spec` was read from, if they are watched
    reason: str = ""  # why it failed, or is unloaded
    error: ApiError | None = None  # of the last load that failed, for who asked for it
    retry_at: float = 0.0  # by `time.monotonic()`: until then a failed model is not loaded again for requests
    users: int = 0  # requests that hold it
    used_at: float = field(default_factory=time.monotonic)  # when it was last used, loaded or became known
    task: asyncio.Task[None] | None = None  # loads or unloads it
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.unused.set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_evictable(self) -> bool:
        """Whether it may be unloaded without being asked for."""
        return self.state is State.LOADED and not self.pinned and not self.users

    def hold(self, context: RequestContext) -> None:
        """Keep the model until the request's reply has been sent: it is not evicted, and unloading waits for it."""
        self.acquire()
        context.on_end.append(self.release)

    def acquire(self, users: int = 1) -> None:
        """Keep the model for so many requests, each until it is given back by `release`."""
        self.users += users
        self.unused.clear()
        self.used_at = time.monotonic()

    def release(self, users: int = 1) -> None:
        self.users -= users
        self.used_at = time.monotonic()
        if not self.users:
            self.unused.set()

    def failed(self, error: ApiError, retry_s: float) -> None:
        """Remember why loading failed; requests get that reason until it is tried again."""
        self.state, self.error, self.reason = State.FAILED, error, error.message
        self.retry_at = time.monotonic() + retry_s

    def refusal(self) -> ApiError:
        """Return the error for a request that needs this model, which failed."""
        seconds = max(1, round(min(self.retry_at - time.monotonic(), 60.0)))
        message = f"model {self.name} could not be loaded: {self.reason}"
        return unavailable(message, "model_failed", seconds)
