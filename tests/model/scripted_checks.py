"""A process that answers as `triptych.model.kernel_check.child` does, by a script: it imports no torch.

The file of `SCRIPTED_CHECKS` has a list for each process: its answers, "crash" or "hang".
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from triptych.model.system.child_process import FrameSocket


def main() -> None:
    file = Path(os.environ["SCRIPTED_CHECKS"])
    answers, *others = json.loads(file.read_text())
    file.write_text(json.dumps(others))
    frames = FrameSocket(socket.socket(fileno=int(sys.argv[1])))
    frames.receive()
    frames.receive()
    for answer in answers:
        if answer == "crash":
            os.abort()
        if answer == "hang":
            time.sleep(3600)
        frames.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
