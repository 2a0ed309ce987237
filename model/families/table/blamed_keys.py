"""Finds the keys of config.json that a refusal is about, where its sentence does not name them.

A key is to blame if the network can be built with another value: the default of the reference's class, or none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from model.errors import ConfigError, shown
from model.families.table.known_keys import known_keys

_MOST_DEPTH, _MOST_TRIES, _MOST_SECONDS, _MOST_NAMED = 4, 300, 0.5, 3
_KINDS = {"model_type", "architectures", "auto_map", "id2label", "label2id"}  # which say what is built

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
    """Return the keys that another value helps, each with the value that it has; empty where no single one does."""
    until = time.monotonic() + _MOST_SECONDS
    found: dict[Path, Any] = {}
    for number, (path, value) in enumerate(_places(raw, ())):
        if number >= _MOST_TRIES or time.monotonic() > until:
            break
        if path[-1] in _KINDS or any(inner[: len(path)] == path for inner in found):
            continue
        if any(_builds(changed, build) for changed in _changed(raw, path)):
            found[path] = value
    exact = [path for path in found if f" {shown(found[path])}" in message] or list(found)
    return ", ".join(f"{'.'.join(path)} = {shown(found[path])}" for path in exact[:_MOST_NAMED])


def _places(raw: Mapping[str, Any], before: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the keys with their values, those of an object before the object itself."""
    for key, value in raw.items():
        if isinstance(value, dict) and len(before) + 1 < _MOST_DEPTH and key not in _KINDS:
            yield from _places(value, (*before, key))
        yield (*before, key), value


def _changed(raw: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Yield copies of the settings with another value at the path: the class's default, and none."""
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
    if default is not None and default != value:
        holder[key] = default
        yield whole


def _builds(raw: dict[str, Any], build: Build) -> bool:
    try:
        build(raw)
    except ConfigError:
        return False
    return True
