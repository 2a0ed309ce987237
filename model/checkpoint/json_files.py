"""Reads the JSON files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model.checkpoint.folder_kind import lfs_pointer
from model.errors import ConfigError
from model.system.folder_files import has_file, read_file


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
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        if lfs_pointer(path):
            raise ConfigError(f"{path.name}: a Git LFS pointer, not the file itself: run `git lfs pull`") from None
        raise ConfigError(f"{path.parent.name}: {path.name} is not valid JSON: {error}") from None
