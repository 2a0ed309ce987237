"""Proposes a sequence's next tokens: what followed its last tokens where they occurred before. No tensors.

This is prompt lookup (Saxena 2023): it drafts text that copies from its prompt, its source or itself, without a model.
A step verifies the drafts and accepts those that would have been sampled anyway. Drafts change no output; a rejected
draft costs its row of the step.

A match is the place that the text seems to be copied from; it moves on with each token. When a token differs, a new
match is looked up: after the latest occurrence of the last 3 tokens, else 2, else 1. For each length of agreement the
acceptance rate is learnt from every token of the output, drafted or not. So drafts stop where they would be rejected
and start again where they would be accepted, at the cost of a lookup.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from model.engine.scheduling.ngram_index import LENGTHS, Hashes, KnownText, NgramTables, hash_end

_MAX_AGREEMENT = 8  # tokens; more are not told apart
READ_AT_ONCE = 4096  # tokens of prompts that a step indexes, in half a millisecond
_LEARNING_RATE = 0.125
_LEAST_CHANCE = 0.1  # of being accepted, for a draft to be worth its row of a step
# Assumed acceptance rates at first, by the tokens of agreement: none, 1, 2 or 3, 4 to 7, 8 or more.
_FIRST_RATES = (0.0, 0.25, 0.5, 0.8, 0.9)


class NgramDrafts:
    """Proposes the drafts of one sequence."""

    def __init__(self, max_tokens: int, known: KnownText) -> None:
        """Propose at most `max_tokens` tokens, found in the `known` text before the output or in the output itself."""
        self.max_tokens = max_tokens
        self.known = known
        self._tokens = array("i")  # the known text, then the part of the output that was indexed
        self._tables: NgramTables | None = None  # of places in the output; None: nothing of it was indexed
        self._hashed: Hashes = (0, 0, 0)  # of the last of these tokens
        self._rates = list(_FIRST_RATES)
        self._place: int | None = None  # the match: where the token that is expected next was found
        self._agreement = 0  # tokens before the match that equal the last tokens, counted up to a maximum

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return drafts of what follows `token_ids`, often none; index what the output gained since the last call.

        There are none until the known text is indexed.
        """
        if not self.known.is_read:
            return []
        if self._tables is None:
            self._tables = self._begin()
        for token in token_ids[num_prompt_tokens + len(self._tokens) - len(self.known.tokens) :]:
            if token < 0:
                break  # known to the device alone
            self._take(token, self._tables)
        return self._drafts()

    @property
    def chance(self) -> float:
        """The probability that the first draft is accepted, if there is one."""
        return self._rates[_grade(self._agreement)]

    def _begin(self) -> NgramTables:
        self._tokens = self.known.tokens[:]
        self._hashed = hash_end(self._tokens)
        tables = NgramTables(len(self._tokens))
        self._look_up(tables)
        if self.known.is_predicted:
            self._place, self._agreement = 0, _MAX_AGREEMENT
        return tables

    def _drafts(self) -> list[int]:
        """Return the tokens from the match on that are likely enough; they may run into their own copy."""
        if self._place is None:
            return []
        count = self._num_likely()
        drafts = list(self._tokens[self._place : self._place + count])
        period = len(self._tokens) - self._place
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def _num_likely(self) -> int:
        """Return how many tokens are likely enough, if each is as likely as the first when those before are right."""
        rate, count = self.chance, 0
        chance = rate
        while chance >= _LEAST_CHANCE and count < self.max_tokens:
            chance *= rate
            count += 1
        return count

    def _take(self, token: int, tables: NgramTables) -> None:
        """Learn whether the next token is the expected one; if not, look up a new match."""
        if self._place is not None:
            right = self._tokens[self._place] == token
            grade = _grade(self._agreement)
            self._rates[grade] += _LEARNING_RATE * (right - self._rates[grade])
            self._place, self._agreement = (self._place + 1, self._agreement + 1) if right else (None, 0)
        self._tokens.append(token)
        tables.put(self._hashed, self._tokens)
        self._hashed = hash_end(self._tokens)
        if self._place is None:
            self._look_up(tables)

    def _look_up(self, own: NgramTables) -> None:
        """Match the latest earlier occurrence of the last tokens."""
        last, tokens = self._tokens[-1], self._tokens
        for length, *places in zip(LENGTHS, own.find(self._hashed), self.known.tables.find(self._hashed), strict=True):
            for place in places:
                if place > 0 and tokens[place - 1] == last and (agreement := self._agreement_at(place)) >= length:
                    self._place, self._agreement = place, agreement
                    return

    def _agreement_at(self, place: int) -> int:
        """Return how many tokens before a place equal the last tokens, up to a maximum."""
        tokens, length = self._tokens, 0
        most = min(place, _MAX_AGREEMENT)
        while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def _grade(agreement: int) -> int:
    """Return the index of an agreement among the rates."""
    return min(agreement, _MAX_AGREEMENT).bit_length()
