"""Finds the keys of config.json that a refusal is about, where its sentence does not name them.

A key is to blame if the network can be built with another value: the default of the reference's class, or none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from triptych.model.errors import ConfigError, shown
from triptych.model.families.table.known_keys import known_keys

_MOST_DEPTH, _MOST_TRIES, _MOST_SECONDS, _MOST_NAMED = 4, 300, 0.5, 3
_KINDS = {"model_type", "architectures", "auto_map"}  # which say what is built: the last to blame
_WHOLE = {"auto_map", "id2label", "label2id"}  # objects that are one value

Path = tuple[str, ...]
Build = Callable[[dict[str, Any]], object]  # raises `ConfigError`


class WrongKindError(ConfigError):
    """A value that Python could not compute with: which one is not known."""


class MissingKeyError(ConfigError):
    """A key that the network needs is not there."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def names_a_key(message: str, raw: Mapping[str, Any]) -> bool:
    """Whether the message has the name of a key of the file, at any depth, and the value where it shows one."""
    words = set(re.findall(r"\w+", message))
    value_shown = message.partition(" found ")[2]
    for path, value in _places(raw, ()):
        key = path[-1]
        if key not in words or not ("_" in key or f"{key} = " in message):
            continue
        if not value_shown or re.search(rf"(?<![\w.]){re.escape(str(value)[:40])}(?![\w.])", value_shown):
            return True
    return False


def blamed_keys(raw: dict[str, Any], message: str, build: Build) -> str:
    """Return the keys that another value helps, each with the value that it has; empty where none is found."""
    until = time.monotonic() + _MOST_SECONDS
    helped, changed = dict[Path, Any](), dict[Path, Any]()
    places = sorted(_places(raw, ()), key=lambda place: place[0][-1] in _KINDS)
    for path, value in places[:_MOST_TRIES]:
        if time.monotonic() > until or (path[-1] in _KINDS and (helped or changed)):
            break
        if any(inner[: len(path)] == path for inner in (*helped, *changed)):
            continue
        outcomes = {_outcome(other, build) for other in _others(raw, path)}
        if "" in outcomes:
            helped[path] = value
        elif outcomes - {message} and (f" {shown(value)}" in message or type(value) not in (int, float, str)):
            changed[path] = value
    found = helped or changed
    exact = [path for path in found if f" {shown(found[path])}" in message] or list(found)
    return ", ".join(f"{'.'.join(path)} = {shown(found[path])}" for path in exact[:_MOST_NAMED])


def _places(raw: Mapping[str, Any], before: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the keys with their values, those of an object before the object itself."""
    for key, value in raw.items():
        if isinstance(value, dict) and len(before) + 1 < _MOST_DEPTH and key not in _WHOLE:
            yield from _places(value, (*before, key))
        yield (*before, key), value


def _others(raw: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield copies of the settings with other values at the path: none, the class's default, small numbers."""
    *parents, key = path
    whole = dict(raw)
    holder = whole
    for parent in parents:
        holder[parent] = dict(holder[parent])
        holder = holder[parent]
    value = holder.pop(key)
    yield whole
    known = known_keys(str(holder.get("model_type")))
    default = None if known is None else known.defaults.get(known.renamed.get(key, key))
    numbers = (1, 2) if isinstance(default, int) and not isinstance(default, bool) else ()
    for other in (default, *numbers):
        if other is not None and other != value:
            holder[key] = other
            yield whole


def _outcome(raw: dict[str, Any], build: Build) -> str:
    """Return why the network cannot be built; empty where it can."""
    try:
        build(raw)
    except ConfigError as error:
        return str(error)
    return ""
