"""Programs import no module of the working directory, even if its name is one of ours or of the standard library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.processes import strange_folder

DOWNLOAD = """
import asyncio
from triptych.model.errors import ConfigError
from triptych.service.runtimes.hub_download import download
try:
    asyncio.run(download("hf:no name", pickle=False, max_bytes=1, log_format="plain"))
except ConfigError as error:
    print(error)
"""
FLEET = """
import asyncio
from triptych.loadtest.generator import fleet
async def start():
    process = await fleet.start_worker()
    process.stdin.close()
    print(await process.wait())
asyncio.run(start())
"""
PAGE = """
from triptych.service.http.static_pages import page
print(page("docs").body[:9].decode() + page("playground").body[:9].decode())
"""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["-P", "-c", PAGE], "<!doctype<!doctype"),
        (["-m", "triptych.loadtest", "--help"], "usage: python -m triptych.loadtest"),
        (["-P", "-c", DOWNLOAD], "hf:no name"),
        (["-P", "-c", FLEET], "1"),  # a worker whose input ends before it has a job
    ],
)
def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, command: list[str], expected: str) -> None:
    strange_folder(tmp_path)
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected), (done.stdout, done.stderr)
    assert not (tmp_path / "imported").exists()
