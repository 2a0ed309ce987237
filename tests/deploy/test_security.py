"""SECURITY.md compared with the application: endpoints and limits."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.deploy.docker import ROOT
from triptych.service.app import TABLE
from triptych.service.settings.service_settings import Limits

TEXT = (ROOT / "SECURITY.md").read_text()


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without its header."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def routes() -> dict[str, set[str]]:
    """Return path -> methods of every route."""
    found: dict[str, set[str]] = {}
    for route in TABLE.rows:
        found.setdefault(route.path, set()).add(route.method)
    return found


def test_every_route_is_in_the_table() -> None:
    told = {path.strip("`"): set(methods.split(", ")) for path, methods, *_ in table("Routes")}
    assert told == routes()


def test_each_route_asks_for_the_key_in_the_table() -> None:
    told = {path.strip("`"): key for path, _, key, _ in table("Routes")}
    access = {"open": "no", "key": "yes", "admin": "admin"}
    assert told == {route.path: access[route.access] for route in TABLE.rows}


def test_every_limit_is_in_the_table_with_its_default() -> None:
    told = {name.strip("`"): float(default) for name, default, _ in table("Limits")}
    assert told == asdict(Limits())


@pytest.mark.parametrize(
    ("package", "floor"),
    [("starlette", "1.0.1"), ("h11", "0.16"), ("jinja2", "3.1.6"), ("aiohttp", "3.14.4"), ("ray", "2.60.0")],
)
def test_the_lock_is_above_versions_with_known_holes(package: str, floor: str) -> None:
    locked = dict(line.lower().split("==") for line in (ROOT / "requirements.lock").read_text().split())
    assert version(locked[package]) >= version(floor)


def test_the_bill_of_materials_names_python_itself(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-P", ROOT / "deploy/image/sbom.py", tmp_path / "bill"], check=True)
    components = json.loads((tmp_path / "bill").read_text())["components"]
    (python,) = [one for one in components if one["name"] == "python"]
    assert (python["version"], python["type"]) == (platform.python_version(), "platform")
    assert python["cpe"].startswith(f"cpe:2.3:a:python:python:{platform.python_version()}:")


def test_the_image_has_the_torch_of_the_makefile() -> None:
    pin = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pin is not None
    assert f"ARG TORCH={pin[1]}\n" in (ROOT / "Dockerfile").read_text()
    assert version(pin[1].partition("==")[2]) >= version("2.10")


def test_no_torch_is_installed_that_was_not_tried() -> None:
    """The newest that was tried is the Makefile's, and the bound ends after it: pip would take any newer one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = (one for one in project["dependencies"] if re.match(r"torch\b", one))
    pin = re.search(r"^TORCH := torch==(\d+)\.(\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pin is not None
    assert bounds == f"torch>=2.11,<{pin[1]}.{int(pin[2]) + 1}"


def test_the_dockerfile_ends_as_a_user_and_listens_to_signals() -> None:
    last = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.MULTILINE)
    assert 'ENTRYPOINT ["triptych"]' in last
    assert "RUN " not in last  # nothing is installed or downloaded there


def test_only_a_gpus_image_gets_a_compiler() -> None:
    base = (ROOT / "Dockerfile").read_text().partition(" AS base\n")[2].partition("\nFROM ")[0]
    runs = re.findall(r"^RUN (.*)$", base, re.MULTILINE)
    assert len(runs) == 2 and runs[1].startswith("rm -rf ")
    assert runs[0].startswith('if [ "${DEVICE}" = cuda ]; then apt-get')


def test_the_manifests_have_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"newTag: {project['version']}}}" in (ROOT / "deploy/kuberay/base/kustomization.yaml").read_text()
    chart = (ROOT / "deploy/helm/Chart.yaml").read_text()
    assert f"\nversion: {project['version']}\nappVersion: {project['version']}\n" in chart


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
