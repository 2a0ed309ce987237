"""The blocks that hold the encodings of sources: who has them, and for how long they are kept. No tensors.

Sequences of equal salt and source share one set of source blocks. It is kept while any of them has not ended; when all
of them are preempted its blocks are cached, so it is encoded anew only if something else needed the room. So they are
where the last of them ends and says that others will follow (`Request.keeps_source`).
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
    """The sources of one model, whose blocks are taken from `pools`, equally many of each."""

    def __init__(self, pools: Sequence[BlockPool], hasher: BlockHasher) -> None:
        self._pools = pools
        self._hasher = hasher
        self._users: Counter[bytes] = Counter()  # sequences that have not ended, by salt and source
        self._expected: dict[bytes, None] = {}  # sources without users that others will follow for, the oldest first

    def reset(self) -> None:
        """As if no sequence had a source; the pools are reset by who has them."""
        self._users.clear()
        self._expected.clear()

    def must_encode(self, sequence: SequenceState) -> bool:
        """Whether the encoder has to run for a sequence: its source's encoding is not there."""
        return sequence.needs_source and not self._is_known(sequence)

    def num_missing(self, sequence: SequenceState) -> int:
        """Blocks of each pool that the source of a sequence is to get."""
        return len(self._hasher.source(sequence)) if self.must_encode(sequence) else 0

    def num_evictable(self, at: int, sequence: SequenceState) -> int:
        """Blocks of pool `at` that hold the sequence's source and that only the cache has."""
        if not sequence.needs_source or not self._is_known(sequence):
            return 0
        pool = self._pools[at]
        return sum(pool.is_cached(pool.known[key]) for key in self._hasher.source(sequence))

    def reuse(self, sequence: SequenceState) -> None:
        """Give a sequence the blocks of its source, if it needs them and that is encoded."""
        if not sequence.needs_source or not self._is_known(sequence):
            return
        for pool, table in zip(self._pools, sequence.source_tables, strict=True):
            table.extend(pool.known[key] for key in self._hasher.source(sequence))
            for block in table:
                pool.share(block)
        self._use(sequence)

    def allocate(self, sequence: SequenceState) -> None:
        """Give a sequence that needs them the blocks that its source is written to in this step."""
        if not sequence.needs_source:
            return
        for pool, table in zip(self._pools, sequence.source_tables, strict=True):
            for key in self._hasher.source(sequence):
                table.append(pool.take())
                pool.make_known(key, table[-1])
        self._use(sequence)

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Let the child have the parent's blocks as well."""
        for pool, ours, theirs in zip(self._pools, parent.source_tables, child.source_tables, strict=True):
            theirs.extend(ours)
            for block in ours:
                pool.share(block)
        if parent.uses_source:
            self._use(child)

    def free(self, sequence: SequenceState, *, ended: bool) -> None:
        """Take the blocks back; one that has not `ended`, but was preempted, still counts as a user of its source."""
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
        """Remove one user of its source; after the last one nothing of it stays cached unless others will follow."""
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
        """Note a source whose blocks stay cached; of more than there can be blocks of, the oldest are gone."""
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
    """Layers of the encoder that a step computes of a source whose sequence does not begin yet."""

    source: Source
    layers: int
    tokens: int  # what they count as: one of L layers is 1/L of the source's tokens
    model: str = ""  # that the sequence's request names: it may be an adapter


@dataclass(slots=True)
class SourcePass:
    """The layers that are computed of a source."""

    sequence: SequenceState  # that waits for them; of equal sources the latest
    source: Source
    layers_done: int = 0
    whole: bool = False  # it failed in parts: it is left to the step in which the sequence begins


class SourcePasses:
    """The source, if any, that the encoder has begun, of one model."""

    def __init__(self, encoder_layers: int) -> None:
        """`encoder_layers`: 1 where an encoder's pass cannot be interrupted."""
        self._layers = encoder_layers
        self.current: SourcePass | None = None

    def left(self, source: Source | None) -> int:
        """The tokens of a source that are not computed; of one that is begun a share of its tokens."""
        length = source.num_positions if source is not None else 0
        return length - length * self._done(source) // self._layers

    def done(self, source: Source) -> int:
        """The tokens of a source that steps before have computed."""
        return source.num_positions - self.left(source)

    def least(self, source: Source | None) -> int:
        """The least that a step can compute of a source: a layer, or all that is left of it."""
        if source is None or not self.may_pause(source):
            return self.left(source)
        return -(-source.num_positions // self._layers)

    def may_pause(self, source: Source | None) -> bool:
        """Whether more than one layer is left of a source, and it may be encoded in parts."""
        begun = self._begun(source)
        failed = begun is not None and begun.whole
        return not failed and self._layers - self._done(source) > 1

    def advance(self, sequence: SequenceState, source: Source, tokens: int) -> LayersAhead:
        """Compute as many layers as `tokens` pay for, at least one, but not the last."""
        before, computed = self._done(source), self.done(source)
        layers = min(max(1, tokens * self._layers // source.num_positions), self._layers - before - 1)
        self.current = SourcePass(sequence, source, before + layers)
        return LayersAhead(source, layers, self.done(source) - computed, sequence.request.model)

    def fail(self) -> None:
        """Leave the current source to the step in which its sequence begins."""
        if self.current is not None:
            self.current = SourcePass(self.current.sequence, self.current.source, whole=True)

    def finish(self, source: Source) -> int:
        """Have a source encoded, and used up what is computed of it: the tokens that this is."""
        done = self.done(source)
        if self._begun(source) is not None:
            self.current = None
        return done

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence that ends."""
        if self.current is not None and self.current.sequence is sequence:
            self.current = None

    def _begun(self, source: Source | None) -> SourcePass | None:
        """The layers that are computed of a source, for any sequence that has an equal one."""
        if self.current is None or source is None or self.current.source.digest != source.digest:
            return None
        return self.current

    def _done(self, source: Source | None) -> int:
        begun = self._begun(source)
        return begun.layers_done if begun is not None else 0
