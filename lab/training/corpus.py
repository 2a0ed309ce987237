"""The training text of `code`: the Python standard library's source and docs, as shipped with the interpreter.

The split is by module name, so it is the same for every interpreter version: a module that became a package stays
on its side. `held_out_code.txt` is a committed copy of `SAMPLE_MODULES` of Python 3.11 (PSF licence), so that the
model card's bits per byte can be checked on any version; those modules, and all inside them, are always held out.

Tests, installed packages, tables of character maps, and generated files about the interpreter's build are excluded.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

SAMPLE_MODULES = ("bisect", "colorsys", "graphlib", "sched")
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
_BUILD_FILES = ("_sysconfigdata", "_sysconfig_vars")
_HELD_OUT_ONE_IN = 32


@dataclass(frozen=True, slots=True)
class Document:
    """One source file; `path` is relative to the library, with forward slashes."""

    path: str
    text: str


def documents(*, held_out: bool) -> list[Document]:
    """Return one side of the split, ordered by path; files that are empty or not UTF-8 are skipped."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in _sources(root) if is_held_out(path) == held_out)
    texts = ((path, _text(root / path)) for path in paths)
    return [Document(path, text) for path, text in texts if text]


def held_out_sample() -> str:
    """Return the committed held-out text, the same on every interpreter."""
    return (resources.files(__package__) / "held_out_code.txt").read_text("utf-8")


def is_held_out(path: str) -> bool:
    """Return whether the module at `path` (relative to the library) is excluded from training."""
    module = path.removesuffix(".py").removesuffix("/__init__")
    return module.split("/")[0] in SAMPLE_MODULES or zlib.crc32(module.encode()) % _HELD_OUT_ONE_IN == 0


def _sources(root: Path) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]  # os.walk skips removed ones
        for name in files:
            if name.endswith(".py") and not name.startswith(_BUILD_FILES):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""
