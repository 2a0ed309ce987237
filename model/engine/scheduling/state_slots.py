"""Allocates slots for the states of recurrent layers, and finds slots that can be shared. No tensors.

A step reads the slot of a sequence and writes a new one, which becomes the sequence's own after the step. The slot
that was read stays unchanged, so a step can run again and forked sequences can read one slot. Each draft writes a slot
more; the sequence keeps that of the last accepted draft.

A state cannot be cut, so only the state at the end of a block can be shared, by the hash of that block (`BlockHasher`).
Such a snapshot is taken after the last block that the same prompt could reuse, and where a prompt departs from known
ones. While slots are free, one is also taken wherever a step ends at the end of a block; an output keeps its last one.

Unused snapshots are evicted, the least recently used first, and always before a sequence is refused a slot. Drafts
leave half of the spare slots to snapshots. Without prefix caching only the outputs of one request share snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from triptych.model.config.cache import NO_STATE, StateSize
from triptych.model.engine.scheduling.block_pool import BlockHasher, BlockPool
from triptych.model.engine.scheduling.sequence import SequenceState


class StateSlots:
    """The state slots of one model. With `keeps` snapshots are also taken for other requests."""

    def __init__(self, size: StateSize, block_size: int, hasher: BlockHasher, *, keeps: bool) -> None:
        self.pool = BlockPool(size.num_slots)
        self._reserved = size.num_sequences
        self._kept_snapshots = size.num_snapshots // 2  # which drafts do not evict
        self._block_size = block_size
        self._hasher = hasher
        self._keeps = keeps

    def aligned(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return `num_tokens`, or fewer so that a step within known tokens ends at the end of a block."""
        start, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        border = stop // self._block_size * self._block_size
        return (
            border - start
            if self._takes_snapshots(sequence) and start < border and stop < sequence.num_tokens
            else num_tokens
        )

    def allocate(self, sequence: SequenceState, num_tokens: int) -> None:
        """Allocate the slots that a step of `num_tokens` tokens writes: one for its end, more for snapshots if free."""
        start, stop = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        last = (sequence.num_tokens - 1) // self._block_size * self._block_size
        for border in sorted({sequence.shared_border, last}):
            wanted = self._takes_snapshots(sequence) and start < border < stop
            if wanted and self.pool.num_free > self._reserved:
                sequence.state_writes.append((border, self.pool.take()))
        sequence.state_writes.append((stop, self.pool.take()))

    def extend(self, sequence: SequenceState, most: int) -> int:
        """Allocate slots for up to `most` drafts after the tokens of this step; return how many."""
        last = sequence.state_writes[-1][0]
        for count in range(most):
            evicts = not self.pool.num_unused and self.pool.num_cached <= self._kept_snapshots
            if self.pool.num_free <= self._reserved or evicts:
                return count
            sequence.state_writes.append((last + count + 1, self.pool.take()))
        return most

    def settle(self, sequence: SequenceState) -> None:
        """Keep the state after the sequence's computed tokens, and free the other slots that its last step wrote.

        A step in flight whose drafts are not verified yet is settled later.
        """
        computed, writes = sequence.num_computed_tokens, sequence.state_writes
        if writes and not (writes[-1][0] > computed == sequence.num_tokens):
            self._settle(sequence)

    def _settle(self, sequence: SequenceState) -> None:
        computed, writes = sequence.num_computed_tokens, sequence.state_writes
        sequence.state_writes = []
        is_computed = any(tokens == computed for tokens, _ in writes)
        if is_computed:
            self._release(sequence.state_slot)
        for tokens, slot in writes:
            if is_computed and tokens <= computed:
                self._make_known(sequence, tokens, slot)
            if is_computed and tokens == computed:
                sequence.state_slot = slot
            else:
                self._release(slot)

    def take_over(self, sequence: SequenceState, digest: bytes) -> None:
        """Give the sequence the cached state with this hash in place of its own."""
        slot = self.pool.known[digest]
        self.pool.share(slot)
        self._release(sequence.state_slot)
        sequence.state_slot = slot

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Share the parent's state with the child."""
        self.settle(parent)
        child.state_slot = parent.state_slot
        if child.state_slot != NO_STATE:
            self.pool.share(child.state_slot)

    def free(self, sequence: SequenceState) -> None:
        """Free the sequence's slots; its last state stays cached if it is a snapshot."""
        self._settle(sequence)
        self._release(sequence.state_slot)
        sequence.state_slot = NO_STATE

    def check_invariants(self, sequences: Iterable[SequenceState]) -> None:
        """Raise `AssertionError` unless slots and sequences add up."""
        owned: Counter[int] = Counter()
        for one in sequences:
            slots = [slot for _, slot in one.state_writes] + [one.state_slot] * (one.state_slot != NO_STATE)
            assert one.num_computed_tokens == 0 or slots, "computed tokens without a state"
            owned.update(slots)
        self.pool.check_invariants(owned)

    def _release(self, slot: int) -> None:
        if slot != NO_STATE:
            self.pool.release(slot, keep=True)  # a snapshot stays cached

    def _takes_snapshots(self, sequence: SequenceState) -> bool:
        return self._keeps or sequence.has_siblings

    def _make_known(self, sequence: SequenceState, tokens: int, slot: int) -> None:
        """Register a state as a snapshot, if it is at the end of a block of known tokens."""
        blocks, rest = divmod(tokens, self._block_size)
        if rest or not self._takes_snapshots(sequence) or tokens > sequence.num_tokens - sequence.has_placeholder:
            return
        size, prompt = self._block_size, sequence.num_prompt_tokens
        wanted = tokens in (sequence.shared_border, (prompt - 1) // size * size, prompt)
        if not wanted and self.pool.num_unused <= self._reserved:  # the slot of the step before is free
            return
        for index in range(len(sequence.block_hashes), blocks):
            self._hasher.block(sequence, index)
        digest = sequence.block_hashes[blocks - 1]
        self.pool.make_known(digest, slot)
        if tokens > prompt:  # of an output: it replaces the output's last snapshot
            if sequence.state_border is not None and sequence.state_border != digest:
                self.pool.drop(sequence.state_border)
            sequence.state_border = digest
