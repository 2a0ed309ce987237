"""Which tokens a sequence must or must not take next, by its checkpoint's rules and its request. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from triptych.model.config.model import GenerationRules
from triptych.model.engine.scheduling.sequence import SequenceState

if TYPE_CHECKING:
    from triptych.model.text.grammar_matcher import Mask


def forced_token(sequence: SequenceState, rules: GenerationRules) -> int | None:
    """Return the only token allowed, if any: the first of a translation, or the end at the maximum length."""
    if rules.forced_last is not None and sequence.num_output_tokens == sequence.params.max_tokens - 1:
        return rules.forced_last
    return rules.forced_first if sequence.num_tokens == 1 else None


def banned_tokens(sequence: SequenceState, rules: GenerationRules) -> list[int]:
    """Return the tokens that must not come next, with repetitions."""
    params = sequence.params
    banned = [*rules.suppressed, *params.suppress_tokens]
    if sequence.num_output_tokens == _begin(sequence, rules):
        banned += rules.suppressed_first
        banned += params.begin_suppress_tokens
    if sequence.num_output_tokens < params.min_tokens:
        banned += sequence.stop_token_ids
    banned += _completing(sequence.token_ids, rules.banned_sequences)
    if sequence.history is not None:
        banned += sequence.history.repeating(sequence.token_ids)
    return banned


def biases(sequence: SequenceState, rules: GenerationRules) -> dict[int, float]:
    """Return what the checkpoint's rules add to the logits of the next token, by token."""
    found: dict[int, float] = {}
    for tokens, bias in rules.biases:
        if len(tokens) == 1 or _completing(sequence.token_ids, (tokens,)):
            found[tokens[-1]] = found.get(tokens[-1], 0.0) + bias
    return found


def allowed_tokens(sequence: SequenceState, banned: Iterable[int]) -> Mask | None:
    """Return the tokens that the sequence's grammar allows, as a mask `[V]`; None without a grammar.

    End tokens are allowed once the grammar is complete. If nothing else is allowed, bans are lifted, and so is
    `min_tokens` if nothing can follow.
    """
    if sequence.matcher is None:
        return None
    may_stop = sequence.num_output_tokens >= sequence.params.min_tokens
    allowed = sequence.matcher.allowed(may_stop=may_stop)
    left = allowed.copy()
    left[list(banned)] = False
    return left if left.any() else allowed


def _begin(sequence: SequenceState, rules: GenerationRules) -> int:
    """Return how many output tokens the checkpoint forces before the first free one."""
    return int(rules.forced_first is not None and sequence.num_prompt_tokens == 1)


def _completing(token_ids: list[int], sequences: Iterable[Rows[int]]) -> list[int]:
    """Return the last token of each of the `sequences` that `token_ids` ends with, but for that token."""
    return [words[-1] for words in sequences if token_ids[len(token_ids) - len(words) + 1 :] == list(words[:-1])]
