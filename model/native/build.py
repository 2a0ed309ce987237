"""Finds the C library that came with the package, or compiles one for this CPU's level of instructions and keeps it."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import platform
import shutil
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from triptych.model.system.cache_folders import user_cache

# -- Levels of instructions for which libraries are compiled ahead of time, and which of them a CPU can run. The x86-64
# levels are those of the psABI (https://gitlab.com/x86-psABIs/x86-64-ABI). CPU flags are spelt as Linux spells them in
# /proc/cpuinfo.

_V3 = (
    *("cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"),
    *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
)
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_ARM_DOT = ("fp", "asimd", "crc32", "atomics", "asimdrdm", "asimddp")  # Armv8.2 as GCC writes it, with dot products


@dataclass(frozen=True, slots=True)
class Level:
    """A level: `flags` are GCC's, `needs` are the CPU's flags without which its code does not run."""

    name: str
    machine: str  # as `platform.machine()` says
    flags: tuple[str, ...]
    needs: frozenset[str]


_BF16_VNNI = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")
LEVELS = (  # best first
    Level(
        "x86-64-v4-bf16-vnni-amx",
        "x86_64",
        (*_BF16_VNNI, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        frozenset((*_V4, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")),
    ),
    Level("x86-64-v4-bf16-vnni", "x86_64", _BF16_VNNI, frozenset((*_V4, "avx512_bf16", "avx512_vnni"))),
    Level(  # Cascade Lake and Ice Lake
        "x86-64-v4-vnni",
        "x86_64",
        ("-march=x86-64-v4", "-mavx512vnni"),
        frozenset((*_V4, "avx512_vnni")),
    ),
    Level("x86-64-v4", "x86_64", ("-march=x86-64-v4",), frozenset(_V4)),
    Level(  # Alder Lake and later
        "x86-64-v3-vnni",
        "x86_64",
        ("-march=x86-64-v3", "-mavxvnni"),
        frozenset((*_V3, "avx_vnni")),
    ),
    Level("x86-64-v3", "x86_64", ("-march=x86-64-v3",), frozenset(_V3)),
    Level(  # Neoverse V1 and N2, and later
        "armv8.2-a-dotprod-i8mm-bf16",
        "aarch64",
        ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        frozenset((*_ARM_DOT, "i8mm", "bf16")),
    ),
    Level("armv8.2-a-dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset(_ARM_DOT)),  # Neoverse N1
    Level("armv8-a", "aarch64", ("-march=armv8-a",), frozenset(("fp", "asimd"))),
)


def fitting(cpuinfo: str, machine: str) -> list[Level]:
    """Find the levels that every processor of a /proc/cpuinfo can run, best first."""
    pairs = (line.partition(":")[::2] for line in cpuinfo.splitlines())
    shown = [set(value.split()) for key, value in pairs if key.strip() in ("flags", "Features")]
    common = set.intersection(*shown) if shown else set()
    return [level for level in LEVELS if level.machine == machine and level.needs <= common]


# -- Finds the library that came with the package, or compiles one for this CPU and keeps it. `python -m
# triptych.model.native.build --portable DIR` compiles a library for each level of instructions of this kind of machine,
# under a name made of the level, the sources and the flags. They are loaded from the package's own folder only. A
# library that is compiled on first use is kept in a cache folder that only its owner may write, under a name made of
# the sources, the compiler, its flags and the CPU: one of another machine or version is never loaded. Processes that
# start at the same time compile it once.

_SOURCES = Path(__file__).parent / "kernels"
_PREBUILT = Path(__file__).parent / "prebuilt"
_FLAGS = ("-O2", "-std=gnu11", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
_SECONDS = 300  # a compiler that takes longer is stuck
_UNWRITABLE = "nothing can be written into the cache folder; set XDG_CACHE_HOME to a folder of your own"
_ELF = struct.Struct(
    "<6s34xQ10xHH2x"
)  # magic, 64 bits, little-endian; the table of sections, which is last in the file
_CPU_KEYS = ("model name", "flags", "CPU implementer", "CPU part", "Features")

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """There is no native library on this machine. The message says why, without paths; its cause may have one."""


@dataclass(frozen=True, slots=True)
class Built:
    path: Path
    origin: str  # where it comes from, for people


def prebuilt() -> Built | None:
    """Find the packaged library of the best level that this CPU runs; None if none was made of these sources."""
    for level in fitting(_cpuinfo(), platform.machine()):
        path = _PREBUILT / _portable_name(level)
        if path.is_file():
            return Built(path, f"prebuilt for {level.name}")
    return None


def compiled_earlier() -> Built | None:
    """Find the library for this machine in the cache; None if there is none. Raises `BuildError` without a compiler."""
    library, _, _ = _for_this_cpu()
    if _is_whole(library):
        return Built(library, "compiled for this CPU")
    if not os.access(library.parent, os.W_OK | os.X_OK):
        raise BuildError(_UNWRITABLE)
    return None


def cpu_levels() -> list[Level]:
    """Return the levels that this CPU can run, best first."""
    return fitting(_cpuinfo(), platform.machine())


def compiler_version() -> str:
    """Return the first line that the compiler says of itself; raises `BuildError` without one."""
    return _compiler()[1]


def _for_this_cpu() -> tuple[Path, str, tuple[str, ...]]:
    """Return where the library for this machine is kept, and the compiler and flags that make it."""
    compiler, version = _compiler()
    flags = (*_FLAGS, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native")
    return cache_folder() / f"native-{_digest(version, flags, _cpu())}.so", compiler, flags


def build() -> Built:
    """Find the library for this machine in the cache, or compile it. Raises `BuildError`.

    A damaged library is compiled again.
    """
    library, compiler, flags = _for_this_cpu()
    folder = library.parent
    built = Built(library, "compiled for this CPU")
    if _is_whole(library):
        return built
    try:
        with open(folder / "lock", "w") as lock:
            _lock(lock)
            if not _is_whole(library):  # another process may have been quicker
                began = time.monotonic()
                logger.info("compiling the native kernels for this CPU, once: about a minute")
                _compile(compiler, flags, library)
                logger.info("compiled the native kernels for this CPU in %.1f s", time.monotonic() - began)
    except OSError as error:  # read-only, full
        raise BuildError(_UNWRITABLE) from error
    return built


def _lock(file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("waiting for another process, which compiles the native kernels")
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_whole(library: Path) -> bool:
    """Return whether there is an ELF file that is as long as its header says.

    A signal ends a process that loads a library whose end is missing.
    """
    try:
        with open(library, "rb") as file:
            header, size = file.read(_ELF.size), os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF.size:
        return False
    magic, sections, bytes_each, count = _ELF.unpack(header)
    return bool(magic == b"\x7fELF\x02\x01" and size >= sections + bytes_each * count)


def build_portable(folder: Path, levels: Sequence[Level] = LEVELS, machine: str | None = None) -> list[Path]:
    """Compile a library in `folder` for each level of a kind of machine, unless it is there.

    Another kind than this machine's needs its cross compiler (Debian: gcc-aarch64-linux-gnu).
    Libraries of these levels from other sources are deleted. Raises `BuildError`.
    """
    machine = machine or platform.machine()
    named = {folder / _portable_name(level): level for level in levels if level.machine == machine}
    if not named:
        raise BuildError(f"no level is known for {machine}")
    folder.mkdir(parents=True, exist_ok=True)
    current = {folder / _portable_name(level) for level in LEVELS}
    for level in named.values():
        for stale in set(folder.glob(f"native-{level.name}-*.so")) - current:
            stale.unlink()
    for library, level in named.items():
        if not library.exists():
            _compile(_compiler(machine)[0], (*_FLAGS, *level.flags), library)
    return list(named)


def cache_folder() -> Path:
    """Find or make a cache folder that only this user can write. Raises `BuildError` if others can."""
    try:
        folder = user_cache()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:
        raise BuildError("no cache folder can be made; set XDG_CACHE_HOME to a folder of your own") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError("the cache folder is not ours alone: another user could put code there")
    return folder


def _compiler(machine: str | None = None) -> tuple[str, str]:
    """Find GCC for a kind of machine, and its version: its OpenMP runtime is the one that torch brings."""
    names = ("gcc", "cc") if machine in (None, platform.machine()) else (f"{machine}-linux-gnu-gcc",)
    for name in names:
        path = shutil.which(name)
        version = _run([path, "--version"]) if path else ""
        if path and "Free Software Foundation" in version:
            return path, version.splitlines()[0]
    raise BuildError("no GCC is installed" if "gcc" in names else f"{names[0]} is not installed")


def _portable_name(level: Level) -> str:
    return f"native-{level.name}-{_digest(*_FLAGS, *level.flags)}.so"


def _digest(*others: object) -> str:
    """Digest the sources and what else makes a library."""
    digest = sha256(repr(others).encode())
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:32]


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _cpu() -> list[str]:
    """Return the lines of /proc/cpuinfo that tell this CPU's instructions from another's."""
    lines = _cpuinfo().split("\n\n")[0].splitlines()
    return [platform.machine(), *(line for line in lines if line.split("\t")[0].strip() in _CPU_KEYS)]


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    sources = sorted(_SOURCES.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=library.parent) as name:
        objects = [Path(name) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        running = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        try:
            for process in running:
                _wait(process)
        finally:
            for process in running:
                process.kill()
                process.communicate()
        linked = Path(name) / library.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(linked), "-lm"])
        linked.chmod(0o755)  # whatever the umask: only the owner may write a library that is loaded
        with open(linked, "rb") as written:
            os.fsync(written.fileno())  # else a crash of the machine may leave a part under the final name
        os.replace(linked, library)


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took longer than {_SECONDS} s") from None
    if process.returncode:
        logger.debug("the compiler said: %s", errors)
        raise BuildError("the compiler failed on the native kernels")


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler does not run ({type(error).__name__})") from None


def main() -> None:
    """Compile the C library before the first start: for this machine, or with `--portable` for others."""
    parser = argparse.ArgumentParser(prog="python -m triptych.model.native.build", description=main.__doc__)
    parser.add_argument(
        "--portable", type=Path, metavar="DIR", help="a library for each level of CPUs, into this folder"
    )
    parser.add_argument(
        "--machine",
        choices=sorted({level.machine for level in LEVELS}),
        default=platform.machine(),
        help="with --portable: the kind of machine; another than this one's needs a cross compiler",
    )
    arguments = parser.parse_args()
    folder = arguments.portable
    try:
        for library in [build().path] if folder is None else build_portable(folder, machine=arguments.machine):
            print(library)
    except BuildError as error:
        raise SystemExit(f"no native kernels: {error}") from None


if __name__ == "__main__":
    main()
