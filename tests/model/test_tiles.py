"""Products in AMX tiles: emulated on most CPUs; the real instructions are compiled, and run if supported."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.matrix import rest_is_slow
from tests.model.attention_cases import Case, Problem, assert_finite_and_close, problem, tolerance
from tests.model.checkpoints import CPU, load_native, native_backends, saved
from tests.model.parity import ours_and_theirs
from tests.model.tiled import AMX, HERE, NARROW, REFUSED, VECTORS, emulated, gcc, needs_vectors, real, temporary_folder
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.native import NativeBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.linear.native import NativeLinear, packed_linear
from triptych.model.native.build import Built, build_portable
from triptych.model.native.library import Kind, Library
from triptych.model.network.transformer import Transformer

SHAPES = [(16, 32), (16, 64), (7, 5), (40, 100), (100, 37), (33, 1000), (144, 96), (280, 70)]
ROWS = [1, 5, 15, 16, 17, 31, 32, 33, 47, 50, 64, 90]
SMALLEST = 2.0**-126  # the smallest normal number

pytestmark = needs_vectors


@pytest.fixture(params=[1, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def with_real_tiles() -> Library:
    library = Library(Built(real(), "real"))
    if not library.tiles:
        pytest.skip("this CPU has no tiles")
    return library


def both(n: int, k: int, kind: Kind, library: Library | None = None) -> tuple[NativeLinear, NativeLinear]:
    """Return one matrix that may use tiles, and the same matrix without tiles."""
    weight, bias = torch.randn(n, k), torch.randn(n)
    tiles, vectors = (packed_linear(library or emulated(), weight, bias, kind) for _ in range(2))
    vectors.matrix.tiles = 0
    return tiles, vectors


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_bfloat16_products_are_exact_up_to_their_sums(n: int, k: int, threads: None) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(n, k), torch.randn(n)
    packed = packed_linear(emulated(), weight, bias, Kind.BF16)
    for rows in ROWS:
        x = torch.randn(rows, k)
        exact = torch.nn.functional.linear(x.bfloat16().double(), weight.bfloat16().double(), bias.double())
        assert (packed(x) - exact).abs().max() < 2e-6 * exact.abs().max()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int8_products_have_the_bits_of_the_vectors(n: int, k: int, threads: None) -> None:
    torch.manual_seed(0)
    tiles, vectors = both(n, k, Kind.INT8)
    for rows in ROWS:
        x = torch.randn(rows, k)
        assert torch.equal(tiles(x), vectors(x))


def with_offsets(linear: NativeLinear) -> NativeLinear:
    """Add a random offset to each group, like a checkpoint with zero points; none beyond n and k."""
    n, k, group, groups = linear.spec.num_outputs, linear.spec.inputs, linear.group, linear.num_groups
    offsets = torch.zeros(linear.arrays["scale"].numel() // 4).view(-1, groups, 16)
    for row in range(n):
        offsets[row // 16, : -(-k // group), row % 16] = torch.randn(-(-k // group))
    linear.adopt({**linear.arrays, "offset": offsets.flatten().view(torch.uint8)})
    return linear


GROUPS = rest_is_slow(
    product(
        [emulated, with_real_tiles],
        [(Kind.INT4, 32), (Kind.INT4, 64), (Kind.INT4, 128), (Kind.INT8, 128)],
        [(16, 64), (7, 5), (100, 37), (33, 1000)],
        [1, 3],
    ),
    lambda make, format, shape, threads: (
        threads == (3 if shape == (100, 37) else 1) and (make is emulated or shape == (33, 1000))
    ),
)


@pytest.mark.parametrize(("make", "format", "shape", "threads"), GROUPS, indirect=["threads"])
def test_groups_have_the_bits_of_the_vectors(
    make: Callable[[], Library], format: tuple[Kind, int], shape: tuple[int, int], threads: None
) -> None:
    (kind, group), (n, k) = format, shape
    weight, bias, x = torch.randn(n, k), torch.randn(n), torch.randn(90, k)
    tiles, vectors = (packed_linear(make(), weight, bias, kind, group) for _ in range(2))
    if n % 2:  # adopting takes the arrays of the one that has offsets
        vectors.adopt(with_offsets(tiles).arrays)
    vectors.matrix.tiles = 0
    for rows in ROWS:
        assert torch.equal(tiles(x[:rows]), vectors(x[:rows]))


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8])
def test_more_rows_than_stay_in_the_second_cache(kind: Kind) -> None:
    torch.manual_seed(0)
    n, rows, k = 40, 200, 320
    tiles, vectors = both(n, k, kind)
    x = torch.randn(rows, k)
    together, parts = tiles(x), torch.cat([tiles(x[:96]), tiles(x[96:])])
    assert torch.equal(together, parts)  # a row's sums do not depend on the tiles of other rows
    torch.testing.assert_close(together, vectors(x), rtol=0, atol=2e-6 * float(together.abs().max()))


@pytest.mark.parametrize("make", [emulated, with_real_tiles])
@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_in_tiles_does_not_depend_on_its_neighbours(
    n: int, k: int, kind: Kind, make: Callable[[], Library], threads: None
) -> None:
    torch.manual_seed(0)
    packed, x = packed_linear(make(), torch.randn(n, k), torch.randn(n), kind), torch.randn(90, k)
    together = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), together[:rows])
        assert torch.equal(packed(x[-rows:]), together[-rows:])


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < SMALLEST, torch.zeros_like(x), x)


def by_the_manual(x: Tensor, weight: Tensor) -> Tensor:
    """Compute TDPBF16PS step by step for operands `[T, k]` and `[n, k]` of bfloat16, with float64 products and sums."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[1], 32):
        apart = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(start, min(start + 32, x.shape[1])):
            product = flushed(x[:, k, None].double()) * flushed(weight[None, :, k].double())
            apart[k % 2] = flushed((apart[k % 2].double() + product).float())
        total = flushed(total + flushed(apart[0] + apart[1]))
    return total


@pytest.mark.parametrize("scale", [1.0, 2.0**-60, 2.0**-125])  # sums, products and weights are subnormal
def test_every_bit_is_what_the_manual_says(scale: float) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 100) * scale, torch.randn(35, 100) * max(scale, 2.0**-64)
    ours = packed_linear(emulated(), weight, None, Kind.BF16)(x)
    theirs = by_the_manual(x.bfloat16(), weight.bfloat16())
    assert torch.equal(ours, theirs)
    assert bool(theirs.any()) == (scale > 2.0**-125)


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.INT8])
@pytest.mark.parametrize("row", [0, 16, 31, 34])  # 34: only the last tile's, which begins at 19
def test_what_is_no_number_spoils_its_row_alone(kind: Kind, row: int) -> None:
    torch.manual_seed(0)
    packed, x = packed_linear(emulated(), torch.randn(20, 37), None, kind), torch.randn(35, 37)
    clean = packed(x)
    x[row, 36] = float("nan")
    spoilt = packed(x)
    others = torch.arange(35) != row
    assert spoilt[row].isnan().all()
    assert torch.equal(spoilt[others], clean[others])


def test_a_weight_that_is_no_number_spoils_its_output_alone() -> None:
    weight = torch.randn(40, 30)
    weight[17, 29] = float("nan")
    spoilt = packed_linear(emulated(), weight, None, Kind.BF16)(torch.randn(33, 30)).isnan()
    assert spoilt.all(dim=0).nonzero().flatten().tolist() == spoilt.any(dim=0).nonzero().flatten().tolist() == [17]


def with_and_without(kind: str, quantise: Kind | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return packed logits, scores or states of a model by tiles and by vectors."""

    def made(library: Library) -> Transformer:
        return load_native(
            read_checkpoint(saved(kind).path), library, dtype, quantization="int8" if quantise else "none"
        )

    return ours_and_theirs(kind, made(emulated()))[0], ours_and_theirs(kind, made(emulated(*REFUSED)))[0]


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2", "t5-relu", "marian", "bert"])
def test_a_models_outputs_are_close_to_the_vectors(kind: str) -> None:
    tiles, vectors = with_and_without(kind, None, torch.bfloat16)
    error = (tiles - vectors).float().pow(2).mean().sqrt()
    assert 0 < error < 0.1 * vectors.float().std()


@pytest.mark.parametrize("kind", ["llama-gqa", "marian", "bert"])
def test_a_models_outputs_in_int8_are_the_vectors(kind: str) -> None:
    dtype = torch.float32 if kind == "bert" else torch.bfloat16  # encoders attend in it
    tiles, vectors = with_and_without(kind, Kind.INT8, dtype)
    assert torch.equal(tiles, vectors)


# (queries, keys) of segments: decoding, chunks that begin before and after a tile's begin, more than a block
LONG = ((1, 70), (90, 100), (3, 64), (40, 300), (1, 257), (20, 20))


def long_case(**changes: Any) -> Case:
    usual = {"segments": LONG, "heads": 8, "kv_heads": 2, "dim": 64, "block_size": 16, "dtype": torch.bfloat16}
    return Case(**{**usual, **changes})


def attending() -> list[Library]:
    """Return libraries that attend in tiles, by vectors of bfloat16, and in this CPU's tiles if it has any."""
    here = Library(Built(real(), "real"))
    return [emulated(), emulated(*REFUSED), *([here] if here.tiles else [])]


def attended(library: Library, case: Case, given: Problem, rows: slice = slice(None)) -> Tensor:
    """Return the results of these rows of a case with one segment, computed alone."""
    metadata, parts = given.metadata, [None if x is None else x[rows] for x in (given.query, given.key, given.value)]
    if rows != slice(None):
        assert metadata.slot_mapping is not None
        tables, slots = metadata.block_tables, metadata.slot_mapping[rows]
        metadata = AttentionMetadata((rows.stop - rows.start,), (rows.stop,), True, None, tables, slots)
    assert parts[0] is not None
    return NativeBackend(library).forward(parts[0], parts[1], parts[2], given.cache, metadata, case.config, given.bias)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"int8": True, "window": 40},
        {"int8": True, "heads": 7, "kv_heads": 1, "dim": 40, "block_size": 8},
        {"heads": 3, "kv_heads": 3, "dim": 128, "window": 100},
        {"heads": 20, "kv_heads": 1, "dim": 80, "block_size": 5, "softcap": 1.5},
        {"dim": 20, "buckets": True, "int8": True},
        {"heads": 6, "kv_heads": 3, "dim": 48, "slopes": True, "window": 90},
        {"causal": False, "writes": False, "segments": ((3, 70), (1, 300), (5, 60))},
    ],
    ids=str,
)
def test_long_contexts_attend_by_products_of_bfloat16(changes: dict[str, Any]) -> None:
    case = long_case(**changes)
    given = problem(case, CPU)
    floats = attended(emulated(), case, replace(given, query=given.query.float())).bfloat16()
    keys = [kv - (q - row - 1 if case.causal else 0) for q, kv in case.segments for row in range(q)]
    short = torch.tensor(keys) <= 64
    for library in attending():
        narrow = attended(library, case, given)
        assert_finite_and_close(narrow, given.expected, tolerance(case))
        assert torch.equal(narrow[short], floats[short])  # only a row's keys decide
        assert not torch.equal(narrow[~short], floats[~short])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "int8", "window"),
    [(8, 2, True, None), (3, 3, False, 50), (17, 1, False, None), (28, 4, False, None)],  # last: 448 queries at a time
)
def test_a_long_context_has_the_same_bits_however_it_is_divided(
    heads: int, kv_heads: int, int8: bool, window: int | None
) -> None:
    case = long_case(segments=((270, 270),), heads=heads, kv_heads=kv_heads, int8=int8, window=window)
    given = problem(case, CPU, solved=False)
    parts = ((63, 64), (64, 65), (64, 66), (255, 256), (256, 257), (50, 90), (60, 269), (256, 260))
    for library in attending():
        whole = attended(library, case, given)
        for part in parts:
            assert torch.equal(attended(library, case, given, slice(*part)), whole[slice(*part)])


@pytest.mark.parametrize(
    ("changes", "bad"),
    [
        ({}, False),
        ({}, True),
        ({"segments": ((1, 1100), (1, 257), (1, 60)), "int8": True, "window": 400}, False),
        ({"segments": ((1, 900), (3, 300), (1, 512)), "heads": 3, "kv_heads": 3, "dim": 128, "softcap": 1.5}, False),
        ({"heads": 40, "kv_heads": 1, "dim": 80, "block_size": 5, "slopes": True}, True),
        ({"segments": ((1, 700), (1, 530)), "causal": False, "writes": False}, False),
    ],
    ids=str,
)
def test_keys_of_one_row_that_threads_divide_give_the_same_bits(changes: dict[str, Any], bad: bool) -> None:
    case = long_case(**{"segments": ((1, 1300),), **changes})
    given = problem(case, CPU, solved=False)
    assert given.metadata.block_tables is not None and given.cache is not None
    if bad:  # rows of products are added one by one
        given.cache.values[given.metadata.block_tables[0, 270 // case.block_size], :3] = float("inf")
    threads = torch.get_num_threads()
    try:
        for library in attending():
            torch.set_num_threads(1)
            alone = attended(library, case, given)
            for count in (3, 16):
                torch.set_num_threads(count)
                divided = attended(library, case, given)
                assert torch.equal(divided.nan_to_num(7.0), alone.nan_to_num(7.0))
            assert alone.isfinite().all() != bad
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("heads", [3, 24])  # with 3 key heads: at most 16 rows are computed together, or 2
def test_rows_that_see_the_same_keys_have_the_bits_that_they_have_alone(heads: int) -> None:
    """Beams that read one source have such tables, which are copies of each other."""
    case = long_case(segments=((1, 300),) * 23, heads=heads, kv_heads=3, causal=False, writes=False)
    given = problem(case, CPU, solved=False)
    tables = given.metadata.block_tables
    assert tables is not None
    sources = [0] * 17 + [3, 3, 5, 0, 0, 3]
    lengths = [300] * 19 + [290, 300, 250, 300]  # a shorter one reads fewer of the same blocks

    def rows(places: list[int], library: Library) -> Tensor:
        kv_lens = [lengths[place] for place in places]
        read = tables[[sources[place] for place in places]]
        metadata = AttentionMetadata((1,) * len(places), kv_lens, causal=False, device=CPU, block_tables=read)
        return NativeBackend(library).forward(given.query[places], None, None, given.cache, metadata, case.config, None)

    places = list(range(len(sources)))
    for library in attending():
        together = rows(places, library)
        assert torch.equal(together, torch.cat([rows([place], library) for place in places]))
        assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_no_number_does_not_reach_rows_that_do_not_see_it(bad: float) -> None:
    case = long_case(segments=((300, 300),), window=25)
    given = problem(case, CPU, solved=False)
    assert given.value is not None
    clean = [attended(library, case, given) for library in attending()]
    given.value[[100, 270]] = bad
    row = torch.arange(300)
    seen = ((row >= 100) & (row < 125)) | ((row >= 270) & (row < 295))
    for library, before in zip(attending(), clean, strict=True):
        spoilt = attended(library, case, given)
        assert torch.equal(spoilt[~seen], before[~seen])
        assert not spoilt[seen].isfinite().any()


def test_the_backend_says_that_there_are_tiles() -> None:
    assert emulated().tiles
    assert emulated().description == "emulated: AVX-512 bf16 VNNI AMX"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("apart[0] + apart[1]", "apart[0]", "their products are wrong"),
        ("(int8_t)emulated.data[b]", "(uint8_t)emulated.data[b]", "their products are wrong"),
        ("from + row * stride", "from + row * 64", "their products are wrong"),
        (
            "int cpu_has_tiles(void) { return 1; }",
            "int cpu_has_tiles(void) { return 0; }",
            "this CPU or its system has",
        ),
        (*REFUSED, "Linux does not permit them"),
    ],
)
def test_tiles_that_are_wrong_or_refused_leave_the_vectors(
    old: str, new: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = emulated.__wrapped__(old, new)  # loaded anew, or nothing is logged
    assert not library.tiles
    assert f"AVX-512 bf16 VNNI, no AMX: {reason}" in library.description
    assert "without its AMX tiles" in caplog.text
    torch.manual_seed(0)
    ours, vectors = both(20, 70, Kind.BF16, library)
    x = torch.randn(40, 70)
    assert torch.equal(ours(x), vectors(x))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump here")
def test_the_level_is_made_of_the_instructions_themselves() -> None:
    listing = subprocess.run(["objdump", "-d", str(real())], check=True, capture_output=True, text=True).stdout
    names = ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tdpbusd", "tdpbssd", "tilestored", "tilerelease")
    assert [name for name in names if f"\t{name}" not in listing] == []


def test_real_tiles_compute_as_emulated_or_leave_the_vectors_where_the_cpu_has_none() -> None:
    library = Library(Built(real(), "real"))
    missing = "" if library.tiles else ", no AMX: this CPU or its system has none"
    assert library.description == "real: AVX-512 bf16 VNNI" + (missing or " AMX")
    torch.manual_seed(0)
    weight, x = torch.randn(40, 100), torch.randn(70, 100)
    for kind in (Kind.BF16, Kind.INT8):
        like = packed_linear(emulated(), weight, None, kind)
        like.matrix.tiles &= library.tiles
        ours, theirs = packed_linear(library, weight, None, kind)(x), like(x)
        exact = kind is Kind.INT8 or not library.tiles  # a CPU may add in any order
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if exact else 2e-6 * float(theirs.abs().max()))


@pytest.mark.skipif(VECTORS not in HERE, reason="this CPU has no bf16 or no VNNI to hold the emulation to")
def test_the_emulated_vectors_have_every_bit_of_the_instructions() -> None:
    path = temporary_folder() / "check.so"
    gcc(*VECTORS.flags, "-fvisibility=default", "-shared", str(NARROW.with_name("narrow_check.c")), "-o", str(path))
    check, count = ctypes.CDLL(str(path)), 20_000
    torch.manual_seed(0)
    anything = torch.randint(0, 256, (count, 192), dtype=torch.uint8)
    usual = torch.cat(
        [torch.randn(count, 16).view(torch.uint8), torch.randn(count, 64).bfloat16().view(torch.uint8)], 1
    )
    for numbers in (anything, usual):
        for name in ("dots_differ", "bytes_differ", "roundings_differ"):
            function = getattr(check, name)
            function.restype = ctypes.c_long
            assert function(ctypes.c_void_p(numbers.data_ptr()), ctypes.c_long(count)) == 0


@pytest.mark.slow
def test_the_whole_level_compiles_and_loads_where_there_are_no_tiles(tmp_path: Path) -> None:
    [path] = build_portable(tmp_path, [AMX])
    assert Library(Built(path, AMX.name)).description.startswith(f"{AMX.name}: AVX-512 bf16 VNNI")


def test_this_cpus_own_library_has_tiles_where_its_backend_says_so() -> None:
    [backend] = native_backends()
    assert isinstance(backend, NativeBackend)
    assert backend.library.tiles == backend.library.description.endswith(" AMX")
