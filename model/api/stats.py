"""Statistics of engines, as plain data for metrics, `/info` and readiness. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.model.api.engine_config import BatchLimits


@dataclass(slots=True)
class StepStats:
    """Statistics of one step of one model's engine."""

    model: str
    kind: str  # "generate" or "encode"
    seconds: float
    num_tokens: int
    num_sequences: int
    num_decodes: int = 0  # tokens that decode: one for each sequence past its prefill, and its drafts
    num_whole_tokens: int = 0  # tokens of encoder inputs, which cannot be split


@dataclass(slots=True)
class EngineStats:
    """The state of one model's engine after its latest step; counters start with the engine."""

    model: str
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0  # includes cached_blocks
    cached_blocks: int = 0  # free blocks that the prefix cache still holds
    total_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of those, found
    window_usage: dict[int, float] = field(default_factory=dict)  # used share of each further pool, by its window
    free_states: int = 0  # slots for the states of recurrent layers; includes cached_states
    cached_states: int = 0  # free slots that hold snapshots
    total_states: int = 0  # 0: there are no such layers
    drafts: int = 0  # runs of tokens that were drafted, each verified by one step
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of those, right
    model_draft_tokens: int = 0  # of draft_tokens, those of a draft model
    model_accepted_tokens: int = 0  # of those, right
    pictures: int = 0  # of prompts that were encoded; those of cached prefixes and of equal ones are not
    picture_tokens: int = 0  # of these
    adapter_of: str = ""  # of an adapter, whose requests alone are counted: the model that computes it

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks


@dataclass(frozen=True, slots=True)
class Demand:
    """The load that clients put on one model, as the front counts it."""

    saturation: float  # running and waiting work over what can run at once; above 1 some waits
    waiting_tokens: int  # of prompts and inputs without an output yet
    wait_seconds: float = 0.0  # estimated, until the first step of a request that comes now


@dataclass(frozen=True, slots=True)
class CachePool:
    """Blocks of KV cache for the layers that read `window` tokens back, or all tokens (None)."""

    window: int | None
    layers: int
    num_blocks: int
    bytes_per_token: int  # of all these layers
    max_sequence_blocks: int | None = None  # that a sequence keeps, however long it is; None: there is no such bound


@dataclass(slots=True)
class ModelInfo:
    """Properties of a loaded model, as the banner and `/info` show them."""

    name: str
    form: str  # decoder-only, encoder-decoder, encoder-only
    model_type: str
    parameters: int
    weight_bytes: int  # on one rank, like all sizes
    dtype: str
    dtype_reason: str
    device: str
    attention_backend: str
    attention_reason: str
    max_model_len: int
    max_model_len_reason: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_seconds: float
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    embedding_size: int
    load_seconds: float
    weights_cache: str = ""  # mapped, written, or why not; empty: no cache is configured
    draft_model: str = ""  # the name of its folder; empty: there is none
    tensor_parallel_size: int = 1
    recorded_sizes: int = 0  # number of batch sizes with a CUDA graph of the decode step
    recorded_prompts: int = 0  # number of sizes of steps with prompts that have one
    recorded_batches: int = 0  # number of batch sizes that are encoded by a CUDA graph
    threads: int = 0  # that compute on the CPU, for all models of the process
    fallbacks: tuple[str, ...] = ()  # features that fell back to a slower path, with the reason
    versions: dict[str, str] = field(default_factory=dict)
    state_slots: int = 0  # for the states of recurrent layers: two of each sequence, others for snapshots
    state_slot_bytes: int = 0  # of one
    cache_pools: tuple[CachePool, ...] = ()  # the first has `num_blocks`; empty: a single one without a window
    reads_pictures: bool = False  # in prompts, as it is computed here: not on several ranks, for example
    similarity: tuple[float, float] | None = None  # of a text and an image: factor of the cosine, and what is added
    memory_bytes: int = 0  # weights, KV cache and planned scratch, on all ranks; of an adapter its matrices alone
    adapter_of: str = ""  # the model that an adapter is computed with; empty: it is a model

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.max_queued_requests,
            self.max_queued_tokens,
            self.max_queue_seconds,
        )

    @property
    def sequence_capacity(self) -> int | None:
        """Tokens of one sequence that an empty KV cache holds; None: layers with windows bound it by nothing."""
        bounded = not self.cache_pools or self.cache_pools[0].max_sequence_blocks is None
        return self.num_blocks * self.block_size if bounded else None

    def shortage(self, sequences: int, length: int, *, source: int = 0) -> tuple[int, int] | None:
        """Return what does not fit into an empty KV cache of sequences of `length` tokens and one `source` for all.

        As (blocks needed, blocks there) of the first pool that is too small; None: all fits.
        """
        pools = self.cache_pools or (CachePool(None, 0, self.num_blocks, self.kv_bytes_per_token),)
        each, shared = -(-length // self.block_size), -(-source // self.block_size)
        for pool in pools:
            needed = sequences * min(each, pool.max_sequence_blocks or each) + shared
            if needed > pool.num_blocks:
                return needed, pool.num_blocks
        return None

    def most_beams(self, wanted: int, length: int, *, source: int = 0) -> int:
        """Return how many of the beams of `length` tokens that are wanted fit into a step and the KV cache; 1 always.

        The service and `LLM` reduce a folder's beams to this number, and refuse those that a request asks for.
        """
        fitting = range(min(wanted, self.max_num_seqs), 1, -1)
        return next((beams for beams in fitting if self.shortage(beams, length, source=source) is None), 1)


@dataclass(slots=True)
class Health:
    """Whether the engines answer. `live`: the step loop responds. `ready`: it also takes requests; else `reason`."""

    live: bool
    ready: bool
    reason: str = ""
