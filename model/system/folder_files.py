"""Looks for files of a model's folder, and reads small ones. Stdlib only.

A pipe or a device in place of a file would be read forever.
"""

from __future__ import annotations

import errno
import json
import re
import stat
from pathlib import Path
from typing import Any

from triptych.model.errors import ConfigError

MOST_BYTES = 128 << 20  # the largest file that is read whole; the largest published tokenizer.json has 33 MB
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of half a character; the other half may follow
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def has_file(path: Path) -> bool:
    """Return whether the file is there; raises `ConfigError` if something else has its name."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        if path.is_symlink():
            raise ConfigError(
                f"{_name(path)} is a link to a file that is not there; download the model again"
            ) from None
        return False
    if kind != stat.S_IFREG:
        raise ConfigError(f"{_name(path)} is {_KINDS.get(kind, 'no file')}, expected a file")
    return True


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text; raises `ValueError`, also for half a character, which can be written nowhere."""
    value = json.loads(content.decode("utf-8"))
    if _HALF.search(content):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_file(path: Path, *, may_be_empty: bool = False) -> bytes:
    """Return a file's bytes; raises `ConfigError` for an empty file, and for a huge one, which is not read."""
    size = path.stat().st_size
    if not size and not may_be_empty:
        raise ConfigError(f"{_name(path)} is empty: copy or download it again")
    if size > MOST_BYTES:
        raise ConfigError(f"{_name(path)} has {size >> 20} MiB; at most {MOST_BYTES >> 20} are read of such a file")
    return path.read_bytes()


def _name(path: Path) -> str:
    return f"{path.parent.name}: {path.name}"
