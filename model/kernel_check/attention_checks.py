"""Checks of attention, of what prepares its queries and keys, and of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from model.attention.base import Preparation, PreparingBackend
from model.attention.reference import ReferenceBackend
from model.cache.kv_cache import StateTables
from model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    GatedDeltaConfig,
    NormSpan,
    RopeScaling,
    RotaryConfig,
)
from model.kernel_check.attention_problems import Problem, ProblemTensors, make_tensors
from model.kernel_check.check import BOUNDS, compare
from model.kernel_check.recurrent_problems import RecurrentProblem, RecurrentStep
from model.network.norms import build_heads_norm, head_norm
from model.network.positions import rotary_frequencies, rotate, turns
from model.system import kernel_faults

_LONG = 600  # keys that are divided over several programs
_WIDEST = 8192  # the largest window whose edge is tried


@dataclass(frozen=True, slots=True)
class LaunchCheck:
    """Compiles and launches the smallest attention. If this fails, no other kernel is tried."""

    dtype: torch.dtype

    @property
    def part(self) -> str:
        return kernel_faults.TRITON

    def run(self, device: torch.device) -> None:
        from model.attention.triton import try_out

        try_out(device, self.dtype)


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """Attention of layers with one configuration, over packed rows or over pages."""

    layer: AttentionConfig
    dtype: torch.dtype
    pages: torch.dtype | None  # None: keys are packed rows
    causal: bool
    cross: bool  # all keys are in the pages before the step
    block_size: int
    most_queries: int
    most_keys: int

    @property
    def part(self) -> str:
        return kernel_faults.attention_part(self.layer)

    def run(self, device: torch.device) -> None:
        from model.attention.triton import TritonBackend

        backend = TritonBackend()
        problem = _problem(self.layer, self.pages, self.block_size, causal=self.causal, writes=not self.cross)
        for segments in dict.fromkeys(self._segments(backend, device)):
            given = make_tensors(replace(problem, segments=segments), device, self.dtype)
            expected = given.copied(torch.float32).forward(ReferenceBackend())
            compare(f"queries and keys {segments}", given.forward(backend), expected, BOUNDS[self.dtype])

    def _segments(self, backend: object, device: torch.device) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield (queries, keys) of segments for each kind of launch, for a window's edge and for a mixed step."""
        from model.attention.triton import TritonBackend

        assert isinstance(backend, TritonBackend)
        bounds = backend.launch_bounds(
            self.layer,
            self.dtype,
            device,
            most_queries=self.most_queries,
            most_keys=min(self.most_keys, _LONG),
            biased=isinstance(self.layer.position, BucketBiasConfig),
            paged=self.pages is not None,
        )
        largest = max((queries for queries, _ in bounds), default=1)
        for queries, keys in bounds:
            rows = queries if queries < largest else min(queries + 50, max(self.most_queries, queries))
            short = min(rows, 3)
            if self.pages is None:
                yield ((rows, rows), (short, short))
            else:
                yield ((rows, max(keys, rows)), (short, short + 20))
        window = self.layer.window
        beyond = window + 70 if window is not None and window <= _WIDEST else _LONG
        if self.pages is None:
            longest = min(beyond, _LONG, self.most_queries)
            yield ((longest, longest), (2, 2))
        else:
            longest = min(beyond, max(self.most_keys, 40))
            yield ((1, 33), (1, longest), (largest, largest + 40), (3, longest))


@dataclass(frozen=True, slots=True)
class PreparationCheck:
    """Norms and rotation of a layer's queries and keys, and their way into the pages."""

    layer: AttentionConfig
    dtype: torch.dtype
    pages: torch.dtype | None
    causal: bool
    block_size: int

    @property
    def part(self) -> str:
        return kernel_faults.PREPARATION

    def run(self, device: torch.device) -> None:
        from model.attention.triton import TritonBackend

        problem = _problem(self.layer, self.pages, self.block_size, causal=self.causal)
        segments = ((1, 20), (9, 30)) if self.pages is not None else ((1, 1), (30, 30))
        given = make_tensors(replace(problem, segments=segments), device, self.dtype)
        plain = given.copied(torch.float32)
        norms = [self._norm(heads, device) for heads in (self.layer.num_heads, self.layer.num_kv_heads)]
        rotary = self._rotary(given, device, self.dtype)
        expected = self._prepared(plain, norms, rotary).forward(ReferenceBackend())
        backend: PreparingBackend = TritonBackend()
        assert given.key is not None and given.value is not None
        found = backend.forward_unprepared(
            given.query,
            given.key,
            given.value,
            self._preparation(norms, rotary),
            given.cache,
            given.metadata,
            problem.config,
            given.bias,
            given.sinks,
        )
        compare("prepared queries and keys", found, expected, BOUNDS[self.dtype])

    def _norm(self, heads: int, device: torch.device) -> nn.Module | None:
        layer = self.layer
        if layer.qk_norm is None or layer.qk_norm_span is not NormSpan.HEAD:
            return None
        norm = build_heads_norm(layer.qk_norm, layer.qk_norm_span, heads, layer.head_dim, None)
        norm = norm.to(device, self.dtype).requires_grad_(False)
        for parameter in norm.parameters():
            parameter.normal_(0.0 if layer.qk_norm.unit_offset else 1.0, 0.3)
        return norm

    def _rotary(
        self, given: ProblemTensors, device: torch.device, dtype: torch.dtype
    ) -> tuple[RotaryConfig, tuple[Tensor, Tensor]] | None:
        """Return how heads turn, with cosine and sine of the rows' positions."""
        position = self.layer.position
        if not isinstance(position, RotaryConfig):
            return None
        frequencies = rotary_frequencies(position, device)
        if position.scaling is RopeScaling.LONGROPE:
            frequencies = frequencies[0]
        lens = zip(given.metadata.q_lens, given.metadata.kv_lens, strict=True)
        positions = torch.cat([torch.arange(keys - queries, keys, device=device) for queries, keys in lens])
        return position, turns(positions, frequencies, position.attention_factor, dtype, position.interleaved)

    @staticmethod
    def _preparation(
        norms: list[nn.Module | None], rotary: tuple[RotaryConfig, tuple[Tensor, Tensor]] | None
    ) -> Preparation:
        query_norm, key_norm = (None if norm is None else head_norm(norm) for norm in norms)
        if rotary is None:
            return Preparation(query_norm, key_norm)
        return Preparation(query_norm, key_norm, rotary[1], rotary[0].interleaved)

    @staticmethod
    def _prepared(
        given: ProblemTensors,
        norms: list[nn.Module | None],
        rotary: tuple[RotaryConfig, tuple[Tensor, Tensor]] | None,
    ) -> ProblemTensors:
        """Return a problem in float32 with its queries and keys prepared by torch."""
        rows = []
        for x, norm in zip((given.query, given.key), norms, strict=True):
            assert x is not None
            x = x if norm is None else norm.float()(x)
            if rotary is not None:
                x = rotate(x, (rotary[1][0].float(), rotary[1][1].float()), interleaved=rotary[0].interleaved)
            rows.append(x)
        return replace(given, query=rows[0], key=rows[1])


def _problem(
    layer: AttentionConfig, pages: torch.dtype | None, block_size: int, *, causal: bool, writes: bool = True
) -> Problem:
    """Return a problem of a layer without segments."""
    return Problem(
        (),
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        causal=causal,
        window=layer.window,
        softcap=layer.softcap,
        paged=pages is not None,
        writes=writes,
        int8=pages is torch.int8,
        fp8=pages is torch.float8_e4m3fn,
        biased=isinstance(layer.position, BucketBiasConfig),
        slopes=layer.position.slopes if isinstance(layer.position, AlibiConfig) else (),
        sinks=layer.sinks,
        block_size=block_size,
    )


# -- Recurrent layers.


@dataclass(frozen=True, slots=True)
class RecurrenceCheck:
    """A recurrent layer between its projections: single tokens, and prompts in chunks."""

    config: GatedDeltaConfig
    dtype: torch.dtype

    @property
    def part(self) -> str:
        return kernel_faults.RECURRENCE

    def run(self, device: torch.device) -> None:
        from model.attention import triton_delta

        for lengths in ((1, 1, 1), (1, 35, 70, 2)):
            step = RecurrentStep(RecurrentProblem(lengths, self.config), device, self.dtype)
            expected, states = step.expected(step.spans)
            found = step.by_kernels(StateTables.of(step.spans, triton_delta.CHUNK, device))
            compare(f"segments of {lengths} tokens", found, expected, BOUNDS[self.dtype])
            compare("their states", step.states.recurrent, states.recurrent, BOUNDS[self.dtype])
            compare("their last tokens", step.states.convolution, states.convolution, BOUNDS[self.dtype])
