"""The keys of config.json that the configuration classes of `transformers` know, by `model_type`.

`known_keys.json` is written by `python -m tests.model.config_keys`, so that serving does not import the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("known_keys.json")


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """What one configuration class knows: keys that its model or the class reads, and other names of them."""

    defaults: Mapping[str, Any]  # None too where there is no default
    nullable: frozenset[str]  # whose value may be null; elsewhere null stands for the default
    renamed: Mapping[str, str]  # the class's key for each other name

    def has_default(self, key: str) -> bool:
        """Whether null stands for the class's default: the key has one, and its value may not be null."""
        return key not in self.nullable and self.defaults.get(key) is not None


@cache
def _file() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


@cache
def known_keys(model_type: str) -> KnownKeys | None:
    """Return the keys of the class for `model_type`; None: the library has no such class, or it is not served."""
    base, own = _file()[""], _file().get(model_type or "-")
    if own is None:
        return None
    return KnownKeys(
        defaults={**base["keys"], **own["keys"]},
        nullable=frozenset((*base["nullable"], *own.get("nullable", ()))),
        renamed=own.get("renamed", {}),
    )
