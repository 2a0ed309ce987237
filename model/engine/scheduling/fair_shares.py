"""Shares one model's engine among tenants, by the tokens computed for each. Policy only: no tensors, no clock.

With sequences of one tenant nothing here has any effect. Among several tenants, at equal priority:

- the next sequence to be admitted is that of the tenant with the fewest computed tokens since its arrival;
- a tenant below its share of the places, or of the KV cache, takes them from one above its share;
- if several have prompts in a step, each gets at most as many of its tokens as the shortest prompt needs. The tenant
  with the fewest computed tokens gets up to 3/4 of the step. So a short prompt is in a short step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from triptych.model.engine.scheduling.sequence import SequenceState

_LEAST_PROMPT = 32  # tokens of a step that a tenant may have for prompts, however short the prompts of others are


class FairShares:
    """The tenants whose sequences are in the scheduler, and what was computed for each."""

    def __init__(self) -> None:
        self.are_several = False
        self.allowed: dict[str, int] = {}  # tokens of prompts in this step, by tenant; empty: not limited
        self._only: str | None = None
        self._served: dict[str, int] = {}  # tokens computed, by tenant; a new one begins with the least of them
        self._places: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # tokens of waiting sequences
        self._prompts: Counter[str] = Counter()  # running prompts

    def came(self, sequence: SequenceState) -> None:
        """Note the tenant of a sequence that was enqueued."""
        if sequence.request.tenant != self._only:
            self.are_several = True

    def look(self, running: Iterable[SequenceState], waiting: Iterable[SequenceState]) -> None:
        """Count the places and tokens of each tenant, at the beginning of a step."""
        self.allowed = {}
        self._places, self._tokens, self._waiting = Counter(), Counter(), Counter()
        for sequence in (one for one in waiting if not one.is_background):
            self._waiting[sequence.request.tenant] += sequence.num_uncomputed_tokens
        for sequence in (one for one in running if not one.is_background):
            self._places[sequence.request.tenant] += sequence.num_slots
            self._tokens[sequence.request.tenant] += sequence.num_computed_tokens
        active = {*self._places, *self._waiting}
        self.are_several = len(active) > 1
        if not self.are_several:
            self._only = next(iter(active), None)
            self._served.clear()
            return
        least = min((self._served[one] for one in active if one in self._served), default=0)
        self._served = {one: self._served.get(one, least) for one in active}

    def serve(self, sequence: SequenceState, num_tokens: int) -> None:
        """Count tokens that this step computes for a sequence."""
        if sequence.request.tenant in self._served:
            self._served[sequence.request.tenant] += num_tokens

    def in_turn(self, waiting: Sequence[SequenceState]) -> Iterator[SequenceState]:
        """Yield waiting sequences, which are sorted by priority, in the order in which they are to be admitted."""
        levels: dict[tuple[int, ...], dict[str, deque[SequenceState]]] = {}
        for sequence in waiting:
            queues = levels.setdefault(_level(sequence), {})
            queues.setdefault(sequence.request.tenant, deque()).append(sequence)
        taken: Counter[str] = Counter()
        for queues in levels.values():
            while queues:
                tenant = min(queues, key=lambda one: (self._served.get(one, 0) + taken[one], self._places[one]))
                sequence = queues[tenant].popleft()
                taken[tenant] += sequence.num_uncomputed_tokens
                if not queues[tenant]:
                    del queues[tenant]
                yield sequence

    def allow_prompts(self, running: Iterable[tuple[SequenceState, int]], budget: int, *, may_admit: bool) -> None:
        """Divide a step's `budget` of prompt tokens among the tenants that have prompts.

        `running` are the running prompts, each with its uncomputed tokens. Waiting prompts count if `may_admit`.
        """
        needs = Counter(self._waiting if may_admit else {})
        self._prompts = Counter()
        for sequence, left in (one for one in running if not one[0].is_background):
            needs[sequence.request.tenant] += left
            self._prompts[sequence.request.tenant] += 1
        self.allowed = {}
        if len(needs) > 1:
            shortest = max(_LEAST_PROMPT, min(needs.values()))
            first = min(needs, key=lambda one: self._served.get(one, 0))
            most = min(needs[first], shortest, max(budget // len(needs), budget * 3 // 4))
            rest = max(1, min(shortest, (budget - most) // (len(needs) - 1)))
            self.allowed = {one: min(need, max(1, most) if one == first else rest) for one, need in needs.items()}

    def room(self, sequence: SequenceState, budget: int) -> int:
        """Return how many tokens of a prompt this step may compute, of a `budget` for all.

        A prompt leaves half to later ones of its tenant.
        """
        allowed = self.allowed.get(sequence.request.tenant, budget)
        return min(budget, -(-allowed // 2) if self._prompts[sequence.request.tenant] > 1 else allowed)

    def spend(self, sequence: SequenceState, num_tokens: int) -> None:
        """Subtract tokens of a prompt from what its tenant may have in this step."""
        if sequence.request.tenant in self.allowed:
            self.allowed[sequence.request.tenant] -= num_tokens

    def may_claim(self, sequence: SequenceState, slots: int, all_slots: int, all_tokens: int) -> bool:
        """Return whether a waiting sequence would be within its tenant's share of places and of the KV cache."""
        tenant, number = sequence.request.tenant, len(self._served)
        within = self._places[tenant] + slots <= max(1, all_slots // number)
        return within and self._tokens[tenant] + sequence.num_tokens <= all_tokens // number

    def one_over(
        self, sequence: SequenceState, running: Sequence[SequenceState], all_slots: int, all_tokens: int
    ) -> SequenceState | None:
        """Return the running sequence to preempt for a waiting one: the last of the tenant with the most places.

        Its tenant is above its share, its priority no higher, and it is not the first running sequence.
        """
        tenant, number = sequence.request.tenant, len(self._served)
        for one in sorted(self._places, key=lambda one: (-self._places[one], -self._tokens[one])):
            is_over = self._places[one] > max(1, all_slots // number) or self._tokens[one] > all_tokens // number
            if one == tenant or not is_over:
                continue
            for victim in reversed(running[1:]):
                is_first = victim.beams is not None and running[0] in victim.beams.members
                if victim.request.tenant == one and _level(victim) >= _level(sequence) and not is_first:
                    return victim
        return None

    def victim(self, later: Sequence[SequenceState]) -> SequenceState:
        """Return which of the `later` running sequences to preempt for an earlier one.

        It has the lowest priority among them, and is the last of the tenant with the most tokens in the KV cache.
        """
        lowest = [one for one in later if _level(one) == _level(later[-1])]
        tenant = max(lowest, key=lambda one: self._tokens[one.request.tenant]).request.tenant
        return next(one for one in reversed(lowest) if one.request.tenant == tenant)


def _level(sequence: SequenceState) -> tuple[int, ...]:
    """Return a sequence's order of service without its arrival: its priority."""
    return sequence.order[:-1]


def place_in_turn(waiting: Sequence[tuple[str, int]], tenant: str) -> int:
    """Return the place of a new input among those that wait, given the tenant and the tokens of each.

    It comes after those of its tenant, and before those by which another tenant has more tokens than its own has.
    """
    own = sum(tokens for one, tokens in waiting if one == tenant)
    last = max((place for place, (one, _) in enumerate(waiting) if one == tenant), default=-1)
    sums: Counter[str] = Counter()
    for place, (one, tokens) in enumerate(waiting):
        if place > last and one != tenant and sums[one] > own:
            return place
        sums[one] += tokens
    return len(waiting)
