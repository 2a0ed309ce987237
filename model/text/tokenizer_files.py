"""The files about a folder's tokenizer: settings, special tokens, vocabularies, tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from triptych.model.errors import ConfigError
from triptych.model.system.folder_files import has_file, parse_json, read_file
from triptych.model.text.sentencepiece_model import SentencePieceModel, read_sentencepiece
from triptych.model.text.special_tokens import SpecialTokens, Token, read_special_tokens
from triptych.model.text.tokenizer_limits import check_cost

SENTENCEPIECE_NAMES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model")
_VERSIONED = re.compile(r"tokenizer\.(\d{1,4}(?:\.\d{1,4})*)\.json")
_MAJOR_VERSION = 5  # of transformers, which this follows
_MAX_COUNT = 100_000  # of tokens that a setting makes


@dataclass(frozen=True)
class Files:
    """A folder's files about its tokenizer."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.object("tokenizer_config.json")

    @cached_property
    def tokenizer_class(self) -> str:
        """The name of the tokenizer's class, without "Tokenizer" and "Fast"; empty if no file says it."""
        name = self.config.get("tokenizer_class") or self.object("config.json").get("tokenizer_class") or ""
        return str(name).removesuffix("Fast").removesuffix("Tokenizer")

    @cached_property
    def model_type(self) -> str:
        return str(self.object("config.json").get("model_type"))

    def setting(self, name: str, default: Any) -> Any:
        found = self.config.get(name)
        return default if found is None else found

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false."""
        found = self.setting(name, default)
        if type(found) is not bool:
            raise self._wrong(name, "true or false", found)
        return found

    def optional_flag(self, name: str) -> bool | None:
        """Return a setting that is true, false or left open."""
        return None if self.config.get(name) is None else self.flag(name, False)

    def text(self, name: str, default: str) -> str:
        found = self.setting(name, default)
        if not isinstance(found, str):
            raise self._wrong(name, "a text", found)
        return found

    def count(self, name: str, default: int) -> int:
        """Return a number of tokens."""
        found = self.setting(name, default)
        if type(found) is not int or not 0 <= found <= _MAX_COUNT:
            raise self._wrong(name, f"an integer from 0 to {_MAX_COUNT}", found)
        return found

    def refuse_options(self, name: str) -> None:
        """Raise `ConfigError` for a setting of further options that is not empty."""
        if found := self.setting(name, {}):
            raise self._wrong(name, "empty", found)

    def _wrong(self, name: str, expected: str, found: Any) -> ConfigError:
        return ConfigError(f"{self.folder.name}: tokenizer_config.json: {name} must be {expected}, found {found!r:.80}")

    @cached_property
    def json_name(self) -> str:
        """The name of the folder's tokenizer.json; `fast_tokenizer_files` lists others for later versions."""
        listed = self.setting("fast_tokenizer_files", [])
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise self._wrong("fast_tokenizer_files", "a list of names", listed)
        versions = {found[1]: name for name in listed if (found := _VERSIONED.fullmatch(name)) is not None}
        fitting = [version for version in sorted(versions) if int(version.partition(".")[0]) <= _MAJOR_VERSION]
        return versions[fitting[-1]] if fitting else "tokenizer.json"

    @property
    def has_json(self) -> bool:
        return self.has(self.json_name)

    @cached_property
    def loaded(self) -> Tokenizer | None:
        """What tokenizer.json holds; None for a folder without it."""
        if not self.has_json:
            return None
        with library_errors(f"{self.folder.name}: {self.json_name} cannot be read"):
            # Read here, as the library would hold the interpreter's lock while it reads a disk.
            found = Tokenizer.from_buffer(read_file(self.folder / self.json_name))
            check_cost(found, f"{self.folder.name}: {self.json_name}")
            return found

    @cached_property
    def json_is_byte_level(self) -> bool:
        """Whether tokenizer.json has a step of byte-level BPE."""
        return self.has_json and b'"ByteLevel"' in read_file(self.folder / self.json_name)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The tokens that the files add to the vocabulary."""
        token_map, added = self.object("special_tokens_map.json"), self.object("added_tokens.json")
        in_json = {} if self.loaded is None else self.loaded.get_added_tokens_decoder()
        return read_special_tokens(self.folder.name, self.config, token_map, added, in_json)

    @cached_property
    def named_tokens(self) -> dict[str, Token | None]:
        """The special tokens that the files name, for which tokenizer.json is not read."""
        token_map, added = self.object("special_tokens_map.json"), self.object("added_tokens.json")
        return read_special_tokens(self.folder.name, self.config, token_map, added, {}).named

    def special(self, name: str, default: str) -> str:
        """Return the text of the special token `name` ("eos_token"), by the files or by its class's default."""
        return self.special_tokens.text(name, default)

    def has(self, *names: str) -> bool:
        return all(has_file(self.folder / name) for name in names)

    @cached_property
    def sentencepiece(self) -> SentencePieceModel:
        name = next((name for name in SENTENCEPIECE_NAMES if self.has(name)), None)
        if name is None:
            raise ConfigError(f"{self.folder.name}: its tokenizer needs one of {', '.join(SENTENCEPIECE_NAMES)}")
        found = read_sentencepiece(self.folder / name)
        for setting, served in (("treat_whitespace_as_suffix", False), ("escape_whitespaces", True)):
            if getattr(found, setting) is not served:
                told = f"{name}: {setting} {str(not served).lower()} is not served"
                raise ConfigError(f"{self.folder.name}: {told}; add the model's tokenizer.json")
        return found

    def json_vocabulary(self, name: str = "vocab.json") -> dict[str, int]:
        found = self.object(name, required=True)
        if not found or not all(type(token) is int and 0 <= token < 1 << 31 for token in found.values()):
            raise ConfigError(f"{self.folder.name}: {name} must map tokens to ids")
        return found

    def lines(self, name: str) -> list[str]:
        if not self.has(name):
            raise ConfigError(f"{self.folder.name}: its tokenizer needs {name}")
        content = read_file(self.folder / name, may_be_empty=True)
        try:
            text = content.decode("utf-8")
            return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.folder.name}: {name} is not UTF-8: {error}") from None

    def object(self, name: str, *, required: bool = False) -> dict[str, Any]:
        if not self.has(name):
            if required:
                raise ConfigError(f"{self.folder.name}: its tokenizer needs {name}")
            return {}
        content = read_file(self.folder / name)
        try:
            found = parse_json(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.folder.name}: {name} is not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{self.folder.name}: {name} must hold an object, found {type(found).__name__}")
        return found


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn what the tokenizers' library raises into a `ConfigError`, its panics too, which are no `Exception`."""
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:  # the library raises nothing narrower
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ConfigError(f"{what}: {str(error) or type(error).__name__:.300}") from None


def is_panic(error: BaseException) -> bool:
    """Whether the library gave up: its panics have a type that cannot be imported."""
    return type(error).__name__ == "PanicException"
