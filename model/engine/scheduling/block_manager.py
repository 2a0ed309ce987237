"""Who owns which block of the KV pool, and which blocks hold tokens that may come again. Knows nothing of tensors.

Ask, then act: `can_allocate` is a pure check, `allocate` after a yes cannot fail, `free` is the only way back. A block
is

    free      nobody's; its content means nothing
    used      in as many tables as its count says
    cached    in no table, but known by the hash of its content: taken by who needs it, or evicted, oldest first

The hash of a full block covers all that its keys and values depend on: the salt, the source of an encoder-decoder,
every token up to its end (SHA-256, chained block by block). Sequences that begin the same share those blocks, also
while they are being computed: a step writes all of its keys before it reads any, so that a block may be read in the
step that fills it, by whoever is scheduled behind. Sequences of equal salt and source share the memory of that source
while one of them is there. Without prefix caching all this is so among the sequences of one request, and no block is
kept. Invariant: free + used + cached is everything, and the counts add up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from hashlib import sha256
from struct import pack

from model.engine.scheduling.sequence import SequenceState


class BlockManager:
    """`num_blocks` blocks of `block_size` tokens; self and cross tables draw on the same ones."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_queried_tokens = 0  # prompt tokens that were looked for
        self.num_hit_tokens = 0  # and found
        self.reset()

    def reset(self) -> None:
        """Make every block free, whoever has it: only after what the sequences say can no longer be believed."""
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: the block freed last is warm
        self._counts = [0] * self.num_blocks
        self._hashes: dict[int, bytes] = {}  # of used and cached blocks
        self._known: dict[bytes, int] = {}  # the block that holds it
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._sources: dict[bytes, list[int]] = {}  # the memory of each salt and source that is in use

    @property
    def num_free(self) -> int:
        """Blocks that a sequence may get: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Whether the sequence's blocks have room for `num_tokens` more and nobody else reads where they go."""
        computed, table = sequence.num_computed_tokens, sequence.block_table
        if computed + num_tokens > len(table) * self.block_size or sequence.needs_source:
            return False
        index, offset = divmod(computed, self.block_size)
        return not offset or self._counts[table[index]] == 1

    def can_allocate(self, sequence: SequenceState, num_tokens: int) -> bool:
        """Whether `num_tokens` more tokens of the sequence, and its source if that has no place yet, fit."""
        return self._missing(sequence, num_tokens) + self._missing_cross(sequence) <= self.num_free

    def can_admit(self, together: Rows[SequenceState]) -> bool:
        """Whether all that is known of waiting sequences fits: of one, or of the beams of a search.

        Blocks that they would find, or that one of them would compute for the others, are counted once.
        """
        wanted = self._missing_cross(together[0])
        found: set[int] = set()
        computed: set[bytes] = set()
        for sequence in together:
            known = self._find(sequence)
            found.update(known)
            wanted += self.blocks_for(sequence.num_tokens) - len(known)
            if len(together) > 1:  # what one of them computes is there for the others
                missing = range(len(known), self._num_shareable(sequence))
                wanted -= len(missing)
                computed.update(self._extend_hashes(sequence, index) for index in missing)
        return wanted + len(computed) <= self.num_free - sum(block in self._cached for block in found)

    def reuse(self, sequence: SequenceState) -> None:
        """Give a sequence the known blocks that go on from what it has computed, and the memory of its source where
        that is there; they count as computed.
        """
        begin = sequence.num_computed_tokens // self.block_size
        found = self._find(sequence, begin)
        for block in found:
            self._cached.pop(block, None)
            self._counts[block] += 1
        if sequence.scheduled_time is None and self.prefix_caching and sequence.reuses_prefix:
            self.num_queried_tokens += sequence.num_prompt_tokens
        if found:
            for block in sequence.block_table[begin:]:  # begun by itself
                self._release(block)
            sequence.block_table[begin:] = found
            reached = (begin + len(found)) * self.block_size
            if self.prefix_caching and not sequence.restarted:  # else it finds what it has computed itself
                sequence.num_cached_tokens += reached - sequence.num_computed_tokens
                self.num_hit_tokens += reached - sequence.num_computed_tokens
            sequence.num_computed_tokens = reached
            sequence.num_offered_blocks = begin + len(found)
        if sequence.needs_source:
            self._share_source(sequence)

    def allocate(self, sequence: SequenceState, num_tokens: int) -> dict[int, int]:
        """Extend the sequence's tables to hold `num_tokens` more computed tokens and its source.

        Returns what must be copied before anything is written, block to fill -> block to read: the last one of the
        table, where others have it too.
        """
        copies = {}
        if self._writes_shared(sequence):
            last = sequence.num_computed_tokens // self.block_size
            shared = sequence.block_table[last]
            sequence.block_table[last] = self._take()
            self._counts[shared] -= 1
            copies[sequence.block_table[last]] = shared
        for table, count in (
            (sequence.block_table, self._missing(sequence, num_tokens)),
            (sequence.cross_block_table, self._missing_cross(sequence)),
        ):
            table.extend(self._take() for _ in range(count))
        if sequence.source_ids and self._is_shared(sequence):
            self._sources.setdefault(self._root(sequence), list(sequence.cross_block_table))
        return copies

    def fork(self, parent: SequenceState, child: SequenceState) -> None:
        """Let the child have the parent's blocks as well."""
        for ours, theirs in (
            (parent.block_table, child.block_table),
            (parent.cross_block_table, child.cross_block_table),
        ):
            theirs.extend(ours)
            for block in ours:
                self._counts[block] += 1

    def cache_full_blocks(self, sequence: SequenceState, num_tokens: int = 0) -> None:
        """Make the full blocks known that the sequence has computed, or will have with `num_tokens` more in the step
        that is being put together.
        """
        known = sequence.num_tokens - sequence.has_placeholder  # what the device alone knows has no hash
        full = min(sequence.num_computed_tokens + num_tokens, known) // self.block_size
        if self._is_shared(sequence):
            for index in range(sequence.num_offered_blocks, full):
                self._make_known(self._extend_hashes(sequence, index), sequence.block_table[index])
        sequence.num_offered_blocks = max(full, sequence.num_offered_blocks)

    def frontier(self, sequence: SequenceState) -> bytes | None:
        """The hash of the block that a sequence will make known next; None if that is not a block of known tokens that
        others could share.
        """
        index = sequence.num_offered_blocks
        return self._extend_hashes(sequence, index) if index < self._num_shareable(sequence) else None

    def frontier_found(self, sequence: SequenceState) -> bytes | None:
        """The same of a sequence without blocks, if it began now."""
        index = len(self._find(sequence))
        return self._extend_hashes(sequence, index) if index < self._num_shareable(sequence) else None

    def unwritten(self, sequence: SequenceState) -> list[int]:
        """Blocks of which a step that failed has left some of what others may have been promised."""
        begin = sequence.num_computed_tokens // self.block_size
        return [*sequence.block_table[begin:], *sequence.cross_block_table]

    def free(self, sequence: SequenceState) -> None:
        """Take all blocks of the sequence back; harmless on one that has none.

        What was promised to others and is not computed is known no longer.
        """
        table = sequence.block_table
        for block in table[sequence.num_computed_tokens // self.block_size :]:
            self._forget(block)
        for block in reversed(table):  # the end of a prefix is evicted before its beginning
            self._release(block)
        table.clear()
        if sequence.cross_block_table:
            last = all(self._counts[block] == 1 for block in sequence.cross_block_table)
            if last and self._is_shared(sequence):
                self._sources.pop(self._root(sequence), None)
            for block in reversed(sequence.cross_block_table):
                self._release(block)
            sequence.cross_block_table.clear()

    def clear_cache(self) -> None:
        """Forget everything; blocks in use stay in use."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hashes.clear()
        self._known.clear()

    def forget(self) -> None:
        """As if nobody had ever asked for anything: no block is known, nothing counted."""
        self.clear_cache()
        self.num_queried_tokens = self.num_hit_tokens = 0

    def slots(self, table: list[int], start: int, stop: int) -> list[int]:
        """Pool slots of tokens `[start, stop)` of a sequence whose blocks are `table`."""
        size = self.block_size
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def check_invariants(self, sequences: Iterable[SequenceState]) -> None:
        """Raise `AssertionError` unless free + used + cached is everything and every count is right."""
        owned = Counter(block for s in sequences for table in (s.block_table, s.cross_block_table) for block in table)
        assert all(self._counts[block] == owned[block] for block in range(self.num_blocks)), "a count is wrong"
        everything = sorted([*owned, *self._free, *self._cached])
        assert everything == list(range(self.num_blocks)), (
            f"blocks lost or doubled: {len(owned)} used + {len(self._free)} free + {len(self._cached)} cached "
            f"of {self.num_blocks}"
        )
        assert {block: digest for digest, block in self._known.items()} == self._hashes, "hashes and blocks disagree"
        assert self._cached.keys() <= self._hashes.keys(), "a cached block is not known"
        shared = {block for table in self._sources.values() for block in table}
        assert all(self._counts[block] for block in shared), "the memory of a source that nobody reads"

    def _take(self) -> int:
        """A block whose content nobody needs any more."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._known[self._hashes.pop(block)]
        self._counts[block] = 1
        return block

    def _release(self, block: int) -> None:
        """One table less that has the block."""
        self._counts[block] -= 1
        if self._counts[block]:
            return
        if block in self._hashes and self.prefix_caching:
            self._cached[block] = None
        else:
            self._forget(block)
            self._free.append(block)

    def _make_known(self, digest: bytes, block: int) -> None:
        before = self._known.get(digest)
        if before is not None and before in self._cached:  # nobody has it: one copy is enough
            del self._cached[before]
            self._forget(before)
            self._free.append(before)
            before = None
        if before is None and block not in self._hashes:
            self._known[digest] = block
            self._hashes[block] = digest

    def _forget(self, block: int) -> None:
        if block in self._hashes:
            del self._known[self._hashes.pop(block)]

    def _share_source(self, sequence: SequenceState) -> None:
        """Let it read the memory of its source where another's encoder has run or runs in this step."""
        if self._is_shared(sequence):
            table = self._sources.get(self._root(sequence), [])
            sequence.cross_block_table.extend(table)
            for block in table:
                self._counts[block] += 1

    def _is_shared(self, sequence: SequenceState) -> bool:
        """Whether anybody could begin the same."""
        return self.prefix_caching or sequence.params.n > 1 or sequence.params.num_beams > 1

    def _num_shareable(self, sequence: SequenceState) -> int:
        """Blocks that the sequence may have from others: at least its last token stays to be computed."""
        if not sequence.reuses_prefix or not self._is_shared(sequence):
            return 0
        return (sequence.num_tokens - 1) // self.block_size

    def _find(self, sequence: SequenceState, begin: int = 0) -> list[int]:
        """Known blocks of the sequence from its block `begin` on."""
        found: list[int] = []
        for index in range(begin, self._num_shareable(sequence)):
            digest = self._extend_hashes(sequence, index)
            if digest not in self._known:
                break
            found.append(self._known[digest])
        return found

    def _extend_hashes(self, sequence: SequenceState, index: int) -> bytes:
        """The hash of the sequence's block `index`, those before it being known to the sequence."""
        if index < len(sequence.block_hashes):
            return sequence.block_hashes[index]
        parent = sequence.block_hashes[-1] if sequence.block_hashes else self._root(sequence)
        tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
        sequence.block_hashes.append(sha256(parent + pack(f"<{len(tokens)}q", *tokens)).digest())
        return sequence.block_hashes[-1]

    def _root(self, sequence: SequenceState) -> bytes:
        """The hash of what all blocks of a sequence depend on before its first token: salt and source."""
        if sequence.root_hash is None:
            request = sequence.request
            salt = (request.cache_salt if self.prefix_caching else request.request_id).encode()
            source = pack(f"<{len(sequence.source_ids)}q", *sequence.source_ids)
            sequence.root_hash = sha256(pack("<q", len(salt)) + salt + source).digest()
        return sequence.root_hash

    def _missing(self, sequence: SequenceState, num_tokens: int) -> int:
        wanted = self.blocks_for(sequence.num_computed_tokens + num_tokens)
        return max(0, wanted - len(sequence.block_table)) + self._writes_shared(sequence)

    def _writes_shared(self, sequence: SequenceState) -> bool:
        """Whether the next token goes into a block that others have too."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and index < len(sequence.block_table) and self._counts[sequence.block_table[index]] > 1

    def _missing_cross(self, sequence: SequenceState) -> int:
        return self.blocks_for(len(sequence.source_ids)) if self.must_encode(sequence) else 0

    def must_encode(self, sequence: SequenceState) -> bool:
        """Whether the encoder has to run for a sequence: nobody's memory of the same source is there."""
        return sequence.needs_source and not (self._is_shared(sequence) and self._root(sequence) in self._sources)
