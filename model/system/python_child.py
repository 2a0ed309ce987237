"""Starts Python in a child process with this process's import path, without the working directory.

`python -m` would search the working directory first, which may contain a user's `model.py` or `json.py`.
"""

from __future__ import annotations

import os
import sys


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs `module`; its environment needs `import_path`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> dict[str, str]:
    """Return the environment variable that gives a child the import path of this process."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
