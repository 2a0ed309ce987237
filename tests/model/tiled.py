"""C libraries with AMX tiles: emulated in plain C (model/native/kernels/amx.h) for other CPUs, and real ones.

bfloat16 and byte products of AVX-512 are emulated too (narrow.h) where the CPU has only the rest of it.

Compiling takes longer than most of the tests. So objects are kept in build/ by a digest of their inputs: each is
compiled once for all processes of a run, and again only when its sources change.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from tests.model.checkpoints import native_backends
from triptych.model.native import build
from triptych.model.native.build import LEVELS, Built, Level, fitting
from triptych.model.native.library import Library

AMX, VECTORS = LEVELS[:2]
PLAIN = next(level for level in LEVELS if level.name == "x86-64-v4")
PRODUCTS = "amx.c"  # `emulated` compiles this anew; all other files have correct tiles
SLOW_TO_COMPILE = ("paged_attention.c", "amx_groups.c", "gemm.c", "groups.c")
WITH_TILES = (PRODUCTS, "amx_groups.c", "tile_attention.c")
KEPT = Path(__file__).parents[2] / "build" / "tiled"
KEPT_SECONDS = 7 * 24 * 3600  # after its last use
NARROW = Path(__file__).parent / "narrow.h"
HERE = fitting(build._cpuinfo(), platform.machine())
# A CPU without the vectors that tiles need has these emulated too.
_EMULATED = (*(VECTORS.flags if VECTORS in HERE else (*PLAIN.flags, "-include", str(NARROW))), "-DEMULATED_TILES")
# `emulated` replaces this to simulate a system that does not let a process use tiles.
REFUSED = ("int tiles_permitted(void) { return 1; }", "int tiles_permitted(void) { return 0; }")

needs_vectors = pytest.mark.skipif(
    not native_backends() or PLAIN not in HERE,
    reason="emulated tiles need AVX-512, and GCC",
)


@cache
def emulated(old: str = "", new: str = "") -> Library:
    """Build with `old` replaced by `new` in amx.h, to simulate a CPU with wrong tiles."""
    if not old:
        return Library(Built(_linked(_objects()), "emulated"))
    header = (build._SOURCES / "amx.h").read_text()
    assert old in header
    spoilt = _compiled(build._SOURCES / PRODUCTS, _soon(PRODUCTS, _EMULATED), header.replace(old, new, 1))
    return Library(Built(_linked({**_objects(), PRODUCTS: spoilt}), "emulated"))


def compiled_soon(level: Level) -> Library:
    """Return a library for a level, compiled quickly rather than for speed."""
    return Library(Built(_linked(_objects(level.flags)), f"prebuilt for {level.name}"))


@cache
def real() -> Path:
    """Return a library with the real instructions, which only a CPU with tiles runs."""
    own = {name: _compiled(build._SOURCES / name, _soon(name, AMX.flags)) for name in WITH_TILES}
    return _linked({**_objects(), **own})


def _linked(objects: dict[str, Path]) -> Path:
    library = temporary_folder() / "tiled.so"
    gcc("-shared", *map(str, objects.values()), "-o", str(library), "-lm")
    return library


@cache
def _objects(flags: tuple[str, ...] = _EMULATED) -> dict[str, Path]:
    """Return the object of each source file; with emulated tiles by default."""
    sources = list(build._SOURCES.glob("*.c"))
    with ThreadPoolExecutor() as threads:
        objects = threads.map(lambda source: _compiled(source, _soon(source.name, flags)), sources)
        return {source.name: made for source, made in zip(sources, objects, strict=True)}


def _soon(name: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return flags for the shortest total time of compiling and testing."""
    return (*flags, "-O0" if name in SLOW_TO_COMPILE else "-O1")


def _compiled(source: Path, flags: tuple[str, ...], amx: str = "") -> Path:
    """Return the kept object of a source file; `amx` is included instead of amx.h if given."""
    headers = {path.name: path.read_text() for path in [*build._SOURCES.glob("*.h"), NARROW]}
    made_of = (build._compiler(), build._FLAGS, flags, source.name, source.read_text(), amx, sorted(headers.items()))
    kept = KEPT / f"{sha256(repr(made_of).encode()).hexdigest()[:32]}.o"
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{source.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        with suppress(FileNotFoundError):
            os.utime(kept)  # before the lookup: another process removes old objects
        if not kept.exists():
            _forget_old()
            with tempfile.TemporaryDirectory(dir=KEPT) as name:
                folder = Path(name)
                if amx:
                    (folder / "amx.h").write_text(amx)
                    shutil.copy(source, folder)  # the header next to a file takes precedence
                made = folder / kept.name
                file = folder / source.name if amx else source
                gcc(*flags, "-I", str(build._SOURCES), "-c", str(file), "-o", str(made))
                made.replace(kept)
    return kept


def _forget_old() -> None:
    for path in KEPT.glob("*.o"):
        with suppress(FileNotFoundError):  # another process was faster
            if path.stat().st_mtime < time.time() - KEPT_SECONDS:
                path.unlink()


def temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiled-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def gcc(*arguments: str) -> None:
    subprocess.run([build._compiler()[0], *build._FLAGS, *arguments], check=True, timeout=240)
