"""Fused GPU operations equal their parts, and fall back to them where a kernel does not work."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triptych.model.config.layer import Activation
from triptych.model.kernel_check.step_problems import compare_steps, step_problems
from triptych.model.network import fused_ops
from triptych.model.network.norms import OffsetRMSNorm
from triptych.model.system import fallbacks

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.float16)  # the interpreter cuts numbers off in bfloat16 that a GPU rounds


def filled(norm: nn.Module) -> nn.Module:
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return norm


@pytest.mark.parametrize(
    "norm",
    [nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8), nn.LayerNorm(8, bias=False), OffsetRMSNorm(8, 1e-6), nn.Identity()],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_and_its_norm(norm: nn.Module, dtype: torch.dtype) -> None:
    norm = filled(norm).to(dtype)
    x, y = torch.randn(5, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    total, normed = fused_ops.add_norm(x, y, norm)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norm(x + y))
    for output in (filled(nn.RMSNorm(8, eps=1e-5)).to(dtype), filled(OffsetRMSNorm(8, 1e-6)).to(dtype)):
        total, normed = fused_ops.add_norm(x, y, norm, output)
        assert torch.equal(total, x + output(y))
        assert torch.equal(normed, norm(total))


def test_a_gain_follows_its_weight() -> None:
    norm = OffsetRMSNorm(4, 1e-6).requires_grad_(False)
    norm.weight.fill_(1.0)
    assert norm.gain is norm.gain
    assert norm.gain.tolist() == [2.0] * 4
    norm.load_state_dict({"weight": torch.full((4,), 3.0)}, assign=True)
    norm.requires_grad_(False)
    assert norm.gain.tolist() == [4.0] * 4
    norm.to(torch.bfloat16)
    assert norm.gain.dtype is torch.float32
    assert norm.gain.tolist() == [4.0] * 4


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels' module, whose kernels the interpreter computes; a kernel that fails fails the test."""
    pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")
    from triptych.model.network import fused_kernels

    monkeypatch.setattr(fused_ops, "on_gpu", lambda tensor: True)
    yield fused_kernels
    assert not fused_ops.broken


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2).to(dtype)


def check_all(width: int, dtype: torch.dtype, device: str) -> None:
    wrong = {name: error for name, error in compare_steps(3, width, dtype, torch.device(device)).items() if error > 1}
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 100, 1030])
def test_kernels_compute_what_torch_does(kernels: Any, width: int, dtype: torch.dtype) -> None:
    check_all(width, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 100, 1030, 4096, 14336])
def test_a_gpu_computes_what_torch_does(kernels: Any, width: int, dtype: torch.dtype) -> None:
    check_all(width, dtype, "cuda")


@pytest.mark.parametrize(
    ("capability", "widths"),
    [(90, ("4096",)), *(pytest.param(one, (), marks=pytest.mark.slow) for one in (80, 89, 90, 100, 120))],
)
def test_kernels_read_and_write_128_bits_at_once(capability: int, widths: tuple[str, ...], tmp_path: Path) -> None:
    """Compile for absent GPUs: widths are known, so nothing is divided by one, and rows are read in vectors."""
    pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.model.compiled_steps", str(capability), *widths]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == (8 if widths else 80)
    for kernel in kernels:
        allowed = {"ld 16", "st 16"}
        if kernel["step"] == "sums":
            allowed |= {"ld 8", "ld 4"}  # places and weights, one at a time
        assert kernel["accesses"].keys() == allowed, kernel
        assert kernel["divisions"] == 0, kernel


def test_few_rows_have_the_numbers_of_many(kernels: Any) -> None:
    for problem in step_problems(5, 40, torch.float16, torch.device("cpu")):
        if problem.name in ("weighted sums", "rotation"):
            continue  # their rows are not the first dimension of all arguments
        alone = [one[3:4] if isinstance(one, Tensor) and len(one) == 5 else one for one in problem.arguments]
        found = problem.function(*alone)
        for one, other in zip(found if isinstance(found, tuple) else (found,), problem.by_kernel(), strict=True):
            assert torch.equal(one, other[3:4]), problem.name


def test_floats_do_not_go_stale(kernels: Any) -> None:
    x, ones = values(3, 8) / 100, torch.ones(8)
    for eps in (1e-5, 1.0, 1e-12):
        torch.testing.assert_close(
            fused_ops._add_rms(x, x, ones, eps)[1], nn.functional.rms_norm(x + x, (8,), ones, eps)
        )
    hidden, plain = values(3, 8), fused_ops.clamped.__wrapped__  # type: ignore[attr-defined]
    for limit in (1.0, 0.5):
        torch.testing.assert_close(fused_ops.clamped(hidden, limit, 1.5), plain(hidden, limit, 1.5))


def test_what_is_not_a_number_stays_so(kernels: Any) -> None:
    hidden = torch.full((1, 16), torch.nan)
    hidden[:, 8:] = 1.0
    for activation in Activation:
        assert fused_ops.gated(hidden, activation).isnan().all(), activation
    assert fused_ops.clamped(hidden, 7.0, 1.7).isnan().all()


def test_what_has_no_kernel_is_torch_s(kernels: Any) -> None:
    x, gain = values(2, 8, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16)
    assert kernels.gated(x, Activation.MISH) is NotImplemented
    assert kernels.add_rms(x.double(), x.double(), gain.double(), 1e-5) is NotImplemented
    assert kernels.add_rms(x, x.float(), gain, 1e-5) is NotImplemented
    assert kernels.add_rms(x[None], x[None], gain, 1e-5) is NotImplemented
    assert torch.equal(fused_ops._add_rms(x[None], x[None], gain, 1e-5)[0][0], x + x)


def test_gradients_are_torch_s() -> None:
    class Elsewhere(Tensor):
        is_cuda = True

    x = values(2, 8).as_subclass(Elsewhere)
    assert fused_ops.on_gpu(x)
    assert not fused_ops.on_gpu(x.requires_grad_())
    assert not fused_ops.on_gpu(values(2, 8))


class OutOfResources(Exception):
    """Like Triton's error of this name, no RuntimeError."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no compiler here\nmore"), "no compiler here"),
        (OutOfResources("out of resource: shared memory"), "out of resource: shared memory"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (AssertionError(), "AssertionError"),
        (ModuleNotFoundError("No module named 'triton'"), "No module named 'triton'"),
    ],
)
def test_torch_goes_on_where_a_kernel_fails(
    error: Exception, said: str, kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def failing(*_: object) -> None:
        calls.append(1)
        raise error

    monkeypatch.setattr(kernels, "gated", failing)
    monkeypatch.setattr(fused_ops, "broken", set())
    fallbacks.forget()
    x = values(3, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            found = fused_ops.gated(x, Activation.RELU)
            assert torch.equal(found, x[:, :4].relu() * x[:, 4:])
    assert len(calls) == 1  # tried once
    assert fallbacks.found() == (f"gated runs in several kernels, as its own does not work: {said}",)
    fallbacks.forget()
    assert fused_ops.broken == {"gated"}
    fused_ops.broken.clear()


def test_memory_that_is_out_says_nothing_of_a_kernel(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [torch.OutOfMemoryError("for now")]
    gated = kernels.gated

    def scarce(*given: Any) -> Tensor:
        if failures:
            raise failures.pop()
        return gated(*given)

    monkeypatch.setattr(kernels, "gated", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        fused_ops.gated(values(3, 8), Activation.RELU)
    assert fused_ops.gated(values(3, 8), Activation.RELU).shape == (3, 4)
