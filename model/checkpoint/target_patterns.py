"""Matches names of projections with the patterns by which compressed-tensors targets them (`re:` in a config.json).

A pattern comes with a checkpoint, and one for `re` could be written to run for years. Served are single characters and
sets of them, each maybe repeated, and groups of alternatives: `.*layers\\.[0-3]\\.mlp\\.(gate|up)_proj$`. As with
`re.match` a name may be longer than a pattern without `$`. Time is linear in the name's length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

_CHARACTER = re.compile(r"(\\[.\-_/dw]|\[[^\[\]\\]+\]|[\w.\-/])([*+]?)")
_GROUP = re.compile(r"\((?:\?:)?([^()]*)\)")
_BETWEEN = re.compile(r"\|(?![^()]*\))")  # alternatives that are in no group
_MOST_WAYS = 256  # to choose one alternative of each group


@dataclass(frozen=True, slots=True)
class _Step:
    """One character of a name, or with `repeats` any number of them."""

    fits: re.Pattern[str]
    repeats: bool


@dataclass(frozen=True, slots=True)
class _Way:
    """A pattern without alternatives."""

    steps: tuple[_Step, ...]
    whole: bool  # nothing may follow

    def matches(self, name: str) -> bool:
        end, places = len(self.steps), self._with_skipped([0])  # how many steps may have been taken
        for character in name:
            if end in places and not self.whole:
                return True
            taken = [place for place in places if place < end and self.steps[place].fits.fullmatch(character)]
            places = self._with_skipped(place if self.steps[place].repeats else place + 1 for place in taken)
        return end in places

    def _with_skipped(self, places: Iterable[int]) -> set[int]:
        """Return these places, and those after steps that may be left out."""
        found: set[int] = set()
        for place in places:
            while place not in found:
                found.add(place)
                if place < len(self.steps) and self.steps[place].repeats:
                    place += 1
        return found


def matches(pattern: str, name: str) -> bool:
    """Whether a name begins with what the pattern describes; raises `ValueError` for one that is not served."""
    return any(way.matches(name) for way in _ways(pattern))


@lru_cache(maxsize=64)
def _ways(pattern: str) -> tuple[_Way, ...]:
    found: list[_Way] = []
    for alternative in _BETWEEN.split(pattern):
        whole = alternative.endswith("$")
        parts = _GROUP.split(alternative.removeprefix("^").removesuffix("$"))  # every second one is a group
        choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
        if len(found) + math.prod(map(len, choices)) > _MOST_WAYS:
            raise ValueError(f"more than {_MOST_WAYS} alternatives")
        found += [_Way(_steps("".join(chosen)), whole) for chosen in product(*choices)]
    return tuple(found)


def _steps(text: str) -> tuple[_Step, ...]:
    steps: list[_Step] = []
    at = 0
    while at < len(text):
        found = _CHARACTER.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:]!r} is not served")
        try:
            one = re.compile(found[1])
        except re.error as error:
            raise ValueError(f"{found[1]!r}: {error}") from None
        steps += [_Step(one, repeats=False)] if found[2] != "*" else []
        steps += [_Step(one, repeats=True)] if found[2] else []
        at = found.end()
    return tuple(steps)
