"""The folder in which several processes share their metrics (`service.observability.metrics`). Imports nothing slow.

prometheus_client reads its name from the environment when it is imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from model.errors import ConfigError

MULTIPROCESS_FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"


def make_folder() -> None:
    """Create the folder of shared metrics, if one is configured; raises `ConfigError`."""
    folder = os.environ.get(MULTIPROCESS_FOLDER)
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{MULTIPROCESS_FOLDER} {folder}: {error.strerror}") from None


@contextmanager
def shared_folder() -> Iterator[None]:
    """Share metrics inside the block, in a folder of its own unless one is configured; raises `ConfigError`."""
    if MULTIPROCESS_FOLDER in os.environ:
        yield
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="triptych-metrics-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no folder for the metrics of several front processes can be made: {error.strerror}; set TMPDIR or "
            f"{MULTIPROCESS_FOLDER} to a writable one"
        ) from None
    with folder as name:
        os.environ[MULTIPROCESS_FOLDER] = name
        try:
            yield
        finally:
            del os.environ[MULTIPROCESS_FOLDER]
