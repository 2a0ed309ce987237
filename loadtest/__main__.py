"""The entry point of `python -m loadtest COMMAND`."""

import os
import sys

if not sys.flags.safe_path:  # `python -m` searches the working directory first: a `json.py` there is not ours
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from loadtest.commands.main import main

if __name__ == "__main__":
    main()
