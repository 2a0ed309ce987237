"""The named pipe that carries the stderr of Ray's workers."""

from __future__ import annotations

import subprocess
import sys

from tests.service.processes import ROOT


def test_the_log_pipe_joins_stderr_of_other_processes() -> None:
    child = "import sys; from pathlib import Path; from triptych.service.observability import logs; "
    child += "logs.adopt(Path(sys.argv[1])); "
    child += "import os; os.write(2, b'from the child\\n')"
    parent = f"""
import subprocess, sys, tempfile
from pathlib import Path
from triptych.service.observability import logs
with tempfile.TemporaryDirectory() as folder, logs.printing(Path(folder, "log")):
    for _ in range(2):
        subprocess.run([sys.executable, "-c", {child!r}, str(Path(folder, "log"))], check=True)
"""
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "from the child\n" * 2)


def test_the_log_pipe_prints_any_byte_and_ends_while_writers_remain() -> None:
    parent = """
import os, tempfile
from pathlib import Path
from triptych.service.observability import logs
with tempfile.TemporaryDirectory() as folder:
    with logs.printing(Path(folder, "log")):
        pipe = os.open(Path(folder, "log"), os.O_WRONLY)
        os.write(pipe, b"a\\0b\\n")
        for _ in range(100):
            os.write(pipe, b"c" * 1000)  # together more than a pipe holds
    os.write(2, b"ended")
"""
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "a\0b\n" + "c" * 100_000 + "ended")


def test_a_full_disk_for_logs_does_not_block_writers() -> None:
    parent = """
import os, tempfile
from pathlib import Path
from triptych.service.observability import logs
with tempfile.TemporaryDirectory() as folder, logs.printing(Path(folder, "log")):
    pipe = os.open(Path(folder, "log"), os.O_WRONLY)
    for _ in range(1000):
        os.write(pipe, b"a" * 1000)  # together more than a pipe holds
"""
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", parent], cwd=ROOT, stderr=full, timeout=240, check=True)
