"""The division of the KV cache into pools, and the context that they hold. No tensors.

A layer without a window keeps the keys and values of a token until the sequence ends. A layer with a window keeps them
while later tokens read them. So a sequence takes a different number of blocks from each pool:

    blocks of a sequence of c tokens = c / block_size                                 without a window
                                     = window / block_size + 1, + those of one step   with a window, if that is less

Memory is divided for sequences of a quarter of the context, as many as it holds: few requests use the whole context,
and shorter sequences need more of the windowed pools. A pool has at least the blocks of one sequence of the whole
context, and at most those of `max_num_seqs` such sequences.

A sequence of a model with recurrent layers also takes slots for their states (`StateSize`), independent of its length.
If memory holds few slots, fewer sequences run at a time. A context of `auto` leaves room for the slots of a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.stats import CachePool
from triptych.model.config.cache import PoolSize, PoolSpec, StateSize, paged_specs, pools_of, state_bytes
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shard
from triptych.model.errors import ConfigError

MIN_CONTEXT = 256  # tokens; the shortest context that `auto` chooses. An explicit context may be shorter
_TYPICAL_SHARE = 4  # memory is divided for sequences of this fraction of the context
_SNAPSHOTS = 2  # states of a sequence kept for others: after its prompt, and where its prompt leaves a known one
_UNBOUNDED = 1 << 32  # blocks: more than any memory holds


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens of prompt and output together."""

    tokens: int
    reason: str  # for people


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The sizes that decide how much KV cache a sequence takes on one rank."""

    block_size: int  # tokens
    pools: tuple[PoolSpec, ...]
    has_source: bool  # encoder-decoder; a source is as long as its sequence unless `source_positions` is set
    step_tokens: int  # the largest step
    state_bytes: int = 0  # one slot, with the states of all recurrent layers
    snapshots: int = 0  # slots for snapshots of each sequence
    max_num_seqs: int = 1  # sequences that run at a time
    source_positions: int | None = None  # the length of every source, if they are equally long

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        config: ModelConfig,
        dtype: torch.dtype,
        limits: BatchLimits,
        draft_token_bytes: int = 0,
    ) -> KVLayout:
        """Return the layout of a model that computes in `dtype`.

        A draft model uses the block numbers of the first pool; `draft_token_bytes` is the size of its token there.
        """
        decoder = Shard(0, engine.tensor_parallel_size).config(config).decoder_stack
        pools = pools_of(paged_specs(decoder, str(kv_dtype(engine, dtype)).removeprefix("torch.")))
        if draft_token_bytes:
            pools = (replace(pools[0], token_bytes=pools[0].token_bytes + draft_token_bytes), *pools[1:])
        snapshots = _SNAPSHOTS * engine.prefix_caching
        step_tokens = limits.max_num_batched_tokens
        return cls(
            *(engine.block_size, pools, config.encoder is not None, step_tokens),
            *(state_bytes(decoder), snapshots, limits.max_num_seqs, config.source_positions),
        )

    @property
    def token_bytes(self) -> int:
        """The bytes of a token that all layers keep."""
        return sum(pool.token_bytes for pool in self.pools)

    def window_blocks(self, pool: PoolSpec) -> int:
        """Return the most blocks that a sequence keeps from step to step."""
        return _UNBOUNDED if pool.window is None else self._blocks(pool.window - 1) + 1

    def blocks_for(self, pool: PoolSpec, context: int, sequences: int = 1) -> int:
        """Return the blocks that `sequences` of `context` tokens, and their sources, take from a pool."""
        all_blocks = self._blocks(context)
        kept = min(all_blocks, self.window_blocks(pool))
        filled = min(all_blocks - kept, self._blocks(self.step_tokens))
        source = self._blocks(self.source_positions or context) if self.has_source else 0
        return sequences * (kept + source) + filled

    def bytes_for(self, context: int, sequences: int = 1) -> int:
        """Return the bytes of the blocks and states of `sequences` of `context` tokens."""
        blocks = [self.blocks_for(pool, context, sequences) for pool in self.pools]
        return self._bytes_of(blocks) + self._state_bytes(sequences)

    def states_for(self, sequences: int) -> StateSize:
        return StateSize(sequences, sequences * self.snapshots)

    def sequences_in(self, memory: int, context: int, max_num_seqs: int) -> int:
        """Return how many sequences can run at a time.

        It is `max_num_seqs`, or the number whose states and pools (`divide`) fit into `memory`; at least 1.
        """
        if not self.state_bytes:
            return max_num_seqs

        def taken(count: int) -> int:
            return self._state_bytes(count) + self._bytes_of(self._wanted(context, count))

        return max(1, bisect_right(range(1, max_num_seqs + 1), memory, key=taken))

    def context_in(self, memory: int) -> int:
        """Return the longest context that one sequence can have in `memory`."""
        blocks = bisect_right(range(_UNBOUNDED), memory, key=lambda count: self.bytes_for(count * self.block_size))
        return max(0, blocks - 1) * self.block_size

    def shared_context_in(self, memory: int) -> int:
        """Return the longest context that leaves room for the states of four sequences, within half of `memory`."""
        counts = range(2, min(self.max_num_seqs, _TYPICAL_SHARE) + 1)
        others = bisect_right(counts, memory // 2, key=self._state_bytes)
        return self.context_in(memory - self._state_bytes(others))

    def divide(self, memory: int, context: int, max_num_seqs: int) -> tuple[PoolSize, ...]:
        """Divide `memory`, less the states of `max_num_seqs` sequences, among the pools.

        At least one sequence of `context` tokens must fit.
        """
        memory -= self._state_bytes(max_num_seqs)
        most = [self.blocks_for(pool, context, max_num_seqs) for pool in self.pools]

        def blocks(sequences: int) -> list[int]:
            return list(map(min, self._wanted(context, sequences), most))

        def taken(sequences: int) -> int:
            return self._bytes_of(blocks(sequences))

        found = blocks(max(0, bisect_right(range(_UNBOUNDED), memory, key=taken) - 1))
        left = memory - self._bytes_of(found)
        for at, pool in enumerate(self.pools):
            block_bytes = pool.token_bytes * self.block_size
            more = min(most[at] - found[at], max(0, left) // block_bytes)
            found[at] += more
            left -= more * block_bytes
        return tuple(PoolSize(count, pool.window) for pool, count in zip(self.pools, found, strict=True))

    def describe(self, sizes: tuple[PoolSize, ...]) -> tuple[CachePool, ...]:
        """Return the pools as `/info` shows them."""
        return tuple(
            CachePool(
                window=pool.window,
                layers=len(pool.layers),
                num_blocks=size.num_blocks,
                bytes_per_token=pool.token_bytes,
                max_sequence_blocks=None if pool.window is None else self.window_blocks(pool),
            )
            for pool, size in zip(self.pools, sizes, strict=True)
        )

    def _wanted(self, context: int, sequences: int) -> list[int]:
        """Return the blocks of each pool for `sequences` of a quarter of the context, and for one of all of it."""
        typical = -(-context // _TYPICAL_SHARE)
        return [max(self.blocks_for(pool, context), self.blocks_for(pool, typical, sequences)) for pool in self.pools]

    def _bytes_of(self, blocks: Sequence[int]) -> int:
        """Return the bytes of this number of blocks of each pool."""
        return sum(self._bytes(pool, count) for pool, count in zip(self.pools, blocks, strict=True))

    def _state_bytes(self, sequences: int) -> int:
        return self.state_bytes * self.states_for(sequences).num_slots

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _bytes(self, pool: PoolSpec, blocks: int) -> int:
        return PoolSize(blocks, pool.window).num_pages * self.block_size * pool.token_bytes


def kv_dtype(engine: EngineConfig, weights: torch.dtype) -> torch.dtype:
    """Return the dtype of the pages of a network that computes in `weights`."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(engine.kv_cache_dtype, weights)


def kv_bytes_per_token(engine: EngineConfig, config: ModelConfig, weights: torch.dtype) -> int:
    """Return the bytes of a token in the self-attention cache of all layers on one rank; 0 without a decoder."""
    own = Shard(0, engine.tensor_parallel_size).config(config)
    if own.decoder is None:
        return 0
    dtype = str(kv_dtype(engine, weights)).removeprefix("torch.")
    return sum(spec.token_bytes for spec in paged_specs(own.decoder, dtype).values())


def max_context(engine: EngineConfig, config: ModelConfig, limits: BatchLimits) -> Context:
    """Return the context of the settings, or for `auto` the longest that the model's positions allow.

    Raises `ConfigError` if the settings exceed the positions.
    """
    if engine.max_model_len is None:
        if config.max_positions is None:
            return Context(limits.max_num_batched_tokens, "the tokens of a step; the model has no limit")
        return Context(config.max_positions, "all that the model takes")
    limit = config.longest_context
    if limit is not None and engine.max_model_len > limit:
        raise ConfigError(f"max_model_len {engine.max_model_len} is beyond the model's {limit} positions")
    return Context(engine.max_model_len, "asked for")


def least_context(engine: EngineConfig, most: Context) -> int:
    """Return the tokens that the pools must hold at least."""
    return most.tokens if engine.max_model_len is not None else min(MIN_CONTEXT, most.tokens)


def fit_context(engine: EngineConfig, most: Context, kv: KVLayout, memory: int) -> Context:
    """Return the context that pools of `memory` bytes serve: `most`, or for `auto` what fits.

    Raises `ConfigError` if there is no room for one request of an explicit context, or of `MIN_CONTEXT`.
    """
    fits, least = kv.context_in(memory), least_context(engine, most)
    if engine.max_model_len is None:
        fits = max(min(fits, least), kv.shared_context_in(memory))
    if fits >= most.tokens:
        return most
    if engine.max_model_len is None and fits >= least:
        return Context(fits, f"what the KV pool holds; the model takes {most.tokens}")
    size = f"{kv.bytes_for(least) / 2**20:.0f} MiB"
    if len(kv.pools) == 1 and not kv.state_bytes:
        room = f"{memory // (kv.token_bytes * kv.block_size)} blocks"
        needed = f"{kv.blocks_for(kv.pools[0], least)} ({size})"
    else:
        room, needed = f"{memory / 2**20:.0f} MiB", size
    raise ConfigError(
        f"the KV pool has room for {room}, but one request of max_model_len {least} needs {needed}: "
        "raise kv_cache_memory or lower max_model_len" + (f", {fits} fits" if fits else "")
    )
