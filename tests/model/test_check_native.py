"""The C kernels under sanitizers (`make check-native`): check_native.c calls every entry point with exact buffers."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.model.checkpoints import native_backends
from tests.model.tiled import HERE, PLAIN, VECTORS
from triptych.model.native import build
from triptych.model.native.build import Level

HARNESS = Path(__file__).parent / "check_native.c"
MEMORY, THREADS = "address,undefined", "thread"
_FLAGS = ("-O1", "-g", "-std=gnu11", "-fopenmp", "-Wno-psabi", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_SECONDS = 900


def sanitizers_missing() -> str:
    """Return why nothing can be checked here; empty: everything can."""
    if not native_backends():
        return "there is no GCC here"
    command = [build._compiler()[0], f"-fsanitize={MEMORY}", "-x", "c", "-", "-o", "/dev/null"]
    found = subprocess.run(command, input="int main(void) { return 0; }", capture_output=True, text=True)
    return "" if found.returncode == 0 else "GCC has no sanitizers here"


pytestmark = [pytest.mark.slow, pytest.mark.skipif(sanitizers_missing() != "", reason=sanitizers_missing() or "-")]


def compiled(folder: Path, sanitizer: str, flags: tuple[str, ...], change: tuple[str, str, str] | None = None) -> Path:
    """Compile the harness and all kernels to one program; `change`: file, old text, new text."""
    sources = shutil.copytree(build._SOURCES, folder / "kernels")
    if change is not None:
        name, old, new = change
        text = (sources / name).read_text()
        assert text.count(old) == 1
        (sources / name).write_text(text.replace(old, new))
    gcc = [build._compiler()[0], f"-fsanitize={sanitizer}"]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        run([*gcc, *_FLAGS, *flags, "-I", str(sources), "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*sorted(sources.glob("*.c")), HARNESS]))
    run([*gcc, *objects, "-o", str(folder / "check"), "-lm", "-lpthread"])  # the harness implements OpenMP's regions
    return folder / "check"


def run(command: list[str]) -> None:
    found = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]


def report(program: Path, threads: int) -> tuple[bool, str]:
    """Return whether nothing was found, and the output; without random addresses, which can upset ThreadSanitizer."""
    fixed = ["setarch", "-R"] if shutil.which("setarch") and subprocess.call(["setarch", "-R", "true"]) == 0 else []
    command, settings = [*fixed, str(program), str(threads)], os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=settings)
    return found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]


@pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)
def test_no_level_reads_or_writes_what_is_not_its_own(level: Level, tmp_path: Path) -> None:
    program = compiled(tmp_path, MEMORY, level.flags)
    for threads in (1, 3):
        fine, said = report(program, threads)
        assert fine, said


@pytest.mark.skipif(VECTORS not in HERE, reason="emulated tiles need AVX-512's narrow products")
def test_nor_do_tiles_whose_loads_can_be_seen(tmp_path: Path) -> None:
    fine, said = report(compiled(tmp_path, MEMORY, (*VECTORS.flags, "-DEMULATED_TILES")), 2)
    assert fine, said
    assert "tiles 1" in said


@pytest.mark.parametrize("level", [HERE[0], HERE[-1]] if len(HERE) > 1 else HERE, ids=lambda level: level.name)
def test_threads_do_not_race(level: Level, tmp_path: Path) -> None:
    fine, said = report(compiled(tmp_path, THREADS, level.flags), 3)
    assert fine, said


@pytest.mark.skipif(PLAIN not in HERE, reason="one level is enough, and this CPU is not of it")
@pytest.mark.parametrize(
    ("sanitizer", "change", "finding"),
    [
        (  # operands are padded by one number too many
            MEMORY,
            ("gemm.c", "for (; i < padded_k(INT8, k); i++)", "for (; i <= padded_k(INT8, k); i++)"),
            "AddressSanitizer",
        ),
        (  # a thread's line is one number too short
            MEMORY,
            ("stack_buffers.c", "scratch, stack->hidden * number)", "scratch, (stack->hidden - 1) * number)"),
            "AddressSanitizer",
        ),
        (  # rows are read while another thread is still writing them
            THREADS,
            ("thread_context.h", "scratch(t, rows));\n    wait_for_threads(t);", "scratch(t, rows));"),
            "data race",
        ),
    ],
    ids=["operand", "scratch", "barrier"],
)
def test_control_a_planted_defect_is_found(
    sanitizer: str, change: tuple[str, str, str], finding: str, tmp_path: Path
) -> None:
    fine, said = report(compiled(tmp_path, sanitizer, PLAIN.flags, change), 3)
    assert not fine
    assert finding in said
