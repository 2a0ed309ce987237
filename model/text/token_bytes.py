"""The bytes that each token of a vocabulary adds to a text, which grammar matching needs.

Decoders may decode a token differently at the beginning of an output (Metaspace and WordPiece drop a space there), so
every token has two forms. Both are found by decoding the token. Only tokens for parts of a character, which do not
decode to text, are read from the vocabulary.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.model.errors import ConfigError
from triptych.model.text.piece_tokenizers import byte_alphabet
from triptych.model.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a token of SentencePiece's byte fallback
_CHECKS, _CHECK_LENGTH = 200, 6  # number and tokens of the random outputs that check the forms


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes of every token `[V]`, in two forms; empty for a token without text (a special token)."""

    first: tuple[bytes, ...]  # as the first token of an output
    later: tuple[bytes, ...]

    def text(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of an output of these tokens."""
        return b"".join([self.first[ids[0]], *(self.later[token] for token in ids[1:])]) if ids else b""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Return the bytes of a model's tokens; those that the tokenizer lacks are empty.

    Raises `ConfigError` if a token's text depends on more than whether it is the first.
    """
    names = tokenizer.token_names(vocab_size)
    decoder = json.dumps(tokenizer.decoder)
    if '"ByteLevel"' in decoder:
        forms = [b"" if name is None else _byte_level(name) for name in names]
        tokens = TokenBytes(tuple(forms), tuple(forms))
    else:
        tokens = _decoded_forms(tokenizer, names)
    _check(tokenizer, tokens)
    return tokens


_ALPHABET = byte_alphabet()


def _byte_level(name: str) -> bytes:
    """Return a byte-level token's bytes; an added token may be outside the alphabet and is then its own text."""
    if all(character in _ALPHABET for character in name):
        return bytes(_ALPHABET[character] for character in name)
    return name.encode()


def part_bytes(tokenizer: Tokenizer, token_id: int) -> bytes | None:
    """Return the bytes of a token that has no text of its own, as part of a character; None if they are not known."""
    name = tokenizer.token_name(token_id)
    if (byte := _BYTE.fullmatch(name)) is not None:
        return bytes([int(byte[1], 16)])
    return _byte_level(name) if name and (_REPLACEMENT in name or _ALPHABET.keys() >= set(name)) else None


def _decoded_forms(tokenizer: Tokenizer, names: Sequence[str | None]) -> TokenBytes:
    """Find both forms of each token by decoding it alone and after another token."""
    ids = [token for token, name in enumerate(names) if name is not None]
    alone = dict(zip(ids, tokenizer.decode_batch([[token] for token in ids]), strict=True))
    anchor = next((token for token in ids if alone[token].isalnum() and not _BYTE.fullmatch(names[token] or "")), None)
    if anchor is None:
        raise ConfigError("no token of its tokenizer is a word")
    prefix = alone[anchor]
    after = dict(zip(ids, tokenizer.decode_batch([[anchor, token] for token in ids]), strict=True))

    def form(token: int, text: str) -> bytes:
        byte = _BYTE.fullmatch(names[token] or "")
        return bytes([int(byte[1], 16)]) if byte and _REPLACEMENT in text else text.encode()

    first = tuple(form(token, alone[token]) if token in alone else b"" for token in range(len(names)))
    later = tuple(
        form(token, after[token][len(prefix) :]) if token in alone and after[token].startswith(prefix) else b""
        for token in range(len(names))
    )
    return TokenBytes(first, later)


def _check(tokenizer: Tokenizer, tokens: TokenBytes) -> None:
    """Raise `ConfigError` unless random outputs of whole characters decode to the bytes of their tokens."""
    whole = [
        token for token in range(len(tokens.first)) if _is_text(tokens.first[token]) and _is_text(tokens.later[token])
    ]
    generator = random.Random(0)
    outputs = [generator.choices(whole, k=_CHECK_LENGTH) for _ in range(_CHECKS if whole else 0)]
    for ids, text in zip(outputs, tokenizer.decode_batch(outputs), strict=True):
        if tokens.text(ids) != text.encode():
            raise ConfigError("its tokenizer shows a token by what follows it")


def _is_text(form: bytes) -> bool:
    try:
        return bool(form.decode())
    except UnicodeDecodeError:
        return False
