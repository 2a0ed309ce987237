"""A script that deletes files from its environment that serving does not need.

These are tests of packages, C++ headers, type stubs, static libraries, parts for other languages and systems, Ray's
libraries for training and data, and pip.
`tests/deploy/test_image.py` serves from the rest.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_UNUSED = (
    "pip",
    "pip-*.dist-info",
    "torch/include",  # headers for extensions: there is no compiler here
    "torch/share",
    "torch/test",
    "torch/bin/*[!r]",  # all but torch_shm_manager
    "torch/lib/*_test.so",
    "ray/jars",  # Java
    "ray/cpp",
    "ray/rllib",
    "ray/data",
    "ray/llm",
    "ray/train",
    "ray/tune",
    "virtualenv/seed/wheels/embed/*.whl",  # pip and setuptools for new environments
    "**/*.a",
    "**/*.h",
    "**/*.js.map",
    "**/*.py[ix]",  # types, and Cython's sources
    "**/*.pxd",
    "**/*.exe",
)
_KEPT = ("triptych/model/native/kernels", "triton/backends/nvidia/include")  # sources: compared, and for a compiler
_TESTS = ("numpy", "sympy", "networkx", "mpmath", "ray", "fsspec", "opencensus", "rich", "smart_open")


def unused(packages: Path) -> Iterator[Path]:
    """Return the paths to delete below the folder of installed packages."""
    for pattern in _UNUSED:
        kept = [packages / folder for folder in _KEPT]
        yield from (path for path in packages.glob(pattern) if path.parent not in kept)
    for name in _TESTS:
        yield from (path for path in (packages / name).rglob("tests") if path.is_dir())


def slim(packages: Path) -> int:
    """Delete these paths and return their size in bytes."""
    freed = 0
    for path in list(unused(packages)):
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        freed += sum(file.lstat().st_size for file in files)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # one inside another is already gone
        else:
            path.unlink(missing_ok=True)
    return freed


if __name__ == "__main__":
    print(f"slim: {slim(Path(sysconfig.get_path('purelib'))) / 1e6:.0f} MB less")
