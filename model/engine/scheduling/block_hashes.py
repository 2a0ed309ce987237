"""Hashes of what blocks hold, by which sequences that begin alike find each other's blocks. No tensors.

The hash of a full block covers all that its keys and values depend on: salt, source, and every token up to its end
(SHA-256, chained block by block). A sequence keeps the hashes that were computed of it.
"""

from __future__ import annotations

from hashlib import sha256
from struct import pack

from model.engine.scheduling.sequence import SequenceState


class BlockHasher:
    """Hashes of blocks of `block_size` tokens; `across_requests`: equal ones of two requests are equal.

    Beyond `short_context` tokens a sequence's keys are others than up to it (`ModelConfig.short_context`).
    """

    def __init__(self, block_size: int, *, across_requests: bool, short_context: int | None = None) -> None:
        self._block_size = block_size
        self._across_requests = across_requests
        self._short_context = short_context

    def root(self, sequence: SequenceState) -> bytes:
        """The hash of what all blocks depend on before the first token: salt, source, and whether it is long."""
        if sequence.root_hash is None:
            request = sequence.request
            salt = (request.cache_salt if self._across_requests else request.request_id).encode()
            source = request.source.digest if request.source is not None else b""
            long = self._short_context is not None and sequence.rotary_context > self._short_context
            sequence.root_hash = sha256(pack("<q", len(salt)) + salt + source + b"long" * long).digest()
        return sequence.root_hash

    def block(self, sequence: SequenceState, index: int) -> bytes:
        """The hash of the full block `index`, where those of the blocks before it were computed already."""
        hashes = sequence.block_hashes
        if index < len(hashes):
            return hashes[index]
        parent = hashes[-1] if hashes else self.root(sequence)
        tokens = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
        hashes.append(sha256(parent + pack(f"<{len(tokens)}q", *tokens)).digest())
        return hashes[-1]

    def source(self, sequence: SequenceState) -> list[bytes]:
        """Hashes of the blocks of the source: longer than those of tokens, so that none are equal."""
        root, blocks = self.root(sequence), -(-sequence.source_length // self._block_size)
        return [root + pack("<q", index) for index in range(blocks)]
