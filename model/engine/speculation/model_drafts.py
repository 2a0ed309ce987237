"""Decides how many tokens a draft model proposes for a sequence, and tracks its KV cache. No tensors.

A small model of the same vocabulary proposes the next tokens one by one. One step of the served model verifies them
all and accepts those that it would have sampled itself (Leviathan et al. 2023; Chen et al. 2023).

The draft model's KV cache uses the block numbers of the served model's first pool, so a block holds the same tokens in
both. The draft model fills a block only when it has to propose. Filled blocks are remembered by hash, so a cached
prefix is found for both models. A block that it has not filled costs time, never correctness.

The number of drafts follows from the acceptance rate and from the cost of a pass of the small model, in steps of the
large one. Where drafts do not pay, a single one is tried now and then, less and less often.
"""

from __future__ import annotations

from collections.abc import Sequence

COMPUTED_AT_ONCE = 256  # tokens that the draft model computes at most in a step
_LEARNING_RATE = 0.125
_SHARED_LEARNING_RATE = 0.05
_FIRST_RATE = 0.7  # assumed acceptance rate before the first draft
_FIRST_COST = 0.15  # assumed cost of a pass, in steps, before it is measured
_ROW_COST = 0.02  # of one row of a step, in steps
_LONGEST_PAUSE = 128  # tokens between two trials where drafts do not pay


class DraftOdds:
    """The acceptance rate and cost of a draft model, shared by all sequences."""

    def __init__(self) -> None:
        self.rate = _FIRST_RATE  # of accepted drafts
        self.pause = 1  # tokens from one trial to the next
        self._wait = 0
        self._pass_seconds: float | None = None
        self._step_seconds: float | None = None

    @property
    def cost(self) -> float:
        """The cost of one more draft of each sequence, in steps without drafts."""
        if not self._pass_seconds or not self._step_seconds:
            return _FIRST_COST
        return self._pass_seconds / self._step_seconds + _ROW_COST

    def measured(self, *, pass_seconds: float | None = None, step_seconds: float | None = None) -> None:
        """Learn the time of a pass over one token of each sequence, or of a step of the served model."""
        if pass_seconds is not None:
            self._pass_seconds = _mean(self._pass_seconds, pass_seconds)
        if step_seconds is not None:
            self._step_seconds = _mean(self._step_seconds, step_seconds)

    def learn(self, *, right: bool) -> None:
        self.rate += _SHARED_LEARNING_RATE * (right - self.rate)

    def is_turn(self) -> bool:
        """Whether this token's turn for a trial has come: one draft although drafts do not pay."""
        self._wait = max(0, self._wait - 1)
        return not self._wait

    def begin_trial(self) -> None:
        self._wait = self.pause

    def tried(self, *, right: bool) -> None:
        """Set the pause after a trial: short if the draft was accepted, twice as long if it was not."""
        self.pause = 1 if right else min(_LONGEST_PAUSE, 2 * self.pause)
        self._wait = self.pause


class DraftPages:
    """The filled blocks of the draft model's cache, by the hash of their content."""

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
        self.rate = odds.rate  # of accepted drafts
        self._num_tokens = 0  # of the sequence when drafts were proposed last
        self._num_drafted = 0  # in a step that is still in flight
        self._is_trial = False

    def wanted(self, num_tokens: int, most: int) -> int:
        """Return how many drafts to propose after `num_tokens` tokens, at most `most`."""
        most = min(most, self.max_tokens)
        if self.context is not None:
            most = min(most, self.context - num_tokens)
        if most < 1:
            return 0
        count = self._num_worth(most)
        self._is_trial = not count and self.odds.is_turn()
        return count or int(self._is_trial)

    def _num_worth(self, most: int) -> int:
        """Return the number of drafts that gives the most tokens per second.

        With acceptance rate r and cost c, k drafts give `1 + r + ... + r^k` tokens in the time of `1 + k c` steps.
        """
        cost, tokens, chance, count = self.odds.cost, 1.0, self.rate, 0
        while count < most and chance * (1 + count * cost) > cost * tokens:
            tokens += chance
            chance *= self.rate
            count += 1
        return count

    def begin(self, num_tokens: int) -> int:
        """Start a run after `num_tokens` tokens; return how many of them are in the draft model's cache.

        Drafts of a failed step are discarded.
        """
        if self._num_drafted:
            self.num_computed = min(self.num_computed, self._num_tokens)
        self._num_tokens, self._num_drafted = num_tokens, 0
        return self.num_computed

    def ask(self, count: int) -> None:
        """Record that `count` drafts will be proposed in this step."""
        self._num_drafted = count
        if self._is_trial and count:
            self.odds.begin_trial()

    def computed(self, num_tokens: int, num_proposed: int) -> None:
        """Record how many tokens are in the cache, drafts included, and how many drafts were proposed."""
        self.num_computed, self._num_drafted = num_tokens, num_proposed

    def verified(self, num_accepted: int) -> bool:
        """Learn from a step that accepted `num_accepted` drafts; return whether the draft model proposed them."""
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
        """Start again, after the sequence has lost its blocks."""
        self.num_computed = self.num_filled = self._num_drafted = 0


def _mean(before: float | None, now: float) -> float:
    """Return a moving mean that a single long time, such as that of a first call, changes little."""
    if before is None or now < before / 2:
        return now
    return before + _LEARNING_RATE * (min(now, 4 * before) - before)
