"""The tokens that a folder's files add to a vocabulary, and in which order they get their ids, as in `transformers`.

`tokenizer_config.json` says them in `added_tokens_decoder`; without it `special_tokens_map.json`, `added_tokens.json`
and tokenizer.json do. Tokens by name ("eos_token", or in `model_specific_special_tokens`) and `extra_special_tokens`
are added where none of these has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer

from triptych.model.errors import ConfigError

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the second is the older name
_MODELS_OWN = "model_specific_special_tokens"  # by name, as transformers 5 saves them
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
Token = str | AddedToken


@dataclass(slots=True)
class SpecialTokens:
    """What the files say. A name whose token is None is a token that the folder does not have."""

    named: dict[str, Token | None] = field(default_factory=dict)
    extra: list[Token] | None = None  # None: no file says any
    listed: bool = False  # `extra` is what `extra_special_tokens` says
    added: dict[int, AddedToken] = field(default_factory=dict)  # by id

    def text(self, name: str, default: str = "") -> str:
        """Return the text of the token `name`; empty if it has none."""
        found = self.named.get(name, default)
        return "" if found is None else token_text(found)


def token_text(token: Token) -> str:
    return token if isinstance(token, str) else str(token.content)


def read_special_tokens(
    where: str,
    config: Mapping[str, Any],
    token_map: Mapping[str, Any],
    added_tokens: Mapping[str, Any],
    in_json: Mapping[int, AddedToken],
) -> SpecialTokens:
    """Read tokenizer_config.json, special_tokens_map.json, added_tokens.json, and take tokenizer.json's own tokens.

    `where` names the folder in errors. Raises `ConfigError` for a field of a wrong type.
    """
    found, reader = SpecialTokens(), _Reader(f"{where}: tokenizer_config.json")
    reader.fill(found, config)
    found.listed = found.extra is not None
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        found.added = reader.by_id(listed)
    else:
        special_list = found.extra
        _Reader(f"{where}: special_tokens_map.json", special=True).fill(found, token_map)
        if token_map.get(_EXTRA[0]):  # tokens that this file lists by the older name are not special by it
            special_list, found.listed = found.extra, isinstance(token_map[_EXTRA[0]], list)
        standard = (found.named.get(name) for name in NAMES)
        special = {token_text(token) for token in (*standard, *(special_list or ())) if token is not None}
        found.added = _Reader(f"{where}: added_tokens.json").older(added_tokens, special) | dict(in_json)
    by_text = {token.content: token for token in found.added.values()}
    for name, token in found.named.items():
        if token is not None:
            found.named[name] = by_text.get(token_text(token), token)
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the fields of one file."""

    where: str
    special: bool = False  # tokens that are objects are special

    def fill(self, found: SpecialTokens, fields: Mapping[str, Any]) -> None:
        """Take the tokens by name and the extra ones; what another file said before is replaced."""
        others = False
        for name, value in fields.items():
            if name in NAMES and (value is None or value == ""):
                found.named[name] = None
            elif name in NAMES or (name.endswith("_token") and isinstance(value, str | dict)):
                found.named[name] = self._token(name, value)
                others |= name not in NAMES
        key = next((key for key in _EXTRA if fields.get(key)), None)
        value = fields[key] if key else None
        if not (others or isinstance(value, dict)):  # which replace them in the library
            found.named |= self._by_name(_MODELS_OWN, fields.get(_MODELS_OWN) or {})
        if key is None:
            if found.extra is None and any(fields.get(name, {}) != {} for name in _EXTRA):
                found.extra = []
            return
        if isinstance(value, dict):
            found.named |= self._by_name(key, value)
            return
        if not isinstance(value, list):
            raise ConfigError(f"{self.where}: {key} must be a list of tokens, found {type(value).__name__}")
        listed = [self._token(f"{key}[{place}]", token) for place, token in enumerate(value)]
        if not found.extra:
            found.extra = listed
        elif key == _EXTRA[0]:
            found.extra += [token for token in listed if token not in found.extra]

    def _by_name(self, key: str, value: Any) -> dict[str, Token]:
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} must be an object of tokens, found {type(value).__name__}")
        return {str(name): self._token(f"{key}.{name}", token) for name, token in value.items()}

    def by_id(self, value: Any) -> dict[int, AddedToken]:
        """Return the tokens of `added_tokens_decoder`."""
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: added_tokens_decoder must be an object, found {type(value).__name__}")
        found = {}
        for key, entry in value.items():
            name = f"added_tokens_decoder[{key!r}]"
            if not (key.isdecimal() and key.isascii() and len(key) < 10) or not isinstance(entry, dict):
                raise ConfigError(f"{self.where}: {name} must be an id with an object that describes its token")
            token = self._token(name, entry)
            assert isinstance(token, AddedToken)
            found[int(key)] = token
        return found

    def older(self, value: Mapping[str, Any], special: Iterable[str]) -> dict[int, AddedToken]:
        """Return the tokens of added_tokens.json, which maps texts to ids."""
        found = {}
        for text, token in value.items():
            if type(token) is not int or not 0 <= token < 1 << 31:
                raise ConfigError(f"{self.where}: the id of {text!r} must be a non-negative integer, found {token!r}")
            is_special = text in special
            found[token] = AddedToken(text, normalized=not is_special, special=is_special)
        return found

    def _token(self, name: str, value: Any) -> Token:
        if isinstance(value, str):
            return value
        if not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise ConfigError(f"{self.where}: {name} must be a text, or an object with `content`, found {value!r:.80}")
        special = self.special or bool(value.get("special", False))
        flags = {flag: bool(value[flag]) for flag in _FLAGS if value.get(flag) is not None}
        return AddedToken(value["content"], special=special, **flags)


def add_special_tokens(
    tokenizer: Tokenizer,
    tokens: SpecialTokens,
    defaults: Mapping[str, Token | None] | None = None,
    extra: Sequence[Token] = (),
    pieces: Sequence[Token] = (),
) -> dict[str, str]:
    """Add the tokens that a vocabulary lacks; return the texts of those with a name.

    `defaults` and `extra` are a tokenizer class's own tokens, where the files say none; `pieces` are added always.
    """
    named: dict[str, Token | None] = {**dict.fromkeys(NAMES), **(defaults or {}), **tokens.named}
    known = [*tokenizer.get_added_tokens_decoder().values()]
    described = {repr(token) for token in known}
    new: list[Token] = [token for _, token in sorted(tokens.added.items()) if repr(token) not in described]
    present = {token.content for token in known} | {token_text(token) for token in new}
    for token in (*named.values(), *pieces, *(extra if tokens.extra is None else tokens.extra)):
        if token is not None and token_text(token) not in present and token not in new:
            new.append(token)
    texts = {name: token_text(token) for name, token in named.items() if token is not None}
    special = set(texts.values())
    tokenizer.add_tokens([_added(token, token_text(token) in special) for token in new])
    return texts


def _added(token: Token, named: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if named and not token.special:
        flags = {flag: getattr(token, flag) for flag in _FLAGS}
        return AddedToken(token.content, special=True, **flags)
    return token
