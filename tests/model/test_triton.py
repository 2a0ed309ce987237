"""Triton's kernels against attention written out in float64: in the interpreter on a CPU, for real with `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from model.attention.base import AttentionMetadata, DeviceLengths, SegmentGroup
from model.attention.reference import ReferenceBackend
from model.attention.sdpa import SdpaBackend
from model.attention.triton import Tiles, TritonBackend
from model.attention.triton_kernels import INTERPRETED
from model.config import AttentionConfig, PositionConfig, PositionKind
from model.kv_cache import LayerCache
from model.positions import BucketBias, StepBias
from tests.model.attention_cases import Case, Problem, assert_finite_and_close, problem, tolerance

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: kernels are compiled, see -m gpu")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = [
    pytest.param(CPU, marks=interpreted, id="interpreter"),
    pytest.param(torch.device("cuda"), marks=[pytest.mark.gpu, no_gpu], id="gpu"),
]


class Cut(TritonBackend):
    """Tiles and parts as a test wants them."""

    def __init__(self, tiles: Tiles | None = None, parts: int | None = None) -> None:
        self.cut, self.split = tiles, parts

    def tiles(self, rows: int, head_dim: int, dtype: torch.dtype, *, biased: bool, paged: bool) -> Tiles:
        return self.cut or super().tiles(rows, head_dim, dtype, biased=biased, paged=paged)

    def parts(self, programs: int, max_kv_len: int, device: torch.device) -> int:
        return self.split or super().parts(programs, max_kv_len, device)


SMALL = Tiles(16, 16, 4, 2)  # so that few keys are many tiles


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Every `torch.empty` is NaN: what a kernel leaves out or reads too much of shows."""
    torch.set_deterministic_debug_mode("warn")
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_deterministic_debug_mode("default")


def run(backend: SdpaBackend, given: Problem) -> Tensor:
    return backend.forward(
        given.query, given.key, given.value, given.cache, given.metadata, given.case.config, given.bias
    )


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


DECODE = ((1, 1), (1, 37), (1, 16))
MIXED = ((1, 33), (21, 21), (1, 3), (5, 40), (2, 2))
CASES = [
    Case(DECODE),
    Case(DECODE, window=7),
    Case(DECODE, heads=6, kv_heads=2, dim=12),
    Case(DECODE, heads=2, kv_heads=2, buckets=True),
    Case(DECODE, int8=True, window=20),
    Case(DECODE, causal=False, writes=False, block_size=16),
    Case(DECODE, heads=5, kv_heads=1, dtype=torch.bfloat16, int8=True),
    Case(DECODE, dtype=torch.float16, block_size=32),
    Case(MIXED),
    Case(MIXED, window=4, block_size=4),
    Case(MIXED, heads=6, kv_heads=2, dim=24),
    Case(MIXED, heads=3, kv_heads=1, dim=40, window=9, dtype=torch.bfloat16),
    Case(MIXED, heads=2, kv_heads=2, buckets=True, block_size=5),
    Case(MIXED, heads=2, kv_heads=1, int8=True, buckets=True, dtype=torch.float16),
    Case(((3, 9), (1, 30), (4, 1)), causal=False, writes=False),
    Case(((7, 7), (1, 1), (30, 30)), paged=False, causal=False),
    Case(((7, 7), (1, 1), (30, 30)), paged=False, causal=False, heads=2, kv_heads=2, buckets=True, window=11),
    Case(((7, 7), (1, 1), (30, 30)), paged=False, causal=True, heads=2, kv_heads=2, dtype=torch.bfloat16, buckets=True),
    Case(((1, 7), (1, 1), (1, 30)), paged=False, causal=False, dim=33),
    Case(((4, 7), (3, 1), (2, 30)), paged=False, causal=False),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_formulas(case: Case, device: torch.device) -> None:
    check(Cut(SMALL), case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 1), (1, 90)), dim=12),
        Case(((1, 70), (1, 18)), window=24, int8=True),
        Case(((2, 50), (1, 20)), heads=2, kv_heads=2, buckets=True),
        Case(((1, 70), (3, 40)), causal=False, writes=False, dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_keys_in_parts_are_the_same_keys(case: Case, parts: int, device: torch.device) -> None:
    check(Cut(SMALL, parts), case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 256])
def test_tiles_as_they_are_chosen(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    for segments in (((1, 70), (1, 5)), ((40, 70), (1, 9))):
        check(TritonBackend(), Case(segments, heads=2, kv_heads=1, dim=dim, dtype=dtype, block_size=16), device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
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
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [None, 512])
@pytest.mark.parametrize("causal", [True, False])
def test_real_sizes(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, int8: bool, window: int | None, causal: bool
) -> None:
    """Against the reference backend in float32 on the same device: the formula itself would take hours."""
    for segments in (
        tuple((1, 37 * at + 1) for at in range(64)),
        ((1, 8000),),
        ((700, 700), (1, 3000), (300, 4000), (1, 1), (33, 33)),
    ):
        for buckets in (False, True):
            case = Case(segments, heads, kv_heads, dim, causal, window, True, True, 16, dtype, int8, buckets)
            device = torch.device("cuda")
            given = real_problem(case, device)
            assert given.cache is not None
            pages = (given.cache.keys.clone(), given.cache.values.clone())
            slow = replace(given, cache=LayerCache(*pages, clone_pair(given.cache.scales)))
            expected = run(ReferenceBackend(), slow)
            assert_finite_and_close(run(TritonBackend(), given), expected.cpu().double(), tolerance(case))


def clone_pair(pair: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].clone(), pair[1].clone())


def real_problem(case: Case, device: torch.device) -> Problem:
    """A problem without its solution, made on the device."""
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
        config = PositionConfig(PositionKind.T5_BUCKETS)
        bias = BucketBias(config, case.heads, bidirectional=not case.causal).requires_grad_(False).to(device)
        bias.weight.normal_()
    metadata = AttentionMetadata(q_lens, kv_lens, case.causal, device, tables.to(device), torch.cat(new).to(device))
    return Problem(case, query, key, value, cache, metadata, bias, torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_pages_are_what_the_cache_itself_would_write(dtype: torch.dtype, device: torch.device) -> None:
    given = problem(Case(MIXED, int8=True, dtype=dtype), device)
    assert given.cache is not None and given.cache.scales is not None
    assert given.key is not None and given.value is not None and given.metadata.slot_mapping is not None
    written = LayerCache(given.cache.keys.clone(), given.cache.values.clone(), clone_pair(given.cache.scales))
    written.write(given.metadata.slot_mapping, given.key, given.value)
    run(TritonBackend(), given)
    assert written.scales is not None
    for ours, theirs in ((given.cache.keys, written.keys), (given.cache.values, written.values)):
        # A compiled product and the sum that rounds it are one operation, which a tie can tell from two.
        assert (ours.int() - theirs.int()).abs().max() <= (0 if INTERPRETED else 1)
        assert (ours == theirs).float().mean() > 0.999
    for ours, theirs in zip(given.cache.scales, written.scales, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def static_step(given: Problem, max_kv_len: int) -> AttentionMetadata:
    """The problem's metadata as a captured step has it: buffers and bounds, the lens of nobody."""
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
    """The last two segments are there to fill up: without keys, and with one that is not theirs."""
    assert given.metadata.slot_mapping is not None and given.cache is not None
    given.metadata.slot_mapping[-2:] = -1
    lengths = given.metadata.on_device()
    lengths.kv_lens[-2] = 0
    lengths.kv_lens[-1] = 1
    given.expected = given.expected[:-1]
    given.expected[-1] = 0.0
    return given


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
    """One metadata, filled anew between steps; nothing of it but tensors and bounds is read."""
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


def fill(static: AttentionMetadata, given: Problem) -> None:
    assert static.device_lengths is not None and static.block_tables is not None and static.slot_mapping is not None
    assert given.metadata.block_tables is not None and given.metadata.slot_mapping is not None
    static.device_lengths.kv_lens.copy_(given.metadata.on_device().kv_lens)
    static.block_tables.zero_()
    static.block_tables[:, : given.metadata.block_tables.shape[1]] = given.metadata.block_tables
    static.slot_mapping.copy_(given.metadata.slot_mapping)


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


def load(into: Problem, given: Problem) -> None:
    """The problem's tensors into those that were captured."""
    assert into.cache is not None and given.cache is not None
    for name in ("query", "key", "value"):
        getattr(into, name).copy_(getattr(given, name))
    into.cache.keys[: len(given.cache.keys)] = given.cache.keys
    into.cache.values[: len(given.cache.values)] = given.cache.values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_integers_of_either_width_at_any_place(width: torch.dtype, device: torch.device) -> None:
    """As a step is packed into one row of integers: nothing in it is aligned to more than an element."""
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


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (16, 64), (32, 1000)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_table_by_distance_is_the_bias(buckets: int, far: int, bidirectional: bool) -> None:
    config = PositionConfig(PositionKind.T5_BUCKETS, num_buckets=buckets, max_distance=far)
    bias = BucketBias(config, 3, bidirectional=bidirectional).requires_grad_(False)
    bias.weight.normal_()
    table = StepBias(bias).by_distance()
    assert table is not None
    assert table.shape == (3, 2 * far + 1)
    distance = torch.arange(-3 * far, 3 * far + 1)
    expected = bias.weight[bias.bucket(distance)].T
    assert torch.equal(table[:, distance.clamp(-far, far) + far], expected)


def of_the_query(query: Tensor, group: SegmentGroup) -> Tensor:
    """A bias as XLNet's: of the query and the key's position, `[B, Q, H, D]` to `[B, H, Q, S]`."""
    return query[..., 0].transpose(1, 2)[..., None] * group.k_positions


class Refusing(TritonBackend):
    """Whose kernels must not be reached."""

    def _attend(self, *arguments: Any) -> Tensor:
        raise AssertionError("this was for torch")


@pytest.mark.parametrize("wrap", [lambda bias: bias, StepBias])
def test_a_bias_of_more_than_the_distance_goes_to_torch(wrap: Any) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(2, 2, 8, 8**-0.5)
    query, key, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    metadata = AttentionMetadata((4, 5), (4, 5), causal=True)
    arguments: tuple[Any, ...] = (query, key, value, None, metadata, config, wrap(of_the_query))
    expected = ReferenceBackend().forward(*arguments)
    torch.testing.assert_close(Refusing().forward(*arguments), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(((2, 4), (3, 3)), dim=264),
        Case(((2, 4), (3, 3)), heads=33, kv_heads=1),
        Case(((2, 4), (3, 3)), dtype=torch.float64),
    ],
    ids=str,
)
def test_shapes_beyond_the_tiles_go_to_torch(case: Case) -> None:
    given = problem(case, CPU)
    assert given.cache is not None
    given.cache.keys.nan_to_num_()  # torch's masks let a page's unused slots through
    given.cache.values.nan_to_num_()
    assert_finite_and_close(run(Refusing(), given), given.expected, 3e-6)


def test_gradients_flow() -> None:
    config = AttentionConfig(2, 1, 8, 8**-0.5)
    query = torch.randn(6, 2, 8, requires_grad=True)
    key, value = torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    metadata = AttentionMetadata((2, 4), (2, 4), causal=True)
    Refusing().forward(query, key, value, None, metadata, config).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_as_large_as_a_tile(device: torch.device) -> None:
    check(TritonBackend(), Case(((1, 20), (1, 3)), heads=32, kv_heads=1), device)
    check(TritonBackend(), Case(((3, 20), (1, 3)), heads=64, kv_heads=1, dtype=torch.bfloat16), device)


def test_parts_follow_bounds_alone_and_are_powers_of_two() -> None:
    backend = TritonBackend()
    parts = {
        (programs, longest): backend.parts(programs, longest, CPU)
        for programs in (1, 2, 8, 40, 132, 264, 4000)
        for longest in (1, 255, 256, 600, 5000, 131_072)
    }
    assert all(count & (count - 1) == 0 and 1 <= count <= 64 for count in parts.values())
    assert parts[1, 131_072] == 64
    assert parts[8, 5000] == 16  # 19 times 256 keys
    assert parts[40, 131_072] == 4  # 6 programs for each of two a processor
    assert parts[8, 256] == parts[8, 1] == 1
    assert parts[8, 600] == 2
    assert parts[264, 131_072] == 1
