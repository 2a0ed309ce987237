"""The Docker command line for tests: what engine there is, images, and containers that are removed in the end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.processes import eventually

ROOT = Path(__file__).parents[2]
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.11-slim")
WHEELS = ROOT / "wheels"
BUILD_SECONDS = 1800
READY_SECONDS = 120


def locked(lock: str) -> dict[str, str]:
    """Return name -> version of a lock, names in small letters with hyphens."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE))


def docker(*arguments: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `docker ...`; a failure shows what it wrote."""
    done = subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done


def inspect(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", name).stdout)[0]
    return found


def need_engine() -> None:
    """Skip the test where there is no Docker engine."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if docker("version", "--format", "{{.Server.Version}}", check=False).returncode:
        pytest.skip("no Docker engine answers (DOCKER_HOST)")


def need_image(name: str) -> None:
    """Skip the test where `name` is neither here nor to be had."""
    if docker("image", "inspect", name, check=False).returncode and docker("pull", name, check=False).returncode:
        pytest.skip(f"image {name} is not here and cannot be pulled")


def build(tag: str, *arguments: str, device: str = "cpu") -> None:
    """Build the Dockerfile; with wheels of `make wheels` without a network, so that nothing else can come in."""
    need_image(BASE_IMAGE)
    closed = ["--network=none", "--build-arg=PIP_NO_INDEX=1"] if any(WHEELS.glob("torch-*.whl")) else []
    base = f"--build-arg=BASE_IMAGE={BASE_IMAGE}"
    docker("build", "-t", tag, base, f"--build-arg=DEVICE={device}", *closed, *arguments, ".", timeout=BUILD_SECONDS)


class Container:
    """A started container of the service; `url` is where it is published."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def url(self) -> str:
        return "http://" + docker("port", self.name, "8000/tcp").stdout.split()[0]

    @property
    def logs(self) -> str:
        done = docker("logs", self.name)
        return done.stdout + done.stderr

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = inspect(self.name)["State"]
        return state

    def execute(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return docker("exec", self.name, *command, check=check)

    def wait_ready(self) -> None:
        """Wait until the service reports that it is ready; under Ray, /readyz is green before a signal would drain."""

        def ready() -> bool:
            assert self.state()["Running"], self.logs
            return "ready in" in self.logs

        eventually(ready, READY_SECONDS)
        assert httpx.get(f"{self.url}/readyz").status_code == 200

    def wait(self, seconds: float = 60) -> int:
        """Wait for the end and return the exit code."""
        eventually(lambda: not self.state()["Running"], seconds)
        code: int = self.state()["ExitCode"]
        return code


@contextmanager
def container(image: str, *command: str, options: Sequence[str] = ()) -> Iterator[Container]:
    """Run the service from `image` on a free port of 127.0.0.1 until the end of the block."""
    started = docker("run", "--detach", "--publish=127.0.0.1::8000", *options, image, *command)
    one = Container(started.stdout.strip())
    try:
        one.wait_ready()
        yield one
    finally:
        docker("rm", "--force", "--volumes", one.name)
