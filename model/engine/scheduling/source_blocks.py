"""The blocks of encoded sources: which sequences share them, and how long they are kept. No tensors.

Sequences of equal salt and source share one set of source blocks. It is kept while any of them has not ended; when all
of them are preempted its blocks stay cached, so it is encoded again only if they are evicted. They also stay cached
after the last sequence whose request says that others will follow (`Request.keeps_source`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triptych.model.api.request import Source
from triptych.model.engine.scheduling.block_pool import BlockHasher, BlockPool
from triptych.model.engine.scheduling.sequence import SequenceState


class SourceBlocks:
    """The sources of one model; each has equally many blocks in each of `pools`."""

    def __init__(self, pools: Sequence[BlockPool], hasher: BlockHasher) -> None:
        self._pools = pools
        self._hasher = hasher
        self._users: Counter[bytes] = Counter()  # sequences that have not ended, by salt and source
        self._expected: dict[bytes, None] = {}  # sources without users that others will follow for, the oldest first

    def reset(self) -> None:
        """Forget all sources; the caller resets the pools."""
        self._users.clear()
        self._expected.clear()

    def must_encode(self, sequence: SequenceState) -> bool:
        """Return whether the encoder must run for a sequence, because its source's encoding is not cached."""
        return sequence.needs_source and not self._is_known(sequence)

    def num_missing(self, sequence: SequenceState) -> int:
        """Return how many blocks of each pool must be allocated for the source of a sequence."""
        return len(self._hasher.source(sequence)) if self.must_encode(sequence) else 0

    def num_evictable(self, at: int, sequence: SequenceState) -> int:
        """Return how many cached, unused blocks of pool `at` hold the sequence's source."""
        if not sequence.needs_source or not self._is_known(sequence):
            return 0
        pool = self._pools[at]
        return sum(pool.is_cached(pool.known[key]) for key in self._hasher.source(sequence))

    def reuse(self, sequence: SequenceState) -> None:
        """Give a sequence the blocks of its source, if it needs them and the source is encoded."""
        if not sequence.needs_source or not self._is_known(sequence):
            return
        for pool, table in zip(self._pools, sequence.source_tables, strict=True):
            table.extend(pool.known[key] for key in self._hasher.source(sequence))
            for block in table:
                pool.share(block)
        self._use(sequence)

    def allocate(self, sequence: SequenceState) -> None:
        """Allocate the blocks to which this step writes the sequence's source, if it needs any."""
        if not sequence.needs_source:
            return
        for pool, table in zip(self._pools, sequence.source_tables, strict=True):
            for key in self._hasher.source(sequence):
                table.append(pool.take())
                pool.make_known(key, table[-1])
        self._use(sequence)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Share the parent's blocks with the child."""
        for pool, ours, theirs in zip(self._pools, parent.source_tables, child.source_tables, strict=True):
            theirs.extend(ours)
            for block in ours:
                pool.share(block)
        if parent.uses_source:
            self._use(child)

    def free(self, sequence: SequenceState, *, ended: bool) -> None:
        """Free the blocks; a sequence that was preempted (not `ended`) still counts as a user of its source."""
        if ended and sequence.uses_source:
            self._leave(sequence)
        has_any = bool(self._users or self._expected)
        kept = has_any and self._is_kept(self._hasher.root(sequence))
        for pool, table in zip(self._pools, sequence.source_tables, strict=True):
            for block in reversed(table):
                pool.release(block, keep=kept)
            table.clear()

    def check_invariants(self, sequences: Iterable[SequenceState]) -> None:
        """Raise `AssertionError` unless every source's users add up."""
        users = Counter(self._hasher.root(one) for one in sequences if one.uses_source)
        assert users == self._users, "a source's users are counted wrong"

    def _is_known(self, sequence: SequenceState) -> bool:
        if not self._is_kept(self._hasher.root(sequence)):
            return False
        keys = self._hasher.source(sequence)
        return all(key in pool.known for pool in self._pools for key in keys)

    def _is_kept(self, root: bytes) -> bool:
        return root in self._users or root in self._expected

    def _use(self, sequence: SequenceState) -> None:
        if not sequence.uses_source:
            sequence.uses_source = True
            root = self._hasher.root(sequence)
            self._users[root] += 1
            self._expected.pop(root, None)

    def _leave(self, sequence: SequenceState) -> None:
        """Remove one user of the source; after the last user its blocks are freed, unless others will follow."""
        root = self._hasher.root(sequence)
        sequence.uses_source = False
        self._users[root] -= 1
        if not self._users[root]:
            del self._users[root]
            if sequence.request.keeps_source:
                self._expect(root)
                return
            for pool in self._pools:
                for key in self._hasher.source(sequence):
                    pool.drop(key)

    def _expect(self, root: bytes) -> None:
        """Keep the blocks of a source cached; forget the oldest such source if they are more than the pool's blocks."""
        self._expected[root] = None
        if len(self._expected) > self._pools[0].num_blocks:
            del self._expected[next(iter(self._expected))]


# -- Spreads the encoding of a long source, or picture, over several steps, some layers in each. No tensors. A source is
# normally encoded whole in the step in which its sequence starts. If running streams leave no time for that, earlier
# steps compute some layers of the encoder for the sequence that starts next. It holds no blocks meanwhile. The hidden
# states between two such steps are kept outside the cache, for one source at a time. Any sequence of that source can
# continue from them, and the one that finishes the encoding uses them up. Encoding a source again costs time and
# changes nothing.


class LayersAhead(NamedTuple):
    """Encoder layers that a step computes for a source whose sequence is not admitted yet."""

    source: Source
    layers: int
    tokens: int  # of the budget: one of L layers counts as 1/L of the source's tokens
    model: str = ""  # named by the sequence's request; it may be an adapter


@dataclass(slots=True)
class SourcePass:
    """A source whose encoding has begun."""

    sequence: SequenceState  # waits for the encoding; the latest of those with this source
    source: Source
    layers_done: int = 0
    whole: bool = False  # encoding it in parts failed: the step that admits the sequence encodes it whole


class SourcePasses:
    """Divides a source's encoding over steps; one source of a model at a time."""

    def __init__(self, encoder_layers: int) -> None:
        """`encoder_layers`: 1 if a pass of the encoder cannot be interrupted."""
        self._layers = encoder_layers
        self.current: SourcePass | None = None

    def left(self, source: Source | None) -> int:
        """Return how many tokens of a source are left to compute; after some of L layers, the rest's share of them."""
        length = source.num_positions if source is not None else 0
        return length - length * self._done(source) // self._layers

    def done(self, source: Source) -> int:
        """Return how many tokens of a source earlier steps have computed."""
        return source.num_positions - self.left(source)

    def least(self, source: Source | None) -> int:
        """Return the fewest tokens of a source that a step can compute: one layer's, or all that are left."""
        if source is None or not self.may_pause(source):
            return self.left(source)
        return -(-source.num_positions // self._layers)

    def may_pause(self, source: Source | None) -> bool:
        """Return whether a source may be encoded in parts, and has more than one layer left."""
        begun = self._begun(source)
        failed = begun is not None and begun.whole
        return not failed and self._layers - self._done(source) > 1

    def advance(self, sequence: SequenceState, source: Source, tokens: int) -> LayersAhead:
        """Return the next layers to compute: as many as `tokens` pay for, at least one, but not the last."""
        before, computed = self._done(source), self.done(source)
        layers = min(max(1, tokens * self._layers // source.num_positions), self._layers - before - 1)
        self.current = SourcePass(sequence, source, before + layers)
        return LayersAhead(source, layers, self.done(source) - computed, sequence.request.model)

    def fail(self) -> None:
        """Have the current source encoded whole, by the step that admits its sequence."""
        if self.current is not None:
            self.current = SourcePass(self.current.sequence, self.current.source, whole=True)

    def finish(self, source: Source) -> int:
        """End the encoding of a source in parts; return how many of its tokens earlier steps have computed."""
        done = self.done(source)
        if self._begun(source) is not None:
            self.current = None
        return done

    def forget(self, sequence: SequenceState) -> None:
        """Forget the current source if the sequence that waits for it ends."""
        if self.current is not None and self.current.sequence is sequence:
            self.current = None

    def _begun(self, source: Source | None) -> SourcePass | None:
        """Return the begun encoding of an equal source, if there is one."""
        if self.current is None or source is None or self.current.source.digest != source.digest:
            return None
        return self.current

    def _done(self, source: Source | None) -> int:
        begun = self._begun(source)
        return begun.layers_done if begun is not None else 0
