"""Problems of attention and steps of recurrent layers, of realistic sizes, generated on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionBackend, AttentionMetadata, DeviceLengths
from triptych.model.attention.layer_backends import Recurrence
from triptych.model.cache.kv_cache import LayerCache, StateCache, StateSpan, StateTables
from triptych.model.config.attention import AlibiConfig, AttentionConfig, BucketBiasConfig, GatedDeltaConfig
from triptych.model.network.delta_net import recur
from triptych.model.network.positions import AlibiBias, BucketBias


@dataclass(frozen=True, slots=True)
class Problem:
    """Describes a problem: (queries, keys) of each segment, and everything else that selects a kernel variant."""

    segments: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    paged: bool = True
    writes: bool = True  # this step's keys; in cross attention all keys are in the pages
    int8: bool = False
    fp8: bool = False
    biased: bool = False  # T5's bias by distance
    slopes: tuple[float, ...] = ()  # ALiBi's, one for each head
    sinks: bool = False
    block_size: int = 16

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            self.heads, self.kv_heads, self.dim, self.dim**-0.5, window=self.window, softcap=self.softcap
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pages that all segments read: bfloat16, or 8 bits with scales."""
        row = self.kv_heads * (self.dim + 4 if self.int8 or self.fp8 else 2 * self.dim)
        return 2 * row * sum(kv_len for _, kv_len in self.segments)

    @property
    def flops(self) -> int:
        """FLOPs of both products; a causal prompt computes half of the square."""
        pairs = sum(q * (k - (q - 1) / 2) if self.causal else q * k for q, k in self.segments)
        return int(4 * pairs * self.heads * self.dim)


@dataclass(frozen=True, slots=True)
class ProblemTensors:
    """Holds a problem's tensors on a device."""

    problem: Problem
    query: Tensor  # [T, H, D]
    key: Tensor | None
    value: Tensor | None
    cache: LayerCache | None
    metadata: AttentionMetadata
    bias: BucketBias | AlibiBias | None
    sinks: Tensor | None = None  # [H]

    def forward(self, backend: AttentionBackend) -> Tensor:
        rows = (self.query, self.key, self.value)
        return backend.forward(*rows, self.cache, self.metadata, self.problem.config, self.bias, self.sinks)

    def copied(self, dtype: torch.dtype) -> ProblemTensors:
        """Return a copy, so that backends do not read each other's writes."""
        cache = self.cache
        if cache is not None:
            scales = cache.scales and (cache.scales[0].clone(), cache.scales[1].clone())
            pages = [x.clone() if scales else x.to(dtype, copy=True) for x in (cache.keys, cache.values)]
            cache = LayerCache(pages[0], pages[1], scales)
        bias = self.bias
        if isinstance(bias, BucketBias):
            weight = bias.weight
            bias = BucketBias(_BUCKETS, self.problem.heads, bidirectional=not self.problem.causal)
            bias = bias.requires_grad_(False).to(self.query.device, dtype)
            bias.weight.copy_(weight)
        query, key, value = (None if x is None else x.to(dtype) for x in (self.query, self.key, self.value))
        assert query is not None
        return replace(self, query=query, key=key, value=value, cache=cache, bias=bias)


_BUCKETS = BucketBiasConfig()


def make_tensors(problem: Problem, device: torch.device, dtype: torch.dtype, seed: int = 0) -> ProblemTensors:
    """Generate random tensors, with shuffled blocks."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, problem.dim, device=device, generator=generator).to(dtype)

    q_lens, kv_lens = zip(*problem.segments, strict=True)
    total, cache, tables, slots = sum(q_lens), None, None, None
    if problem.paged:
        cache, tables, slots = _pages(problem, device, dtype, generator)
    bias: BucketBias | AlibiBias | None = AlibiBias(AlibiConfig(problem.slopes)) if problem.slopes else None
    if problem.biased:
        bias = BucketBias(_BUCKETS, problem.heads, bidirectional=not problem.causal).requires_grad_(False)
        bias = bias.to(device, dtype)
        bias.weight.normal_(generator=generator)
    sinks = torch.randn(problem.heads, device=device, generator=generator).to(dtype) if problem.sinks else None
    own = problem.writes or not problem.paged
    key, value = (rows(total, problem.kv_heads) if own else None for _ in range(2))
    metadata = AttentionMetadata(
        q_lens, kv_lens, problem.causal, device, tables, slots if problem.writes and problem.paged else None
    )
    if tables is not None:  # else keys are the packed rows
        starts = [0, *torch.tensor(q_lens).cumsum(0).tolist()]
        cu_seqlens, lens = (torch.tensor(values, dtype=torch.int64, device=device) for values in (starts, kv_lens))
        singles = q_lens.count(1) if max(q_lens) > 1 else 0
        if 1 in q_lens[singles:]:  # the engine puts decoding sequences first; otherwise one launch handles all
            singles = 0
        metadata.device_lengths = DeviceLengths(
            cu_seqlens,
            lens,
            max(q_lens),
            max(kv_lens),
            singles=singles,
            max_single_kv_len=max(kv_lens[:singles], default=0),
        )
    return ProblemTensors(problem, rows(total, problem.heads), key, value, cache, metadata, bias, sinks)


def _pages(
    problem: Problem, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[LayerCache, Tensor, Tensor]:
    """Return filled pages, the segments' block tables, and the slots of this step's keys."""
    size = problem.block_size
    widths = [-(-kv_len // size) for _, kv_len in problem.segments]
    ends = torch.tensor(widths).cumsum(0).tolist()
    blocks = torch.randperm(ends[-1])
    tables = torch.zeros(len(widths), max(widths), dtype=torch.int64)
    for segment, (begin, end) in enumerate(pairwise([0, *ends])):
        tables[segment, : end - begin] = blocks[begin:end]
    slots = []
    for segment, (q_len, kv_len) in enumerate(problem.segments):
        at = torch.arange(kv_len - q_len, kv_len)
        slots.append(tables[segment, at // size] * size + at % size)
    shape = (ends[-1], size, problem.kv_heads, problem.dim)
    if problem.int8 or problem.fp8:
        keys, values = (
            torch.randint(-127, 128, shape, dtype=torch.int8, device=device, generator=generator) for _ in range(2)
        )
        if problem.fp8:
            keys, values = (pages.float().to(torch.float8_e4m3fn) for pages in (keys, values))
        scales = tuple(torch.rand(shape[:3], device=device, generator=generator) / 60 for _ in range(2))
        cache = LayerCache(keys, values, (scales[0], scales[1]))
    else:
        pages = [torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator) for _ in range(2)]
        cache = LayerCache(pages[0], pages[1])
    return cache, tables.to(device), torch.cat(slots).to(device)


QWEN = GatedDeltaConfig(16, 32, 128, 128, 4, 1e-6)  # Qwen3-Next, Qwen3.5


@dataclass(frozen=True, slots=True)
class RecurrentProblem:
    """Describes a step of one layer: each segment of these lengths reads a slot and writes another."""

    lengths: tuple[int, ...]
    config: GatedDeltaConfig = QWEN

    @property
    def state_bytes(self) -> int:
        """Return the bytes of states that are read and written."""
        return 8 * len(self.lengths) * self.config.state_elements


class RecurrentStep:
    """Holds a layer and the rows and slots of a step."""

    def __init__(self, problem: RecurrentProblem, device: torch.device, dtype: torch.dtype) -> None:
        config, rows, count = problem.config, sum(problem.lengths), len(problem.lengths)
        draw = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(of)

        heads = config.num_value_heads
        shapes = (config.channels, config.kernel), (heads,), (heads,), (config.value_dim,)
        self.layer = Recurrence(config, *(normal(*shape) for shape in shapes))
        self.inputs, self.gates = normal(rows, config.channels + config.value_size), normal(rows, 2 * heads)
        states = (normal(2 * count, *shape, of=torch.float32) for shape in config.state_shapes)
        self.states = StateCache(*states)
        self.spans, first = list[StateSpan](), 0
        for place, length in enumerate(problem.lengths):
            self.spans.append(StateSpan(first, first + length, place, count + place))
            first += length

    def expected(self, spans: Iterable[StateSpan]) -> tuple[Tensor, StateCache]:
        """Return outputs and states by torch in float32, and leave the step as it is."""
        states = StateCache(self.states.recurrent.clone(), self.states.convolution.clone())
        return recur(self.layer, self.inputs.float(), self.gates.float(), spans, states), states

    def by_kernels(self, tables: StateTables) -> Tensor:
        from triptych.model.attention import triton_delta

        return triton_delta.compute(self.layer, self.inputs, self.gates, tables, self.states)
