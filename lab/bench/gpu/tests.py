"""The command `tests`: the kernels' tests on the device, in parallel if pytest-xdist is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures, Skip
from lab.bench.gpu.machine import Bench

_TESTS = Path(__file__).parents[3] / "tests"
_MARKS = re.compile(r"mark\.gpu|\bDEVICES\b")  # one of them is in every file that has a test for a GPU


def cases(bench: Bench) -> list[Case]:
    return [Case("pytest -m gpu", _pytest, 90)]


def _pytest(bench: Bench) -> Figures:
    """Run the tests that have the marker `gpu`; without a GPU only collect them, which shows what they import."""
    if find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    how = ["-n", "8"] if find_spec("xdist") is not None else []
    if not bench.cuda:
        how = ["--collect-only", "-q"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *how, *_files()]
    limit = max(30.0, bench.left - 30)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    (bench.folder / "pytest.txt").write_text((done.stdout + done.stderr)[-200_000:])
    lines = done.stdout.strip().splitlines()
    found: Figures = {"ok": done.returncode == 0, "said": lines[-1] if lines else ""}
    if not bench.cuda:
        found["collected"] = sum(map(int, re.findall(r"\.py: (\d+)$", done.stdout, re.MULTILINE)))
    return found


def _files() -> list[str]:
    """Return the files that have tests for a GPU; others import what a bare GPU machine has not."""
    files = sorted(_TESTS.glob("*/test_*.py"))
    return [str(path) for path in files if _MARKS.search(path.read_text())]
