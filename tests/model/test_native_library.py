"""The C library's build, cache, threads and scratch memory."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.model.checkpoints import CPU, load_native, loaded, native_backends, prompt, saved
from tests.model.parity import ours_and_theirs
from tests.model.test_attention import DIM, HEADS, pool_with_past
from tests.model.test_native import library, needs_native
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.native import fill_segments
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import pool_of_layers
from triptych.model.native import build
from triptych.model.native import library as native_library
from triptych.model.native.library import Kind, Library
from triptych.model.native.structures import (
    AttentionLayer,
    AttentionShape,
    Layer,
    MLPLayer,
    Norm,
    PackedMatrix,
    Segments,
    Stack,
    Step,
)
from triptych.model.network.inputs import packed_input
from triptych.model.network.native_scratch import planned_scratch
from triptych.model.system.cache_folders import user_cache


def test_sanitizers_see_every_entry_point() -> None:
    harness = (Path(__file__).parent / "check_native.c").read_text()  # the harness declares each, and must call it too
    sources = [source.read_text() for source in build._SOURCES.glob("*.c")]
    entries = [name for text in sources for name in re.findall(r"^EXPORTED \w+ (\w+)\(", text, re.M)]
    assert "run_stack" in entries
    assert [name for name in entries if len(re.findall(rf"\b{name}\(", harness)) < 2] == []


@needs_native
def test_indices_that_c_would_misread_are_refused_or_made_plain() -> None:
    torch.manual_seed(0)
    config, segments = AttentionConfig(HEADS, 2, DIM, 1.0), [(3, 9), (2, 9)]
    layer, tables, slots = pool_with_past(config, segments)
    query, key, value = (torch.randn(5, heads, DIM) for heads in (HEADS, 2, 2))

    def attend(tables: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        metadata = AttentionMetadata((3, 2), (9, 9), causal=True, block_tables=tables, slot_mapping=slots)
        return native_backends()[0].forward(query, key, value, layer, metadata, config)

    plain = attend(tables, slots)
    spread = slots.repeat_interleave(2)[::2]
    assert not spread.is_contiguous()
    assert torch.equal(attend(tables.T.contiguous().T, spread), plain)
    with pytest.raises(TypeError, match="block_tables must be int64 on the CPU"):
        attend(tables.int(), slots)
    with pytest.raises(TypeError, match="slot_mapping must be int64 on the CPU"):
        attend(tables, slots.int())


@needs_native
def test_a_library_with_other_structures_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = type("Norm", (ctypes.Structure,), {"_fields_": (*Norm._fields_, ("more", ctypes.c_int64))})
    structures = tuple(longer if one is Norm else one for one in native_library.STRUCTURES)
    monkeypatch.setattr(native_library, "STRUCTURES", structures)
    with pytest.raises(OSError, match="its Norm has 32 bytes where 40 are declared"):
        Library(build.build())
    monkeypatch.setattr(native_library, "STRUCTURES", (*structures, longer))
    count = len(structures)
    with pytest.raises(OSError, match=f"it has {count} structures where {count + 1} are declared"):
        Library(build.build())


@needs_native
def test_threads_meet_whether_they_share_a_cpu_or_not() -> None:
    program = """
import os
import torch
from triptych.model.native import library
from triptych.model.native.library import native
from triptych.model.linear.native import packed_linear
library.LARGE = 0

def meet(cpus):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    packed, x = packed_linear(native(), torch.randn(70, 64, dtype=torch.bfloat16), None), torch.randn(5, 64)
    torch.set_num_threads(1)
    alone = packed(x)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert all(torch.equal(packed(x), alone) for _ in range(500))

for cpus in (1, 2):
    if not os.fork():  # before there are threads
        meet(cpus)
        os._exit(0)
    assert os.wait()[1] == 0, f"on {cpus} CPUs"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


@needs_native
def test_a_forked_child_is_told_instead_of_waiting_for_ever() -> None:
    program = """
import os
import torch
from triptych.model.native import library
from triptych.model.native.library import native
from triptych.model.linear.native import packed_linear
library.LARGE = 0
packed, x = packed_linear(native(), torch.ones(70, 64), None), torch.ones(5, 64)
torch.set_num_threads(2)
before = packed(x)

def child(threads):
    torch.set_num_threads(threads)
    try:
        assert torch.equal(packed(x), before)
    except RuntimeError as error:
        os._exit(7 if "forked after the native kernels" in str(error) else 1)
    os._exit(0)

for threads, code in ((2, 7), (1, 0)):
    if not os.fork():
        child(threads)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == code, threads
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def scratch_of_attention(segments: list[tuple[int, int]]) -> int:
    """Return the scratch bytes for 32 query heads and 8 key heads of size 128, on one thread."""
    described, shape = Segments(), AttentionShape(32, 8, 128, 0, 1.0)
    kept = [*fill_segments(described, AttentionMetadata(*zip(*segments, strict=True), causal=True), None)]
    found = library()._functions.attention_scratch_bytes(
        ctypes.byref(shape), ctypes.byref(described), ctypes.c_int64(1)
    )
    del kept
    return int(found)


@needs_native
def test_decoding_takes_scratch_for_its_scores_alone() -> None:
    context = 131_072
    assert 4 * 32 * context < scratch_of_attention([(1, context), (64, 100)]) < 4 * 32 * context + 100_000
    assert (
        scratch_of_attention([(1, 100), (64, context)]) > 4 * 2 * 128 * context
    )  # keys and values of a head as floats


@needs_native
def test_an_mlps_operands_take_scratch_for_the_rows_that_go_through_it_together() -> None:
    def needed(rows: int) -> int:
        layer = Layer(mlp=MLPLayer(up=PackedMatrix(Kind.BF16, 4096, 64), down=PackedMatrix(Kind.BF16, 64, 4096)))
        layer.self = AttentionLayer(shape=AttentionShape(4, 4, 16, 0, 0.25), rotary=-1, score_bias=-1, relative=-1)
        layer.self.input, layer.self.output = PackedMatrix(Kind.BF16, 192, 64), PackedMatrix(Kind.BF16, 64, 64)
        stack = Stack(64, 1, (ctypes.POINTER(Layer) * 1)(ctypes.pointer(layer)), Kind.BF16)
        step = Step(rows=rows, num_segments=1, segments=(Segments * 1)(), planned_keys=1)
        return int(library()._functions.scratch_bytes(ctypes.byref(stack), ctypes.byref(step), ctypes.c_int64(100)))

    of_a_row = 4 * (192 + 64) + 4 * 192 + 4 + 100 * 4 * 48  # queries to values, mixed, an operand, its scale, sums
    assert needed(8192) - needed(4096) < 4096 * of_a_row


@needs_native
@pytest.mark.parametrize("kind", ["llama-gqa", "gpt-neox", "t5-relu", "bert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_stay_within_the_scratch_that_they_asked_for(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []

    def guarded(self: Library, needed: int) -> ctypes.c_void_p:
        given.append(torch.full((needed + 4096,), 77, dtype=torch.uint8))
        given[-1][:needed] = 0
        return ctypes.c_void_p(given[-1].data_ptr())

    backend = native_backends()[0]
    model = loaded(kind, backend, dtype)
    expected, _ = ours_and_theirs(kind, model)
    monkeypatch.setattr(Library, "_scratch_of", guarded)
    assert torch.equal(ours_and_theirs(kind, model)[0], expected)
    assert given
    assert all(bool((buffer[-4096:] == 77).all()) for buffer in given)


@needs_native
def test_scratch_grows_by_need_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Library(build.build())
    fresh._scratch_of(1000)
    assert fresh._scratch.tensor.numel() == 1250  # a quarter more
    fresh._scratch_of(5_000_000)
    for _ in range(native_library._SCRATCH_CALLS - 3):
        fresh._scratch_of(2000)
    assert fresh._scratch.tensor.numel() == 6_250_000
    for _ in range(native_library._SCRATCH_CALLS + 1):
        fresh._scratch_of(2000)
    assert fresh._scratch.tensor.numel() == 2500


@needs_native
def test_a_library_exports_what_python_calls_and_nothing_else() -> None:
    listing = subprocess.run(["nm", "-D", "--defined-only", str(build.build().path)], check=True, capture_output=True)
    exported = {line.split()[-1] for line in listing.stdout.decode().splitlines()}
    assert exported == set(library().ENTRY_POINTS)


@needs_native
def test_the_library_is_built_once_and_again_for_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(build, "_SOURCES", sources)
    before = os.umask(0)
    request.addfinalizer(lambda: os.umask(before))
    first = build.build()
    written = first.path.stat().st_mtime_ns
    assert build.build() == first
    assert first.path.stat().st_mtime_ns == written
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    assert first.path.stat().st_mode & 0o777 == 0o755
    os.truncate(first.path, 200)
    assert build.compiled_earlier() is None
    assert build.build() == first and first.path.stat().st_size > 200
    (sources / "one.c").write_text("int one(void) { return 2; }\n")
    assert build.build() != first
    (sources / "one.c").write_text("int one(void) { return }\n")
    with pytest.raises(build.BuildError, match="the compiler failed"):
        build.build()


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "triptych").mkdir()
    os.chmod(tmp_path / "triptych", 0o777)
    with pytest.raises(build.BuildError, match="not ours alone"):
        build.cache_folder()


@pytest.mark.parametrize("home", ["", "relative", None])
def test_a_cache_never_depends_on_the_working_directory(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr("pwd.getpwuid", lambda _: SimpleNamespace(pw_dir="/home/someone"))
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home)
    assert user_cache() == Path("/home/someone/.cache/triptych")
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}["no such user"])
    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME"):
        user_cache()


def test_a_cache_that_cannot_be_written_is_a_reason_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compiler", lambda: ("gcc", "gcc 12"))
    (tmp_path / "triptych" / "lock").mkdir(parents=True)  # no process can open it for writing, root's neither
    os.chmod(tmp_path / "triptych", 0o700)
    with pytest.raises(build.BuildError, match="nothing can be written"):
        build.build()


def test_without_a_compiler_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.BuildError, match="no GCC"):
        build.build()


@needs_native
@pytest.mark.parametrize(
    ("dtype", "how"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float32, "int8"), (torch.bfloat16, "int4")],
)
@pytest.mark.parametrize("kind", ["llama-gqa", "gpt-neox", "gemma2", "bert", "bart"])
def test_scratch_is_what_was_planned_from_the_configuration(
    kind: str, dtype: torch.dtype, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_native(read_checkpoint(saved(kind).path), library(), dtype, quantization=how)
    monkeypatch.setattr(library(), "_scratch", threading.local())
    rows = 48
    inputs = packed_input([prompt(rows)], CPU, causal=model.encoder is None)
    config = model.config if model.encoder is None else replace(model.config, decoder=None, head=None)
    planned = planned_scratch(library(), config, dtype, how, rows=rows, context=rows)
    with torch.inference_mode():
        if model.encoder is None:
            assert model.decoder is not None
            pools = max(pool_of_layers(model.decoder.config)) + 1
            cache = KVCache(model.decoder.config, [4] * pools, 16, dtype, CPU)
            metadata = replace(
                inputs.metadata, block_tables=torch.arange(3)[None], slot_mapping=torch.arange(rows), causal=True
            )
            model.decode(replace(inputs, metadata=metadata, other_pools=(metadata,) * (pools - 1)), cache)
        else:
            model.encode(inputs)
    assert library()._scratch.tensor.numel() == planned
    assert planned < planned_scratch(library(), config, dtype, how, rows=64, context=rows)
    if model.encoder is None:
        assert planned < planned_scratch(library(), config, dtype, how, rows=rows, context=2048)
