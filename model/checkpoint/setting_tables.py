"""What is done with each key of a settings file: a table for each file, which the docs show.

A reader asks its table for the keys that change results and are not computed, and for those that are not in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Use(StrEnum):
    """What is done with a key."""

    SERVED = "served"
    WARNED = "named in a warning"  # it would change results, and is not computed
    REFUSED = "refused"  # likewise, and nothing can be served without it
    UNUSED = "without effect"  # on results


@dataclass(frozen=True, slots=True)
class Setting:
    """Says what is done with one key, unless its value is null, false, empty or one of `neutral`."""

    use: Use
    neutral: tuple[Any, ...] = ()

    def is_set(self, value: object) -> bool:
        """Return whether a value asks for anything."""
        return bool(value) and value not in self.neutral


Table = Mapping[str, Setting]


def table(
    *,
    served: tuple[str, ...] = (),
    warned: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> Table:
    """Return a table of the keys of each use; `neutral` has the values that ask for nothing."""
    groups = {Use.SERVED: served, Use.WARNED: warned, Use.REFUSED: refused, Use.UNUSED: unused}
    return {key: Setting(use, (neutral or {}).get(key, ())) for use, keys in groups.items() for key in keys}


def asked_for(settings: Mapping[str, Any], known: Table, use: Use) -> Iterator[str]:
    """Yield the keys of a file that ask for something of this use."""
    for key, value in settings.items():
        if (setting := known.get(key)) is not None and setting.use is use and setting.is_set(value):
            yield key


def unknown(settings: Mapping[str, Any], known: Table) -> list[str]:
    """Return the keys of a file that the table does not have, but for null ones and private ones (`_name`)."""
    return sorted(key for key, value in settings.items() if key not in known and value is not None and key[:1] != "_")
