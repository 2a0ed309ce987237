"""What penalties and bans look back at, brought up to date by the tokens that came since. No torch.

A step then costs a sequence what is new, however long its text is. Nothing here depends on blocks: a preempted sequence
keeps its history, and a beam's continuation takes a copy, which shares what was made of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from secrets import randbelow

import numpy as np
from numpy.typing import NDArray

_MODULUS = (1 << 127) - 1  # a prime
_BASE = 1 + randbelow(_MODULUS - 1)  # of this process: nobody can choose texts that are taken for each other

_Followers = dict[int, int | set[int]]  # by the hash of a run: what came after it, nearly always one token


class TokenCounts:
    """Counts tokens: the distinct ones `[N]`, in the order of their first coming, and how often each came `[N]`."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._numbers = np.zeros((2, 16), np.int64)

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._numbers[0, : len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._numbers[1, : len(self._places)]

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == self._numbers.shape[1]:
                self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
            self._numbers[0, place] = token
            self._numbers[1, place] += 1

    def copy(self) -> TokenCounts:
        made = TokenCounts()
        made._places, made._numbers = self._places.copy(), self._numbers.copy()
        return made


class RepeatedRuns:
    """Tells which tokens would let a run of `size` tokens come twice (Paulus et al. 2017).

    Runs of `size - 1` tokens are known by a rolling hash (Karp and Rabin 1987) modulo 2^127 - 1 over a random base:
    that two of a text of 100,000 tokens are taken for each other has a chance of less than 1e-22.
    """

    def __init__(self, size: int, num_prompt_tokens: int) -> None:
        self._length = size - 1  # of the runs
        self._top = pow(_BASE, self._length - 1, _MODULUS) if self._length else 0  # of the oldest token of a run
        self._num_prompt_tokens = num_prompt_tokens
        self._num_read = 0
        self._hash = 0  # of the last run, as far as there were tokens
        self._of_prompt: _Followers = {}  # complete once the prompt is read, and then shared
        self._of_output: _Followers = {}

    def following(self, token_ids: Sequence[int]) -> list[int]:
        """Distinct tokens that have followed the last `size - 1` ones, in no order."""
        self.read(token_ids)
        if self._num_read < self._length:
            return []
        found = (followers.get(self._hash, ()) for followers in (self._of_prompt, self._of_output))
        return list({token for one in found for token in ((one,) if isinstance(one, int) else one)})

    def fork(self) -> RepeatedRuns:
        made = RepeatedRuns(self._length + 1, self._num_prompt_tokens)
        made._num_read, made._hash, made._of_prompt = self._num_read, self._hash, self._of_prompt
        if self._num_read < self._num_prompt_tokens:
            made._of_prompt = _copied(self._of_prompt)
        made._of_output = _copied(self._of_output)
        return made

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in what is new, if anything is: a preempted sequence comes by its tokens again."""
        if len(token_ids) <= self._num_read:
            return
        length, run = self._length, self._hash
        for at in range(self._num_read, len(token_ids)):
            token = token_ids[at]
            if at >= length:
                followers = self._of_prompt if at < self._num_prompt_tokens else self._of_output
                before = followers.setdefault(run, token)
                if isinstance(before, set):
                    before.add(token)
                elif before != token:
                    followers[run] = {before, token}
                run -= (token_ids[at - length] + 1) * self._top
            if length:
                run = (run * _BASE + token + 1) % _MODULUS
        self._num_read, self._hash = len(token_ids), run


def _copied(followers: _Followers) -> _Followers:
    return {run: tokens if isinstance(tokens, int) else tokens.copy() for run, tokens in followers.items()}


class History:
    """One sequence's past. Each method takes the tokens of its whole text, of which it reads those that are new."""

    def __init__(self, num_prompt_tokens: int, no_repeat_ngram_size: int = 0) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._prompt: NDArray[np.int64] | None = None  # its distinct tokens
        self._output = TokenCounts()
        self._num_counted = num_prompt_tokens
        self._runs = RepeatedRuns(no_repeat_ngram_size, num_prompt_tokens) if no_repeat_ngram_size else None

    def seen(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Distinct tokens of the prompt, then distinct ones of the output `[N]`."""
        if self._prompt is None:
            self._prompt = np.unique(np.array(token_ids[: self._num_prompt_tokens], np.int64))
        return np.concatenate([self._prompt, self.output(token_ids).tokens])

    def output(self, token_ids: Sequence[int]) -> TokenCounts:
        """How often each token came in the output."""
        self._output.add(token_ids[self._num_counted :])
        self._num_counted = len(token_ids)
        return self._output

    def repeating(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens by which a run of `no_repeat_ngram_size` would come twice."""
        return self._runs.following(token_ids) if self._runs is not None else []

    def read(self, token_ids: Sequence[int]) -> None:
        """Take in a piece of a long prompt, so that not all of it is left for its last step."""
        if self._runs is not None:
            self._runs.read(token_ids)

    def fork(self) -> History:
        """The same, to go on in another way."""
        made = History(self._num_prompt_tokens)
        made._prompt, made._output, made._num_counted = self._prompt, self._output.copy(), self._num_counted
        made._runs = self._runs.fork() if self._runs is not None else None
        return made
