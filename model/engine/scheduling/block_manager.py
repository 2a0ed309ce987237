"""Allocates KV cache blocks to sequences and finds blocks that can be shared. No tensors.

`can_allocate` only checks; after it has returned True, `allocate` cannot fail. `free` returns a sequence's blocks.

Layers with the same window share a pool (`BlockPool`). A sequence has one block table in each pool: block i holds the
tokens [i * block_size, (i + 1) * block_size). A second table holds the cross keys and values of its source. Tables are
equally long in all pools. In a windowed pool `NULL_BLOCK` stands for blocks that have left the window:

    table    | null  null  null | read by the next token      | filled by the step |
             0                  first_kept(computed tokens)   computed             computed + step

Sequences with a common prefix share full blocks (`SharedPrefixes`). They also share the keys and values of a source
(`SourceBlocks`) and the states of recurrent layers (`StateSlots`).

Without prefix caching only the sequences of one request share blocks, and nothing is kept after they end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triptych.model.config.cache import PoolSize, StateSize
from triptych.model.engine.scheduling.block_pool import NULL_BLOCK, BlockHasher, BlockPool
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.shared_prefixes import SharedPrefixes
from triptych.model.engine.scheduling.source_blocks import SourceBlocks
from triptych.model.engine.scheduling.state_slots import StateSlots


class BlockCopy(NamedTuple):
    """A block that is filled with what another one of its pool holds."""

    pool: int
    target: int
    source: int


class BlockManager:
    """The pools of one model, and the tables of its sequences. Layers of the first pool read furthest back."""

    def __init__(
        self,
        pools: Sequence[PoolSize],
        block_size: int,
        *,
        prefix_caching: bool = True,
        short_context: int | None = None,
        states: StateSize | None = None,
    ) -> None:
        """`short_context` is the model's: longer sequences share no blocks with shorter ones (`BlockHasher`). `states`
        are for recurrent layers; None: there are none."""
        self.pools = tuple(BlockPool(*size, block_size) for size in pools)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.short_context = short_context
        self.num_queried_tokens = 0  # prompt tokens that were looked for
        self.num_hit_tokens = 0  # and found
        self._windowed = [at for at, pool in enumerate(self.pools) if pool.window is not None]
        self.hasher = BlockHasher(block_size, across_requests=prefix_caching, short_context=short_context)
        self._states: StateSlots | None = None
        if states is not None:
            self._states = StateSlots(states, block_size, self.hasher, keeps=prefix_caching)
        self._sources = SourceBlocks(self.pools, self.hasher)
        self.prefixes = SharedPrefixes(
            self.pools, block_size, self.hasher, self._states, across_requests=prefix_caching
        )

    def reset(self) -> None:
        """Free every block, whichever tables it is in: an exception may have left tables and counts in disagreement."""
        for pool in self._all_pools:
            pool.reset()
        self._sources.reset()

    @property
    def _all_pools(self) -> tuple[BlockPool, ...]:
        """The pools of blocks, and that of states."""
        return self.pools if self._states is None else (*self.pools, self._states.pool)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return self._states is not None

    @property
    def num_blocks(self) -> int:
        """The blocks of the first pool; `num_free` and `num_cached` are of this pool too."""
        return self.pools[0].num_blocks

    @property
    def num_free(self) -> int:
        return self.pools[0].num_free

    @property
    def num_cached(self) -> int:
        return self.pools[0].num_cached

    @property
    def window_usage(self) -> dict[int, float]:
        """Return the used share of each pool after the first, by its window."""
        return {pool.window: 1 - pool.num_free / pool.num_blocks for pool in self.pools[1:] if pool.window is not None}

    @property
    def has_windows(self) -> bool:
        return bool(self._windowed)

    @property
    def num_states(self) -> int:
        """The slots for states of recurrent layers."""
        return self._states.pool.num_blocks if self._states is not None else 0

    @property
    def num_free_states(self) -> int:
        """The slots that can be allocated: free ones and cached ones."""
        return self._states.pool.num_free if self._states is not None else 0

    @property
    def num_cached_states(self) -> int:
        """The cached slots, each with a snapshot."""
        return self._states.pool.num_cached if self._states is not None else 0

    @property
    def is_empty(self) -> bool:
        """Whether no block of any pool is in use, and no state."""
        return all(pool.num_free == pool.num_blocks for pool in self._all_pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Return whether `num_tokens` more fit into the sequence's own blocks, without a copy of a shared block."""
        if self._states is not None:
            return False
        computed, table = sequence.num_computed_tokens, sequence.tables[0]
        if computed + num_tokens > len(table) * self.block_size or sequence.needs_source:
            return False
        index, offset = divmod(computed, self.block_size)
        return not offset or self.pools[0].counts[table[index]] == 1

    def can_allocate(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Return whether `num_tokens` more tokens fit, and the source if it has no blocks yet."""
        if self._states is not None and not self._states.pool.num_free:
            return False
        wanted = self._missing(sequence, num_tokens) + self._sources.num_missing(sequence)
        return all(wanted <= pool.num_free for pool in self.pools)

    def fitting(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many of the tokens to compute: those that fit in windowed pools, up to a state that can be shared.

        A windowed pool gets blocks back as the sequence continues, so smaller steps need fewer; other pools do not.
        """
        for at in self._windowed:
            free = self.pools[at].num_free - self._writes_shared(sequence) - self._sources.num_missing(sequence)
            room = (len(sequence.tables[0]) + free) * self.block_size - sequence.num_computed_tokens
            num_tokens = min(num_tokens, room if free >= 0 else 0)
        return num_tokens if self._states is None else self._states.aligned(sequence, num_tokens)

    def can_admit(self, together: Sequence[SequenceState]) -> bool:
        """Return whether all known tokens of a waiting sequence fit, or of all beams of a search.

        Blocks that they share, cached or computed by one of them, count once.
        """
        reached = [self.prefixes.find(sequence) for sequence in together]
        source = self._sources.num_missing(together[0])
        own = 0
        computed: set[bytes] = set()  # by one of them for all
        for sequence, found in zip(together, reached, strict=True):
            own += self.blocks_for(sequence.num_tokens) - found
            if len(together) > 1:
                missing = range(found, self.prefixes.num_shareable(sequence))
                own -= len(missing)
                computed.update(self.hasher.block(sequence, index) for index in missing)
        for at, pool in enumerate(self.pools):
            wanted = own + len(computed) + self.prefixes.num_evictable(at, together, reached)
            if pool.reach is not None:
                wanted = min(wanted, len(together) * (pool.reach + 1))
            if wanted + source + self._sources.num_evictable(at, together[0]) > pool.num_free:
                return False
        return True

    def reuse(self, sequence: SequenceState) -> None:
        """Give a sequence the cached blocks that continue its computed tokens, and those of its source.

        The shared tokens count as computed.
        """
        begin = sequence.num_computed_tokens // self.block_size
        reached = self.prefixes.find(sequence, begin)
        if self._states is not None and not sequence.num_computed_tokens:
            sequence.shared_border = self.prefixes.num_known(sequence) * self.block_size
        if sequence.scheduled_time is None and self.prefix_caching and sequence.reuses_prefix:
            self.num_queried_tokens += sequence.num_prompt_tokens
        if reached > begin:
            if self.prefix_caching and not sequence.restarted:  # else it finds what it has computed itself
                sequence.num_cached_tokens += reached * self.block_size - sequence.num_computed_tokens
                self.num_hit_tokens += reached * self.block_size - sequence.num_computed_tokens
            sequence.num_computed_tokens = reached * self.block_size
            sequence.num_offered_blocks = reached
            if self._states is not None:
                self._states.take_over(sequence, self.hasher.block(sequence, reached - 1))
            self.free_outside_window(sequence)
            for at, table in enumerate(sequence.tables):
                self._go_on(sequence, at, table, begin, reached)
        self._sources.reuse(sequence)

    def _go_on(self, sequence: SequenceState, at: int, table: list[int], begin: int, reached: int) -> None:
        """Replace a table's blocks from `begin` on by the known blocks `[begin, reached)`."""
        pool = self.pools[at]
        first = max(begin, pool.first_kept(reached))
        found = [pool.known[self.hasher.block(sequence, index)] for index in range(first, reached)]
        for block in found:
            pool.share(block)
        for block in pool.held(table[begin:]):
            pool.release(block, keep=self.prefix_caching)
        table[begin:] = [NULL_BLOCK] * (first - begin) + found

    def allocate(self, sequence: SequenceState, num_tokens: int) -> list[BlockCopy]:
        """Extend the sequence's tables to hold `num_tokens` more computed tokens and its source.

        Returns the copies to make before the step writes: of the last block, if other sequences share it.
        """
        if self._states is not None:
            self._states.allocate(sequence, num_tokens)
        copies = []
        if self._writes_shared(sequence):
            last = sequence.num_computed_tokens // self.block_size
            for at, (pool, table) in enumerate(zip(self.pools, sequence.tables, strict=True)):
                copies.append(BlockCopy(at, pool.take(), table[last]))
                pool.counts[table[last]] -= 1
                table[last] = copies[-1].target
        missing = self._missing(sequence, num_tokens)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            table.extend(pool.take() for _ in range(missing))
        self._sources.allocate(sequence)
        return copies

    def extend(self, sequence: SequenceState, num_tokens: int, most: int, spare: int) -> int:
        """Allocate blocks for up to `most` drafts after the `num_tokens` of this step; return how many drafts fit.

        The sequence has blocks for the `num_tokens` already. At least `spare` blocks of each pool stay free.
        """
        end = sequence.num_computed_tokens + num_tokens
        free = max(0, min(pool.num_free for pool in self.pools) - spare)
        count = min(most, (len(sequence.tables[0]) + free) * self.block_size - end)
        if self._states is not None:
            count = self._states.extend(sequence, count)
        missing = self.blocks_for(end + count) - len(sequence.tables[0])
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            table.extend(pool.take() for _ in range(missing))
        return count

    def trim(self, sequence: SequenceState) -> None:
        """Free the blocks after the sequence's last token; they held drafts."""
        wanted = self.blocks_for(sequence.num_tokens)
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for block in table[wanted:]:
                pool.release(block, keep=False)
            del table[wanted:]

    def free_outside_window(self, sequence: SequenceState) -> None:
        """Free the blocks of windowed pools that no later token reads; nothing where there are no windows."""
        for at in self._windowed:
            pool, table = self.pools[at], sequence.tables[at]
            index = min(pool.first_kept(sequence.num_computed_tokens // self.block_size), len(table))
            while index and table[index - 1] != NULL_BLOCK:
                index -= 1
                pool.release(table[index], keep=self.prefix_caching)
                table[index] = NULL_BLOCK

    def settle(self, sequence: SequenceState) -> None:
        """Keep the states that the sequence's last step wrote, and offer its full blocks to others."""
        if self._states is not None:
            self._states.settle(sequence)
            if sequence.num_computed_tokens // self.block_size > sequence.num_offered_blocks:
                self.prefixes.cache_full_blocks(sequence)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Share the parent's blocks with the child."""
        for pool, ours, theirs in zip(self.pools, parent.tables, child.tables, strict=True):
            theirs.extend(ours)
            for block in pool.held(ours):
                pool.share(block)
        self._sources.fork(parent, child)
        if self._states is not None:
            self._states.fork(parent, child)

    def forget_unwritten(self, sequence: SequenceState) -> set[tuple[int, int]]:
        """Remove from the cache the blocks that a failed step did not fill; other sequences may share them already.

        Returns them as (pool, block). Sequences that share one must be recomputed.
        """
        begin = sequence.num_computed_tokens // self.block_size
        found = set()
        for at, pool in enumerate(self.pools):
            for block in [*sequence.tables[at][begin:], *sequence.source_tables[at]]:
                pool.forget(block)
                found.add((at, block))
        return found

    def free(self, sequence: SequenceState, *, ended: bool = True) -> None:
        """Free all blocks of a sequence, which may have none.

        Blocks that are not computed leave the cache. A sequence that has not `ended`, but was
        preempted, still counts as a user of its source.
        """
        if self._states is not None:
            self._states.free(sequence)
        begin = sequence.num_computed_tokens // self.block_size
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for block in table[begin:]:
                pool.forget(block)
            for block in reversed(pool.held(table)):  # the end of a prefix is evicted before its beginning
                pool.release(block, keep=self.prefix_caching)
            table.clear()
        self._sources.free(sequence, ended=ended)

    def clear_cache(self) -> None:
        """Remove all cached content, and zero the counts of cache hits; blocks in use stay in use."""
        for pool in self._all_pools:
            pool.clear_cache()
        self.num_queried_tokens = self.num_hit_tokens = 0

    def slots(self, table: list[int], start: int, stop: int) -> list[int]:
        """Return the pool slots of tokens `[start, stop)` of a sequence whose blocks are `table`."""
        size = self.block_size
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def check_invariants(self, sequences: Iterable[SequenceState]) -> None:
        """Raise `AssertionError` unless every pool's blocks, every table and every source's users add up."""
        everyone = list(sequences)
        if self._states is not None:
            self._states.check_invariants(everyone)
        for at, pool in enumerate(self.pools):
            tables = [table for one in everyone for table in (one.tables[at], one.source_tables[at])]
            pool.check_invariants(Counter(block for table in tables for block in pool.held(table)))
        for at in self._windowed:
            for one in everyone:
                table, first = one.tables[at], self.pools[at].first_kept(one.num_computed_tokens // self.block_size)
                assert len(table) == len(one.tables[0]), "tables of different lengths"
                assert NULL_BLOCK not in table[first:], "a block that the next token reads was freed"
        self._sources.check_invariants(everyone)

    def _missing(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many blocks of each pool `num_tokens` more tokens need."""
        wanted = self.blocks_for(sequence.num_computed_tokens + num_tokens)
        return max(0, wanted - len(sequence.tables[0])) + self._writes_shared(sequence)

    def _writes_shared(self, sequence: SequenceState) -> bool:
        """Return whether the next token goes into a block that other sequences share, in all pools or in none."""
        table = sequence.tables[0]
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and index < len(table) and self.pools[0].counts[table[index]] > 1

    def must_encode(self, sequence: SequenceState) -> bool:
        """Return whether the encoder must run for a sequence, because its source's encoding is not cached."""
        return self._sources.must_encode(sequence)
