"""Drafts of a sequence's next tokens: what followed its last tokens where they occurred before. No tensors.

This is prompt lookup (Saxena 2023): text that copies from its prompt, its source or itself is drafted without a model.
A step computes drafts behind the last token, and as many of them are kept as are what would have been sampled. So they
change no output; wrong ones cost their rows of a step.

The place that the text seems to be copied from is followed from token to token. Where the next token differs, another
place is looked up: behind the latest occurrence of the last 3 tokens, else 2, else 1. How often a place tells the next
token is learnt from every token of the output, drafted or not, for each number of tokens on which the texts before
agree. So drafts cease where they are wrong, and begin again where they would have been right, which costs only looks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from model.engine.scheduling.ngram_index import LENGTHS, Hashes, KnownText, NgramTables, hash_end

_MAX_AGREEMENT = 8  # tokens; more are not told apart
READ_AT_ONCE = 4096  # tokens of prompts that a step reads for drafts, which take half a millisecond
_LEARNING_RATE = 0.125
_LEAST_CHANCE = 0.1  # of a draft that is worth its row of a step
# How often a place tells the next token at first, by the tokens of agreement: none, 1, 2 or 3, 4 to 7, 8 or more.
_FIRST_RATES = (0.0, 0.25, 0.5, 0.8, 0.9)


class NgramDrafts:
    """Finds the drafts of one sequence."""

    def __init__(self, max_tokens: int, known: KnownText) -> None:
        """At most `max_tokens` are drafted, from what is known before the output and from itself."""
        self.max_tokens = max_tokens
        self.known = known
        self._tokens = array("i")  # what is known, once it is read, then the output, as far as it was
        self._tables: NgramTables | None = None  # of places in the output; None: nothing of it was read
        self._hashed: Hashes = (0, 0, 0)  # of the last of these tokens
        self._rates = list(_FIRST_RATES)
        self._place: int | None = None  # of the token that is expected next
        self._agreement = 0  # tokens before that place that are those at the end, as far as was looked

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return drafts of what follows `token_ids`, often none; reads the output's that came since the last call.

        There are none until everything before the output is read.
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
        """How likely the first draft is right, if there is one."""
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
        """Return what is from the expected place on, as far as it is likely enough; it may run into its own copy."""
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
        """Learn whether the next token is what was expected, and look where the one behind it could be found."""
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
        """Expect what followed the latest occurrence of the last tokens."""
        last, tokens = self._tokens[-1], self._tokens
        for length, *places in zip(LENGTHS, own.find(self._hashed), self.known.tables.find(self._hashed), strict=True):
            for place in places:
                if place > 0 and tokens[place - 1] == last and (agreement := self._agreement_at(place)) >= length:
                    self._place, self._agreement = place, agreement
                    return

    def _agreement_at(self, place: int) -> int:
        """Return how many tokens before a place are those at the end, as far as it matters."""
        tokens, length = self._tokens, 0
        most = min(place, _MAX_AGREEMENT)
        while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def _grade(agreement: int) -> int:
    """Return the place of an agreement among the rates."""
    return min(agreement, _MAX_AGREEMENT).bit_length()
