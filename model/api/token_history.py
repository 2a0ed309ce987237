"""Incremental token counts and n-gram tables of a sequence, for penalties and n-gram bans. No torch.

Each step reads only the new tokens, so its cost does not grow with the sequence. The history does not depend on KV
blocks: a preempted sequence keeps it. A beam's continuation gets a copy that shares the prompt's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from secrets import randbelow

import numpy as np
from numpy.typing import NDArray

_MODULUS = (1 << 127) - 1  # a prime
_BASE = 1 + randbelow(_MODULUS - 1)  # random for each process, so that no client can construct hash collisions

_MANY = 64  # a longer list of tokens is counted at once

_Successors = dict[int, int | set[int]]  # hash of a context -> the tokens that followed it, nearly always one


class TokenCounts:
    """Counts tokens: distinct `tokens` `[N]` and their `counts` `[N]`."""

    def __init__(self) -> None:
        self._columns: dict[int, int] = {}  # by token
        self._table = np.zeros((2, 16), np.int64)  # tokens, counts; the width doubles when it is full

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._table[0, : len(self._columns)]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._table[1, : len(self._columns)]

    def present(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens whose count is above 0, and these counts."""
        there = self.counts > 0
        return self.tokens[there], self.counts[there]

    def add(self, tokens: Sequence[int]) -> None:
        counted: Iterable[tuple[int, int]] = ((token, 1) for token in tokens)
        if len(tokens) > _MANY:
            distinct, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
            counted = zip(distinct.tolist(), counts.tolist(), strict=True)
        for token, count in counted:
            column = self._columns.setdefault(token, len(self._columns))
            if column == self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._table[0, column] = token
            self._table[1, column] += count

    def remove(self, tokens: Iterable[int]) -> None:
        """Take back tokens that were added."""
        for token in tokens:
            self._table[1, self._columns[token]] -= 1

    def copy(self) -> TokenCounts:
        copy = TokenCounts()
        copy._columns, copy._table = self._columns.copy(), self._table.copy()
        return copy


class NgramTable:
    """Finds the tokens that would complete an n-gram of `size` tokens a second time (Paulus et al. 2017).

    Contexts of `size - 1` tokens are identified by a rolling hash (Karp and Rabin 1987) modulo 2^127 - 1 with a random
    base. The probability of a collision within 100,000 tokens is below 1e-22.
    """

    def __init__(self, size: int, num_prompt_tokens: int) -> None:
        self._context_length = size - 1
        # Factor of a context's oldest token in its hash.
        self._oldest_factor = pow(_BASE, self._context_length - 1, _MODULUS) if self._context_length else 0
        self._num_prompt_tokens = num_prompt_tokens
        self._num_read = 0
        self._hash = 0  # of the last context, or of all tokens while there are fewer
        self._prompt_successors: _Successors = {}  # shared between forks once the prompt is read
        self._output_successors: _Successors = {}

    def successors(self, token_ids: Sequence[int]) -> list[int]:
        """Return the distinct tokens that followed an earlier occurrence of the last `size - 1` tokens, unordered."""
        self.read(token_ids)
        if self._num_read < self._context_length:
            return []
        tables = (self._prompt_successors, self._output_successors)
        found = (table.get(self._hash, ()) for table in tables)
        return list({token for tokens in found for token in ((tokens,) if isinstance(tokens, int) else tokens)})

    def fork(self) -> NgramTable:
        """Return an independent copy for another continuation."""
        copy = NgramTable(self._context_length + 1, self._num_prompt_tokens)
        copy._num_read, copy._hash, copy._prompt_successors = self._num_read, self._hash, self._prompt_successors
        if self._num_read < self._num_prompt_tokens:
            copy._prompt_successors = _copy_successors(self._prompt_successors)
        copy._output_successors = _copy_successors(self._output_successors)
        return copy

    def read(self, token_ids: Sequence[int]) -> None:
        """Add the tokens that are new; a preempted sequence passes tokens again that were read before."""
        if len(token_ids) <= self._num_read:
            return
        length, context = self._context_length, self._hash
        for position in range(self._num_read, len(token_ids)):
            token = token_ids[position]
            if position >= length:
                table = self._prompt_successors if position < self._num_prompt_tokens else self._output_successors
                known = table.setdefault(context, token)
                if isinstance(known, set):
                    known.add(token)
                elif known != token:
                    table[context] = {known, token}
                context -= (token_ids[position - length] + 1) * self._oldest_factor
            if length:
                context = (context * _BASE + token + 1) % _MODULUS
        self._num_read, self._hash = len(token_ids), context


def _copy_successors(table: _Successors) -> _Successors:
    return {context: tokens if isinstance(tokens, int) else tokens.copy() for context, tokens in table.items()}


class SourceTokens:
    """The tokens of a source, or of a decoder-only model's prompt, that an output is compared with."""

    def __init__(self, token_ids: Sequence[int], ngram_size: int = 0) -> None:
        """`ngram_size`: no n-gram of this size may occur in the output; 0: any may."""
        self.distinct: NDArray[np.int64] = np.unique(np.array(token_ids, np.int64))
        self._context_length = ngram_size - 1
        self._successors: dict[tuple[int, ...], list[int]] = {}
        if ngram_size:
            for end in range(ngram_size - 1, len(token_ids)):
                context = tuple(token_ids[end - ngram_size + 1 : end])
                self._successors.setdefault(context, []).append(token_ids[end])

    def following(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens that would complete an n-gram of the source; may repeat."""
        if self._context_length < 0 or len(token_ids) < self._context_length:
            return ()
        return self._successors.get(tuple(token_ids[len(token_ids) - self._context_length :]), ())


class History:
    """Token statistics of one sequence. Each method gets all token ids and reads those that are new.

    With a `window`, penalties look at the last `window` tokens of prompt and output, as in llama.cpp.
    """

    def __init__(
        self, num_prompt_tokens: int, no_repeat_ngram_size: int = 0, source: SourceTokens | None = None, window: int = 0
    ) -> None:
        self.source = source
        self._window = window
        self._num_prompt_tokens = num_prompt_tokens
        self._prompt: NDArray[np.int64] | None = None  # its distinct tokens
        self._counts = TokenCounts()  # of the output, or of the window
        self._begin = self._end = 0 if window else num_prompt_tokens  # of the counted tokens
        self._ngrams = NgramTable(no_repeat_ngram_size, num_prompt_tokens) if no_repeat_ngram_size else None

    def seen(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return the distinct tokens of the prompt, then those of the output `[N]`; or those of the window."""
        if self._window:
            return self.counted(token_ids)[0]
        if self._prompt is None:
            self._prompt = np.unique(np.array(token_ids[: self._num_prompt_tokens], np.int64))
        return np.concatenate([self._prompt, self.counted(token_ids)[0]])

    def counted(self, token_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the distinct tokens of the output, or of the window, and how often each is there."""
        begin, end = max(self._begin, len(token_ids) - self._window) if self._window else self._begin, len(token_ids)
        self._counts.remove(token_ids[self._begin : min(begin, self._end)])
        self._counts.add(token_ids[max(begin, self._end) :])
        self._begin, self._end = begin, end
        return self._counts.present() if self._window else (self._counts.tokens, self._counts.counts)

    def repeating(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that would complete an n-gram a second time, or one of the source."""
        repeating = self._ngrams.successors(token_ids) if self._ngrams is not None else []
        return repeating if self.source is None else [*repeating, *self.source.following(token_ids)]

    def read(self, token_ids: Sequence[int]) -> None:
        """Read a chunk of a long prompt early, so that the last step of its prefill does not read all of it."""
        if self._ngrams is not None:
            self._ngrams.read(token_ids)

    def fork(self) -> History:
        """Return an independent copy for another continuation (a beam)."""
        copy = History(self._num_prompt_tokens, source=self.source, window=self._window)
        copy._prompt, copy._counts, copy._begin, copy._end = self._prompt, self._counts.copy(), self._begin, self._end
        copy._ngrams = self._ngrams.fork() if self._ngrams is not None else None
        return copy
