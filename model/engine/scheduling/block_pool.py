"""One pool of KV cache blocks: which are free, used or cached, and the hashes by which their content is found."""

from __future__ import annotations

from collections import Counter, OrderedDict
from hashlib import sha256
from struct import pack

from triptych.model.engine.scheduling.sequence import SequenceState

# -- The blocks of one pool. No sequences, no tensors.

NULL_BLOCK = 0  # in the tables of a windowed pool: a block that has left the window; it holds zeros, never allocated


class BlockPool:
    """`num_blocks` blocks for layers that read `window` tokens back, or everything (None). A block is

    free      in no table; its content means nothing
    used      in as many tables as its count says
    cached    in no table, but known by the hash of its content: taken by a sequence that needs that content, or
              evicted, the least recently used first
    """

    def __init__(self, num_blocks: int, window: int | None = None, block_size: int = 1) -> None:
        """`block_size`: tokens of a block; only a pool with a window needs it."""
        self.num_blocks = num_blocks
        self.window = window
        # Full blocks before the one being filled that are still read; None: all.
        self.reach = None if window is None else -(-(window - 1) // block_size)
        self.reset()

    def reset(self) -> None:
        """Free all blocks, and remove all cached content."""
        first = 0 if self.window is None else NULL_BLOCK + 1
        self._free = list(range(first + self.num_blocks - 1, first - 1, -1))  # a stack: the block freed last is warm
        self.counts = [0] * (first + self.num_blocks)
        self.known: dict[bytes, int] = {}  # the block that holds what has this hash
        self._hashes: dict[int, bytes] = {}  # of used and cached blocks
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        """The blocks that can be allocated: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_unused(self) -> int:
        """The free blocks, without the cached ones."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def held(self, table: list[int]) -> list[int]:
        """Return the allocated blocks of a table, without those that have left the window."""
        return table if self.window is None else [block for block in table if block != NULL_BLOCK]

    def first_kept(self, block: int) -> int:
        """Return the first block of a table that a token in `block` reads."""
        return 0 if self.reach is None else max(0, block - self.reach)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def take(self) -> int:
        """Allocate a block, evicting the least recently used cached one if no block is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self.known[self._hashes.pop(block)]
        self.counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add one reference to a used or cached block."""
        self._cached.pop(block, None)
        self.counts[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Remove one reference; after the last one a known block is cached if `keep`, else it is free."""
        self.counts[block] -= 1
        if self.counts[block]:
            return
        if keep and block in self._hashes:
            self._cached[block] = None
        else:
            self.forget(block)
            self._free.append(block)

    def make_known(self, digest: bytes, block: int) -> None:
        """Register a used block under the hash of its content, unless another used block has that hash."""
        before = self.known.get(digest)
        if before is not None and before in self._cached:  # unused: one copy is enough
            self.drop(digest)
            before = None
        if before is None and block not in self._hashes:
            self.known[digest] = block
            self._hashes[block] = digest

    def forget(self, block: int) -> None:
        """Remove the hash of a block, which is then no longer found."""
        if block in self._hashes:
            del self.known[self._hashes.pop(block)]

    def drop(self, digest: bytes) -> None:
        """Free the block with this hash if it is cached and unused."""
        block = self.known.get(digest)
        if block is not None and block in self._cached:
            del self._cached[block]
            self.forget(block)
            self._free.append(block)

    def clear_cache(self) -> None:
        """Remove all cached content; blocks in use stay in use."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hashes.clear()
        self.known.clear()

    def check_invariants(self, owned: Counter[int]) -> None:
        """Raise `AssertionError` unless free + used + cached is everything; `owned`: tables that have each block."""
        first = len(self.counts) - self.num_blocks
        blocks = range(first, first + self.num_blocks)
        assert all(self.counts[block] == owned[block] for block in blocks), "a count is wrong"
        assert sorted([*owned, *self._free, *self._cached]) == list(blocks), (
            f"blocks lost or doubled: {len(owned)} used + {len(self._free)} free + {len(self._cached)} cached "
            f"of {self.num_blocks}"
        )
        assert {block: digest for digest, block in self.known.items()} == self._hashes, "hashes and blocks disagree"
        assert self._cached.keys() <= self._hashes.keys(), "a cached block is not known"


# -- Hashes of blocks, by which sequences with a common prefix find each other's blocks. No tensors. The hash of a
# full block covers all that its keys and values depend on: salt, source, adapter, and every token up to its end
# (SHA-256, chained block by block), and the pictures in it. A sequence keeps its computed hashes.


class BlockHasher:
    """Computes the hashes of blocks; with `across_requests`, equal blocks of two requests have equal hashes.

    Sequences longer than `short_context` tokens have other keys than shorter ones (`ModelConfig.short_context`).
    """

    def __init__(self, block_size: int, *, across_requests: bool, short_context: int | None = None) -> None:
        self._block_size = block_size
        self._across_requests = across_requests
        self._short_context = short_context

    def root(self, sequence: SequenceState) -> bytes:
        """Return the hash of what all blocks depend on: salt, source, adapter, and whether the sequence is long."""
        if sequence.root_hash is None:
            request = sequence.request
            salt = (request.cache_salt if self._across_requests else request.request_id).encode()
            source = request.source.digest if request.source is not None else b""
            long = self._short_context is not None and sequence.rotary_context > self._short_context
            sequence.root_hash = sha256(
                pack("<qq", len(salt), sequence.adapter) + salt + source + b"long" * long
            ).digest()
        return sequence.root_hash

    def block(self, sequence: SequenceState, index: int) -> bytes:
        """Return the hash of the full block `index`; those of the blocks before it must be computed already."""
        hashes = sequence.block_hashes
        if index < len(hashes):
            return hashes[index]
        parent = hashes[-1] if hashes else self.root(sequence)
        start, stop = index * self._block_size, (index + 1) * self._block_size
        tokens = sequence.token_ids[start:stop]
        content = parent + pack(f"<{len(tokens)}q", *tokens)
        for image in sequence.request.images:  # whose tokens are the same whatever they show
            if image.start < stop and image.stop > start:
                content += pack("<qq", image.start - start, image.row_length) + image.source.digest
        hashes.append(sha256(content).digest())
        return hashes[-1]

    def picture(self, sequence: SequenceState, index: int) -> bytes:
        """Return the key of a picture's encoding, which requests of one salt and one adapter share."""
        keys = sequence.picture_keys
        for image in sequence.request.images[len(keys) :]:
            keys.append(sha256(self.root(sequence) + image.source.digest).digest())
        return keys[index]

    def source(self, sequence: SequenceState) -> list[bytes]:
        """Return the hashes of the source's blocks; they are longer than those of tokens, so none are equal."""
        root, blocks = self.root(sequence), -(-sequence.source_length // self._block_size)
        return [root + pack("<q", index) for index in range(blocks)]
