"""The exceptions that the package raises.

ConfigError               a configuration that cannot be served (a `ValueError`)
|- CheckpointError        tensors that do not fit their configuration
`- MemoryShortageError    a model that does not fit into the memory that it may take
TokenizerError            the tokenizers' library gave up on a text or on tokens
GrammarError              a grammar, schema or pattern that no output can be held to (a `ValueError`)
EngineError               an engine client could not do what was asked
|- QueueFullError         refused before any work: try again after `retry_after_s` seconds
|- ModelNotLoadedError    refused before any work: no such model is loaded, or it is being unloaded
|- LoadFailedError        a model could not be loaded for a reason that is not its configuration
`- EngineDeadError        the engine failed while the request was in it
   `- EngineGoneError     no engine was running: refused before any work
"""

from __future__ import annotations

from collections.abc import Iterable


def listed(names: Iterable[str], *, most: int = 12, longest: int = 60) -> str:
    """Return names as a short list for a message: the first `most`, each in printable form and cut to `longest`."""
    names = list(names)
    shown = [name if len(name) <= longest else f"{name[:longest]}..." for name in names[:most]]
    text = ", ".join(name if name.isprintable() else ascii(name) for name in shown)
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def shown(value: object, longest: int = 80) -> str:
    """Return a value of a file for a message: as Python writes it, cut off where it is long."""
    text = ascii(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


class ConfigError(ValueError):
    """A configuration cannot be served; the message names the field, its place, its value and what is expected."""


class CheckpointError(ConfigError):
    """A checkpoint's tensors do not fit its configuration."""


class MemoryShortageError(ConfigError):
    """A model does not fit: by its plan it needs `needed_bytes`, of `available_bytes` that it may take."""

    def __init__(self, message: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class TokenizerError(Exception):
    """The tokenizers' library gave up on a text or on tokens, for a reason that is in the model's tokenizer."""


class TooManyTokensError(Exception):
    """Says that a text has more tokens than were asked for: `count`."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has {count} tokens")
        self.count = count


class GrammarError(ValueError):
    """A grammar is invalid, matches nothing, costs too much or is not served; the message says why and where."""


class EngineError(Exception):
    """Base of the exceptions that an engine client raises."""


class QueueFullError(EngineError):
    """Admission control refused a request: the waiting queue is full."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason  # "queue_seconds", "queue_requests" or "queue_tokens"
        self.retry_after_s = retry_after_s


class ModelNotLoadedError(EngineError):
    """No model of this name is loaded, or it is being unloaded."""


class LoadFailedError(EngineError):
    """A model could not be loaded though nothing is wrong with its configuration; what is served is not affected."""


class EngineDeadError(EngineError):
    """The engine ended or broke; every unfinished request gets this error at once."""


class EngineGoneError(EngineDeadError):
    """No engine is running at the moment, so the request was refused."""
