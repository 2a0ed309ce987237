"""Finds GGUF files: by their names or first bytes, alone, in several parts, or in a folder with other files."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from triptych.model.errors import ConfigError

_SUFFIX = ".gguf"
MAGIC = b"GGUF"
SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_PEEK = 1 << 14  # bytes that hold the first entries, which say what a file is
_STRING = 8
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of single values, by type
# The purposes of GGUF files that are no models, by `general.type`, or `general.architecture` in older files.
OTHER_PURPOSES = {
    "mmproj": "the part of a model that reads images or sounds, which is not served: give the language model's file",
    "adapter": "a LoRA adapter without its model: merge both (llama.cpp's llama-export-lora), and serve the result",
    "imatrix": "statistics for quantisation (an importance matrix), no model",
    "vocab": "a vocabulary without weights",
}


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file: by its suffix, or by its first bytes where it has none (Ollama's blobs)."""
    if path.suffix.lower() == _SUFFIX:
        return path.is_file()
    if path.suffix or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def model_name(path: Path) -> str:
    """Return the name of a GGUF file without its ending and the number of its part."""
    shard = SHARD.fullmatch(path.name)
    return path.stem if shard is None else shard["stem"]


def gguf_files(folder: Path) -> list[Path]:
    """Return the models in a folder, of those in several files the first; files for another purpose are left out."""
    return [file for file in _first_parts(folder) if purpose(file) is None]


def _first_parts(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.iterdir() if _can_be_seen(file) and is_gguf(file))
    return [file for file in files if (shard := SHARD.fullmatch(file.name)) is None or int(shard["number"]) == 1]


def _can_be_seen(file: Path) -> bool:
    """Return whether a file can be looked up; false for a link to where this process may not look."""
    try:
        file.stat()
    except OSError:
        return False
    return True


def gguf_path(path: Path) -> Path | None:
    """Return the GGUF file that a path means: the file itself, or the only model of a folder without other weights.

    None for folders of another kind. Raises `ConfigError` for a folder with several models.
    """
    if is_gguf(path):
        return path
    if not path.is_dir() or any((path / name).exists() for name in _OTHER_WEIGHTS):
        return None
    files = gguf_files(path)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path.name} has several models, {names}: give the path of one of them")
    return next(iter(files or _first_parts(path)), None)  # without a model, what is there says what it is


# Weights that win where a folder has several kinds.
_OTHER_WEIGHTS = tuple(
    f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin") for index in ("", ".index.json")
)


def purpose(path: Path) -> str | None:
    """Return the purpose of a file that is no model, in words; None: it may be a model."""
    try:
        with path.open("rb") as file:
            texts = _first_texts(file.read(_PEEK))
    except OSError:
        return None
    kind = "mmproj" if texts.get("general.architecture") == "clip" else texts.get("general.type", "")
    return OTHER_PURPOSES.get(kind)


def _first_texts(data: bytes) -> dict[str, str]:
    """Return the strings among a file's first entries, up to an array or the end of the bytes."""
    found: dict[str, str] = {}
    if data[:4] != MAGIC:
        return found
    at = 24

    def text() -> str:
        nonlocal at
        length = struct.unpack_from("<Q", data, at)[0]
        if length > len(data) - at - 8:
            raise struct.error
        at += 8 + length
        return data[at - length : at].decode("utf-8", errors="replace")

    try:
        while True:
            key, kind = text(), struct.unpack_from("<I", data, at)[0]
            at += 4
            if kind == _STRING:
                found[key] = text()
            elif kind in _SIZES:
                at += _SIZES[kind]
            else:
                return found
    except struct.error:
        return found
