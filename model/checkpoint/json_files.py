"""Reads the JSON files of a folder, and lists the files that a model's folder is read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from triptych.model.checkpoint.folder_kind import lfs_pointer
from triptych.model.errors import ConfigError
from triptych.model.system.folder_files import has_file, parse_json, read_file

# -- Reads the JSON files of a folder.


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read the JSON object in `path`; {} if an optional file is absent. Raises `ConfigError`."""
    if not has_file(path):
        if required:
            raise ConfigError(f"{path.parent.name}: {path.name} is missing")
        return {}
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path.parent.name}: {path.name} must hold an object, found {type(value).__name__}")
    return value


def read_json_value(path: Path) -> Any:
    content = read_file(path)
    try:
        return parse_json(content)
    except (ValueError, RecursionError) as error:
        if lfs_pointer(path):
            raise ConfigError(f"{path.name}: a Git LFS pointer, not the file itself: run `git lfs pull`") from None
        raise ConfigError(f"{path.parent.name}: {path.name} is not valid JSON: {error}") from None


# -- The files that a model's folder is read from: one list for those that read, download and copy them. Patterns are of
# `fnmatch`, whose `*` goes into folders too.

SPARSE, COLBERT = "sparse_linear.pt", "colbert_linear.pt"  # BGE-M3's projections
COLBERT_SETTINGS = "artifact.metadata"
SETTINGS = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", COLBERT_SETTINGS)
SAFETENSORS = ("model.safetensors", "model-*.safetensors")
ADAPTER = "adapter_config.json"  # of a LoRA adapter's folder
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin")
_MODULE = "[0-9]*_*/"  # a folder of a module of sentence-transformers
MODULE_SAFETENSORS = tuple(_MODULE + name for name in SAFETENSORS)
MODULE_PICKLES = (SPARSE, COLBERT, *(_MODULE + name for name in PICKLES))


CARD = "README.md"  # its examples of texts


def is_read(name: str) -> bool:
    """Return whether a file of this name within the folder may be read."""
    patterns = (CARD, *SETTINGS, *SAFETENSORS, *PICKLES, *MODULE_SAFETENSORS, *MODULE_PICKLES)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class Use(StrEnum):
    """How a key is handled."""

    SERVED = "served"
    WARNED = "named in a warning"  # it would change results, and is not computed
    REFUSED = "refused"  # likewise, and nothing can be served without it
    UNUSED = "without effect"  # on results


@dataclass(frozen=True, slots=True)
class Setting:
    """Says what is done with one key, unless its value is null, false, empty or one of `neutral`."""

    use: Use
    neutral: tuple[Any, ...] = ()

    def is_set(self, value: object) -> bool:
        """Return whether a value asks for anything."""
        return bool(value) and value not in self.neutral


Table = Mapping[str, Setting]


def table(
    *,
    served: tuple[str, ...] = (),
    warned: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> Table:
    """Return a table of the keys of each use; `neutral` has the values that ask for nothing."""
    groups = {Use.SERVED: served, Use.WARNED: warned, Use.REFUSED: refused, Use.UNUSED: unused}
    return {key: Setting(use, (neutral or {}).get(key, ())) for use, keys in groups.items() for key in keys}


def asked_for(settings: Mapping[str, Any], known: Table, use: Use) -> Iterator[str]:
    """Yield the keys of a file that ask for something of this use."""
    for key, value in settings.items():
        if (setting := known.get(key)) is not None and setting.use is use and setting.is_set(value):
            yield key


def unknown(settings: Mapping[str, Any], known: Table) -> list[str]:
    """Return the keys of a file that the table does not have, but for null ones and private ones (`_name`)."""
    return sorted(key for key, value in settings.items() if key not in known and value is not None and key[:1] != "_")
