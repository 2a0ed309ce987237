"""Archives of compiler caches of Triton and torch, in tar files of at most 16 MB. Uses only the standard library."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

PART_BYTES = 16_000_000
MOST_PARTS = 4
_PARTS = "caches-*.tar.*"
_GROUP = "__grp__"  # how the file begins that lists a kernel's files
_MARGIN = 1 << 18  # for the compressor's buffer and the end of the file
_KIND = "xz" if find_spec("_lzma") else "gz"  # as fast and half the size, if Python has it


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that make the compilers use caches in `folder`."""
    at = folder.resolve()
    return {"TRITON_CACHE_DIR": str(at / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(at / "inductor")}


def unpack(parts: Path, folder: Path) -> int:
    """Extract all parts in folder `parts` into `folder`, and return the number of files."""
    count = 0
    for part in sorted(parts.glob(_PARTS)):
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(part) as tar:
            tar.extractall(folder, filter="data")
            names = tar.getnames()
        for name in names:
            if Path(name).name.startswith(_GROUP):
                _moved(folder / name)
        count += len(names)
    return count


def _moved(group: Path) -> None:
    """Rewrite the absolute paths of a kernel's files, without which Triton would compile it again."""
    content = json.loads(group.read_text())
    content["child_paths"] = {name: str(group.resolve().parent / name) for name in content["child_paths"]}
    group.write_text(json.dumps(content))


def pack(folder: Path, into: Path, *, part_bytes: int = PART_BYTES, most_parts: int = MOST_PARTS) -> Iterator[str]:
    """Write all files of `folder` as parts that can be extracted independently; yields progress messages.

    A directory stays within a part if it fits, so that a lost part costs only its own entries.
    """
    for old in into.glob(_PARTS):
        old.unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    waiting = iter(files)
    path = next(waiting, None)
    number = 0
    while path is not None and number < most_parts:
        name = into / f"caches-{number:02}.tar.{_KIND}"
        with name.open("wb") as raw, _begun(raw) as tar:
            empty = True
            while path is not None and (empty or raw.tell() + path.stat().st_size + _MARGIN < part_bytes):
                tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
                empty, path = False, next(waiting, None)
        if name.stat().st_size > part_bytes:  # a single file that is larger than a part
            name.unlink()
            continue
        number += 1
        yield f"{name.name}: {name.stat().st_size / 1e6:.1f} MB of compilers' caches"
    if path is not None:
        left = 1 + sum(1 for _ in waiting)
        yield f"{left} of {len(files)} cached files are left out: they do not fit into {most_parts} parts"


def _begun(raw: BinaryIO) -> tarfile.TarFile:
    if _KIND == "xz":
        return tarfile.open(fileobj=raw, mode="w:xz", preset=1)
    return tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6)
