"""The folder of kernels that Triton compiles for a GPU, so that the next start compiles nothing.

What lies there is loaded and run, so only this user may write there. Stdlib only.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from triptych.model.errors import ConfigError
from triptych.model.system.cache_folders import untrusted, user_cache

VARIABLE = "TRIPTYCH_KERNEL_CACHE"
TRITONS = "TRITON_CACHE_DIR"

logger = logging.getLogger(__name__)


def use_kernel_cache() -> Path:
    """Make Triton, in this process and its children, keep its kernels in `kernel_cache`, and return that.

    Triton's own variable stays, if it is set. Call it before the first kernel is compiled.
    """
    folder = kernel_cache()
    _check_tritons(Path(os.environ.setdefault(TRITONS, str(folder / "triton"))))
    return folder


@cache
def kernel_cache() -> Path:
    """Find or make the folder: the one of `TRIPTYCH_KERNEL_CACHE`, or `kernels` in the user's cache.

    A folder that cannot be written is replaced by a temporary one, with a warning. Raises `ConfigError` for a folder
    of the variable that another user could write.
    """
    named = os.environ.get(VARIABLE, "")
    try:
        folder = Path(named).absolute() if named else user_cache() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = untrusted(folder.stat())
        if not reason and not os.access(folder, os.W_OK | os.X_OK):
            return _temporary(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        return _temporary(f"no folder can be made: {getattr(error, 'strerror', None) or error}")
    if reason and named:
        raise ConfigError(f"{VARIABLE} {folder}: it {reason}, who could put code there; name a folder of your own")
    return _temporary(f"{folder} {reason}") if reason else folder


def _temporary(reason: str) -> Path:
    logger.warning("compiled kernels are not kept for the next start: %s; set %s to a folder", reason, VARIABLE)
    folder = Path(tempfile.mkdtemp(prefix="triptych-kernels-"))  # private to this user
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _check_tritons(folder: Path) -> None:
    """Make the folder for this user alone, if it is missing, and warn if others can write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = untrusted(folder.stat())
    except OSError:
        return  # Triton reports it
    if reason:
        logger.warning("%s %s: it %s, who could put code there", TRITONS, folder, reason)
