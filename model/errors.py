"""The errors that the whole package raises.

ConfigError            a configuration that cannot be served (a `ValueError`)
`- CheckpointError     tensors that do not fit their configuration
EngineError            a request was accepted, or refused, and not answered
|- QueueFullError    refused now: nothing was computed, try again after `retry_after_s`
`- EngineDeadError   the engine failed while the request was in it
   `- EngineGoneError  it was gone before: nothing was computed
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be served; the message says what, where, what was found and what is expected."""


class CheckpointError(ConfigError):
    """A checkpoint whose tensors do not fit its configuration."""


class EngineError(Exception):
    """Base of what an engine client raises."""


class QueueFullError(EngineError):
    """The waiting queue is at its bound."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason  # "queue_requests" or "queue_tokens"
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine ended or broke; whoever waited on it is told so at once."""


class EngineGoneError(EngineDeadError):
    """There is no engine at the moment: refused now, as by a full queue."""
