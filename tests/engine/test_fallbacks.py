"""Slow fallbacks on a GPU are reported in the log, /info and the banner, or refuse the start."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import triptych.model.engine.builder as loading
from tests.model.checkpoints import native_backends, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.attention.selection import Selection
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.engine.builder import load, slow_ways
from triptych.model.engine.generate_builder import unrecordable
from triptych.model.errors import ConfigError
from triptych.model.system import fallbacks

GPU, CPU = torch.device("cuda"), torch.device("cpu")
TORCH = Selection(SdpaBackend(), "torch scaled_dot_product_attention: triton does not work here: no compiler")
TRITON = Selection(SimpleNamespace(name="triton", graph_safe=True), "triton 3.6.0: pages read in place")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_noted() -> Iterator[None]:
    fallbacks.forget()
    yield
    fallbacks.forget()


def test_no_fallback_is_reported_if_all_works_or_was_set() -> None:
    assert slow_ways(EngineConfig(), TRITON, {}, GPU) == ()
    assert slow_ways(EngineConfig(attention_backend="sdpa"), TORCH, {"decode steps": ""}, GPU) == ()


def test_a_cpu_without_kernels_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "native", lambda: "no GCC is installed")
    slow = slow_ways(EngineConfig(), TORCH, {}, CPU)
    assert slow == ("torch computes in place of the C kernels, several times slower: no GCC is installed",)
    assert slow_ways(EngineConfig(attention_backend="sdpa"), TORCH, {}, CPU) == ()
    monkeypatch.setattr(loading, "native", lambda: object())
    assert slow_ways(EngineConfig(dtype="float16"), TORCH, {}, CPU) == ()


def test_every_fallback_is_reported_with_its_reason() -> None:
    try:
        raise RuntimeError("no space\nleft")
    except RuntimeError as error:
        fallbacks.note("gated runs in several kernels", error)
    assert slow_ways(EngineConfig(), TORCH, {"decode steps": "stream is capturing"}, GPU) == (
        "gated runs in several kernels: no space",
        f"attention is not Triton's: {TORCH.reason}",
        "decode steps are launched kernel by kernel: stream is capturing",
    )


def test_a_slow_draft_model_is_reported() -> None:
    draft = SimpleNamespace(selection=TORCH)
    assert slow_ways(EngineConfig(), TRITON, {}, GPU, draft) == (  # type: ignore[arg-type]
        f"attention of the draft model is not Triton's: {TORCH.reason}",
    )


def test_fallback_is_in_the_log_and_the_model_info(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ModelSpec("m", str(saved("llama").path), EngineConfig(device="cpu", dtype="float32", max_model_len=16))
    assert load(spec).info.fallbacks == ()
    monkeypatch.setattr(loading, "slow_ways", lambda *_: ("decode steps are launched kernel by kernel: x",))
    with caplog.at_level("WARNING"):
        loaded = load(spec)
    assert loaded.info.fallbacks == ("decode steps are launched kernel by kernel: x",)
    assert "m is slower than it could be: decode steps are launched kernel by kernel: x" in caplog.text


def test_graphs_need_recurrent_layers_that_the_backend_computes() -> None:
    """Check the reason, which is known before weights are read; on a CPU nothing is recorded."""
    decoder = read_checkpoint(saved("qwen3-next").path).config.decoder
    given = (decoder, TRITON.backend, torch.bfloat16)
    assert unrecordable(EngineConfig(), *given, GPU) == "recurrent layers are torch's"
    assert unrecordable(EngineConfig(), *given, CPU) == ""
    assert unrecordable(EngineConfig(cuda_graphs=False), *given, GPU) == ""
    assert unrecordable(EngineConfig(), decoder, SdpaBackend(), torch.bfloat16, GPU) == ""  # the backend is the reason


@pytest.mark.parametrize("at_once", [True, False])
def test_fallbacks_can_be_refused(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the refusal comes before weights are read if the fallback is known by then."""
    read: list[bool] = []
    real = loading.load_packed
    monkeypatch.setattr(loading, "load_packed", lambda *given, **named: read.append(True) or real(*given, **named))
    monkeypatch.setattr(loading, "unrecordable", lambda *_: "x" if at_once else "")
    monkeypatch.setattr(
        loading,
        "slow_ways",
        lambda engine, selection, unrecorded, *_: ("x",) if any(unrecorded.values()) or read else (),
    )
    settings = EngineConfig(device="cpu", dtype="float32", slow_fallbacks="refuse", max_model_len=16)
    with pytest.raises(ConfigError, match="slow_fallbacks is refuse, and x"):
        load(ModelSpec("m", str(saved("llama").path), settings))
    assert bool(read) != at_once


@pytest.mark.skipif(not native_backends(), reason="there is no GCC here")
def test_what_computes_attention_is_told_with_the_reason() -> None:
    def told(kind: str) -> tuple[str, str]:
        spec = ModelSpec(kind, str(saved(kind).path), EngineConfig(device="cpu", dtype="float32", max_model_len=16))
        info = load(spec).info
        return info.attention_backend, info.attention_reason

    backend, reason = told("gemma3")
    assert backend == "native" and "torch computes" not in reason
    assert told("apertus")[1] == f"{reason}; torch computes the decoder: layer 0 has xIELU"
    reason = "torch scaled_dot_product_attention: the native kernels add no bias that depends on the query"
    assert told("xlnet") == ("sdpa", reason)
