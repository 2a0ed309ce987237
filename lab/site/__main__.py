"""Writes the pages of the site and what `mkdocs` builds it from: `python -m lab.site FOLDER`; `make docs` runs both."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from lab.site.pages import write


def main() -> int:
    """Run the command; returns its exit status."""
    if len(sys.argv) != 2:
        print("usage: python -m lab.site FOLDER", file=sys.stderr)
        return 2
    write(Path(sys.argv[1]), version("triptych"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
