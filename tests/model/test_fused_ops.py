"""Fused GPU operations equal their parts, and fall back to them where they cannot be compiled."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from model.network import fused_ops
from model.network.norms import OffsetRMSNorm
from model.system import fallbacks


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


@pytest.mark.slow  # the compiler alone takes ten seconds to import
@pytest.mark.parametrize(
    "function",
    [
        fused_ops._add_rms,
        fused_ops._add_layer,
        fused_ops._add_offset_rms,
        fused_ops._norm_add_norm,
        fused_ops.gated,
        fused_ops.sigmoid_gated,
        fused_ops.rotate_both,
        fused_ops._turns,
    ],
)
def test_the_compiler_takes_them_whole(function) -> None:  # type: ignore[no-untyped-def]
    """The whole operation is compiled, for any number of rows."""
    plain = function.__wrapped__
    compiled = torch.compile(plain, dynamic=True, fullgraph=True, backend="eager")
    for rows in (1, 3, 64):
        x = torch.randn(rows, 16)
        inputs = {
            "_add_rms": (x, x + 1, torch.randn(16), 1e-5),
            "_add_layer": (x, x + 1, torch.randn(16), torch.randn(16), 1e-5),
            "_add_offset_rms": (x, x + 1, torch.randn(16), 1e-5),
            "_norm_add_norm": (x, x + 1, torch.randn(16), 1e-5, torch.randn(16), 1e-6),
            "turns": (torch.arange(rows), torch.rand(4), 1.5, torch.bfloat16),
            "gated": (x, nn.functional.silu),
            "sigmoid_gated": (x, x + 1),
            "rotate_both": (*(torch.randn(rows, heads, 16) for heads in (4, 2)), *torch.randn(2, rows, 1, 8)),
        }[plain.__name__]
        torch.testing.assert_close(compiled(*inputs), plain(*inputs))


@pytest.mark.slow  # likewise
def test_every_model_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant is compiled for each width, dtype and epsilon, for one row and for more."""
    variants = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        variants.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    add_rms = fused_ops._compiled(fused_ops._add_rms.__wrapped__)
    widths = range(8, 24)
    for width in widths:
        for rows in (1, 5, 7):
            add_rms(torch.ones(rows, width), torch.ones(rows, width), nn.Parameter(torch.ones(width), False), 1e-6)
    assert len(variants) == 2 * len(widths)


class Elsewhere(torch.Tensor):
    is_cuda = True


class OutOfResources(Exception):
    """Like Triton's error of this name, no RuntimeError."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no compiler here\nmore"), "no compiler here"),
        (OutOfResources("out of resource: shared memory"), "out of resource: shared memory"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_what_cannot_be_compiled_runs_as_it_is(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def broken(function):  # type: ignore[no-untyped-def]
        def run(*_: object) -> None:
            calls.append(function.__name__)
            raise error

        return run

    monkeypatch.setattr(fused_ops, "_compiled", broken)
    fallbacks.forget()

    @fused_ops.fused
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    x = torch.ones(3).as_subclass(Elsewhere)
    with caplog.at_level(logging.WARNING):
        assert [double(x).sum().item() for _ in range(3)] == [6.0] * 3
    assert len(calls) == 1  # tried once
    assert "could not be compiled" in caplog.text
    assert fallbacks.found() == (f"double runs in several kernels, as it could not be compiled: {said}",)
    fallbacks.forget()


@pytest.mark.parametrize("threads", [None, "6"])
def test_no_process_stays_for_compiling(threads: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", threads)
    with inductor.patch(compile_threads=6):
        fused_ops._compiled(abs)
        assert inductor.compile_threads == (1 if threads is None else 6)
    ended: list[bool] = []
    compiler = SimpleNamespace(shutdown_compile_workers=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", compiler)
    fused_ops.release_compilers()
    assert ended == [True]
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile")
    fused_ops.release_compilers()


def test_memory_that_is_out_says_nothing_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [torch.OutOfMemoryError("for now"), None]

    def scarce(function):  # type: ignore[no-untyped-def]
        def run(x: torch.Tensor) -> torch.Tensor:
            failure = failures.pop(0)
            if failure is not None:
                raise failure
            return function(x)  # type: ignore[no-any-return]

        return run

    monkeypatch.setattr(fused_ops, "_compiled", scarce)
    double = fused_ops.fused(lambda x: x + x)
    x = torch.ones(3).as_subclass(Elsewhere)
    with pytest.raises(torch.OutOfMemoryError):
        double(x)
    assert double(x).sum().item() == 6.0
    assert not failures  # it was asked again
