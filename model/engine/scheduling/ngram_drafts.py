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

from collections.abc import Sequence

_LENGTHS = (3, 2, 1)  # of n-grams that are looked up, in tokens
_MAX_AGREEMENT = 8  # tokens; more are not told apart
READ_AT_ONCE = 4096  # tokens of prompts that a step reads for drafts, which take 4 ms, 10 where tables grow
_KEY_BITS = 32  # of a token in the key of an n-gram
_LEARNING_RATE = 0.125
_LEAST_CHANCE = 0.1  # of a draft that is worth its row of a step
# How often a place tells the next token at first, by the tokens of agreement: none, 1, 2 or 3, 4 to 7, 8 or more.
_FIRST_RATES = (0.0, 0.25, 0.5, 0.8, 0.9)


class NgramDrafts:
    """Finds the drafts of one sequence."""

    def __init__(self, max_tokens: int, source: tuple[int, ...] = (), prediction: tuple[int, ...] = ()) -> None:
        """At most `max_tokens` are drafted. The output may also copy from a source, and is expected to begin as a
        prediction does, if there is one.
        """
        self.max_tokens = max_tokens
        self._predicted = bool(prediction)
        self._before = prediction + source
        self._tokens: list[int] = []  # of `_before`, then the sequence's, as far as they were read
        self._num_indexed = 0  # tokens that are found by the n-grams before them
        self._places: tuple[dict[int, int], ...] = tuple({} for _ in _LENGTHS)  # of next tokens, by n-gram
        self._rates = list(_FIRST_RATES)
        self._place: int | None = None  # of the token that is expected next
        self._agreement = 0  # tokens before that place that are those at the end, as far as was looked

    def read(self, token_ids: Sequence[int], num_prompt_tokens: int, most: int) -> int:
        """Read at most so many tokens more of what is known before the output; return how many: 0 once all are read.

        Those are the prediction's, the source's and the first `num_prompt_tokens` of `token_ids`.
        """
        before, begin = len(self._before), len(self._tokens)
        end = before + num_prompt_tokens
        stop = min(end, begin + most)
        if stop > begin:
            self._tokens += self._before[begin:stop]
            self._tokens += token_ids[max(0, begin - before) : max(0, stop - before)]
            self._index()
            if stop == end:
                self._look_up()
                if self._predicted:
                    self._place, self._agreement = 0, _MAX_AGREEMENT
        return max(0, stop - begin)

    def propose(self, token_ids: Sequence[int], num_prompt_tokens: int) -> list[int]:
        """Return drafts of what follows `token_ids`, often none; reads the output's that came since the last call.

        There are none until everything before the output is read.
        """
        begin = len(self._tokens) - len(self._before)
        if begin < num_prompt_tokens:
            return []
        for token in token_ids[begin:]:
            if token < 0:
                break  # known to the device alone
            self._take(token)
        return self._drafts()

    def _drafts(self) -> list[int]:
        """Return what is from the expected place on, as far as it is likely enough; it may run into its own copy."""
        if self._place is None:
            return []
        count = self._num_likely()
        drafts = self._tokens[self._place : self._place + count]
        period = len(self._tokens) - self._place
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def _num_likely(self) -> int:
        """Return how many tokens are likely enough, if each is as likely as the first when those before are right."""
        rate, count = self._rates[_grade(self._agreement)], 0
        chance = rate
        while chance >= _LEAST_CHANCE and count < self.max_tokens:
            chance *= rate
            count += 1
        return count

    def _take(self, token: int) -> None:
        """Learn whether the next token is what was expected, and look where the one behind it could be found."""
        if self._place is not None:
            right = self._tokens[self._place] == token
            grade = _grade(self._agreement)
            self._rates[grade] += _LEARNING_RATE * (right - self._rates[grade])
            self._place, self._agreement = (self._place + 1, self._agreement + 1) if right else (None, 0)
        self._tokens.append(token)
        self._index()
        if self._place is None:
            self._look_up()

    def _index(self) -> None:
        """Let the tokens that were read be found by the n-grams before them; there is none behind the last yet."""
        tokens = self._tokens
        thirds, pairs, singles = self._places
        for place in range(max(1, self._num_indexed), len(tokens)):
            key = tokens[place - 1]
            singles[key] = place
            if place > 1:
                key |= tokens[place - 2] << _KEY_BITS
                pairs[key] = place
            if place > 2:
                thirds[key | tokens[place - 3] << 2 * _KEY_BITS] = place
        self._num_indexed = len(tokens)

    def _look_up(self) -> None:
        """Expect what followed the latest occurrence of the last tokens."""
        tokens = self._tokens
        for length, places in zip(_LENGTHS, self._places, strict=True):
            if len(tokens) <= length:
                continue
            key = 0
            for token in tokens[-length:]:
                key = key << _KEY_BITS | token
            place = places.get(key)
            if place is not None:
                while length < min(place, _MAX_AGREEMENT) and tokens[place - 1 - length] == tokens[-1 - length]:
                    length += 1
                self._place, self._agreement = place, length
                return


def _grade(agreement: int) -> int:
    """Return the place of an agreement among the rates."""
    return min(agreement, _MAX_AGREEMENT).bit_length()
