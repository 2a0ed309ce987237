"""The exceptions that the package raises.

ConfigError            a configuration that cannot be served (a `ValueError`)
`- CheckpointError     tensors that do not fit their configuration
EngineError            an engine client could not answer a request
|- QueueFullError    refused before any work: try again after `retry_after_s` seconds
`- EngineDeadError   the engine failed while the request was in it
   `- EngineGoneError  no engine was running: refused before any work
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration cannot be served; the message names the field, its place, its value and what is expected."""


class CheckpointError(ConfigError):
    """A checkpoint's tensors do not fit its configuration."""


class EngineError(Exception):
    """Base of the exceptions that an engine client raises."""


class QueueFullError(EngineError):
    """Admission control refused a request: the waiting queue is full."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason  # "queue_requests" or "queue_tokens"
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine ended or broke; every unfinished request gets this error at once."""


class EngineGoneError(EngineDeadError):
    """No engine is running at the moment, so the request was refused."""
