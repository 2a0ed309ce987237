"""The native library's own tests with a protected page at either end of every tensor (`make check-native`).

Unlike check_native.c this runs Python's own calls, with the sizes that Python computes, at full speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.checkpoints import native_backends
from triptych.model.native import build

_HERE = Path(__file__).parent
_SECONDS = 900
FILES = (
    *("test_native", "test_native_layers", "test_native_groups", "test_native_experts", "test_native_delta"),
    *("test_native_encoders", "test_top_k", "test_tiles", "test_lora"),
)
_LINUX = sys.platform == "linux" and bool(native_backends())
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not _LINUX, reason="there is no GCC here, or no Linux")]


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library that replaces the system's allocation."""
    built = tmp_path_factory.mktemp("guard") / "guard_pages.so"
    flags = ("-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run([build._compiler()[0], *flags, str(_HERE / "guard_pages.c"), "-o", str(built)], check=True)
    return built


def run(guard: Path, place: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"LD_PRELOAD": str(guard), "GUARD_PAGES": place}
    command = [sys.executable, "-X", "faulthandler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)


@pytest.mark.parametrize("place", ["end", "begin"])
@pytest.mark.parametrize("name", FILES)
def test_no_call_touches_what_is_not_its_own(name: str, place: str, guard: Path) -> None:
    found = run(guard, place, "-m", "pytest", "-q", "-p", "tests.model.guard_pages", str(_HERE / f"{name}.py"))
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]


_TENSOR = "import ctypes, torch; x = torch.zeros(16); p = x.data_ptr(); "


@pytest.mark.parametrize(
    ("place", "code", "finding"),
    [
        ("end", "ctypes.string_at(p + 64, 1)", "Segmentation fault"),
        ("end", "ctypes.memset(p + 64, 1, 1)", "Segmentation fault"),
        ("end", "ctypes.memset(p - 1, 1, 1); del x", "something wrote in front of a buffer of 64 bytes"),
        ("end", "y = torch.zeros(5); ctypes.memset(y.data_ptr() + 20, 1, 1); del y", "behind a buffer of 20 bytes"),
        ("begin", "ctypes.string_at(p - 1, 1)", "Segmentation fault"),
        ("begin", "ctypes.memset(p + 64, 1, 1); del x", "something wrote behind a buffer of 64 bytes"),
        ("end", "del x; ctypes.string_at(p, 1)", "Segmentation fault"),
    ],
)
def test_control_what_touches_it_is_found(place: str, code: str, finding: str, guard: Path) -> None:
    found = run(guard, place, "-c", _TENSOR + code)
    assert found.returncode < 0 and finding in found.stderr, found.stderr


def test_control_scratch_that_is_too_short_is_found(guard: Path) -> None:
    """The library reports 64 bytes less than it uses."""
    code = """
import torch
from triptych.model.native.library import Kind, Library, native
from tests.model import guard_pages
library = native()
library._scratch_of = lambda needed: guard_pages._exact(library, needed - 64)
library.run_time_warping(torch.rand(9, 33))
library._scratch.tensor = None
"""
    found = run(guard, "end", "-c", code)
    assert found.returncode < 0, found.stdout + found.stderr
