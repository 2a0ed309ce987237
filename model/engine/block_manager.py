"""Who owns which block of the KV pool, and which blocks hold tokens that may come again. Knows nothing of tensors.

Ask, then act: `can_allocate` is a pure check, `allocate` after a yes cannot fail, `free` is the only way back. A block
is

    free      nobody's; its content means nothing
    used      in as many tables as its count says
    cached    in no table, but known by the hash of its content: taken by who needs it, or evicted, oldest first

The hash of a full block covers all that its keys and values depend on: the salt, the source of an encoder-decoder,
every token up to its end (SHA-256, chained block by block). Sequences that begin the same share those blocks; blocks
of a source are never shared. Invariant: free + used + cached is everything, and the counts add up.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from struct import pack

from model.engine.sequence import Sequence


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

    @property
    def num_free(self) -> int:
        """Blocks that a sequence may get: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def holds(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the sequence's blocks have room for `num_tokens` more and nobody else reads where they go."""
        computed, table = sequence.num_computed_tokens, sequence.block_table
        if computed + num_tokens > len(table) * self.block_size or sequence.needs_source:
            return False
        index, offset = divmod(computed, self.block_size)
        return not offset or self._counts[table[index]] == 1

    def can_allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `num_tokens` more tokens of the sequence, and its source if that has no place yet, fit."""
        return self._missing(sequence, num_tokens) + self._missing_cross(sequence) <= self.num_free

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether all that is known of a waiting sequence fits, given the blocks it would find."""
        found = self._find(sequence)
        wanted = self.blocks_for(sequence.num_tokens) - len(found) + self._missing_cross(sequence)
        return wanted <= self.num_free - sum(block in self._cached for block in found)

    def reuse(self, sequence: Sequence) -> None:
        """Give a sequence without blocks those that hold its beginning already; they count as computed."""
        found = self._find(sequence)
        for block in found:
            self._cached.pop(block, None)
            self._counts[block] += 1
        sequence.block_table.extend(found)
        sequence.num_computed_tokens = len(found) * self.block_size
        if sequence.scheduled_time is None and sequence.reuses_prefix:  # else it finds what it has computed itself
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens

    def allocate(self, sequence: Sequence, num_tokens: int) -> dict[int, int]:
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
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let the child have the parent's blocks as well."""
        for ours, theirs in (
            (parent.block_table, child.block_table),
            (parent.cross_block_table, child.cross_block_table),
        ):
            theirs.extend(ours)
            for block in ours:
                self._counts[block] += 1

    def share_source(self, first: Sequence, other: Sequence) -> None:
        """Let `other` read the memory of `first`, whose source is the same."""
        other.cross_block_table.extend(first.cross_block_table)
        for block in first.cross_block_table:
            self._counts[block] += 1

    def remember(self, sequence: Sequence) -> None:
        """Make the full blocks that the sequence has computed known to those who come after it."""
        if not self.prefix_caching:
            return
        known = sequence.num_tokens - sequence.awaits  # what the device alone knows has no hash
        full = min(sequence.num_computed_tokens, known) // self.block_size
        for index in range(sequence.num_remembered_blocks, full):
            digest = self._extend_hashes(sequence, index)
            block = sequence.block_table[index]
            if digest not in self._known and block not in self._hashes:
                self._known[digest] = block
                self._hashes[block] = digest
        sequence.num_remembered_blocks = full

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of the sequence back; harmless on one that has none."""
        for table in (sequence.block_table, sequence.cross_block_table):
            for block in reversed(table):  # the end of a prefix is evicted before its beginning
                self._counts[block] -= 1
                if self._counts[block]:
                    continue
                if block in self._hashes:
                    self._cached[block] = None
                else:
                    self._free.append(block)
            table.clear()

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

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
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

    def _take(self) -> int:
        """A block whose content nobody needs any more."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._known[self._hashes.pop(block)]
        self._counts[block] = 1
        return block

    def _find(self, sequence: Sequence) -> list[int]:
        """Known blocks of the sequence's beginning; at least its last token stays to be computed."""
        if not self.prefix_caching or not sequence.reuses_prefix:
            return []
        found: list[int] = []
        for index in range((sequence.num_tokens - 1) // self.block_size):
            digest = self._extend_hashes(sequence, index)
            if digest not in self._known:
                break
            found.append(self._known[digest])
        return found

    def _extend_hashes(self, sequence: Sequence, index: int) -> bytes:
        """The hash of the sequence's block `index`, those before it being known to the sequence."""
        if index < len(sequence.block_hashes):
            return sequence.block_hashes[index]
        parent = sequence.block_hashes[-1] if sequence.block_hashes else _root(sequence)
        tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
        sequence.block_hashes.append(sha256(parent + pack(f"<{len(tokens)}q", *tokens)).digest())
        return sequence.block_hashes[-1]

    def _missing(self, sequence: Sequence, num_tokens: int) -> int:
        wanted = self.blocks_for(sequence.num_computed_tokens + num_tokens)
        return max(0, wanted - len(sequence.block_table)) + self._writes_shared(sequence)

    def _writes_shared(self, sequence: Sequence) -> bool:
        """Whether the next token goes into a block that others have too."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and index < len(sequence.block_table) and self._counts[sequence.block_table[index]] > 1

    def _missing_cross(self, sequence: Sequence) -> int:
        return self.blocks_for(len(sequence.source_ids)) if sequence.needs_source else 0


def _root(sequence: Sequence) -> bytes:
    """What all blocks of a sequence depend on before its first token."""
    salt = sequence.request.cache_salt.encode()
    source = pack(f"<{len(sequence.source_ids)}q", *sequence.source_ids)
    return sha256(pack("<q", len(salt)) + salt + source).digest()
