"""The folder in which several processes share their metrics (`service.observability.metrics`). Imports nothing slow.

prometheus_client reads its name from the environment when it is imported.
"""

from __future__ import annotations

import os
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
