"""Validated settings of one model's engine: number formats, batch limits, memory. Stdlib only."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

from triptych.model.config.formats import FORMATS, QUANTIZED_LAYERS
from triptych.model.errors import ConfigError

AUTO_CACHE = "auto"  # `weights_cache`: the folder of the user's cache
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS, INTEGERS = ("none", *FORMATS), tuple(QUANTIZED_LAYERS)
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
ATTENTION_BACKENDS = ("auto", "native", "triton", "sdpa")
SLOW_FALLBACKS = ("allow", "refuse")
MAX_SPECULATIVE_TOKENS = 64  # that a step may draft for one sequence

_CPU_BATCH = (64, 2048)  # sequences and tokens of a step
_GPU_BATCHES = (  # the same by the GPU's bytes (1e9 a GB): the activations of a step must fit too
    (40e9, (256, 8192)),
    (20e9, (256, 4096)),
    (0, (128, 2048)),
)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on one model's sequences and tokens: in a step, and waiting."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one model's engine; `None` is derived from the checkpoint and the machine at load time."""

    device: str = "auto"  # auto | cpu | cuda[:N]
    dtype: str = "auto"
    pickle: bool = True  # read weights from pytorch_model.bin where there are no safetensors; nothing in it is run
    pictures: bool = True  # a model that reads pictures in its prompts does; else only its language model is loaded
    weights_cache: str | None = None  # folder of a CPU's packed weights; auto: in the user's cache; None: nowhere
    weights_cache_size: int | None = None  # bytes of all files there; None: 32 GiB in the user's cache, else unlimited
    quantization: str = "none"  # of the stacks' weight matrices; on a CPU also of the head
    attention_backend: str = "auto"
    kv_cache_dtype: str = "auto"  # auto: the dtype of the weights
    tensor_parallel_size: int = 1  # ranks (processes, each with its own GPU if any) that the matrices are split over
    batch_invariant: bool = False  # refuse settings by which a result's bits could depend on the rest of the batch
    max_model_len: int | None = None  # tokens of prompt and output together; None: the most positions and memory allow
    max_num_seqs: int | None = None  # None: by the device, see `limits`
    max_num_batched_tokens: int | None = None  # of decoders in a step, and as many of new encoder sources
    block_size: int = 16  # tokens of one KV block
    kv_cache_memory: int | None = None  # bytes on each rank
    gpu_memory_utilization: float = 0.9
    gpu_share: float = 1.0  # of the GPU that belongs to this process; other replicas have the rest
    cuda_graphs: bool = True  # on a GPU: record decode steps and batches to encode at start; takes seconds
    slow_fallbacks: str = "allow"  # refuse: do not start where Triton, CUDA graphs, fused or C kernels fail
    prefix_caching: bool = True  # keep computed KV blocks for requests with the same prefix
    num_speculative_tokens: int = 0  # of requests that do not say: most tokens that a step drafts; 0: none
    draft_model: str | None = None  # folder of a small model that drafts too, of the same vocabulary
    draft_model_shared: bool = False  # it is that of all models: those that are not decoder-only do without
    model_weight: float = 1.0  # relative share of compute time among the models of the process
    max_queue_seconds: float = 60.0  # that a new request may have to wait until its first step
    max_queued_requests: int | None = None  # bound of memory; None: 128 x max_num_seqs
    max_queued_tokens: int | None = None  # bound of memory; None: 1024 x max_num_batched_tokens

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", self.device):
            raise ConfigError(f"device must be auto, cpu or cuda[:N], found {self.device!r}")
        for name, allowed in (
            ("dtype", DTYPES),
            ("quantization", QUANTIZATIONS),
            ("attention_backend", ATTENTION_BACKENDS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("slow_fallbacks", SLOW_FALLBACKS),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, found {getattr(self, name)!r}")
        for name in ("block_size", "tensor_parallel_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, found {getattr(self, name)}")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory",
            "weights_cache_size",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, found {value}")
        for name in ("max_queued_requests", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} must not be negative, found {value}")
        if not 0 <= self.max_queue_seconds < math.inf:
            raise ConfigError(f"max_queue_seconds must be a number from 0, found {self.max_queue_seconds}")
        if not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            found = self.num_speculative_tokens
            raise ConfigError(f"num_speculative_tokens must be 0 to {MAX_SPECULATIVE_TOKENS}, found {found}")
        if self.draft_model is not None and not self.num_speculative_tokens and not self.draft_model_shared:
            raise ConfigError("draft_model needs num_speculative_tokens: the most tokens that a step drafts")
        if not 0 < self.model_weight < math.inf:
            raise ConfigError(f"model_weight must be a positive number, found {self.model_weight}")
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence gets a token a step"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], found {self.gpu_memory_utilization}")
        if not 0 < self.gpu_share <= 1:
            raise ConfigError(f"gpu_share must be in (0, 1], found {self.gpu_share}")

    def limits(self, gpu_memory: int | None = None) -> BatchLimits:
        """Return the batch limits; unset ones are chosen for a GPU of `gpu_memory` bytes, or for a CPU (None).

        A step needs a token for each sequence: where only one of the two bounds is set, the other is adapted to it.
        """
        seqs, tokens = _CPU_BATCH
        if gpu_memory is not None:
            seqs, tokens = next(batch for min_memory, batch in _GPU_BATCHES if gpu_memory >= min_memory)
        seqs = self.max_num_seqs or min(seqs, self.max_num_batched_tokens or seqs)
        tokens = self.max_num_batched_tokens or max(tokens, seqs)
        return BatchLimits(
            seqs,
            tokens,
            128 * seqs if self.max_queued_requests is None else self.max_queued_requests,
            1024 * tokens if self.max_queued_tokens is None else self.max_queued_tokens,
            self.max_queue_seconds,
        )

    def largest_limits(self) -> BatchLimits:
        """Return an upper bound of `limits`, for use before the device is known."""
        return self.limits(None if self.device == "cpu" else sys.maxsize)
