"""The examples run as examples/README.md says and print what they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.processes import ServiceProcess

ROOT = Path(__file__).parents[1]


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, f"examples/{name}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url(embedded_service: ServiceProcess) -> str:
    return embedded_service.url


def test_offline() -> None:
    assert run("transcribe.py") == "the meeting is on the fifth of july at eighteen twenty three\n"


@pytest.mark.slow
def test_the_other_offline_ones() -> None:
    assert run("offline.py").endswith("05-03 09:05\n")
    assert run("encode.py").startswith("[[1. ")


def test_clients(url: str) -> None:
    assert run("stream.py", url).startswith('\n    """Return')
    said = run("tools.py", url)
    assert said == 'called: get_weather {"city": "Oslo"}\nanswered: It is 12 degrees and cloudy in Oslo.\n'


def test_the_load(url: str, tmp_path: Path) -> None:
    script = (ROOT / "examples" / "load.sh").read_text().replace(".venv/bin/python", sys.executable)
    script = script.replace("--duration 10", f"--duration 1 --warmup 0 --quiet --max-lag 5000 --out {tmp_path}")
    done = subprocess.run(["sh", "-c", script, "load.sh", url], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_are_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    files = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert all(f"[{name}]({name})" in listed for name in files)
