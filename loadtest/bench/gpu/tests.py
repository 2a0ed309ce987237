"""The command `tests`: the kernels' tests on the device, in parallel if pytest-xdist is installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from loadtest.bench.gpu.cases import Case
from loadtest.bench.gpu.figures import Figures, Skip
from loadtest.bench.gpu.machine import Bench


def cases(bench: Bench) -> list[Case]:
    return [Case("pytest -m gpu", _pytest, 60)]


def _pytest(bench: Bench) -> Figures:
    if not bench.cuda:
        raise Skip("there is no CUDA device")
    if find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    spread = ["-n", "8"] if find_spec("xdist") is not None else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *spread, "tests/model/test_triton.py"]
    limit = max(30.0, bench.left - 30)
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    (bench.folder / "pytest.txt").write_text((done.stdout + done.stderr)[-200_000:])
    lines = done.stdout.strip().splitlines()
    return {"ok": done.returncode == 0, "said": lines[-1] if lines else ""}
