"""One option: its name in flags, variables and the configuration file, and how its value is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triptych.model.errors import ConfigError
from triptych.service.settings.parsers import cache_folder, draft_model, folder, key_file, keys

PREFIX = "TRIPTYCH_"
_FREE_TEXTS = (str, cache_folder, draft_model, folder, key_file)  # parsers that take nearly any text


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: `name` in a file, `--name` on the command line, `TRIPTYCH_NAME` in the environment."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = "N"
    shown: str = ""  # the default in words, if the value does not explain itself
    per_model: bool = False  # a field of EngineConfig: a file may also set it for one model
    group: str = ""  # of `option_groups`: the heading in `--help`
    common: bool = False  # also in the short help

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def read(self, value: Any, where: str) -> Any:
        """Parse a value from any source; raises `ConfigError` that names its source, `where`."""
        if value is None:
            raise ConfigError(f"{where}: found nothing; give a value, or leave the setting out")
        if self.is_secret:
            return self._read_secret(value, where)
        if value is False and (self.parse is cache_folder or "off" in self.metavar.split("|")):
            value = "off"  # Helm and Ray read this word of a file as a boolean
        if isinstance(value, bool) and self.parse in _FREE_TEXTS:
            raise ConfigError(f"{where}: found {value}, expected a text; in quotation marks, if it is this word")
        try:
            return self.parse(value if isinstance(value, str) else _text(value))
        except ValueError as error:
            expected = "a whole number" if self.parse is int else "a number" if self.parse is float else str(error)
            raise ConfigError(f"{where}: found {value!r}, expected {expected}") from None

    @property
    def is_secret(self) -> bool:
        """Whether the value must never be shown or logged."""
        return self.parse is keys

    def _read_secret(self, value: Any, where: str) -> Any:
        """Parse a text or a list of texts. A number is refused: YAML may read it differently from what was written."""
        texts = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) for text in texts):
            what = "an empty list" if not texts else "a key that is no text"
            raise ConfigError(f"{where}: found {what}, expected texts in quotation marks, one or more")
        if isinstance(value, list) and all(text.strip() for text in texts):
            return tuple(text.strip() for text in texts)
        try:
            return tuple(key for text in texts for key in self.parse(text))
        except ValueError as error:
            raise ConfigError(f"{where}: found an empty key, expected {error}") from None


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
