"""Finds a folder's files of weights and the names of the tensors in them; reads headers only. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open

from model.checkpoint.folder_kind import describe_folder, lfs_pointer
from model.checkpoint.json_files import read_json
from model.checkpoint.state_dict import read_state_dict
from model.checkpoint.tensor_names import Wrapping, wrapping_of
from model.errors import ConfigError
from model.families.table.rules import Family
from model.system.folder_files import has_file

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in this order; each may be in shards
_SHARD = re.compile(
    r"(?P<stem>model|pytorch_model)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors|\.bin)"
)
_MOST_SHARDS = 10_000


def weight_files(path: Path, *, pickle: bool) -> tuple[Path, ...]:
    """Return the files of weights; without `pickle` only safetensors.

    Raises `ConfigError`, which says what a folder without weights is.
    """
    for name in WEIGHTS if pickle else WEIGHTS[:1]:
        index = path / f"{name}.index.json"
        if has_file(index):
            files = _shards(index)
        elif has_file(path / name):
            files = (path / name,)
        else:
            files = _shards_without_index(path, name)
        if files:
            pointers = [file.name for file in files if lfs_pointer(file)]
            if pointers:
                raise ConfigError(f"{', '.join(pointers[:3])}: a Git LFS pointer, not the weights: run `git lfs pull`")
            empty = [file.name for file in files if file.stat().st_size == 0]
            if empty:
                raise ConfigError(f"{', '.join(empty[:3])} is empty: copy or download it again")
            return files
    refused = [] if pickle else [file.name for file in sorted(path.glob("pytorch_model*.bin"))][:3]
    if refused:
        raise ConfigError(f"its weights are in {', '.join(refused)}, which --no-pickle refuses; no model.safetensors")
    raise ConfigError(describe_folder(path))


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files that an index names; raises `ConfigError` if one is missing or outside the folder."""
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index.name}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError(f"{index.name} names files outside the folder: {', '.join(outside[:3])}")
    missing = [name for name in names if not has_file(folder / name)]
    if missing or not names:
        shown = ", ".join(missing[:3]) or "none"
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{index.name} names shards that are missing: {shown}{more}; copy or download them again")
    return tuple(folder / name for name in names)


def _shards_without_index(path: Path, name: str) -> tuple[Path, ...]:
    """Return all shards where their names count them completely; () where there are none, raises `ConfigError`."""
    stem, suffix = Path(name).stem, Path(name).suffix
    found = [match for file in path.iterdir() if (match := _SHARD.fullmatch(file.name)) is not None]
    found = [match for match in found if match["stem"] == stem and match["suffix"] == suffix]
    if not found:
        return ()
    counts = {match["count"] for match in found}
    count = int(min(counts))
    if len(counts) > 1 or not 0 < count <= _MOST_SHARDS:
        raise ConfigError(
            f"shards of {name} of different counts, {', '.join(sorted(counts))}, and no {name}.index.json"
        )
    wanted = [path / f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
    missing = [file.name for file in wanted if not has_file(file)]
    if missing:
        raise ConfigError(
            f"shards of {name} are missing, {', '.join(missing[:3])} ({len(missing)} of {count}), and there is no "
            f"{name}.index.json; copy or download them again"
        )
    return tuple(wanted)


def tensor_names(files: Iterable[Path], family: Family | None = None) -> tuple[frozenset[str], Wrapping]:
    """Return the names of all stored tensors, and what was left out of them; reads headers only. Raises `ConfigError`.

    Those of a `family` that hold all experts of a layer are named by the parts that are read of them.
    """
    names: set[str] = set()
    for file in files:
        if file.suffix == ".bin":
            shapes = {tensor.name: tensor.shape for tensor in read_state_dict(file)}
            names.update(*(_read_as(family, name, shapes.__getitem__) for name in shapes))
            continue
        try:
            with safe_open(file, framework="numpy") as tensors:
                stored = tensors.keys()
                names.update(
                    *(_read_as(family, name, lambda name: tensors.get_slice(name).get_shape()) for name in stored)
                )
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file.name} is not a valid safetensors file: {error}") from None
    wrapping = wrapping_of(family, names)
    return frozenset(map(wrapping.unwrapped, names) if wrapping else names), wrapping


def _read_as(family: Family | None, name: str, shape_of: Callable[[str], Sequence[int]]) -> Iterable[str]:
    """Return the names that a stored tensor is read by."""
    fused = None if family is None else family.fused_as(name)
    return (name,) if fused is None else chain(*fused.part_names(name, (*shape_of(name), 0)[0]))
