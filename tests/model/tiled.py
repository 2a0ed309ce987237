"""C libraries with AMX tiles: emulated in plain C (model/native/kernels/amx.h), for CPUs that have none, and real.

Products of bfloat16 and of bytes in AVX-512 are emulated too (narrow.h) where the CPU has only the rest of it.
"""

from __future__ import annotations

import atexit
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest

from model.native import build
from model.native.build import Built
from model.native.levels import LEVELS, fitting
from model.native.library import Library
from tests.model.checkpoints import native_backends

AMX, VECTORS = LEVELS[:2]
PLAIN = next(level for level in LEVELS if level.name == "x86-64-v4")
WITH_TILES = ("amx.c", "amx_groups.c")
ATTENTION = "tile_attention.c"  # with tiles as they should be in every emulation, and compiled once
NARROW = Path(__file__).parent / "narrow.h"
HERE = fitting(build._cpuinfo(), platform.machine())
# On a CPU without the vectors that tiles stand beside, these are emulated too.
_EMULATED = (*(VECTORS.flags if VECTORS in HERE else (*PLAIN.flags, "-include", str(NARROW))), "-DEMULATED_TILES")
# What `emulated` replaces for a system that does not let a process use tiles.
REFUSED = ("int tiles_permitted(void) { return 1; }", "int tiles_permitted(void) { return 0; }")

needs_vectors = pytest.mark.skipif(
    not native_backends() or PLAIN not in HERE,
    reason="tiles are emulated beside AVX-512, and GCC compiles them",
)


@cache
def emulated(old: str = "", new: str = "") -> Library:
    """Build with `old` replaced by `new` in amx.h, as for a CPU whose tiles are wrong."""
    folder = Path(tempfile.mkdtemp(prefix="tiles-", dir=_objects()))
    text = (build._SOURCES / "amx.h").read_text()
    assert old in text
    (folder / "amx.h").write_text(text.replace(old, new, 1) if old else text)
    for name in WITH_TILES:
        shutil.copy(build._SOURCES / name, folder)
    return Library(Built(_linked(folder, WITH_TILES, *_EMULATED), "emulated"))


@cache
def real() -> Path:
    """A library of the instructions themselves, which only a CPU that has them runs."""
    return _linked(build._SOURCES, (*WITH_TILES, ATTENTION), *AMX.flags)


def _linked(sources: Path, names: tuple[str, ...], *flags: str) -> Path:
    """These files of `sources`, with everything else, which is the same for all."""
    folder = Path(tempfile.mkdtemp(prefix="linked-", dir=_objects()))
    objects = {path.stem: path for path in _objects().glob("*.o")}
    for name in names:
        made = objects[Path(name).stem] = folder / f"{Path(name).stem}.o"
        gcc(*flags, "-I", str(build._SOURCES), "-c", str(sources / name), "-o", str(made))
    gcc("-shared", *map(str, objects.values()), "-o", str(folder / "tiled.so"), "-lm")
    return folder / "tiled.so"


@cache
def _objects() -> Path:
    folder = temporary_folder()
    sources = [source for source in build._SOURCES.glob("*.c") if source.name not in WITH_TILES]
    with ThreadPoolExecutor() as threads:
        list(threads.map(partial(_compiled, folder), sources))
    return folder


def temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiled-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compiled(folder: Path, source: Path) -> None:
    """Attention, which has no work for tiles and takes GCC longer than all others, as it is compiled soonest."""
    level = "-O0" if source.stem == "paged_attention" else "-O1"
    gcc(*_EMULATED, level, "-c", str(source), "-o", str(folder / f"{source.stem}.o"))


def gcc(*arguments: str) -> None:
    subprocess.run([build._compiler()[0], *build._FLAGS, *arguments], check=True, timeout=240)
