"""The commands that `make` would run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.docker import ROOT


def would_run(target: str, *variables: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    own = {name: value for name, value in os.environ.items() if name not in ("BASE_IMAGE", "IMAGE_ARGS", "MAKEFLAGS")}
    command = ["make", "--dry-run", target, *variables]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["image", "image-test", "compose-test"])
def test_the_python_of_an_image_is_the_one_that_its_wheels_are_for(target: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 3.13\n")
    python.chmod(0o755)
    ran = would_run(target, f"PYTHON={python}")
    assert f"{python} -m pip download" in ran or (ROOT / "wheels" / ".done").exists()
    assert "BASE_IMAGE=python:3.13-slim " in ran
    assert "BASE_IMAGE=debian-python " in would_run(target, f"PYTHON={python}", "BASE_IMAGE=debian-python")
