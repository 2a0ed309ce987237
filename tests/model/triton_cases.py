"""Helpers of the tests of Triton's kernels: devices, tile sizes, problems of real size, captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.attention_cases import Case, Problem, assert_finite_and_close, problem, tolerance
from triptych.model.attention.base import AttentionMetadata, DeviceLengths
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.attention.triton import Tiles, TritonBackend
from triptych.model.attention.triton_kernels import INTERPRETED
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import BucketBiasConfig
from triptych.model.network.positions import BucketBias
from triptych.model.system.background_work import Work

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: kernels are compiled, see -m gpu")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = [
    pytest.param(CPU, marks=interpreted, id="interpreter"),
    pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, no_gpu], id="gpu"),
]
GRID_DEVICES = [  # a grid has hundreds of variants to compile: -m slow runs it, -m gpu does not
    DEVICES[0],
    pytest.param(torch.device("cuda"), marks=no_gpu, id="gpu"),
]
DECODE = ((1, 1), (1, 37), (1, 16))
MIXED = ((1, 33), (21, 21), (1, 3), (5, 40), (2, 2))
SMALL = Tiles(16, 16, 4, 2)  # small, so that few keys are many tiles


class Cut(TritonBackend):
    """A backend with the tiles and parts that a test sets."""

    def __init__(self, tiles: Tiles | None = None, parts: int | None = None) -> None:
        self.cut, self.split = tiles, parts

    def tiles(self, *arguments: Any, **named: Any) -> Tiles:
        return self.cut or super().tiles(*arguments, **named)

    def parts(self, programs: int, max_kv_len: int, device: torch.device) -> int:
        return self.split or super().parts(programs, max_kv_len, device)


def run(backend: SdpaBackend, given: Problem) -> Tensor:
    rows = (given.query, given.key, given.value)
    return backend.forward(*rows, given.cache, given.metadata, given.case.config, given.bias, given.sinks)


def check(backend: SdpaBackend, case: Case, device: torch.device) -> None:
    given = problem(case, device)
    pages = None if given.cache is None else [given.cache.keys.clone(), given.cache.values.clone()]
    out = run(backend, given)
    assert out.dtype is case.dtype
    assert out.is_contiguous()
    assert_finite_and_close(out, given.expected, tolerance(case))
    if given.cache is not None and pages is not None:
        for before, after in zip(pages, (given.cache.keys, given.cache.values), strict=True):
            kept = given.untouched.to(device)
            same = [x.flatten(0, 1)[kept] for x in (before, after)]
            torch.testing.assert_close(*same, rtol=0, atol=0, equal_nan=True)


def clone_pair(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].clone(), pair[1].clone())


def real_problem(case: Case, device: torch.device) -> Problem:
    """Return a problem without its solution, made on the device."""
    torch.manual_seed(0)
    q_lens, kv_lens = zip(*case.segments, strict=True)
    widths = [-(-kv_len // case.block_size) for kv_len in kv_lens]
    blocks = torch.randperm(sum(widths)).split(widths)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    new = [
        tables[b, torch.arange(k - q, k) // case.block_size] * case.block_size
        + torch.arange(k - q, k) % case.block_size
        for b, (q, k) in enumerate(case.segments)
    ]
    shape = (sum(widths), case.block_size, case.kv_heads, case.dim)
    pages = [torch.randn(shape, device=device).to(case.dtype) for _ in range(2)]
    cache = LayerCache(pages[0], pages[1])
    if case.int8:
        empty = [torch.zeros(shape, dtype=torch.int8, device=device) for _ in range(2)]
        cache = LayerCache(
            empty[0], empty[1], (torch.zeros(shape[:3], device=device), torch.zeros(shape[:3], device=device))
        )
        cache.write(torch.arange(shape[0] * shape[1], device=device), *(x.flatten(0, 1) for x in pages))
    rows = sum(q_lens)
    query, key, value = (
        torch.randn(rows, heads, case.dim, device=device).to(case.dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    bias = None
    if case.buckets:
        bias = (
            BucketBias(BucketBiasConfig(), case.heads, bidirectional=not case.causal).requires_grad_(False).to(device)
        )
        bias.weight.normal_()
    metadata = AttentionMetadata(q_lens, kv_lens, case.causal, device, tables.to(device), torch.cat(new).to(device))
    return Problem(case, query, key, value, cache, metadata, bias, torch.empty(0), torch.empty(0))


def static_step(given: Problem, max_kv_len: int) -> AttentionMetadata:
    """Return the problem's metadata as in a captured step: buffers and bounds, without actual lengths."""
    known = given.metadata.on_device()
    count, width = len(known.kv_lens), -(-max_kv_len // given.case.block_size)
    assert given.metadata.block_tables is not None
    tables = given.metadata.block_tables.new_zeros(count, width)
    tables[:, : given.metadata.block_tables.shape[1]] = given.metadata.block_tables
    assert given.metadata.slot_mapping is not None
    slots = given.metadata.slot_mapping.clone()
    lengths = DeviceLengths(known.cu_seqlens_q.clone(), known.kv_lens.clone(), 1, max_kv_len)
    return AttentionMetadata((), (), given.case.causal, known.kv_lens.device, tables, slots, lengths)


def padded(given: Problem) -> Problem:
    """Add two segments of padding: one without keys, and one with a key that is not its own."""
    assert given.metadata.slot_mapping is not None and given.cache is not None
    given.metadata.slot_mapping[-2:] = -1
    lengths = given.metadata.on_device()
    lengths.kv_lens[-2] = 0
    lengths.kv_lens[-1] = 1
    given.expected = given.expected[:-1]
    given.expected[-1] = 0.0
    return given


def fill(static: AttentionMetadata, given: Problem) -> None:
    assert static.device_lengths is not None and static.block_tables is not None and static.slot_mapping is not None
    assert given.metadata.block_tables is not None and given.metadata.slot_mapping is not None
    static.device_lengths.kv_lens.copy_(given.metadata.on_device().kv_lens)
    static.block_tables.zero_()
    static.block_tables[:, : given.metadata.block_tables.shape[1]] = given.metadata.block_tables
    static.slot_mapping.copy_(given.metadata.slot_mapping)


def load(into: Problem, given: Problem) -> None:
    """Copy the problem's tensors into the captured ones."""
    assert into.cache is not None and given.cache is not None
    for name in ("query", "key", "value"):
        getattr(into, name).copy_(getattr(given, name))
    into.cache.keys[: len(given.cache.keys)] = given.cache.keys
    into.cache.values[: len(given.cache.values)] = given.cache.values


def compute_nothing(*_: object) -> Work[None]:
    """Replace `compute_first_token`, which takes a second in the interpreter, where a test is about something else."""
    yield from ()
