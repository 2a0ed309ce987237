"""Parsers of settings, each from a text to a value. All raise `ValueError` with a text of what is expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

from triptych.model import names
from triptych.model.checkpoint.hub_names import is_hub_name
from triptych.model.errors import ConfigError
from triptych.model.system.cpu_threads import usable_sockets
from triptych.service.settings.service_settings import LOAD_SOURCES

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MOST_BYTES = 2**63


def byte_size(text: str) -> int:
    """Parse a size such as `2GiB`, `500MB` or `1048576` into bytes; raises `ValueError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * _UNITS.get(match[2].upper(), math.inf) if match is not None else math.inf
    if size >= _MOST_BYTES:
        raise ValueError("a size such as 2GiB, 500MB or a number of bytes")
    return int(size)


def keys(text: str) -> tuple[str, ...]:
    """Split a list of keys at its commas; raises `ValueError` for an empty key, as no key means open access."""
    found = tuple(key.strip() for key in text.split(","))
    if not all(found):
        raise ValueError("keys with commas between them, none of them empty; leave the setting out for none")
    return found


def adapters(text: str) -> tuple[str, ...]:
    """Split adapters at commas: `NAME=PATH`, or `MODEL:NAME=PATH`."""
    found = tuple(one.strip() for one in text.split(",") if one.strip())
    if not found or not all(one.partition("=")[0].strip() and one.partition("=")[2].strip() for one in found):
        raise ValueError("NAME=PATH, or MODEL:NAME=PATH where there are several models, with commas between them")
    return found


def adapter_folders(text: str) -> tuple[str, ...]:
    """Split folders of adapters at commas: `DIR`, or `MODEL:DIR`."""
    found = tuple(one.strip() for one in text.split(",") if one.strip())
    if not found or not all(one.rpartition(":")[2].strip() for one in found):
        raise ValueError("DIR, or MODEL:DIR where there are several models, with commas between them")
    return found


def key_file(text: str) -> str:
    """Check the path of a key file; raises `ValueError` for an empty one, as no file means open access."""
    if not text.strip():
        raise ValueError("the path of a file; leave the setting out for none")
    return text


def origins(text: str) -> tuple[str, ...]:
    """Split a list of origins at its commas; `ServiceSettings` checks each."""
    found = tuple(one.strip() for one in text.split(",") if one.strip())
    if not found:
        raise ValueError("origins such as https://app.example.com, with commas between them, or *")
    return found


def hosts(text: str) -> tuple[str, ...]:
    """Split a list of host names at its commas; `ServiceSettings` checks each."""
    return tuple(one.strip() for one in text.split(","))


def sources(text: str) -> tuple[str, ...]:
    """Parse a list of `LOAD_SOURCES`."""
    found = tuple(word.strip() for word in text.split(","))
    if not set(found) <= set(LOAD_SOURCES):
        raise ValueError(f"some of {', '.join(LOAD_SOURCES)}, with commas between them")
    return found


def replicas(text: str) -> dict[str, int]:
    """Parse `3`, a range such as `1-4`, or `auto`, into fields of `Scaling`."""
    if text.strip() == "auto":
        return dict.fromkeys(("min_replicas", "max_replicas"), usable_sockets())
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
    if match is None:
        raise ValueError("a number, a range such as 1-4, or auto")
    return {"min_replicas": int(match[1]), "max_replicas": int(match[2] or match[1])}


def context(text: str) -> int | None:
    """Parse a context length, or `auto` (None: the engine decides)."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number, or auto") from None


def folder(text: str) -> str:
    """Make a folder's path absolute, because replicas have other working directories."""
    if not text:
        raise ValueError("a folder")
    return str(Path(text).expanduser().absolute())


def draft_model(text: str) -> str:
    """Parse the path of a draft model, or the name of an embedded one."""
    if not text:
        raise ValueError("a folder")
    try:
        found = names.locate(text)
    except ConfigError as error:
        raise ValueError(f"a folder ({error})") from None
    if is_hub_name(found):
        raise ValueError("a folder or an embedded model; run triptych download, and give the folder in the cache")
    return folder(found)


def cache_folder(text: str) -> str | None:
    """Parse a folder's path; return `auto` unchanged, and None for `off`."""
    if text in ("auto", "off"):
        return None if text == "off" else text
    return folder(text)


def route(text: str) -> str:
    """Check a path prefix such as `/chat`."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", text):
        raise ValueError("a path such as /chat")
    return text


def boolean(text: str) -> bool:
    """Parse true, yes, on, 1, or false, no, off, 0; raises `ValueError`."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser that accepts only these texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse
