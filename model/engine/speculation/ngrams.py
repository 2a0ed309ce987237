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

import numpy as np

# -- Finds where the last tokens of a text occurred before, in arrays of four bytes a number. No tensors. A place is the
# index of a token, found by the n-gram before it. Tables are direct-mapped: n-grams with the same slot overwrite each
# other, so a reader compares the tokens at the place, and an older place may be lost. There are at least twice as many
# slots as places, so few are lost.

LENGTHS = (3, 2, 1)  # of n-grams that are looked up, in tokens
_NOWHERE = -1
_LEAST_SLOTS = 64
_FACTOR = 0x9E3779B97F4A7C15  # of multiplicative hashing (Knuth): 2^64 / the golden ratio
_WORD = (1 << 64) - 1
_SHIFT = 32  # of a hash, whose upper bits are the better ones

Hashes = tuple[int, int, int]  # of the last tokens, for each of `LENGTHS`


class NgramTables:
    """The latest places by the n-grams before them, for each of `LENGTHS`."""

    def __init__(self, begin: int, num_places: int = 0) -> None:
        """Keep places from `begin` on, with room for `num_places` at first."""
        self._begin = self._end = max(1, begin)  # nothing is before the first token
        self._make(num_places)

    def _make(self, num_places: int) -> None:
        self._size = max(_LEAST_SLOTS, 1 << (2 * num_places - 1).bit_length())
        self._tables = tuple(array("i", [_NOWHERE]) * self._size for _ in LENGTHS)

    @property
    def nbytes(self) -> int:
        return sum(table.itemsize * len(table) for table in self._tables)

    def index(self, tokens: array[int]) -> None:
        """Add the tokens that are new to the index."""
        begin, self._end = self._end, max(self._end, len(tokens))
        if 2 * (self._end - self._begin) > self._size:
            self._make(2 * (self._end - self._begin))
            begin = self._begin
        if self._end > begin:
            self._index_many(tokens, begin)

    def put(self, hashed: Hashes, tokens: array[int]) -> None:
        """Add one token, by the hashes of the tokens before it."""
        place = self._end
        if 2 * (place - self._begin) >= self._size:
            return self.index(tokens)
        self._end = place + 1
        thirds, pairs, singles = self._tables
        third, pair, single = hashed
        slots = self._size - 1
        thirds[third & slots] = pairs[pair & slots] = singles[single & slots] = place
        return None

    def _index_many(self, tokens: array[int], begin: int) -> None:
        """Index the tokens from `begin` on."""
        first = max(0, begin - LENGTHS[0])
        ids = np.array(tokens[first:-1], np.uint64)
        hashed = np.zeros(len(ids) + 1, np.uint64)
        for length, table in zip(reversed(LENGTHS), reversed(self._tables), strict=True):
            # Entry i is of the n-gram that ends before place first + length + i.
            hashed = (hashed[1:] ^ ids[: len(ids) + 1 - length]) * np.uint64(_FACTOR)
            known = max(0, begin - first - length)
            slots = (hashed[known:] >> np.uint64(_SHIFT)) & np.uint64(self._size - 1)
            places = np.arange(first + length + known, len(tokens), dtype=np.int32)
            np.frombuffer(table, np.int32)[slots] = places  # of equal slots the last place stays

    def find(self, hashed: Hashes) -> tuple[int, int, int]:
        """Return a place for each of `LENGTHS` by the hashes of the n-grams before it; a negative number for none."""
        thirds, pairs, singles = self._tables
        third, pair, single = hashed
        slots = self._size - 1
        return thirds[third & slots], pairs[pair & slots], singles[single & slots]


def hash_end(tokens: array[int]) -> Hashes:
    """Hash the last tokens of a text, once for each of `LENGTHS`; the hash of too short a text means nothing."""
    count = len(tokens)
    single = tokens[-1] * _FACTOR & _WORD
    pair = (single ^ tokens[-2]) * _FACTOR & _WORD if count > 1 else 0
    third = (pair ^ tokens[-3]) * _FACTOR & _WORD if count > 2 else 0
    return third >> _SHIFT, pair >> _SHIFT, single >> _SHIFT


class KnownText:
    """The text before the outputs of a request, indexed for drafts."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        source: tuple[int, ...] = (),
        prediction: tuple[int, ...] = (),
        continued: tuple[int, int] | None = None,
    ) -> None:
        """`prediction`: what an output is expected to begin with.

        `continued`: the part of the source, or else of the prompt, that the output continues. It is put last, so that
        what follows its last tokens elsewhere, in a suffix too, is proposed first.
        """
        if continued is None:
            text = source + prompt
        else:
            (begin, end), whole = continued, source or prompt
            text = whole[:begin] + whole[end:] + whole[begin:end]
        self._token_ids = prediction + text
        self.tokens = array("i")  # the part that was indexed
        self.tables = NgramTables(0, len(self._token_ids))
        self.is_predicted = bool(prediction)

    @property
    def is_read(self) -> bool:
        return len(self.tokens) == len(self._token_ids)

    def read(self, most: int) -> int:
        """Index at most `most` tokens more; return how many: 0 once all are indexed."""
        begin = len(self.tokens)
        self.tokens.extend(self._token_ids[begin : begin + most])
        self.tables.index(self.tokens)
        return len(self.tokens) - begin


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
