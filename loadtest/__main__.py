"""The entry point of `python -m triptych.loadtest COMMAND`."""

import os
import sys

if not sys.flags.safe_path:  # `python -m` searches the working directory first: a `json.py` there is not ours
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from triptych.loadtest.commands.main import main

if __name__ == "__main__":
    main()
