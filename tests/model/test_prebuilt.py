"""Prebuilt C libraries: which one a CPU gets, which are never loaded, and correct results at each level."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.model.checkpoints import loaded, native_backends
from tests.model.parity import decoder_logits, decoder_prompts
from tests.model.test_attention import DIM, HEADS, SHAPES, pool_with_past
from tests.model.test_native_groups import must_be_exact_and_alone
from tests.model.tiled import compiled_soon
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.native import NativeBackend
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.config.attention import AttentionConfig
from triptych.model.linear.base import LinearSpec, Part
from triptych.model.linear.native import Int8RowsLinear, packed_linear
from triptych.model.native import build
from triptych.model.native.build import LEVELS, Built, build_portable, fitting, prebuilt
from triptych.model.native.library import Kind, Library, native

V2 = "pni cx16 lahf_lm popcnt ssse3 sse4_1 sse4_2"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
NARROW = "avx512_vnni avx512_bf16"
ARM = "fp asimd evtstrm aes crc32 atomics asimdrdm asimddp"
PLAIN = ("x86-64-v4", "x86-64-v3")
HERE = fitting(build._cpuinfo(), platform.machine())
SHIPPED = [pytest.param((level, True), marks=pytest.mark.slow, id=level.name) for level in HERE]


def x86(*flags: str) -> str:
    """Return /proc/cpuinfo with one processor for each of `flags`."""
    return "\n\n".join(f"processor\t: 0\nmodel name\t: One\nflags\t\t: {one}\nbugs\t\t: avx512f" for one in flags)


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "names"),
    [
        ("x86_64", x86(V2), []),
        ("x86_64", x86(V3.replace(" fma", " fma4")), []),
        ("x86_64", x86(V3), ["x86-64-v3"]),
        ("x86_64", x86(V4.replace(" avx512dq", "")), ["x86-64-v3"]),
        ("x86_64", x86(f"{V3} avx_vnni"), ["x86-64-v3-vnni", "x86-64-v3"]),
        ("x86_64", x86(V4), ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", x86(f"{V4} avx512_vnni"), ["x86-64-v4-vnni", *PLAIN]),
        ("x86_64", x86(f"{V4} {NARROW}"), ["x86-64-v4-bf16-vnni", "x86-64-v4-vnni", *PLAIN]),
        (
            "x86_64",
            x86(f"{V4} {NARROW} amx_bf16 amx_tile"),
            ["x86-64-v4-bf16-vnni", "x86-64-v4-vnni", *PLAIN],
        ),
        (
            "x86_64",
            x86(f"{V4} {NARROW} avx_vnni amx_bf16 amx_tile amx_int8"),
            [level.name for level in LEVELS if level.machine == "x86_64"],
        ),
        ("x86_64", x86(V4, V3), ["x86-64-v3"]),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd evtstrm aes\nCPU part\t: 0xd0c", ["armv8-a"]),
        ("aarch64", f"Features\t: {ARM} asimdhp", ["armv8.2-a-dotprod", "armv8-a"]),
        ("aarch64", f"Features\t: {ARM.replace('atomics', 'sve')}", ["armv8-a"]),
        ("aarch64", f"Features\t: {ARM} i8mm sve", ["armv8.2-a-dotprod", "armv8-a"]),
        ("aarch64", f"Features\t: {ARM} i8mm bf16", [level.name for level in LEVELS if level.machine == "aarch64"]),
        ("aarch64", x86(V4), []),
        ("x86_64", "", []),
    ],
)
def test_a_cpu_is_given_the_best_level_that_it_shows_whole(machine: str, cpuinfo: str, names: list[str]) -> None:
    assert [level.name for level in fitting(cpuinfo, machine)] == names


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a package of one source file on a CPU of level 4; return its folder of libraries."""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "_SOURCES", tmp_path)
    monkeypatch.setattr(build, "_PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_cpuinfo", lambda: x86(V4))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return tmp_path / "prebuilt"


def put(folder: Path, name: str) -> Path:
    [level] = [level for level in LEVELS if level.name == name]
    folder.mkdir(exist_ok=True)
    path = folder / build._portable_name(level)
    path.write_bytes(b"")
    return path


def test_the_best_library_that_is_there_is_taken(shipped: Path) -> None:
    assert prebuilt() is None
    put(shipped, "x86-64-v4-bf16-vnni")
    assert prebuilt() is None
    lower = put(shipped, "x86-64-v3")
    assert prebuilt() == Built(lower, "prebuilt for x86-64-v3")
    best = put(shipped, "x86-64-v4")
    assert prebuilt() == Built(best, "prebuilt for x86-64-v4")


def test_a_library_of_other_sources_is_not_loaded(shipped: Path) -> None:
    put(shipped, "x86-64-v4")
    assert prebuilt() is not None
    (shipped.parent / "one.c").write_text("int one(void) { return 2; }\n")
    assert prebuilt() is None


def test_only_the_packages_own_folder_counts(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache" / "triptych"
    cache.mkdir(parents=True)
    put(cache, "x86-64-v4")
    put(tmp_path, "x86-64-v4")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    monkeypatch.chdir(tmp_path)
    assert prebuilt() is None


def test_what_does_not_load_is_passed_over(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(shipped, "x86-64-v4")
    monkeypatch.setenv("PATH", "")
    assert native.__wrapped__() == "no GCC is installed"


def test_portable_libraries_are_made_once_and_old_ones_go(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, stranger = put(shipped, "x86-64-v4"), shipped / "native-other.so"
    stranger.write_bytes(b"")
    (shipped.parent / "one.c").write_text("int one(void) { return 2; }\n")
    made = [put(shipped, level.name) for level in LEVELS if level.machine == "x86_64"]
    monkeypatch.setenv("PATH", "")
    assert build_portable(shipped) == made
    assert sorted(shipped.iterdir()) == sorted([*made, stranger])
    assert not old.exists()
    made[0].unlink()
    with pytest.raises(build.BuildError, match="no GCC"):
        build_portable(shipped)


@pytest.fixture(
    scope="module", params=[*SHIPPED, *(pytest.param((level, False), id=f"{level.name}-soon") for level in HERE[-1:])]
)
def portable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Return a shipped level that this CPU runs; by default the lowest, optimised less, to halve its compile time.

    This CPU's own library is tested in more detail elsewhere.
    """
    if not native_backends():
        pytest.skip(f"nothing can be compiled here: {native()}")
    level, shipped = request.param
    if not shipped:
        return compiled_soon(level)
    [path] = build_portable(tmp_path_factory.mktemp("prebuilt"), [level])
    return Library(Built(path, f"prebuilt for {level.name}"))


def test_a_level_has_the_instructions_of_its_name(portable: Library) -> None:
    level, _, found = portable.description.removeprefix("prebuilt for ").partition(": ")
    names = {"x86-64-v4-bf16-vnni": "AVX-512 bf16 VNNI", "x86-64-v4-vnni": "AVX-512 VNNI", "x86-64-v4": "AVX-512"}
    names["x86-64-v3-vnni"] = "VNNI"
    names["x86-64-v4-bf16-vnni-amx"] = f"{names['x86-64-v4-bf16-vnni']} AMX"
    assert found == names.get(level, "")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are of x86-64")
@pytest.mark.skipif(not native_backends(), reason="nothing can be compiled here")
def test_levels_with_vnni_multiply_by_it_and_others_do_not() -> None:
    """The preprocessor decides, because CPUs of every level are not at hand; test_aarch64.py has AArch64's levels."""
    having = set()
    for level in LEVELS:
        if level.machine == "x86_64":
            command = [build._compiler()[0], *level.flags, "-E", "-dM", str(build._SOURCES / "gemm.c")]
            macros = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            if "#define HAS_INT8_DOT 1" in macros:
                having.add(level.name)
    assert having == {level.name for level in LEVELS if "vnni" in level.name}


@pytest.mark.parametrize(("kind", "of_largest"), [(Kind.F32, 3e-6), (Kind.BF16, 2e-2), (Kind.INT8, 3e-2)])
@pytest.mark.parametrize(("n", "k"), [(16, 16), (100, 37), (48, 64), (33, 4864)])
def test_products_equal_torchs_whatever_the_neighbours(
    portable: Library, n: int, k: int, kind: Kind, of_largest: float
) -> None:
    torch.manual_seed(0)
    exact, x = nn.Linear(k, n).requires_grad_(False), torch.randn(33, k)
    packed = packed_linear(portable, exact.weight, exact.bias, kind)
    together, expected = packed(x), exact(x)
    assert (together - expected).abs().max() < of_largest * expected.abs().max()
    for rows in (1, 2, 3, 4, 5, 7, 17):
        assert torch.equal(packed(x[:rows]), together[:rows])
        assert torch.equal(packed(x[-rows:]), together[-rows:])


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.INT8])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (50, 700)])
def test_products_in_groups_are_exact_whatever_the_neighbours(
    portable: Library, n: int, k: int, group: int, kind: Kind
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(n, k) * torch.randn(n, 1).exp()
    must_be_exact_and_alone(packed_linear(portable, weight, torch.randn(n), kind, group), torch.randn(40, k))


def test_products_of_stored_integers_are_exact(portable: Library) -> None:
    """The integers include sums that fill 16 bits twice, and -128, which our own quantisation never makes."""
    torch.manual_seed(0)
    integers = torch.randint(-128, 128, (37, 130), dtype=torch.int8)
    integers[3], integers[5] = -128, 127
    linear = Int8RowsLinear(LinearSpec("m", 130, (Part(37),), bias=False), Kind.INT8, torch.float32, portable)
    linear.fill("m.weight", (slice(0, 37),), integers)
    linear.fill("m.weight_scale", (slice(0, 37),), torch.ones(37, 1))
    x = torch.randint(-127, 128, (9, 130)).float()
    x[:, 0], x[2], x[4] = 127.0, 127.0, -127.0  # each row's scale is 1, so its integers equal its numbers
    assert torch.equal(linear(x), x @ integers.float().T)


@pytest.mark.parametrize("dim", [8, DIM, 40, 64, 128])
@pytest.mark.parametrize("shapes", SHAPES)
def test_attention_equals_the_reference(portable: Library, shapes: str, dim: int) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(HEADS, 2, dim, dim**-0.5)
    q_lens, kv_lens = zip(*SHAPES[shapes], strict=True)
    layer, tables, slots = pool_with_past(config, SHAPES[shapes])
    metadata = AttentionMetadata(q_lens, kv_lens, causal=True, block_tables=tables, slot_mapping=slots)
    query, key, value = (torch.randn(sum(q_lens), heads, dim) for heads in (HEADS, 2, 2))
    ours = NativeBackend(portable).forward(query, key, value, layer, metadata, config)
    theirs = ReferenceBackend().forward(query, key, value, layer, metadata, config)
    torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_models_logits_are_close_to_this_cpus_own(portable: Library, dtype: torch.dtype) -> None:
    prompts = decoder_prompts()
    ours = decoder_logits(loaded("llama-gqa", NativeBackend(portable), dtype), prompts)
    theirs = decoder_logits(loaded("llama-gqa", native_backends()[0], dtype), prompts)
    error = (ours - theirs).pow(2).mean().sqrt()
    assert error < (1e-5 if dtype is torch.float32 else 0.1) * theirs.std()
