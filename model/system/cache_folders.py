"""Where the user's caches are, and whether another user could have written a file or folder. Stdlib only."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of all caches of triptych; it may not exist. Raises `RuntimeError` without a home directory.

    A variable that holds no absolute path is ignored, as the folder would change with the working directory.
    """
    root, home = (os.environ.get(name, "") for name in ("XDG_CACHE_HOME", "HOME"))
    if os.path.isabs(root):
        return Path(root) / "triptych"
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise RuntimeError("there is no home directory: set XDG_CACHE_HOME to a folder") from None
    return Path(home) / ".cache" / "triptych"


def untrusted(found: os.stat_result, kind: Callable[[int], bool] = stat.S_ISDIR) -> str:
    """Return why another user could have written a file or folder; empty if none could."""
    if not kind(found.st_mode):
        return "is of another kind than expected"
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    return f"may be written by others (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o022 else ""
