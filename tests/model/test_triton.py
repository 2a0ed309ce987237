"""Triton's kernels against attention in float64: interpreted on a CPU, compiled on a GPU with `-m gpu`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.matrix import rest_is_slow
from tests.model.attention_cases import Case, assert_finite_and_close, problem, tolerance
from tests.model.triton_cases import (
    DECODE,
    DEVICES,
    GRID_DEVICES,
    MIXED,
    SMALL,
    Cut,
    check,
    clone_pair,
    fill,
    load,
    no_gpu,
    padded,
    real_problem,
    run,
    static_step,
)
from triptych.model.attention.base import DeviceLengths
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import LayerCache

pytestmark = pytest.mark.usefixtures("poisoned")

# Every pair of settings at least once: each variant takes a second to compile.
PAIRS = [
    (False, None, False, False),
    (False, 512, True, True),
    (True, None, True, True),
    (True, 512, False, True),
    (True, 512, True, False),
]

CASES = [
    Case(DECODE, heads=6, kv_heads=2, dim=12),
    Case(DECODE, heads=2, kv_heads=2, buckets=True),
    Case(DECODE, int8=True, window=20),
    Case(DECODE, window=9, softcap=1.5),
    Case(DECODE, causal=False, writes=False, block_size=16),
    Case(DECODE, dtype=torch.float16, block_size=32),
    Case(MIXED),
    Case(MIXED, window=4, block_size=4),
    Case(MIXED, window=5, softcap=0.5, heads=2, kv_heads=1),
    Case(MIXED, heads=3, kv_heads=1, dim=40, window=9, dtype=torch.bfloat16),
    Case(MIXED, heads=2, kv_heads=1, int8=True, buckets=True, dtype=torch.float16),
    Case(MIXED, heads=4, kv_heads=2, fp8=True),
    Case(MIXED, heads=6, kv_heads=2, slopes=True, window=9),
    Case(((3, 9), (1, 30), (4, 1)), causal=False, writes=False),
    Case(((7, 7), (1, 1), (30, 30)), paged=False, causal=False, heads=2, kv_heads=2, buckets=True, window=11),
    Case(((7, 7), (1, 1), (30, 30)), paged=False, causal=True, heads=2, kv_heads=2, dtype=torch.bfloat16, buckets=True),
    Case(((1, 7), (1, 1), (1, 30)), paged=False, causal=False, dim=33),
]
COMBINED = [  # settings that `CASES` have singly or in other combinations
    Case(DECODE),
    Case(DECODE, window=7),
    Case(DECODE, int8=True, heads=2, kv_heads=1, softcap=0.7, dtype=torch.bfloat16),
    Case(DECODE, heads=5, kv_heads=1, dtype=torch.bfloat16, int8=True),
    Case(MIXED, heads=2, kv_heads=2, buckets=True, softcap=2.0),
    Case(MIXED, heads=2, kv_heads=2, softcap=50.0),
    Case(MIXED, heads=6, kv_heads=2, dim=24),
    Case(MIXED, heads=2, kv_heads=2, buckets=True, block_size=5),
    Case(MIXED, heads=2, kv_heads=1, dim=24, fp8=True, window=9, dtype=torch.bfloat16),
    Case(((7, 7), (1, 1), (30, 30)), paged=False, causal=False),
    Case(((4, 7), (3, 1), (2, 30)), paged=False, causal=False),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", rest_is_slow([*CASES, *COMBINED], lambda case: case in CASES), ids=str)
def test_attention_is_the_formulas(case: Case, device: torch.device) -> None:
    check(Cut(SMALL), case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 1), (1, 90)), dim=12),
        Case(((1, 70), (1, 18)), window=24, int8=True),
        Case(((1, 70), (1, 18)), fp8=True),
        Case(((1, 70), (3, 18)), window=24, softcap=1.0),
        Case(((2, 50), (1, 20)), heads=2, kv_heads=2, buckets=True),
        Case(((2, 50), (1, 20)), heads=3, kv_heads=3, slopes=True),
        Case(((2, 50), (1, 20)), window=9, sinks=True),
        Case(((1, 70), (3, 40)), causal=False, writes=False, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_keys_in_parts_are_the_same_keys(case: Case, parts: int, device: torch.device) -> None:
    check(Cut(SMALL, parts), case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
def test_one_long_sequence_among_short_ones(window: int | None, device: torch.device) -> None:
    """Its keys are split as if it were alone; the others' keys are one part, and their other parts end at once."""
    case = Case(((1, 3), (1, 700), (1, 40), (1, 1)), window=window)
    given = problem(case, device)
    given.metadata.on_device().uneven = True
    assert_finite_and_close(run(Cut(SMALL, 4), given), given.expected, tolerance(case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [pytest.param(None, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("causal", "buckets"), [pytest.param(True, False, marks=pytest.mark.slow), (False, False), (True, True)]
)
def test_decoding_apart_from_prompts(causal: bool, buckets: bool, parts: int | None, device: torch.device) -> None:
    """Two launches of one step, each with its own tiles and parts, fill one output."""
    segments = ((1, 33), (1, 1), (1, 16), (21, 21), (5, 40), (2, 2))
    given = problem(Case(segments, causal=causal, writes=causal, buckets=buckets), device)
    lengths = given.metadata.on_device()
    given.metadata.device_lengths = replace(lengths, singles=3, max_single_kv_len=33)
    out = run(Cut(SMALL, parts), given)
    assert_finite_and_close(out, given.expected, tolerance(given.case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 256])
def test_tiles_as_they_are_chosen(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for segments in (((1, 70), (1, 5)), ((40, 70), (1, 9))):
        check(TritonBackend(), Case(segments, heads=2, kv_heads=1, dim=dim, dtype=dtype, block_size=16), device)


@pytest.mark.slow
@pytest.mark.parametrize("device", GRID_DEVICES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 16), (4, 1, 80), (6, 2, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "segments", [DECODE, MIXED, ((17, 50), (1, 70), (33, 33)), ((16, 16),) * 2, ((1, 130),)], ids=str
)
def test_the_grid(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, segments: tuple[tuple[int, int], ...], device: torch.device
) -> None:
    for causal, window, int8, buckets in product((True, False), (None, 1, 19), (False, True), (False, True)):
        block = 32 if int8 else 8
        case = Case(segments, heads, kv_heads, dim, causal, window, True, True, block, dtype, int8, buckets)
        check(Cut(SMALL), case, device)
        if not int8 and all(q_len == kv_len for q_len, kv_len in segments):
            check(Cut(SMALL), replace(case, paged=False), device)


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64), (8, 1, 256), (12, 12, 64)])
@pytest.mark.parametrize(("int8", "window", "causal", "buckets"), PAIRS)
def test_real_sizes(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, int8: bool, window: int | None, causal: bool, buckets: bool
) -> None:
    """The reference is the reference backend in float32 on the same device: the formula would take hours."""
    for segments in (
        tuple((1, 37 * at + 1) for at in range(64)),
        ((1, 8000),),
        ((700, 700), (1, 3000), (300, 4000), (1, 1), (33, 33)),
    ):
        case = Case(segments, heads, kv_heads, dim, causal, window, True, True, 16, dtype, int8, buckets)
        given = real_problem(case, torch.device("cuda"))
        assert given.cache is not None
        pages = (given.cache.keys.clone(), given.cache.values.clone())
        slow = replace(given, cache=LayerCache(*pages, clone_pair(given.cache.scales)))
        expected = run(ReferenceBackend(), slow)
        assert_finite_and_close(run(TritonBackend(), given), expected.cpu().double(), tolerance(case))


@pytest.mark.parametrize("device", DEVICES)
def test_small_values_in_8_bits_keep_their_digits_in_float16(device: torch.device) -> None:
    """A probability times the worth of 1 in a page would be below the normal numbers of float16."""
    case = Case(((1, 60), (3, 40)), int8=True, causal=False, writes=False, dtype=torch.float16)
    given = problem(case, device)
    assert given.cache is not None and given.cache.scales is not None
    given.cache.scales[1].mul_(1e-3)
    found = run(Cut(SMALL), given)
    assert_finite_and_close(1e3 * found.float(), given.expected, tolerance(case))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_pages_of_8_bits_are_what_the_cache_itself_would_write(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    given = problem(Case(MIXED, int8=kind == "int8", fp8=kind == "fp8", dtype=dtype), device)
    assert given.cache is not None and given.cache.scales is not None
    assert given.key is not None and given.value is not None and given.metadata.slot_mapping is not None
    written = LayerCache(given.cache.keys.clone(), given.cache.values.clone(), clone_pair(given.cache.scales))
    written.write(given.metadata.slot_mapping, given.key, given.value)
    run(TritonBackend(), given)
    assert written.scales is not None
    for ours, theirs in ((given.cache.keys, written.keys), (given.cache.values, written.values)):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(given.cache.scales, written.scales, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [None, 4])
def test_rows_that_fill_up_are_zeros_and_write_nothing(parts: int | None, device: torch.device) -> None:
    given = padded(problem(Case(((1, 20), (1, 40), (1, 5), (1, 1))), device))
    assert given.cache is not None
    before = given.cache.keys.clone()
    out = run(Cut(SMALL, parts), replace(given, metadata=static_step(given, 64)))
    assert_finite_and_close(out[:-1], given.expected, 3e-6)
    assert not out[-2].any()
    changed = (before != given.cache.keys).flatten(0, 1).flatten(1).any(1) & ~before.flatten(0, 1).flatten(
        1
    ).isnan().all(1)
    assert not changed.any()
    filled = before.isnan() & ~given.cache.keys.isnan()
    assert int(filled.sum()) == 2 * given.case.kv_heads * given.case.dim  # two real rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("buckets", [False, True])
def test_static_buffers_serve_steps_of_other_lengths(buckets: bool, device: torch.device) -> None:
    """One metadata object, refilled between steps; only its tensors and bounds are read."""
    kinds = dict(heads=2, kv_heads=1, buckets=buckets)
    steps = [problem(Case(s, **kinds), device, at) for at, s in enumerate([DECODE, ((1, 50), (1, 2), (1, 64))])]
    static, backend = static_step(steps[0], 96), Cut(SMALL)
    assert static.device_lengths is not None and static.block_tables is not None and static.slot_mapping is not None
    launched = backend.parts(3, 96, device)
    for given in steps:
        fill(static, given)
        assert_finite_and_close(run(backend, replace(given, metadata=static)), given.expected, 3e-6)
        assert backend.parts(3, static.device_lengths.max_kv_len, device) == launched
    assert (static.q_lens, static.kv_lens) == ((), ())


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("parts", [1, 8])
def test_a_captured_step_is_replayed_over_other_lengths(parts: int) -> None:
    device, backend = torch.device("cuda"), Cut(None, parts)
    steps = [problem(Case(s), device, at) for at, s in enumerate([DECODE, ((1, 70), (1, 2), (1, 64))])]
    static = static_step(steps[0], 96)
    pages = [torch.full((40, 8, 2, 16), float("nan"), device=device) for _ in range(2)]
    first = steps[0]
    assert first.key is not None and first.value is not None
    own = dict(query=first.query.clone(), key=first.key.clone(), value=first.value.clone())
    inputs = replace(first, cache=LayerCache(pages[0], pages[1]), metadata=static, **own)
    load(inputs, first)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(backend, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(backend, inputs)
    for given in (*steps, first):
        load(inputs, given)
        fill(static, given)
        graph.replay()
        assert_finite_and_close(out, given.expected, 3e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [torch.int32, pytest.param(torch.int64, marks=pytest.mark.slow)])
def test_integers_of_either_width_at_any_place(width: torch.dtype, device: torch.device) -> None:
    """A step is packed into one row of integers: nothing in it is aligned to more than an element."""
    given = problem(Case(MIXED), device)
    lengths = given.metadata.on_device()
    assert given.metadata.block_tables is not None and given.metadata.slot_mapping is not None

    def moved(tensor: Tensor) -> Tensor:
        row = torch.zeros(tensor.numel() + 1, dtype=width, device=device)[1:].view(tensor.shape)
        return row.copy_(tensor)

    own = DeviceLengths(moved(lengths.cu_seqlens_q), moved(lengths.kv_lens), lengths.max_q_len, lengths.max_kv_len)
    metadata = replace(
        given.metadata,
        block_tables=moved(given.metadata.block_tables),
        slot_mapping=moved(given.metadata.slot_mapping),
        device_lengths=own,
    )
    assert_finite_and_close(run(Cut(SMALL), replace(given, metadata=metadata)), given.expected, 3e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_control_a_wrong_page_changes_its_row_alone(device: torch.device) -> None:
    given = problem(Case(((1, 30), (1, 30), (1, 30))), device)
    right = run(Cut(SMALL), given)
    assert given.metadata.block_tables is not None
    given.metadata.block_tables[1, 1] = given.metadata.block_tables[0, 1]
    wrong = run(Cut(SMALL), given)
    assert torch.equal(wrong[[0, 2]], right[[0, 2]])
    assert (wrong[1] - right[1]).abs().max() > 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_as_large_as_a_tile(device: torch.device) -> None:
    check(TritonBackend(), Case(((1, 20), (1, 3)), heads=32, kv_heads=1), device)
    check(TritonBackend(), Case(((3, 20), (1, 3)), heads=64, kv_heads=1, dtype=torch.bfloat16), device)
