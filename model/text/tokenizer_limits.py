"""Refuses tokenizers whose cost grows out of proportion to a text: what a text costs must be bounded by its length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers

from triptych.model.errors import ConfigError

_MAX_WORD = 1_000  # characters of a word that WordPiece splits, which takes the square of it; published ones have 100
_MAX_GROWTH = 1_000  # how many characters the replacements of a tokenizer may make of one
_MAX_ADDED = 1_000  # tokens that a template puts around a text, and characters that a normalizer puts before it


def check_cost(tokenizer: Tokenizer, where: str) -> None:
    """Raise `ConfigError` for a tokenizer with which a short text could take minutes, or all memory."""
    word = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if word > _MAX_WORD:
        raise ConfigError(
            f"{where}: model.max_input_chars_per_word is {word}; at most {_MAX_WORD} are served, as splitting a word "
            "takes the square of its length"
        )
    _check_added(tokenizer, where)
    for name, step in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = 1
        for replacement in _replacements(step):
            growth *= _growth(replacement)
            if growth > _MAX_GROWTH:
                raise ConfigError(
                    f"{where}: the replacements of its {name} can make a text more than {_MAX_GROWTH} times as long"
                )


def _check_added(tokenizer: Tokenizer, where: str) -> None:
    """Refuse what adds much to every text, a short one too."""
    if tokenizer.normalizer is not None:
        steps = _steps(json.loads(tokenizer.normalizer.__getstate__()))
        if sum(len(step["prepend"]) for step in steps if step["type"] == "Prepend") > _MAX_ADDED:
            raise ConfigError(f"{where}: its normalizer puts more than {_MAX_ADDED} characters before a text")
    if tokenizer.post_processor is None:
        return
    growth, added = 1, 0
    for step in _steps(json.loads(tokenizer.post_processor.__getstate__())):
        if step["type"] == "TemplateProcessing":
            tokens = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
            single, pair = (_counted(step[kind], tokens) for kind in ("single", "pair"))
            growth *= max(1, single[0], pair[0])
            added = added * max(1, single[0], pair[0]) + max(single[1], pair[1])
    if growth > _MAX_GROWTH or added > _MAX_ADDED:
        bound = f"more than {_MAX_ADDED} tokens to a text, or the text more than {_MAX_GROWTH} times"
        raise ConfigError(f"{where}: its post_processor adds {bound}")


def _counted(template: list[dict[str, Any]], tokens: dict[str, int]) -> tuple[int, int]:
    """Return how often a template has a text, and how many tokens it adds."""
    special = [piece["SpecialToken"]["id"] for piece in template if "SpecialToken" in piece]
    return len(template) - len(special), sum(tokens.get(name, 0) for name in special)


def _steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a sequence, which may hold sequences."""
    if step["type"] != "Sequence":
        yield step
    for one in step.get("normalizers") or step.get("decoders") or step.get("processors") or ():
        yield from _steps(one)


def _replacements(step: Any) -> Iterator[dict[str, Any]]:
    steps = () if step is None else _steps(json.loads(step.__getstate__()))
    return (one for one in steps if one["type"] == "Replace")


def _growth(step: dict[str, Any]) -> int:
    """Return how many characters a replacement makes of one at most."""
    content, pattern = str(step["content"]), step["pattern"]
    if "String" in pattern:
        return max(1, -(-len(content) // max(1, len(pattern["String"]))))
    matches_nothing = normalizers.Replace(Regex(pattern["Regex"]), "x").normalize_str("") != ""
    return max(1, len(content)) * (2 if matches_nothing else 1)
