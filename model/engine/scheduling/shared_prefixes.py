"""Finds cached blocks of a sequence's prefix, and offers the blocks that it fills to others. No tensors.

Full blocks are found by hash (`BlockHasher`). They can be shared while they are being computed: a step writes all keys
of a layer before it reads any, so a sequence scheduled later in the step may read a block that the step fills.

A prefix can be reused up to a block where every pool still has what the next token reads: all blocks before it, or
those of the window. A model with recurrent layers also needs the state at that block (`StateSlots`), and states can be
shared only once they are computed, because layers read and write them in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.model.engine.scheduling.block_pool import BlockHasher, BlockPool
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.state_slots import StateSlots


class SharedPrefixes:
    """Registers full blocks and finds those that a sequence could reuse. It allocates none."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        block_size: int,
        hasher: BlockHasher,
        states: StateSlots | None,
        *,
        across_requests: bool,
    ) -> None:
        """Without `across_requests` only sequences of one request share blocks."""
        self._pools = pools
        self._block_size = block_size
        self._hasher = hasher
        self._states = states
        self._across_requests = across_requests
        self._windowed = [(at, pool.reach) for at, pool in enumerate(pools) if pool.reach is not None]

    def cache_full_blocks(self, sequence: SequenceState, num_tokens: int = 0) -> None:
        """Register the full blocks that the sequence has computed, or will have after `num_tokens` more tokens in
        the step that is being scheduled.
        """
        known = sequence.num_tokens - sequence.has_placeholder  # a token that is still on the device has no hash
        full = min(sequence.num_computed_tokens + num_tokens, known) // self._block_size
        if self._is_shared(sequence):
            for index in range(sequence.num_offered_blocks, full):
                digest = self._hasher.block(sequence, index)
                for pool, table in zip(self._pools, sequence.tables, strict=True):
                    for block in pool.held(table[index : index + 1]):
                        pool.make_known(digest, block)
        sequence.num_offered_blocks = max(full, sequence.num_offered_blocks)

    def frontier(self, sequence: SequenceState) -> bytes | None:
        """Return the hash of the block that a sequence will cache next; None if it is not a block of known tokens that
        others could share.
        """
        index = sequence.num_offered_blocks
        return self._hasher.block(sequence, index) if index < self.num_shareable(sequence) else None

    def frontier_found(self, sequence: SequenceState) -> bytes | None:
        """Return `frontier` as it would be if the sequence, which has no blocks, were admitted now."""
        index = self.find(sequence)
        return self._hasher.block(sequence, index) if index < self.num_shareable(sequence) else None

    def _is_shared(self, sequence: SequenceState) -> bool:
        """Return whether another sequence may share the sequence's blocks."""
        return self._across_requests or sequence.has_siblings

    def num_shareable(self, sequence: SequenceState) -> int:
        """Return how many blocks the sequence may reuse; at least its last token must be computed."""
        if not sequence.reuses_prefix or not self._is_shared(sequence):
            return 0
        return (sequence.num_tokens - 1) // self._block_size

    def find(self, sequence: SequenceState, begin: int = 0) -> int:
        """Return how many blocks a sequence, computed up to block `begin`, would have with the cached ones."""
        stop, reached = self.num_shareable(sequence), begin
        if not self._windowed and self._states is None:
            known = self._pools[0].known
            for index in range(begin, stop):
                if self._hasher.block(sequence, index) not in known:
                    return index
            return max(begin, stop)
        runs = [0] * len(self._pools)  # where the known blocks that end at `index` begin, in each pool
        for index in range(begin, stop):
            digest = self._hasher.block(sequence, index)
            for at, pool in enumerate(self._pools):
                if digest not in pool.known:
                    if pool.window is None:
                        return reached
                    runs[at] = index + 1
            has_windows = all(runs[at] <= max(0, index + 1 - reach) for at, reach in self._windowed)
            if has_windows and (self._states is None or digest in self._states.pool.known):
                reached = index + 1
        return reached

    def num_known(self, sequence: SequenceState) -> int:
        """Return how many full blocks from the first token on the first pool has, whether or not states are cached."""
        blocks, known = range(self.num_shareable(sequence)), self._pools[0].known
        return next((index for index in blocks if self._hasher.block(sequence, index) not in known), len(blocks))

    def num_evictable(self, at: int, together: Sequence[SequenceState], reached: Sequence[int]) -> int:
        """Return how many cached, unused blocks of a pool the sequences would reuse up to `reached`."""
        pool = self._pools[at]
        found = {
            pool.known[self._hasher.block(sequence, index)]
            for sequence, stop in zip(together, reached, strict=True)
            for index in range(pool.first_kept(stop), stop)
        }
        return sum(map(pool.is_cached, found))
