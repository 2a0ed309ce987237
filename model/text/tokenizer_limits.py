"""Refuses tokenizers whose cost grows out of proportion to a text: what a text costs must be bounded by its length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers

from model.errors import ConfigError

_MAX_WORD = 1_000  # characters of a word that WordPiece splits, which takes the square of it; published ones have 100
_MAX_GROWTH = 1_000  # how many characters the replacements of a tokenizer may make of one


def check_cost(tokenizer: Tokenizer, where: str) -> None:
    """Raise `ConfigError` for a tokenizer with which a short text could take minutes, or all memory."""
    word = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if word > _MAX_WORD:
        raise ConfigError(
            f"{where}: model.max_input_chars_per_word is {word}; at most {_MAX_WORD} are served, as splitting a word "
            "takes the square of its length"
        )
    for name, step in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = 1
        for replacement in _replacements(json.loads(step.__getstate__()) if step is not None else {}):
            growth *= _growth(replacement)
            if growth > _MAX_GROWTH:
                raise ConfigError(
                    f"{where}: the replacements of its {name} can make a text more than {_MAX_GROWTH} times as long"
                )


def _replacements(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = step.get("normalizers") or step.get("decoders") or ()
    for one in inner:
        yield from _replacements(one)
    if step.get("type") == "Replace":
        yield step


def _growth(step: dict[str, Any]) -> int:
    """Return how many characters a replacement makes of one at most."""
    content, pattern = str(step["content"]), step["pattern"]
    if "String" in pattern:
        return max(1, -(-len(content) // max(1, len(pattern["String"]))))
    matches_nothing = normalizers.Replace(Regex(pattern["Regex"]), "x").normalize_str("") != ""
    return max(1, len(content)) * (2 if matches_nothing else 1)
