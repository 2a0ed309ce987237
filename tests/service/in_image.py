"""Runs `triptych serve` of the container image in the place of this checkout's, for `tests.service.processes`.

`TEST_IMAGE=triptych:test pytest ...` makes every test that starts a service start it so: with a root that
cannot be written, without capabilities, as the user of the tests, in the network of this machine and, of its files,
with those that an argument names and the folder for temporary ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

IMAGE = os.environ.get("TEST_IMAGE", "")
_START_SECONDS = 60.0


class ImageCommand:
    """The command line of one container, and the process that it starts as this machine sees it."""

    def __init__(self, arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._note = Path(tempfile.mkdtemp(prefix="triptych-image-")) / "id"
        temporary = tempfile.gettempdir()
        named = {found for text in (*arguments, *variables.values()) for found in re.findall(r"/[^\s,=\"']+", text)}
        mounted = {path for path in (*named, str(folder)) if Path(path).exists() and not path.startswith(temporary)}
        self.line = [
            *("docker", "run", "--rm", "--network=host", "--read-only", "--cap-drop=ALL"),
            *("--security-opt=no-new-privileges", f"--user={os.getuid()}:{os.getgid()}", f"--cidfile={self._note}"),
            *("--cpuset-cpus=" + ",".join(map(str, sorted(os.sched_getaffinity(0)))), f"--workdir={folder}"),
            *(f"--volume={path}:{path}:ro" for path in sorted(mounted)),
            *(f"--volume={temporary}:{temporary}", f"--env=TMPDIR={temporary}"),
            *(f"--env={name}={value}" for name, value in variables.items()),
            *(IMAGE, "serve", "--host", "127.0.0.1", "--port", "0", *arguments),
        ]

    def pid(self) -> int:
        """Return the service's process; raises if the container is gone."""
        from tests.service.processes import eventually

        eventually(lambda: self._note.exists() and bool(self._note.read_text()), _START_SECONDS)
        command = ["docker", "inspect", "--format={{.State.Pid}}", self._note.read_text()]
        found: list[int] = []

        def started() -> bool:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(int(done.stdout))
            return found[-1] > 0

        eventually(started, _START_SECONDS)
        return found[-1]
