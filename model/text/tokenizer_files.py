"""The files about a folder's tokenizer beside tokenizer.json: settings, special tokens, vocabularies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from model.errors import ConfigError
from model.text.sentencepiece_model import SentencePieceModel, read_sentencepiece

SENTENCEPIECE_NAMES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model")


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

    def special(self, name: str, default: str) -> AddedToken:
        """The special token `name` ("eos_token"), by the files or by its class's default."""
        found = self.config.get(name) or self.object("special_tokens_map.json").get(name) or default
        if isinstance(found, dict):
            return added_token(found, special=True)
        return AddedToken(found, special=True, normalized=False, lstrip=name == "mask_token")

    def additional(self) -> list[AddedToken]:
        """Special tokens beside the named ones."""
        names = ("additional_special_tokens", "extra_special_tokens")
        files = (self.config, self.object("special_tokens_map.json"))
        lists = [file[name] for file in files for name in names if isinstance(file.get(name), list)]
        tokens = lists[0] if lists else []
        return [added_token(one if isinstance(one, dict) else {"content": one}, special=True) for one in tokens]

    def added(self) -> list[tuple[int, AddedToken]]:
        """Tokens with an id of their own beyond the vocabulary, in the order of their ids."""
        found: dict[int, AddedToken] = {
            int(token): added_token(entry) for token, entry in self.setting("added_tokens_decoder", {}).items()
        }
        for text, token in self.object("added_tokens.json").items():
            found.setdefault(token, AddedToken(text, normalized=False))
        return sorted(found.items(), key=lambda entry: entry[0])

    def has(self, *names: str) -> bool:
        return all((self.folder / name).is_file() for name in names)

    def sentencepiece(self) -> SentencePieceModel:
        for name in SENTENCEPIECE_NAMES:
            if self.has(name):
                return read_sentencepiece(self.folder / name)
        raise ConfigError(f"{self.folder.name}: its tokenizer needs one of {', '.join(SENTENCEPIECE_NAMES)}")

    def json_vocabulary(self) -> dict[str, int]:
        found = self.object("vocab.json", required=True)
        if not found or not all(type(token) is int and token >= 0 for token in found.values()):
            raise ConfigError(f"{self.folder.name}: vocab.json must map tokens to ids")
        return found

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        if not path.is_file():
            raise ConfigError(f"{self.folder.name}: its tokenizer needs {name}")
        try:
            return path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.folder.name}: {name} is not UTF-8: {error}") from None

    def object(self, name: str, *, required: bool = False) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            if required:
                raise ConfigError(f"{self.folder.name}: its tokenizer needs {name}")
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{self.folder.name}: {name} is not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{self.folder.name}: {name} must hold an object, found {type(found).__name__}")
        return found


def added_token(entry: dict[str, Any], *, special: bool = False) -> AddedToken:
    flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(entry["content"], special=bool(entry.get("special", special)), **flags)
