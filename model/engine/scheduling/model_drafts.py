"""How many of a sequence's next tokens a draft model says, and what it has computed of the sequence. No tensors.

A small model of the same vocabulary says the next tokens one by one, and a step of the served model computes them all
(Leviathan et al. 2023; Chen et al. 2023), keeping as many as are what it would have sampled. It has keys and values of
its own in pages that are numbered as those of the served model's first pool: a block holds the same tokens in both. It
computes them later, when it is to say something, and what they were computed of is remembered by block, so that
prefixes that are found are found for both. What it has not computed, or not any more, costs its drafts, nothing else.

Drafts are worth it by how often they are right and what they cost: a pass of the small model over a step of the large
one. Where they are not, one is tried now and then, ever more seldom.
"""

from __future__ import annotations

from collections.abc import Sequence

COMPUTED_AT_ONCE = 256  # tokens that a step computes by the draft model at most, behind which it may say something
_LEARNING_RATE = 0.125
_SHARED_LEARNING_RATE = 0.05
_FIRST_RATE = 0.7  # of drafts that are right, before any was
_FIRST_COST = 0.15  # of a pass in steps, before it is measured
_ROW_COST = 0.02  # of a row of a step in steps
_LONGEST_PAUSE = 128  # tokens between drafts where none is worth it


class DraftOdds:
    """What all sequences of a model have learnt of its draft model."""

    def __init__(self) -> None:
        self.rate = _FIRST_RATE  # of drafts that are right
        self.pause = 1  # tokens from one draft that is not worth it to the next
        self._wait = 0
        self._pass_seconds: float | None = None
        self._step_seconds: float | None = None

    @property
    def cost(self) -> float:
        """Of one more draft of each sequence, in steps without drafts."""
        if not self._pass_seconds or not self._step_seconds:
            return _FIRST_COST
        return self._pass_seconds / self._step_seconds + _ROW_COST

    def measured(self, *, pass_seconds: float | None = None, step_seconds: float | None = None) -> None:
        """Take the time of a pass over one token of each sequence, or of a step of the served model."""
        if pass_seconds is not None:
            self._pass_seconds = _mean(self._pass_seconds, pass_seconds)
        if step_seconds is not None:
            self._step_seconds = _mean(self._step_seconds, step_seconds)

    def learn(self, *, right: bool) -> None:
        self.rate += _SHARED_LEARNING_RATE * (right - self.rate)

    def is_turn(self) -> bool:
        """Whether one draft is to be tried, though it is not worth it, before one more token."""
        self._wait = max(0, self._wait - 1)
        return not self._wait

    def begin_trial(self) -> None:
        self._wait = self.pause

    def tried(self, *, right: bool) -> None:
        """Try again soon behind one that was right, later behind one that was wrong."""
        self.pause = 1 if right else min(_LONGEST_PAUSE, 2 * self.pause)
        self._wait = self.pause


class DraftPages:
    """By the content's hash, which blocks of the draft model's cache are filled."""

    def __init__(self) -> None:
        self._filled: dict[int, bytes] = {}

    def clear(self) -> None:
        self._filled.clear()

    def find(self, table: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Return how many blocks of a sequence are filled, from its first on."""
        pairs = enumerate(zip(table, hashes, strict=False))
        most = min(len(table), len(hashes))
        return next((at for at, (block, digest) in pairs if self._filled.get(block) != digest), most)

    def write(self, blocks: Sequence[int]) -> None:
        """Forget what these held: something else is written there."""
        for block in blocks:
            self._filled.pop(block, None)

    def fill(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Remember what whole blocks hold."""
        self._filled.update(zip(blocks, hashes, strict=False))


class ModelDrafts:
    """What a draft model has computed of one sequence, and how often it was right."""

    def __init__(self, max_tokens: int, odds: DraftOdds, context: int | None = None) -> None:
        """At most `max_tokens` are drafted, up to `context` tokens of the sequence: the draft model's; None: no end."""
        self.max_tokens = max_tokens
        self.odds = odds
        self.context = context
        self.num_computed = 0  # tokens whose keys and values are in the draft model's cache
        self.num_filled = 0  # of its blocks, remembered as filled
        self.rate = odds.rate  # of its drafts that are right
        self._num_tokens = 0  # of the sequence when it was drafted last
        self._num_drafted = 0  # in a step that was not heard of yet
        self._is_trial = False

    def wanted(self, num_tokens: int, most: int) -> int:
        """Return how many drafts, `most` at most, are worth it behind so many tokens."""
        most = min(most, self.max_tokens)
        if self.context is not None:
            most = min(most, self.context - num_tokens)
        if most < 1:
            return 0
        count = self._num_worth(most)
        self._is_trial = not count and self.odds.is_turn()
        return count or int(self._is_trial)

    def _num_worth(self, most: int) -> int:
        """Return for how many drafts a step says the most tokens in its time.

        `1 + r + ... + r^k` tokens take `1 + k c` steps, if each draft is right as often as the first, `r`.
        """
        cost, tokens, chance, count = self.odds.cost, 1.0, self.rate, 0
        while count < most and chance * (1 + count * cost) > cost * tokens:
            tokens += chance
            chance *= self.rate
            count += 1
        return count

    def begin(self, num_tokens: int) -> int:
        """Go on behind so many tokens, and return how many of them are computed: of drafts that were not heard of, as
        they may be where a step has failed, none is believed.
        """
        if self._num_drafted:
            self.num_computed = min(self.num_computed, self._num_tokens)
        self._num_tokens, self._num_drafted = num_tokens, 0
        return self.num_computed

    def ask(self, count: int) -> None:
        """Let so many drafts be said."""
        self._num_drafted = count
        if self._is_trial and count:
            self.odds.begin_trial()

    def computed(self, num_tokens: int, num_said: int) -> None:
        """Take of how many tokens, with drafts, there are keys and values now, and how many drafts were said."""
        self.num_computed, self._num_drafted = num_tokens, num_said

    def verified(self, num_accepted: int) -> bool:
        """Learn from the drafts of a step, of which so many were right; return whether they were the draft model's."""
        drafted, self._num_drafted = self._num_drafted, 0
        if not drafted:
            return False
        self.num_computed = min(self.num_computed, self._num_tokens + num_accepted)
        for place in range(min(drafted, num_accepted + 1)):
            right = place < num_accepted
            self.rate += _LEARNING_RATE * (right - self.rate)
            self.odds.learn(right=right)
        if self._is_trial:
            self.odds.tried(right=num_accepted > 0)
        return True

    def restart(self) -> None:
        """Forget what was computed: the sequence has lost its blocks."""
        self.num_computed = self.num_filled = self._num_drafted = 0


def _mean(before: float | None, now: float) -> float:
    """Return a moving mean, in which a single long time, such as that of a first call, counts little."""
    if before is None or now < before / 2:
        return now
    return before + _LEARNING_RATE * (min(now, 4 * before) - before)
