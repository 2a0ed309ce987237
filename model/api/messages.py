"""Frames between the asynchronous front and the engine loop: plain data, one frame a step in each direction.

The same frames travel through a queue to a thread or over a socket to a child process (`process_transport`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from model.api.engine_config import EngineConfig
from model.api.request import EncodeOutput, EncodeRequest, FinishReason, Request, TokenOutput
from model.api.stats import EngineStats, ModelInfo, StepStats


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve: its name, its checkpoint folder and its engine's settings."""

    name: str
    path: str
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True)
class Abort:
    """A command to end a request, or its sequence `index`, with `reason`."""

    model: str
    request_id: str
    index: int | None
    reason: FinishReason


@dataclass(slots=True)
class Commands:
    """A frame from the front to the loop. The first frame has `load`; `close` ends the loop."""

    load: list[ModelSpec] = field(default_factory=list)
    generate: list[Request] = field(default_factory=list)
    encode: list[EncodeRequest] = field(default_factory=list)
    abort: list[Abort] = field(default_factory=list)
    close: bool = False

    def __bool__(self) -> bool:
        return bool(self.load or self.generate or self.encode or self.abort or self.close)


@dataclass(slots=True)
class Events:
    """A frame from the loop to the front, sent after every round of steps and every second while idle (heartbeat).

    A frame with `failure` is the last one: the loop could not load (`invalid`: a configuration error) or broke.
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
    """The loop's end of the connection to the front."""

    def receive(self, timeout: float) -> Commands | None:
        """Return the next frame, or None after `timeout` seconds (0: at once). Raises `EOFError` if the front ended."""

    def send(self, events: Events) -> None: ...
