"""Token ids that a checkpoint demands or forbids in outputs: how they are read, and checked against the vocabulary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from triptych.model.config.model import GenerationRules, ModelConfig
from triptych.model.errors import ConfigError, listed
from triptych.model.families.table.helpers import ids

_TUPLE = re.compile(r"\(\s*\d{1,9}(\s*,\s*\d{1,9})*,?\s*\)")  # of Python, as a key of JSON


def generation_rules(raw: Mapping[str, Any]) -> GenerationRules:
    """Return the token ids that a checkpoint demands or forbids, which `read_checkpoint` merges into config.json.

    Raises `ConfigError` for what is no token id. Ids beyond the vocabulary are left to `within_vocabulary`.
    """
    eos = [[token] for token in ids(raw.get("eos_token_id"))]
    words = [tuple(word) for word in _banned(raw.get("bad_words_ids")) if word not in eos]
    return GenerationRules(
        forced_first=only_token(raw, "forced_bos_token_id"),
        forced_last=only_token(raw, "forced_eos_token_id"),
        suppressed=(
            *ids(raw.get("suppress_tokens"), "suppress_tokens"),
            *(word[0] for word in words if len(word) == 1),
        ),
        suppressed_first=ids(raw.get("begin_suppress_tokens"), "begin_suppress_tokens"),
        banned_sequences=tuple(word for word in words if len(word) > 1),
        biases=tuple(_biases(raw.get("sequence_bias"))),
    )


def only_token(raw: Mapping[str, Any], key: str) -> int | None:
    """Return a field of at most one token id; raises `ConfigError` for several different ones."""
    found = set(ids(raw.get(key), key))
    if len(found) > 1:
        raise ConfigError(f"{key} with several ids is not served, found {sorted(found)[:8]}")
    return next(iter(found), None)


def _banned(value: object) -> list[list[int]]:
    """Return the sequences of token ids in `bad_words_ids`."""
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(one, list | tuple) for one in value):
        raise ConfigError(f"bad_words_ids must be a list of lists of token ids, found {value!r}"[:200])
    if not all(value):
        raise ConfigError("bad_words_ids holds an empty sequence")
    return [list(ids(one, "bad_words_ids")) for one in value]


def _biases(value: object) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield sequences of tokens and what is added to their last one's logit: `[[[5, 6], -1.0]]`, or `{"(5, 6)": -1.0}`.

    The second way is what `transformers` writes of a dictionary.
    """
    if not value:
        return
    pairs: Iterable[Any] = value.items() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    for pair in pairs:
        tokens, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        if isinstance(tokens, str) and _TUPLE.fullmatch(tokens):
            tokens = [int(one) for one in tokens.strip("()").split(",") if one.strip()]
        if not isinstance(tokens, list) or not tokens or not _is_bias(bias):
            raise ConfigError(f"sequence_bias must be pairs of a list of token ids and a number, found {pair!r}"[:200])
        yield ids(tokens, "sequence_bias"), float(bias or 0)


def _is_bias(value: object) -> bool:
    """Whether it can be added to a logit; infinities can."""
    if isinstance(value, float):
        return not math.isnan(value)
    return type(value) is int and abs(value) < 1 << 100


def within_vocabulary(config: ModelConfig) -> tuple[ModelConfig, list[str]]:
    """Return the configuration without token ids that no output can have, and a sentence for each field that had some.

    Raises `ConfigError` for an id that outputs have to begin or end with, and where every token is forbidden.
    """
    size, rules, warnings = config.embedding.vocab_size, config.generation, list[str]()
    for name, id in (
        ("forced_bos_token_id", rules.forced_first),
        ("forced_eos_token_id", rules.forced_last),
        ("decoder_start_token_id", config.decoder_start_token_id if config.can_generate else None),
    ):
        if id is not None and not 0 <= id < size:
            raise ConfigError(f"{name} must be a token id below {size}, found {id}")

    def kept(name: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
        outside = [token for token in tokens if not 0 <= token < size]
        if outside:
            shown = listed(map(str, outside), most=4)
            warnings.append(f"{name}: {shown} cannot occur, as the vocabulary has {size} tokens")
        return tuple(token for token in tokens if 0 <= token < size) if outside else tokens

    def possible(name: str, tokens: tuple[int, ...]) -> bool:
        return len(kept(name, tokens)) == len(tokens)

    eos = kept("eos_token_id", config.eos_token_ids)
    rules = replace(
        rules,
        suppressed=kept("suppress_tokens or bad_words_ids", rules.suppressed),
        suppressed_first=kept("begin_suppress_tokens", rules.suppressed_first),
        banned_sequences=tuple(one for one in rules.banned_sequences if possible("bad_words_ids", one)),
        biases=tuple(one for one in rules.biases if possible("sequence_bias", one[0])),
    )
    if len(set(rules.suppressed)) >= size > 0:
        raise ConfigError(f"suppress_tokens and bad_words_ids leave none of {size} tokens that may be generated")
    if not warnings:
        return config, warnings
    return replace(config, eos_token_ids=eos, generation=rules), warnings[:8]
