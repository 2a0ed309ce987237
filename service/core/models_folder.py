"""The folder of `--models-dir`: its models, and the paths below it that may be loaded.

A sub-folder with a config.json or a GGUF file is a model, and so is a GGUF file by itself, if the name is valid in a
URL. Neither `..` nor a sub-folder that is a symbolic link leads outside the folder. Files of a model may be links, as
in the caches of the Hub.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from triptych.model.checkpoint.adapter_folder import read_adapter_settings
from triptych.model.checkpoint.folder import Checkpoint, read_checkpoint
from triptych.model.checkpoint.json_files import ADAPTER
from triptych.model.errors import ConfigError
from triptych.model.gguf.paths import gguf_files, is_gguf
from triptych.model.gguf.paths import model_name as gguf_name

# Names of models that are loaded while the service runs: one part, or two as on the Hub.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"
MAX_FOLDERS = 1_000
_NAME = re.compile(NAME_PATTERN[:-1] + r"\Z")

logger = logging.getLogger(__name__)

Stamp = tuple[tuple[str, int, int], ...]


def valid_name(name: str) -> bool:
    """Return whether a model may have this name, which appears in URLs, metric labels and log lines."""
    return _NAME.match(name) is not None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A sub-folder or file with its checkpoint, or with the `reason` why it cannot be served."""

    name: str
    path: Path
    stamp: Stamp  # names, sizes and times of the folder's files
    checkpoint: Checkpoint | None  # of an adapter None
    reason: str = ""  # why it cannot be served


class ModelsFolder:
    """The models of a folder; each scan reads only models that have changed."""

    setting: ClassVar[str] = "models_dir"

    def __init__(self, folder: str, *, pickle: bool = True) -> None:
        """Check that the folder exists; raises `ConfigError`."""
        self.path = Path(folder).absolute()
        self._pickle = pickle
        self._found: dict[str, FoundModel] = {}
        self._skipped: set[str] = set()
        self._is_listed = True  # by the last scan
        if not self.path.is_dir():
            raise ConfigError(f"{self.setting} {folder}: no such folder")

    def scan(self) -> dict[str, FoundModel] | None:
        """Return all models by name; None if the folder cannot be listed now. Reads headers of files, so it blocks."""
        try:
            real = self.path.resolve(strict=True)
            names = [entry.name for entry in os.scandir(real) if _is_folder(entry)]
            files = self._files(real)
        except (OSError, RuntimeError) as error:
            if self._is_listed:  # said once, not at every look
                reason = error.strerror if isinstance(error, OSError) else "a link leads in a circle"
                logger.warning("%s cannot be listed: %s", self.setting, reason)
            self._is_listed = False
            return None
        self._is_listed = True
        found = {name: folder for name in names if (folder := self._folder(real, name)) is not None}
        found |= {name: file for name, file in files.items() if name not in found and self._is_named(name)}
        folders = dict(sorted(found.items()))
        if len(folders) > MAX_FOLDERS:
            self._skip("", f"{self.setting} has {len(folders)} models; only the first {MAX_FOLDERS} are served")
        self._found = {name: self._read(name, folders[name]) for name in list(folders)[:MAX_FOLDERS]}
        return self._found

    def _files(self, real: Path) -> dict[str, Path]:
        """Return the files that are models, by name."""
        return {gguf_name(file): file for file in gguf_files(real)}

    def below(self, path: str) -> Path:
        """Return the folder that `path` names relative to this one; raises `ConfigError` if it is not below it."""
        try:
            real, found = self.path.resolve(strict=True), (self.path / path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise ConfigError("path: models_dir has no such folder") from None
        if real not in found.parents or not (found.is_dir() or is_gguf(found)):
            raise ConfigError("path: models_dir has no such folder")
        return found

    def _folder(self, real: Path, name: str) -> Path | None:
        """Return the real path of a sub-folder that may be a model."""
        try:
            folder = (real / name).resolve(strict=True)
            if not self._is_one(folder):
                return None
        except (OSError, RuntimeError):
            return None
        if real not in folder.parents:
            self._skip(name, f"{self.setting}: {name!r} is a link to a folder elsewhere, and is not served")
            return None
        return folder if self._is_named(name) else None

    def _is_one(self, folder: Path) -> bool:
        """Return whether a sub-folder may be a model."""
        marks = ("config.json", "modules.json")  # modules.json: the network may be in a sub-folder
        return any((folder / mark).is_file() for mark in marks) or bool(gguf_files(folder))

    def _is_named(self, name: str) -> bool:
        """Return whether a model of this name can be served, and log once if not."""
        if not valid_name(name):
            self._skip(name, f"{self.setting}: {name!r} is not served: names have 1-64 letters, digits and ._-")
            return False
        return True

    def _skip(self, name: str, text: str) -> None:
        if name not in self._skipped:
            self._skipped.add(name)
            logger.warning("%s", text)

    def _read(self, name: str, folder: Path) -> FoundModel:
        stamp = _stamp(folder)
        known = self._found.get(name)
        if known is not None and known.stamp == stamp:
            return known
        try:
            return FoundModel(name, folder, stamp, self._described(folder))
        except (ConfigError, OSError) as error:
            return FoundModel(name, folder, stamp, None, str(error))
        except Exception as error:  # no folder, whatever it contains, may prevent the others from being served
            logger.warning("%s: %s cannot be read: %s", self.setting, name, type(error).__name__)
            return FoundModel(name, folder, stamp, None, f"{name}: cannot be read ({type(error).__name__})")

    def _described(self, folder: Path) -> Checkpoint | None:
        return read_checkpoint(folder, pickle=self._pickle)


class AdaptersFolder(ModelsFolder):
    """The LoRA adapters of a folder, which have no description of their own."""

    setting = "lora_dir"

    def _files(self, real: Path) -> dict[str, Path]:
        return {}

    def _is_one(self, folder: Path) -> bool:
        return os.path.lexists(folder / ADAPTER)  # also one that cannot be read, and is told so

    def _described(self, folder: Path) -> None:
        read_adapter_settings(folder, pickle=self._pickle)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder; false for a link in a circle, or to where this process may not look."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _stamp(folder: Path) -> Stamp:
    """Return the name, size and modification time of each file; zeros for a link to nothing."""
    try:
        files = [folder] if folder.is_file() else list(folder.iterdir())
    except OSError:
        return ()
    return tuple(sorted(map(_stamp_of, files)))


def _stamp_of(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError:
        return file.name, 0, 0
    return file.name, found.st_size, found.st_mtime_ns
