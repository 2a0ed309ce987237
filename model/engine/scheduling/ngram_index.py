"""Finds where the last tokens of a text occurred before, in arrays of four bytes a number. No tensors.

A place is the index of a token, found by the n-gram before it. Tables are direct-mapped: n-grams with the same slot
overwrite each other, so a reader compares the tokens at the place, and an older place may be lost. There are at least
twice as many slots as places, so few are lost.
"""

from __future__ import annotations

from array import array

import numpy as np

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
        """Let the tokens that are new be found."""
        begin, self._end = self._end, max(self._end, len(tokens))
        if 2 * (self._end - self._begin) > self._size:
            self._make(2 * (self._end - self._begin))
            begin = self._begin
        if self._end > begin:
            self._index_many(tokens, begin)

    def put(self, hashed: Hashes, tokens: array[int]) -> None:
        """The same of one token, by the hashes of what is before it."""
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

    def __init__(self, prompt: tuple[int, ...], source: tuple[int, ...] = (), prediction: tuple[int, ...] = ()) -> None:
        """`prediction`: what an output is expected to begin with."""
        self._token_ids = prediction + source + prompt
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
