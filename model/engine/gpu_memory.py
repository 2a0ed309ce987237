"""The size of a GPU's KV pool, computed from the measured memory of the largest step.

    pool = utilization * total - used - peak - margin

`used` is the memory of all processes once the weights are loaded. `peak` is the additional memory of the largest step:
a full batch of prompt tokens through every stack, then logits and sampling for the maximum number of sequences.
`margin` covers what that step does not show: CUDA graphs of decode steps and allocator fragmentation. Graphs of the
encoder are recorded before, so `used` has them.
If replicas share the GPU, `total` is this one's share, and `used` is its own memory, or more if others exceed theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triptych.model.api.engine_config import BatchLimits
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.attention.base import AttentionMetadata
from triptych.model.config.cache import paged_specs, pools_of
from triptych.model.engine.execution.sources import blank_source, source_input
from triptych.model.errors import ConfigError
from triptych.model.network.inputs import CrossInput, StackInput, packed_input
from triptych.model.network.transformer import Transformer
from triptych.model.sampling.sampler import SamplingRow, sample

MARGIN = 256 << 20  # bytes; not measured on a GPU yet
GRAPH_MARGIN = 8 << 20  # bytes for each recorded step; the batches of BERT-base took 6 MiB each on an H200

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of one GPU, in bytes."""

    free: int
    total: int

    @property
    def used(self) -> int:
        return self.total - self.free

    def part(self, share: float, reserved: int) -> GpuMemory:
        """Return the share of it that belongs to this process, which has reserved `reserved` bytes.

        Other processes may use the rest, now or later, but what they use beyond the rest is not free.
        """
        total = int(self.total * share)
        return GpuMemory(min(self.free, total - reserved), total)


class Allocator(Protocol):
    """Memory statistics of a device: `CudaMemory`, or a scripted one in tests."""

    def gpu_memory(self) -> GpuMemory:
        """Return free and total bytes as the driver reports them, for all processes."""

    def reserved(self) -> int:
        """Return the bytes that this process's allocator holds."""

    def restart_peak(self) -> None:
        """Release cached memory and restart the statistics of `peak`."""

    def peak(self) -> int:
        """Return the most bytes that were reserved since `restart_peak`."""


class CudaMemory:
    """The memory statistics of torch's CUDA allocator for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def gpu_memory(self) -> GpuMemory:
        return GpuMemory(*torch.cuda.mem_get_info(self._device))

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def restart_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)


def measure_peak(run: Callable[[], None], memory: Allocator) -> int:
    """Return the most bytes that `run` reserves beyond those before; afterwards they are released."""
    memory.restart_peak()
    before = memory.reserved()
    run()
    peak = memory.peak() - before
    memory.restart_peak()
    return peak


def pool_bytes(
    gpus: Iterable[GpuMemory], utilization: float, peak: int, *, recorded_sizes: int = 0, gathered_layers: float = 0.0
) -> int:
    """Return the bytes of the pool on the GPU with the least room; 0 if there is none.

    `gathered_layers`: the fraction of the pool that a step copies, if the backend cannot read pages in place.
    """
    margin = MARGIN + recorded_sizes * GRAPH_MARGIN
    room = min(int(gpu.total * utilization) - gpu.used - peak - margin for gpu in gpus)
    return max(0, int(room / (1 + gathered_layers)))


def pool_memory(
    model: Transformer,
    limits: BatchLimits,
    max_model_len: int,
    utilization: float,
    memory: Allocator,
    others: Iterable[GpuMemory] = (),
    *,
    gpu_share: float = 1.0,
    recorded_sizes: int = 0,
) -> int:
    """Measure the largest step and return the bytes of the KV pool of a model whose weights are on the device.

    `others`: the GPUs of the other ranks, which take part in the step and need as much memory for it as this one.
    Raises `ConfigError` if there is no memory for the step.
    """
    try:
        peak = measure_peak(lambda: largest_step(model, limits, max_model_len), memory)
    except torch.OutOfMemoryError:
        tokens = limits.max_num_batched_tokens
        raise ConfigError(
            f"a step of max_num_batched_tokens {tokens} does not fit with the weights: lower it"
        ) from None
    gathered = 0.0
    if model.backend.gathers_pages and model.decoder is not None:
        specs = paged_specs(model.decoder.config, "float32")
        # A layer's pages and a copy in the query's dtype. A windowed layer copies as many, though it has fewer.
        gathered = 2 * max(spec.token_bytes for spec in specs.values()) / pools_of(specs)[0].token_bytes
    own = memory.gpu_memory()
    gpus = [own.part(gpu_share, memory.reserved()) if gpu_share < 1 else own, *others]
    pool = pool_bytes(gpus, utilization, peak, recorded_sizes=recorded_sizes, gathered_layers=gathered)
    logger.info(
        "of %.1f GiB at a utilization of %g: %.2f GiB in use, %.2f GiB for the largest step, %.2f GiB for KV",
        *(gpus[0].total / 2**30, utilization, gpus[0].used / 2**30, peak / 2**30, pool / 2**30),
    )
    return pool


@torch.inference_mode()
def largest_step(model: Transformer, limits: BatchLimits, max_model_len: int) -> None:
    """Run the step that needs the most memory: the maximum of prompt tokens, then sampling of the maximum of rows."""
    device = model.device
    lengths = _split_lengths(limits.max_num_batched_tokens, max_model_len)
    encoder_output = None
    if model.encoder is not None:
        longest = model.config.source_positions or max_model_len
        sources = [
            blank_source(model.config, length) for length in _split_lengths(limits.max_num_batched_tokens, longest)
        ]
        encoder_output = model.encode(source_input(sources, device))
    hidden = model.decode(*_decoder_inputs(lengths, encoder_output, device))
    rows = [_sampling_row() for _ in range(limits.max_num_seqs)]
    logits = model.logits(hidden[: len(rows)])
    sample(logits, rows[: len(logits)])


def _split_lengths(tokens: int, max_length: int) -> list[int]:
    """Divide `tokens` into inputs of `max_length`; the last one may be shorter."""
    whole, rest = divmod(tokens, max_length)
    return [max_length] * whole + [rest] * (rest > 0)


def _decoder_inputs(
    lengths: list[int], encoder_output: Tensor | None, device: torch.device
) -> tuple[StackInput, None, CrossInput | None]:
    inputs = packed_input([[0] * length for length in lengths], device, causal=True)
    if encoder_output is None:
        return inputs, None, None
    rows, count = len(encoder_output), len(lengths)
    sources = tuple(rows * (place + 1) // count - rows * place // count for place in range(count))
    metadata = AttentionMetadata(tuple(lengths), sources, causal=False, device=device)
    return inputs, None, CrossInput(metadata, encoder_output)


def _sampling_row() -> SamplingRow:
    """Return a row with a penalty, which copies the logits, and top-p, which reads all of them."""
    params = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5)
    return SamplingRow(params, 0, (0, 0), 1)
