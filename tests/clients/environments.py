"""Makes an environment for each client below build/clients, with uv, which is itself installed by pip.

An environment is kept until its requirements change.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.clients.table import UV, Client

ROOT = Path(__file__).parents[2] / "build" / "clients"
_WITHOUT_TORCH = Path(__file__).parent / "without_torch.txt"
_SECONDS = 900.0


def python_of(client: Client) -> Path:
    """Return the Python of the client's environment, which is made where it is missing."""
    folder = ROOT / "environments" / client.name
    python, made = folder / "bin" / "python", folder / "made"
    wanted = "\n".join([*client.requirements, *client.npm, *client.debian])
    if not made.exists() or made.read_text() != wanted:
        with _alone():
            uv = _uv()
            _run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)])
            if client.requirements:
                without = ["--override", str(_WITHOUT_TORCH)] if client.torch else []
                _run([uv, "pip", "install", "--quiet", "--python", str(python), *without, *client.requirements])
            if client.torch:
                _lend_torch(folder)
            if client.npm:
                _run(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *client.npm])
            for package in client.debian:
                _unpack(package, folder)
        made.write_text(wanted)
    return python


def environment_of(client: Client) -> dict[str, str]:
    """Return the variables that a client's program runs with: a home of its own, and no way off this machine."""
    home = ROOT / "homes" / client.name
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR", "JAVA_HOME") if name in os.environ}
    binaries = ROOT / "environments" / client.name / "bin"
    closed = "http://127.0.0.1:9"  # the discard port: what is sent elsewhere fails at once
    return {
        **kept,
        "PATH": f"{binaries}:{binaries.parent / 'usr' / 'sbin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), closed),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "LANGSMITH_TRACING": "false",
        "LOGFIRE_SEND_TO_LOGFIRE": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "AIDER_ANALYTICS": "false",
        "AIDER_CHECK_UPDATE": "false",
    }


def _uv() -> str:
    folder = ROOT / "uv"
    uv = folder / "bin" / "uv"
    if not uv.exists():
        venv.create(folder, with_pip=True)
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", UV])
    return str(uv)


def _unpack(package: str, folder: Path) -> None:
    """Unpack a package of Debian into a folder, where the machine has not installed it."""
    if shutil.which(package) is None:
        _run(["apt-get", "download", "-qq", package], folder)
        [archive] = folder.glob(f"{package}_*.deb")
        _run(["dpkg", "-x", str(archive), str(folder)])


def _lend_torch(folder: Path) -> None:
    """Link this interpreter's torch into an environment."""
    import torch

    packages = Path(torch.__file__).parents[1]
    [into] = folder.glob("lib/python*/site-packages")
    for pattern in ("torch", "torchgen", "functorch", "torch-*.dist-info"):
        for found in packages.glob(pattern):
            (into / found.name).symlink_to(found)


class _alone:
    """Holds a lock, so that two runs do not make the same environment."""

    def __enter__(self) -> None:
        ROOT.mkdir(parents=True, exist_ok=True)
        self._file = (ROOT / "lock").open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _run(command: list[str], folder: Path | None = None) -> None:
    environment = {**os.environ, "UV_CACHE_DIR": str(ROOT / "cache")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-800:]}")
