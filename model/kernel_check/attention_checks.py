"""Checks of attention, of what prepares its queries and keys, and of recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from triptych.model.attention.base import Preparation
from triptych.model.attention.base import given as known
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.cache.kv_cache import LayerCache, StateTables, whole_segments
from triptych.model.config.attention import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
    GatedDeltaConfig,
    NormSpan,
    RopeScaling,
    RotaryConfig,
)
from triptych.model.kernel_check.attention_problems import (
    Problem,
    ProblemTensors,
    RecurrentProblem,
    RecurrentStep,
    make_tensors,
)
from triptych.model.kernel_check.check import BOUNDS, compare, repeated
from triptych.model.network.delta_net import recur
from triptych.model.network.norms import build_norm, head_norm
from triptych.model.network.positions import rotary_frequencies, rotate, turns
from triptych.model.system import kernel_faults

_LONG = 600  # keys that are divided over several programs
_EIGHT_BITS = 0.1  # the bound of pages in 8 bits, where rounding may go either way
_WIDEST = 8192  # the largest window whose edge is tried


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
        from triptych.model.attention.triton import TritonBackend

        backend = TritonBackend()
        problem = _problem(self.layer, self.pages, self.block_size, causal=self.causal, writes=not self.cross)
        for segments in dict.fromkeys(self._segments(backend, device)):
            given = make_tensors(replace(problem, segments=segments), device, self.dtype)
            expected = given.copied(torch.float32).forward(ReferenceBackend())
            for found in repeated(partial(given.forward, backend), device):
                compare(f"queries and keys {segments}", found, expected, BOUNDS[self.dtype])

    def _segments(self, backend: object, device: torch.device) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield (queries, keys) of segments for each kind of launch, for a window's edge and for a mixed step."""
        from triptych.model.attention.triton import TritonBackend

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
    block_size: int

    @property
    def part(self) -> str:
        return kernel_faults.PREPARATION

    def run(self, device: torch.device) -> None:
        from triptych.model.attention.triton_heads import prepare

        problem = _problem(self.layer, self.pages, self.block_size, causal=True)
        given = make_tensors(replace(problem, segments=((1, 20), (9, 30))), device, self.dtype)
        norms = [self._norm(device) for _ in range(2)]
        rotary, slots = self._rotary(given, device), given.metadata.slot_mapping
        query_norm, key_norm = (None if norm is None else head_norm(norm) for norm in norms)
        preparation = Preparation(query_norm, key_norm, *rotary)
        key, value = known(given.key), known(given.value)
        expected, expected_keys = (
            _prepared(rows, norm, preparation) for rows, norm in zip((given.query, key), norms, strict=True)
        )
        written = None if given.cache is None else given.copied(torch.float32).cache
        if written is not None:
            written.write(known(slots), expected_keys, value.float())
        for queries, keys in repeated(
            lambda: prepare(given.query, key, value, preparation, given.cache, slots), device
        ):
            compare("prepared queries", queries, expected, BOUNDS[self.dtype])
            if given.cache is None or written is None:
                compare("prepared keys", keys, expected_keys, BOUNDS[self.dtype])
                continue
            bound = BOUNDS[self.dtype] if given.cache.scales is None else _EIGHT_BITS
            for name, ours, theirs in zip(("keys", "values"), _pages(given.cache), _pages(written), strict=True):
                compare(f"the pages of {name}", ours, theirs, bound)

    def _norm(self, device: torch.device) -> nn.Module | None:
        layer = self.layer
        if layer.qk_norm is None or layer.qk_norm_span is not NormSpan.HEAD:
            return None
        norm = build_norm(layer.qk_norm, layer.head_dim).to(device, self.dtype).requires_grad_(False)
        for parameter in norm.parameters():
            parameter.normal_(0.0 if layer.qk_norm.unit_offset else 1.0, 0.3)
        return norm

    def _rotary(self, given: ProblemTensors, device: torch.device) -> tuple[tuple[Tensor, Tensor] | None, bool]:
        """Return cosine and sine of the rows' positions, and whether pairs are neighbours."""
        position = self.layer.position
        if not isinstance(position, RotaryConfig):
            return None, False
        frequencies = rotary_frequencies(position, device)
        if position.scaling is RopeScaling.LONGROPE:
            frequencies = frequencies[0]
        lens = zip(given.metadata.q_lens, given.metadata.kv_lens, strict=True)
        positions = torch.cat([torch.arange(keys - queries, keys, device=device) for queries, keys in lens])
        made = turns(positions, frequencies, position.attention_factor, self.dtype, position.interleaved)
        return made, position.interleaved


def _prepared(rows: Tensor, norm: nn.Module | None, preparation: Preparation) -> Tensor:
    """Return queries or keys in float32, prepared by torch."""
    x = rows.float()
    if norm is not None:
        x = deepcopy(norm).float()(x)
    if preparation.rotary is None:
        return x
    cos, sin = preparation.rotary
    return rotate(x, (cos.float(), sin.float()), interleaved=preparation.interleaved)


def _pages(cache: LayerCache) -> list[Tensor]:
    """Return keys and values of all slots in float32."""
    scales = cache.scales or (None, None)
    return [
        pages.float() if scale is None else pages.float() * scale[..., None]
        for pages, scale in zip((cache.keys, cache.values), scales, strict=True)
    ]


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
        from triptych.model.attention import triton_delta

        for lengths in ((1, 1, 1), (1, 35, 2)):
            step = RecurrentStep(RecurrentProblem(lengths, self.config), device, self.dtype)
            expected, states = step.expected(step.spans)
            tables = StateTables.of(step.spans, triton_delta.CHUNK, device)
            for found in repeated(partial(step.by_kernels, tables), device):
                compare(f"segments of {lengths} tokens", found, expected, BOUNDS[self.dtype])
            plain = whole_segments(lengths)  # as for inputs that are encoded, which keep no states
            expected_plain = recur(step.layer, step.inputs.float(), step.gates.float(), plain, None)
            tables = StateTables.of(plain, triton_delta.CHUNK, device)
            launch = partial(triton_delta.compute, step.layer, step.inputs, step.gates, tables, None)
            for found in repeated(launch, device):
                compare(f"segments of {lengths} tokens without states", found, expected_plain, BOUNDS[self.dtype])
            compare("their states", step.states.recurrent, states.recurrent, BOUNDS[self.dtype])
            compare("their last tokens", step.states.convolution, states.convolution, BOUNDS[self.dtype])
