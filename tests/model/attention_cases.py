"""Attention problems with poisoned pages, and their solution in float64 by the formula."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionMetadata
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import AlibiConfig, AttentionConfig, BucketBiasConfig
from triptych.model.network.positions import AlibiBias, BucketBias

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """The (queries, keys) of each segment, and all other properties on which a kernel's code depends."""

    segments: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    paged: bool = True
    writes: bool = True  # this step's keys; cross attention finds all of them in the pages
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    int8: bool = False
    buckets: bool = False  # T5's bias
    fp8: bool = False
    slopes: bool = False  # ALiBi's bias
    sinks: bool = False

    def __str__(self) -> str:
        lens = "_".join(f"{q}of{k}" for q, k in self.segments[:3]) + ("_and_more" if len(self.segments) > 3 else "")
        named = ("causal", "paged", "writes", "int8", "buckets")
        named += ("fp8",) * self.fp8 + ("slopes",) * self.slopes + ("sinks",) * self.sinks
        flags = [name if getattr(self, name) else f"no-{name}" for name in named]
        shape = f"{self.heads}x{self.kv_heads}x{self.dim}-window{self.window}-block{self.block_size}"
        shape += f"-softcap{self.softcap}" * (self.softcap is not None)
        return f"{lens}-{shape}-{'-'.join(flags)}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def config(self) -> AttentionConfig:
        scale = 0.9 * self.dim**-0.5
        return AttentionConfig(self.heads, self.kv_heads, self.dim, scale, window=self.window, softcap=self.softcap)


@dataclass
class Problem:
    """The inputs of a backend and the expected results."""

    case: Case
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: LayerCache | None
    metadata: AttentionMetadata
    bias: BucketBias | AlibiBias | None
    expected: Tensor  # [T, H, D], float64
    untouched: Tensor  # [slots], bool: slots that no write may change
    sinks: Tensor | None = None  # [H]


def problem(case: Case, device: torch.device, seed: int = 0, *, solved: bool = True) -> Problem:
    """Return random inputs: rows are views of wider rows, and every slot without a key of a segment is NaN."""
    torch.manual_seed(seed)
    num_queries = sum(q_len for q_len, _ in case.segments)
    query = _row_views(num_queries, case.heads, case)
    keys = [_row_views(kv_len, case.kv_heads, case) for _, kv_len in case.segments]
    values = [_row_views(kv_len, case.kv_heads, case) for _, kv_len in case.segments]
    bias = _t5_bias(case) if case.buckets else AlibiBias(AlibiConfig.of_heads(case.heads)) if case.slopes else None
    cache, tables, slots = _pages(case, keys, values) if case.paged else (None, None, None)
    known = [_dequantised(rows, case) if case.int8 or case.fp8 else rows.double() for rows in (*keys, *values)]
    sinks = torch.randn(case.heads) if case.sinks else None
    expected = torch.empty(0)
    if solved:
        expected = exact_attention(case, query.double(), known[: len(keys)], known[len(keys) :], bias, sinks)
    q_lens, kv_lens = zip(*case.segments, strict=True)
    untouched = torch.ones(0 if cache is None else cache.keys.shape[0] * case.block_size, dtype=torch.bool)
    if slots is not None:
        untouched[slots] = False
    key: Tensor | None = torch.cat(keys)
    value: Tensor | None = torch.cat(values)
    if case.paged:
        new = [slice(kv_len - q_len, kv_len) for q_len, kv_len in case.segments]
        key = torch.cat([k[rows] for k, rows in zip(keys, new, strict=True)]) if case.writes else None
        value = torch.cat([v[rows] for v, rows in zip(values, new, strict=True)]) if case.writes else None
    metadata = AttentionMetadata(
        q_lens,
        kv_lens,
        causal=case.causal,
        device=device,
        block_tables=_to(tables, device),
        slot_mapping=_to(slots, device) if case.writes else None,
    )
    if cache is not None:
        scales = None if cache.scales is None else tuple(scale.to(device) for scale in cache.scales)
        cache = LayerCache(cache.keys.to(device), cache.values.to(device), scales)  # type: ignore[arg-type]
    if isinstance(bias, BucketBias):
        bias = bias.to(device)
    rows = (query.to(device), _to(key, device), _to(value, device))
    return Problem(case, *rows, cache, metadata, bias, expected, untouched, _to(sinks, device))


def exact_attention(
    case: Case,
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    bias: BucketBias | AlibiBias | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention by the definition, one query, head and key at a time; a query without keys gets zeros."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = case.heads // case.kv_heads
    row = 0
    for (q_len, kv_len), k, v in zip(case.segments, keys, values, strict=True):
        for at in range(q_len):
            position = kv_len - q_len + at
            seen = [
                n
                for n in range(kv_len)
                if (not case.causal or n <= position) and (case.window is None or abs(position - n) < case.window)
            ]
            for head in range(case.heads if seen else 0):
                scores = k[seen, head // group] @ query[row, head] * case.config.scale
                if case.softcap is not None:
                    scores = case.softcap * (scores / case.softcap).tanh()
                if isinstance(bias, AlibiBias):
                    scores = scores - bias.config.slopes[head] * (position - torch.tensor(seen)).double()
                elif bias is not None:
                    buckets = bias.bucket(torch.tensor(seen) - position)
                    scores = scores + bias.weight[buckets, head].double()
                powers = scores.exp()
                whole = powers.sum() + (0.0 if sinks is None else sinks[head].double().exp())
                out[row, head] = powers / whole @ v[seen, head // group]
            row += 1
    return out


def _row_views(rows: int, heads: int, case: Case) -> Tensor:
    """Return `[rows, heads, D]` as a view of wider rows, like queries, keys and values of one fused product."""
    wide = torch.randn(rows, (heads + 2) * case.dim).to(case.dtype)
    return wide[:, case.dim : (heads + 1) * case.dim].unflatten(-1, (heads, case.dim))


def _t5_bias(case: Case) -> BucketBias:
    config = BucketBiasConfig(num_buckets=8, max_distance=20)
    bias = BucketBias(config, case.heads, bidirectional=not case.causal).requires_grad_(False)
    bias.weight.normal_()
    return bias.to(case.dtype)


def _pages(case: Case, keys: list[Tensor], values: list[Tensor]) -> tuple[LayerCache, Tensor, Tensor]:
    """Shuffled pages with each segment's past in them (all of its keys where the step writes none), their tables, and
    the slots of the keys that are new."""
    widths = [-(-kv_len // case.block_size) for _, kv_len in case.segments]
    num_blocks = sum(widths) + 2
    shape = (num_blocks, case.block_size, case.kv_heads, case.dim)
    cache = LayerCache(torch.full(shape, NAN, dtype=case.dtype), torch.full(shape, NAN, dtype=case.dtype))
    if case.int8 or case.fp8:
        pair = (torch.full(shape[:3], NAN), torch.full(shape[:3], NAN))
        full = torch.full(shape, 99, dtype=torch.int8)
        if case.fp8:
            full = torch.full(shape, NAN).to(torch.float8_e4m3fn)
        cache = LayerCache(full, full.clone(), pair)
    blocks = iter((torch.randperm(sum(widths)) + 2).tolist())
    tables = torch.zeros(len(widths), max(widths) + 1, dtype=torch.int64)
    new: list[int] = []
    for segment, ((q_len, kv_len), width) in enumerate(zip(case.segments, widths, strict=True)):
        tables[segment, :width] = torch.tensor([next(blocks) for _ in range(width)])
        slots = [
            int(tables[segment, n // case.block_size]) * case.block_size + n % case.block_size for n in range(kv_len)
        ]
        past = kv_len - q_len if case.writes else kv_len
        cache.write(torch.tensor(slots[:past], dtype=torch.int64), keys[segment][:past], values[segment][:past])
        new += slots[past:]
    return cache, tables, torch.tensor(new, dtype=torch.int64)


def _dequantised(rows: Tensor, case: Case) -> Tensor:
    """Return `[S, K, D]` rounded to 8 bits with one scale for each token and head."""
    most = rows.float().abs().amax(-1, keepdim=True)
    levels = torch.full_like(most, 448 if case.fp8 else 127)
    if case.fp8:
        return ((rows.float() * (levels / most)).to(torch.float8_e4m3fn).float() * (most / levels)).double()
    return ((rows.float() * (levels / most)).round() * (most / levels)).double()


def _to(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def tolerance(case: Case) -> float:
    """Return the tolerance for outputs of order one: rounding of the dtype, and of int8 values to a narrow dtype."""
    if case.dtype is torch.float32:
        return 3e-6
    return 1.6e-2 if case.dtype is torch.bfloat16 else 2e-3


def assert_finite_and_close(found: Tensor, expected: Tensor, atol: float) -> None:
    assert found.isfinite().all()
    difference = (found.cpu().double() - expected).abs().max().item()
    assert difference <= atol * max(1.0, math.ceil(expected.abs().max().item())), difference
