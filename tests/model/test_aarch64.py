"""Levels of AArch64, compiled by a cross compiler and run under qemu-user (Debian: gcc-aarch64-linux-gnu, qemu-user).

Integer products by SDOT and by I8MM's SMMLA give the bits of the plain level, and of this machine's own.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from triptych.model.native import build
from triptych.model.native.build import LEVELS, Level, fitting

HERE = Path(__file__).parent
GCC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ARM = [level for level in LEVELS if level.machine == "aarch64"]
_FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Werror", "-Wno-psabi", "-static")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which(GCC) and shutil.which(QEMU)), reason=f"there is no {GCC} or no {QEMU} here"),
]


def compiled(folder: Path, harness: str, compiler: str, flags: tuple[str, ...]) -> Path:
    """Compile a harness and all kernels to one program."""
    common = [compiler, *_FLAGS, *flags, "-fopenmp", "-I", str(build._SOURCES)]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([*common, "-c", str(source), "-o", target], check=True)
        return target

    folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*sorted(build._SOURCES.glob("*.c")), HERE / harness]))
    link = [compiler, "-static", *objects, "-o", str(folder / "program"), "-lm", "-lpthread"]
    subprocess.run([*link, *(() if harness == "check_native.c" else ("-fopenmp",))], check=True)
    return folder / "program"


def emulated(program: Path, *arguments: str) -> bytes:
    return subprocess.run([QEMU, "-cpu", "max", str(program), *arguments], check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the output of products.c at each level."""
    folder = tmp_path_factory.mktemp("aarch64")
    return {level.name: emulated(compiled(folder / level.name, "products.c", GCC, level.flags)) for level in ARM}


def test_levels_multiply_integers_alike(products: dict[str, bytes], tmp_path: Path) -> None:
    plain = np.frombuffer(products["armv8-a"], np.float32)
    assert len(plain) > 100_000 and np.isfinite(plain).all()
    for name, found in products.items():
        assert found == products["armv8-a"], name
    if own := fitting(build._cpuinfo(), platform.machine()):
        program = compiled(tmp_path / "own", "products.c", build._compiler()[0], own[-1].flags)
        ours = np.frombuffer(subprocess.run([program], check=True, capture_output=True).stdout, np.float32)
        assert np.allclose(plain, ours, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("level", ARM, ids=lambda level: level.name)
def test_every_entry_point_gives_finite_results(level: Level, tmp_path: Path) -> None:
    """Calls them like `make check-native`, but without sanitizers, which do not run under qemu."""
    program = compiled(tmp_path / "check", "check_native.c", GCC, level.flags)
    assert b"all results are finite" in emulated(program, "3")


@pytest.mark.parametrize(
    ("level", "instruction"),
    [("armv8.2-a-dotprod", "sdot"), ("armv8.2-a-dotprod-i8mm-bf16", "smmla"), ("armv8.2-a-dotprod-i8mm-bf16", "bfdot")],
)
def test_a_level_has_the_instructions_of_its_name(level: str, instruction: str, tmp_path: Path) -> None:
    flags = next(one.flags for one in ARM if one.name == level)
    assembly = tmp_path / "gemm.s"
    subprocess.run([GCC, *_FLAGS, *flags, "-S", str(build._SOURCES / "gemm.c"), "-o", str(assembly)], check=True)
    assert f"\t{instruction}\t" in assembly.read_text()
