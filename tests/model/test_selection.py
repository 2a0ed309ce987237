"""Which backend runs where, and the reason that is given."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest
import torch

import model.attention.selection as selection
from model.attention.selection import select_backend
from model.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def installed(monkeypatch: pytest.MonkeyPatch, there: bool, capability: tuple[int, int] = (9, 0)) -> None:
    """A GPU of that capability, with Triton or without."""
    monkeypatch.setattr(selection, "find_spec", lambda name: ModuleSpec(name, None) if there else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(selection, "_tried", lambda device, dtype: None)


@with_triton
@pytest.mark.parametrize("wanted", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gets_triton(monkeypatch: pytest.MonkeyPatch, wanted: str, dtype: torch.dtype) -> None:
    installed(monkeypatch, True)
    found = select_backend(GPU, dtype, wanted)
    assert found.backend.name == "triton"
    assert found.reason == f"triton {sys.modules['triton'].__version__}: pages read in place"
    assert found.library is None


@pytest.mark.parametrize(
    ("there", "capability", "reason"),
    [
        (False, (9, 0), "triton is not installed (it comes with PyTorch's CUDA build)"),
        (True, (7, 5), "the GPU is older than compute capability 8.0"),
    ],
)
def test_a_gpu_without_it_gets_torch_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, there: bool, capability: tuple[int, int], reason: str
) -> None:
    installed(monkeypatch, there, capability)
    found = select_backend(GPU)
    assert (found.backend.name, found.reason) == ("sdpa", f"torch scaled_dot_product_attention: {reason}")
    with pytest.raises(ConfigError, match=f"the triton backend cannot be had: {reason[:20]}"):
        select_backend(GPU, wanted="triton")


def test_torch_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    for device in (CPU, GPU):
        assert select_backend(device, wanted="sdpa").reason == "torch scaled_dot_product_attention: asked for"
    with pytest.raises(ConfigError, match="no native backend for cuda"):
        select_backend(GPU, wanted="native")


def test_a_cpu_never_gets_triton_unasked_and_outside_of_tests_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, True)
    assert select_backend(CPU).backend.name != "triton"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="no Triton kernels for cpu"):
        select_backend(CPU, wanted="triton")


@with_triton
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify.\nmore"),
            "Failed to find C compiler. Please specify.",
        ),
        (OSError(30, "Read-only file system"), "[Errno 30] Read-only file system"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_what_stands_in_its_way_is_found_at_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception, shown: str
) -> None:
    import model.attention.triton as triton_backend

    def fail(device: torch.device, dtype: torch.dtype) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_backend, "try_out", fail)
    found = select_backend(GPU)
    assert found.backend.name == "sdpa"
    assert found.reason == f"torch scaled_dot_product_attention: triton does not work here: {shown}"
    with pytest.raises(ConfigError, match="triton does not work here"):
        select_backend(GPU, wanted="triton")


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_trial_passes_where_it_works(dtype: torch.dtype) -> None:
    import model.attention.triton as triton_backend

    triton_backend.try_out(torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype)


@with_triton
def test_the_interpreter_is_the_tests_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend(CPU, wanted="triton").backend.name == "triton"
