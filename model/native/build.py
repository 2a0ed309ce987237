"""Compiles the C sources for this very CPU and keeps the result, so that only the first start waits for it.

The library lies in a folder that only its owner may write, under a name made of the sources, the compiler, its flags
and the CPU: what was built for another machine or version is never loaded. Processes that start at once build once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from hashlib import sha256
from pathlib import Path

_SOURCES = Path(__file__).parent
_FLAGS = ("-O2", "-std=gnu11", "-fopenmp", "-fPIC", "-Wno-psabi")
_SECONDS = 300  # a compiler that takes longer is stuck
_CPU_KEYS = ("model name", "flags", "CPU implementer", "CPU part", "Features")

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """There is no native library on this machine; the message says why, without paths."""


def build() -> Path:
    """The library for this machine, compiled unless it is there; raises `BuildError`."""
    compiler, version = _compiler()
    flags = (*_FLAGS, "-mcpu=native" if platform.machine() == "aarch64" else "-march=native")
    sources = sorted(_SOURCES.glob("*.[ch]"))
    digest = sha256(repr((version, flags, _cpu())).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    folder = cache_folder()
    library = folder / f"native-{digest.hexdigest()[:32]}.so"
    if library.exists():
        return library
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():  # another process may have been quicker
            began = time.monotonic()
            _compile(compiler, flags, [s for s in sources if s.suffix == ".c"], library)
            logger.info("compiled the native kernels for this CPU in %.1f s", time.monotonic() - began)
    return library


def cache_folder() -> Path:
    """A folder of ours that nobody else can write; raises `BuildError` if what lies there is not."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
        folder = base / "triptych"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"no cache folder can be made ({type(error).__name__})") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError("the cache folder is not ours alone: another user could put code there")
    return folder


def _compiler() -> tuple[str, str]:
    """The path and version of GCC, whose OpenMP runtime is the one that torch brings."""
    for name in ("gcc", "cc"):
        path = shutil.which(name)
        version = _run([path, "--version"]) if path else ""
        if path and "Free Software Foundation" in version:
            return path, version.splitlines()[0]
    raise BuildError("no GCC is installed")


def _cpu() -> list[str]:
    """What tells this CPU's instructions from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    return [platform.machine(), *(line for line in lines if line.split("\t")[0].strip() in _CPU_KEYS)]


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
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
        for process in running:
            _wait(process)
        linked = Path(name) / library.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(linked), "-lm"])
        os.replace(linked, library)


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        _, errors = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise BuildError(f"the compiler took longer than {_SECONDS} s") from None
    if process.returncode:
        logger.debug("the compiler said: %s", errors)
        raise BuildError("the compiler failed on the native kernels")


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the compiler does not run ({type(error).__name__})") from None
