"""What each token of a vocabulary adds to a text, as bytes: by this a grammar over texts judges tokens.

Decoders may show a token in another way where the output begins (Metaspace and WordPiece leave a space out there), so
that every token has two forms. They are found by asking the decoder itself; only parts of characters, which no text can
show, are read off the vocabulary.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from model.errors import ConfigError
from model.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of SentencePiece's byte fallback
_CHECKED, _CHECKED_LENGTH = 200, 6  # random outputs by which the forms are checked


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The forms of every token, `[V]`; empty for one that adds nothing (a special token)."""

    first: tuple[bytes, ...]  # where the output begins
    later: tuple[bytes, ...]

    def text(self, ids: Sequence[int]) -> bytes:
        """What an output of these tokens reads."""
        return b"".join([self.first[ids[0]], *(self.later[token] for token in ids[1:])]) if ids else b""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """The forms of a model's tokens; those that only the model knows are empty.

    Raises `ConfigError` where a token's text depends on more than whether it is the first.
    """
    names = tokenizer.token_names(vocab_size)
    decoder = json.dumps(tokenizer.decoder)
    if '"ByteLevel"' in decoder:
        forms = [b"" if name is None else _byte_level(name) for name in names]
        found = TokenBytes(tuple(forms), tuple(forms))
    else:
        found = _probed(tokenizer, names)
    _check(tokenizer, found)
    return found


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _byte_level(name: str) -> bytes:
    """An added token need not be spelt in the alphabet: it then stands for itself."""
    if all(character in _ALPHABET for character in name):
        return bytes(_ALPHABET[character] for character in name)
    return name.encode()


def _probed(tokenizer: Tokenizer, names: Sequence[str | None]) -> TokenBytes:
    """Each token decoded alone, and behind another one."""
    ids = [token for token, name in enumerate(names) if name is not None]
    alone = dict(zip(ids, tokenizer.decode_batch([[token] for token in ids]), strict=True))
    anchor = next((token for token in ids if alone[token].isalnum() and not _BYTE.fullmatch(names[token] or "")), None)
    if anchor is None:
        raise ConfigError("no token of its tokenizer is a word")
    before = alone[anchor]
    behind = dict(zip(ids, tokenizer.decode_batch([[anchor, token] for token in ids]), strict=True))

    def form(token: int, text: str) -> bytes:
        byte = _BYTE.fullmatch(names[token] or "")
        return bytes([int(byte[1], 16)]) if byte and _REPLACEMENT in text else text.encode()

    first = tuple(form(token, alone[token]) if token in alone else b"" for token in range(len(names)))
    later = tuple(
        form(token, behind[token][len(before) :]) if token in alone and behind[token].startswith(before) else b""
        for token in range(len(names))
    )
    return TokenBytes(first, later)


def _check(tokenizer: Tokenizer, found: TokenBytes) -> None:
    """Random outputs of whole characters read as the forms say."""
    whole = [
        token for token in range(len(found.first)) if _is_text(found.first[token]) and _is_text(found.later[token])
    ]
    draw = random.Random(0)
    outputs = [draw.choices(whole, k=_CHECKED_LENGTH) for _ in range(_CHECKED if whole else 0)]
    for ids, text in zip(outputs, tokenizer.decode_batch(outputs), strict=True):
        if found.text(ids) != text.encode():
            raise ConfigError("its tokenizer shows a token by what follows it")


def _is_text(form: bytes) -> bool:
    try:
        return bool(form.decode())
    except UnicodeDecodeError:
        return False
