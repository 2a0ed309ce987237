"""What crosses the seam between the asynchronous front and the engine loop: plain data, one frame a step each way.

The same frames travel through a thread's queue or a socket to a child process (`process.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from model.api.engine_config import EngineConfig
from model.api.request import (
    EncodeOutput,
    EncodeRequest,
    FinishReason,
    Request,
    TokenOutput,
)
from model.api.stats import EngineStats, ModelInfo, StepStats


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to be served: its name, its folder and how its engine is set."""

    name: str
    path: str
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request, or one of its sequences, for `reason`."""

    model: str
    request_id: str
    index: int | None
    reason: FinishReason


@dataclass(slots=True)
class Commands:
    """From the front to the loop. `load` comes first and once; `close` ends the loop."""

    load: list[ModelSpec] = field(default_factory=list)
    generate: list[Request] = field(default_factory=list)
    encode: list[EncodeRequest] = field(default_factory=list)
    abort: list[Abort] = field(default_factory=list)
    close: bool = False

    def __bool__(self) -> bool:
        return bool(self.load or self.generate or self.encode or self.abort or self.close)


@dataclass(slots=True)
class Events:
    """From the loop to the front, after every round of steps, and every second while idle (a sign of life).

    `failure` is the loop's last word: it could not load (`invalid` if the fault is the configuration's) or broke.
    """

    tokens: list[TokenOutput] = field(default_factory=list)
    encoded: list[EncodeOutput] = field(default_factory=list)
    steps: list[StepStats] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)
    loaded: list[ModelInfo] = field(default_factory=list)
    ready: bool = False  # every model is loaded
    failure: str | None = None
    invalid: bool = False


class Channel(Protocol):
    """The loop's end of the seam."""

    def receive(self, timeout: float) -> Commands | None:
        """The next frame, or None after `timeout` seconds (0: at once). Raises `EOFError` when the front is gone."""

    def send(self, events: Events) -> None: ...
