"""Numbers about engines, as plain data for metrics, `/info` and readiness. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass, field

from model.api.engine_config import BatchLimits


@dataclass(slots=True)
class StepStats:
    """One step of one model's engine."""

    model: str
    kind: str  # "generate" or "encode"
    seconds: float
    num_tokens: int
    num_sequences: int
    num_decodes: int = 0  # of the tokens: each the next one of a sequence
    num_whole_tokens: int = 0  # of the tokens: of sources and texts, which are computed whole


@dataclass(slots=True)
class EngineStats:
    """The state of one model's engine after its latest step; counters count since it started."""

    model: str
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0  # of them, cached_blocks hold tokens that may come again
    cached_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked for in the cache
    prefix_hits: int = 0  # and found

    @property
    def used_blocks(self) -> int:
        return self.total_blocks - self.free_blocks


@dataclass(frozen=True, slots=True)
class Demand:
    """What clients ask of one model, as the front counts it."""

    saturation: float  # what runs and waits over what can run at once; above 1 some wait
    waiting_tokens: int  # of prompts and inputs without an output yet


@dataclass(slots=True)
class ModelInfo:
    """What a loaded model turned out to be; the banner and `/info` show it."""

    name: str
    form: str  # decoder-only, encoder-decoder, encoder-only
    model_type: str
    parameters: int
    weight_bytes: int  # of one rank, as all sizes
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
    block_size: int
    num_blocks: int
    kv_bytes_per_token: int
    embedding_size: int
    load_seconds: float
    tensor_parallel_size: int = 1
    recorded_sizes: int = 0  # batch sizes whose decode steps are replayed as CUDA graphs
    fallbacks: tuple[str, ...] = ()  # what runs slower than it could, and why
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            self.max_num_seqs, self.max_num_batched_tokens, self.max_queued_requests, self.max_queued_tokens
        )

    def blocks_for(self, sequences: int, length: int, *, source: int = 0) -> int:
        """Of the KV pool, for sequences of `length` tokens each and the `source` that all of them read."""
        return sequences * -(-length // self.block_size) - (-source // self.block_size)


@dataclass(slots=True)
class Health:
    """Whether the engines answer. `live`: the step loop moves. `ready`: it also takes work. Else `reason` says why."""

    live: bool
    ready: bool
    reason: str = ""
