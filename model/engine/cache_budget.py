"""How many blocks of KV cache the pools of a model get, and the context that they hold. Without tensors.

A layer without a window keeps the keys and values of a token until the sequence ends, one with a window only while
later tokens read them. So pools differ in what a sequence takes of them, and memory is divided in advance:

    blocks of a sequence of c tokens = c / block_size                                 where there is no window
                                     = window / block_size + 1, + those of one step   where that is less

The division is that of as many sequences of a quarter of the context as memory holds: traffic is seldom as long as the
context allows, and shorter sequences need more of the windowed pools. A pool never gets less than one sequence of the
whole context takes, nor more than the most sequences take.

A sequence of a model with recurrent layers takes slots for their states beside that (`StateSize`), whatever its length.
They decide how many sequences run at a time, where memory holds fewer than were asked for; the context, where nobody
says how long, leaves room for a few.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from model.api.engine_config import BatchLimits, EngineConfig
from model.api.stats import CachePool
from model.config.cache import PoolSize, PoolSpec, StateSize, paged_specs, pools_of, state_bytes
from model.config.model import ModelConfig
from model.config.sharding import Shard
from model.errors import ConfigError

MIN_CONTEXT = 256  # what `auto` will go down to; less is served where it was asked for
_TYPICAL_SHARE = 4  # of the context is the length that memory is divided for
_SNAPSHOTS = 2  # of a sequence's states that others may begin with: behind its prompt, and where it parts from others'
_UNBOUNDED = 1 << 32  # blocks: more than any memory holds


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens of prompt and output together."""

    tokens: int
    reason: str  # for people


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What sequences take of the KV cache of one rank."""

    block_size: int  # tokens
    pools: tuple[PoolSpec, ...]
    has_source: bool  # each sequence may have one, as long as itself if `source_positions` does not say how long
    step_tokens: int  # the most of one step
    state_bytes: int = 0  # of a slot for the states of all recurrent layers
    snapshots: int = 0  # slots of each sequence beside those that it runs with
    max_num_seqs: int = 1  # that are to run at a time, where there are states
    source_positions: int | None = None  # of every source, where they are equally long

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        config: ModelConfig,
        dtype: torch.dtype,
        limits: BatchLimits,
        draft_token_bytes: int = 0,
    ) -> KVLayout:
        """`dtype` is the network's. A draft model has pages for the blocks of the first pool: `draft_token_bytes` are
        its bytes of a token."""
        decoder = Shard(0, engine.tensor_parallel_size).config(config).decoder
        assert decoder is not None
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
        """Of a token that all layers keep."""
        return sum(pool.token_bytes for pool in self.pools)

    def window_blocks(self, pool: PoolSpec) -> int:
        """The most blocks that a sequence keeps from step to step."""
        return _UNBOUNDED if pool.window is None else self._blocks(pool.window - 1) + 1

    def blocks_for(self, pool: PoolSpec, context: int, sequences: int = 1) -> int:
        """Of a pool for so many sequences of `context` tokens, each with a source, of as many if that is not fixed."""
        all_blocks = self._blocks(context)
        kept = min(all_blocks, self.window_blocks(pool))
        filled = min(all_blocks - kept, self._blocks(self.step_tokens))
        source = self._blocks(self.source_positions or context) if self.has_source else 0
        return sequences * (kept + source) + filled

    def bytes_for(self, context: int, sequences: int = 1) -> int:
        """Of blocks and of states."""
        blocks = [self.blocks_for(pool, context, sequences) for pool in self.pools]
        return self._bytes_of(blocks) + self._state_bytes(sequences)

    def states_for(self, sequences: int) -> StateSize:
        return StateSize(sequences, sequences * self.snapshots)

    def sequences_in(self, memory: int, context: int, max_num_seqs: int) -> int:
        """How many can run at a time: `max_num_seqs`, or as many as have room for their states beside the pools that
        `divide` makes for them; one at least."""
        if not self.state_bytes:
            return max_num_seqs

        def taken(count: int) -> int:
            return self._state_bytes(count) + self._bytes_of(self._wanted(context, count))

        return max(1, bisect_right(range(1, max_num_seqs + 1), memory, key=taken))

    def context_in(self, memory: int) -> int:
        """The longest that one sequence may have."""
        blocks = bisect_right(range(_UNBOUNDED), memory, key=lambda count: self.bytes_for(count * self.block_size))
        return max(0, blocks - 1) * self.block_size

    def shared_context_in(self, memory: int) -> int:
        """The longest that one may have beside the states of four, or of as many as take half of the memory."""
        counts = range(2, min(self.max_num_seqs, _TYPICAL_SHARE) + 1)
        others = bisect_right(counts, memory // 2, key=self._state_bytes)
        return self.context_in(memory - self._state_bytes(others))

    def divide(self, memory: int, context: int, max_num_seqs: int) -> tuple[PoolSize, ...]:
        """The pools that `memory` bytes make beside `max_num_seqs` states, for sequences of up to `context` tokens,
        of which one at least fits."""
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
        """The pools for `/info`."""
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
        """Blocks of each pool for so many sequences of a quarter of the context, and for one of all of it."""
        typical = -(-context // _TYPICAL_SHARE)
        return [max(self.blocks_for(pool, context), self.blocks_for(pool, typical, sequences)) for pool in self.pools]

    def _bytes_of(self, blocks: Sequence[int]) -> int:
        """Of so many blocks of each pool."""
        return sum(self._bytes(pool, count) for pool, count in zip(self.pools, blocks, strict=True))

    def _state_bytes(self, sequences: int) -> int:
        return self.state_bytes * self.states_for(sequences).num_slots

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _bytes(self, pool: PoolSpec, blocks: int) -> int:
        return PoolSize(blocks, pool.window).num_pages * self.block_size * pool.token_bytes


def kv_dtype(engine: EngineConfig, weights: torch.dtype) -> torch.dtype:
    """The dtype of the pages, where the network computes in that of `weights`."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(engine.kv_cache_dtype, weights)


def kv_bytes_per_token(engine: EngineConfig, config: ModelConfig, weights: torch.dtype) -> int:
    """Of the self attention of all layers, on one rank; 0 where there is no decoder."""
    own = Shard(0, engine.tensor_parallel_size).config(config)
    if own.decoder is None:
        return 0
    dtype = str(kv_dtype(engine, weights)).removeprefix("torch.")
    return sum(spec.token_bytes for spec in paged_specs(own.decoder, dtype).values())


def max_context(engine: EngineConfig, config: ModelConfig, limits: BatchLimits) -> Context:
    """What is asked for, within what the positions allow; or, where memory is to decide, what they allow."""
    if engine.max_model_len is None:
        if config.max_positions is None:
            return Context(limits.max_num_batched_tokens, "the tokens of a step; the model has no limit")
        return Context(config.max_positions, "all that the model takes")
    limit = config.longest_context
    if limit is not None and engine.max_model_len > limit:
        raise ConfigError(f"max_model_len {engine.max_model_len} is beyond the model's {limit} positions")
    return Context(engine.max_model_len, "asked for")


def least_context(engine: EngineConfig, most: Context) -> int:
    """The tokens that the pools must hold at least."""
    return most.tokens if engine.max_model_len is not None else min(MIN_CONTEXT, most.tokens)


def fit_context(engine: EngineConfig, most: Context, kv: KVLayout, memory: int) -> Context:
    """The context that pools of `memory` bytes serve: `most`, or less where it is not said how much.

    Raises `ConfigError` where a request of the context that was asked for, or of `MIN_CONTEXT`, has no room.
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
