"""Checks of what `LLM`'s methods are given, and the lock that lets one of them run at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from triptych.model.api.request import Source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.errors import ConfigError

_NO_TEXTS = tuple(  # parameters that are numbers or lists
    one.name for one in fields(SamplingParams) if type(getattr(SamplingParams(), one.name)) in (int, float, tuple)
)


class Turns:
    """Lets one call at a time use the engines of a model; calls of other threads wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None  # that has the turn

    @contextmanager
    def one(self) -> Iterator[None]:
        """Take a turn. Raises `ConfigError` where waiting would never end: this thread has the turn already."""
        if self._thread == threading.get_ident():
            raise ConfigError("a stream of this model is still open: read it to its end, or close it, before you call")
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None


def several(prompts: Any, name: str = "prompts") -> Sequence[Any]:
    """Return prompts as a sequence; a text or a source alone is one. Raises `ConfigError`."""
    if isinstance(prompts, str | Source):
        return [prompts]
    expected = f"{name}: expected a text, or a list of texts and lists of token ids, found"
    if isinstance(prompts, bytes | Mapping) or not _is_sequence(prompts):
        raise ConfigError(f"{expected} {_described(prompts)}")
    for place, one in enumerate(prompts):
        if not isinstance(one, str | Source) and (isinstance(one, bytes | Mapping) or not _is_sequence(one)):
            raise ConfigError(f"{expected} {_described(one)} at place {place}")
    found: Sequence[Any] = prompts
    return found


def checked_params(given: Any) -> SamplingParams | Mapping[str, Any]:
    """Return the parameters of a call. Raises `ConfigError` for another type."""
    if given is not None and not isinstance(given, SamplingParams | Mapping):
        raise ConfigError(f"params: expected a SamplingParams or a dict of its fields, found {_described(given)}")
    found = given or {}
    for name in _NO_TEXTS:
        value = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
        if isinstance(value, str | bytes):
            expected = "a list of texts" if name == "stop" else "no text"
            raise ConfigError(f"params: {name}: expected {expected}, found {_described(value)}")
    return found


def _is_sequence(value: Any) -> bool:
    """Return whether a value is a list or the like; arrays of numpy and torch are."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "ndim", 1) != 0


def _described(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:100]
