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
    """The only token allowed: the first of a translation, or the end where the length is used up."""
    if rules.forced_last is not None and sequence.num_output_tokens == sequence.params.max_tokens - 1:
        return rules.forced_last
    return rules.forced_first if sequence.num_tokens == 1 else None


def banned_tokens(sequence: SequenceState, rules: GenerationRules) -> list[int]:
    """Tokens that must not come next; may repeat."""
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
    """What the checkpoint adds to logits of next tokens, by token."""
    found: dict[int, float] = {}
    for tokens, bias in rules.biases:
        if len(tokens) == 1 or _completing(sequence.token_ids, (tokens,)):
            found[tokens[-1]] = found.get(tokens[-1], 0.0) + bias
    return found


def allowed_tokens(sequence: SequenceState, banned: Iterable[int]) -> Mask | None:
    """The tokens that its grammar leaves, as a mask over the vocabulary; None where it has none.

    What ends the output is left where the grammar is complete. Bans give way where nothing else is left, and so does
    `min_tokens` where nothing can follow.
    """
    if sequence.matcher is None:
        return None
    may_stop = sequence.num_output_tokens >= sequence.params.min_tokens
    allowed = sequence.matcher.allowed(may_stop=may_stop)
    left = allowed.copy()
    left[list(banned)] = False
    return left if left.any() else allowed


def _begin(sequence: SequenceState, rules: GenerationRules) -> int:
    """Output tokens before the first that is free to be chosen."""
    return int(rules.forced_first is not None and sequence.num_prompt_tokens == 1)


def _completing(token_ids: list[int], sequences: Iterable[Rows[int]]) -> list[int]:
    """Last tokens of the sequences whose beginning the tokens end with."""
    return [words[-1] for words in sequences if token_ids[len(token_ids) - len(words) + 1 :] == list(words[:-1])]
