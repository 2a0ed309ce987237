"""Finds a folder's files of weights and the names of the tensors in them; reads headers only. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError, safe_open

from triptych.model.checkpoint.folder_kind import describe_folder, lfs_pointer
from triptych.model.checkpoint.json_files import read_json
from triptych.model.checkpoint.state_dict import read_state_dict
from triptych.model.errors import ConfigError, listed, shown
from triptych.model.families.table.rules import Family
from triptych.model.system.folder_files import has_file

# -- What stored tensors are called without the names of wrappers: torch.compile, FSDP, modules of trainers.

# Modules that only wrap others, wherever they stand in a name: torch.compile, FSDP, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Parts of stored names that the family's table lacks: modules that wrap others, and a `prefix` of all names."""

    prefix: str = ""
    modules: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefix or self.modules)

    def unwrapped(self, name: str) -> str:
        """Return a stored name without them."""
        if self.modules:
            name = ".".join(part for part in name.split(".") if part not in self.modules)
        return name.removeprefix(self.prefix)

    def __str__(self) -> str:
        return ", ".join([*self.modules, *([self.prefix] if self.prefix else [])])


PLAIN = Wrapping()


def wrapping_of(family: Family | None, names: Collection[str]) -> Wrapping:
    """Return what is to be left out of the names so that the family finds its token table.

    A prefix is left out where exactly one tensor has the table's name after it. With two models in one file neither
    is meant.
    """
    parts = {part for name in names if "._" in f".{name}" for part in name.split(".")}
    modules = Wrapping(modules=tuple(wrapper for wrapper in _WRAPPERS if wrapper in parts))
    if family is None:
        return modules
    plain = {modules.unwrapped(name) for name in names}
    tables = set(family.tables)
    if tables & {family.canonical(name) for name in plain}:
        return modules
    tails = tuple(f".{table}" for table in tables)
    found = {prefix for name in plain if name.endswith(tails) and (prefix := _prefix(family, name)) is not None}
    return Wrapping(found.pop(), modules.modules) if len(found) == 1 else modules


def _prefix(family: Family, name: str) -> str | None:
    """Return the shortest prefix of a name without which it is the token table's."""
    return next((prefix for prefix in _prefixes(name) if family.canonical(name[len(prefix) :]) in family.tables), None)


def _prefixes(name: str) -> Iterator[str]:
    for at, letter in enumerate(name, 1):
        if letter == ".":
            yield name[:at]


WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in this order; each may be in shards
_SHARD = re.compile(
    r"(?P<stem>model|pytorch_model)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.safetensors|\.bin)"
)
_MOST_SHARDS = 10_000
_INDEX = ".index.json"


def weight_files(path: Path, *, pickle: bool, named: object = None) -> tuple[Path, ...]:
    """Return the files of weights, in the order of transformers; without `pickle` only safetensors.

    `named` is what config.json calls the file (`transformers_weights`). Raises `ConfigError`, which says what a folder
    without weights is.
    """
    for name in (WEIGHTS if pickle else WEIGHTS[:1]) if named is None else (_checked_name(path, named),):
        index = path / (name if name.endswith(_INDEX) else f"{name}{_INDEX}")
        if path / name != index and has_file(path / name):
            files: tuple[Path, ...] = (path / name,)
        elif has_file(index):
            files = _shards(index)
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


def _checked_name(path: Path, named: object) -> str:
    """Return the name of the file that config.json names, or its index; raises `ConfigError`."""
    if not isinstance(named, str) or _outside(named) or not named.endswith((".safetensors", f".safetensors{_INDEX}")):
        what = "the name of a safetensors file, or of its index, in the folder"
        raise ConfigError(f"config.json: transformers_weights must be {what}, found {shown(named)}")
    if not has_file(path / named):
        raise ConfigError(f"config.json: transformers_weights names {listed([named])}, which is not in the folder")
    return named


def _outside(name: str) -> bool:
    """Return whether this is no name of a file right in the folder."""
    return name in ("", "..") or "\0" in name or Path(name).name != name


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files that an index names; raises `ConfigError` if one is missing or outside the folder."""
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index.name}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if _outside(name)]:
        raise ConfigError(f"{index.name} names files outside the folder: {listed(outside, most=3)}")
    missing = [name for name in names if not has_file(folder / name)]
    if missing or not names:
        found = listed(missing, most=3) or "none"
        raise ConfigError(f"{index.name} names shards that are missing: {found}; copy or download them again")
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
