"""How a child process of Python is started: with this process's import path, never with the working directory.

`python -m` searches the working directory first. A folder of a user may hold a `model.py` or a `json.py`, which is
none of ours.
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
