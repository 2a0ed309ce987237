"""Frames between the asynchronous front and the engine loop: plain data, one frame a step in each direction.

The same frames travel through a queue to a thread or over a socket to a child process (`process_transport`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request, TokenOutput
from triptych.model.api.stats import EngineStats, ModelInfo, StepStats


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve: its name, its checkpoint folder and its engine's settings."""

    name: str
    path: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    memory: int | None = None  # bytes that it may take in all, on all ranks; None: what is free on the machine
    adapter_of: str | None = None  # the loaded model that `path` has a LoRA adapter for; None: it has a model


@dataclass(frozen=True, slots=True)
class Abort:
    """A command to end a request, or its sequence `index`, with `reason`."""

    model: str
    request_id: str
    index: int | None
    reason: FinishReason


class FailureKind(StrEnum):
    """Why a model could not be loaded."""

    CONFIG = "config"  # its folder or its settings
    MEMORY = "memory"  # it does not fit by its plan
    ERROR = "error"  # anything else


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A failed load; everything that it took was given back."""

    model: str
    kind: FailureKind
    message: str
    needed_bytes: int = 0  # with `MEMORY`
    available_bytes: int = 0


@dataclass(slots=True)
class Commands:
    """A frame from the front to the loop. The first frame has `start`; `close` ends the loop.

    Models of `start` are loaded before anything is served, in this order. A failure to load one of them ends the loop,
    unless it is also in `optional`. Models of `load` are loaded while others are served, one at a time.
    """

    start: list[ModelSpec] | None = None
    optional: list[str] = field(default_factory=list)
    load: list[ModelSpec] = field(default_factory=list)
    unload: list[str] = field(default_factory=list)  # ends what they compute; one that is being loaded is given up
    generate: list[Request] = field(default_factory=list)
    encode: list[EncodeRequest] = field(default_factory=list)
    abort: list[Abort] = field(default_factory=list)
    close: bool = False

    def __bool__(self) -> bool:
        asked = (self.load, self.unload, self.generate, self.encode, self.abort)
        return self.start is not None or self.close or any(asked)


@dataclass(slots=True)
class Events:
    """A frame from the loop to the front, sent after every round of steps and every second while idle (heartbeat).

    A frame with `failure` is the last one: the loop could not start (`invalid`: a configuration error) or broke.
    """

    tokens: list[TokenOutput] = field(default_factory=list)
    encoded: list[EncodeOutput] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)
    loaded: list[ModelInfo] = field(default_factory=list)
    load_failures: list[LoadFailure] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)  # their memory is given back
    ready: bool = False  # every model of `start` is loaded
    failure: str | None = None
    invalid: bool = False


class Channel(Protocol):
    """The loop's end of the connection to the front."""

    def receive(self, timeout: float) -> Commands | None:
        """Return the next frame, or None after `timeout` seconds (0: at once). Raises `EOFError` if the front ended."""

    def send(self, events: Events) -> None: ...
