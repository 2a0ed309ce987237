"""The dtype that `--dtype auto` chooses depends on device and model, not on the checkpoint's dtype."""

from __future__ import annotations

import pytest
import torch

import triptych.model.engine.planning.kernels as dtypes
from tests.model.checkpoints import loaded
from triptych.model.engine.planning.kernels import choose_dtype
from triptych.model.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    def of(device: torch.device) -> tuple[int, int]:
        assert device == GPU
        return capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", of)


@pytest.mark.parametrize("kind", ["llama", "bert", "t5-relu", "bart", "gpt2"])  # all stored in float32
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_bfloat16_since_ampere(kind: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, capability)
    found = choose_dtype("auto", loaded(kind).config, GPU)
    assert found.dtype is torch.bfloat16
    assert found.reason == f"compute capability {capability[0]}.{capability[1]}"


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_float16_before_it_but_for_what_overflows(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, capability)
    gpu = f"compute capability {capability[0]}.{capability[1]} has no bfloat16"
    for kind in ("llama", "bert", "bart", "gpt2", "marian"):
        assert choose_dtype("auto", loaded(kind).config, GPU) == dtypes.ComputeDtype(torch.float16, gpu)
    for kind, name in (("t5-relu", "t5"), ("mt5", "mt5"), ("umt5", "umt5"), ("pegasus", "pegasus")):
        found = choose_dtype("auto", loaded(kind).config, GPU)
        assert found == dtypes.ComputeDtype(torch.float32, f"{gpu}, and {name} leaves float16's range")


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_cpu_dtype_follows_from_its_instructions(
    fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "has_fast_bf16", lambda: fast)
    assert choose_dtype("auto", loaded("llama").config, CPU).dtype is dtype


def test_explicit_dtype_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (7, 5))
    for name in ("float32", "bfloat16", "float16"):
        found = choose_dtype(name, loaded("t5-relu").config, GPU)
        assert found == dtypes.ComputeDtype(getattr(torch, name), "asked for")
    with pytest.raises(ConfigError, match="dtype 'int4' is not served"):
        choose_dtype("int4", loaded("llama").config, CPU)
