"""The device of a model: what its setting may name on this machine."""

from __future__ import annotations

import pytest
import torch

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.engine import network_plan
from triptych.model.errors import ConfigError
from triptych.model.system.devices import resolve_device


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_auto_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, kind in ((0, "cpu"), (2, "cuda")):
        with_gpus(monkeypatch, count)
        assert resolve_device("auto") == torch.device(kind)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"device 'cuda:2' was asked for, but this process sees 2 GPUs, counted from"):
        resolve_device("cuda:2")
    with_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match="device 'cuda' was asked for, but this machine has no usable CUDA device"):
        resolve_device("cuda")


def test_products_of_16_bits_add_up_in_float32_where_a_model_is_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(products, name) for name in names]

    def found(device: str) -> list[bool]:
        for name in names:
            setattr(products, name, True)
        monkeypatch.setattr(network_plan, "resolve_device", lambda name: torch.device(name))
        monkeypatch.setattr(network_plan, "read_checkpoint", lambda *_, **__: None)
        monkeypatch.setattr(network_plan, "use_kernel_cache", lambda: None)
        with pytest.raises(AttributeError):  # goes on with the folder, which is none
            network_plan.plan_network(ModelSpec("m", "m", EngineConfig(device=device)))
        return [bool(getattr(products, name)) for name in names]

    try:
        assert found("cuda") == [False, False]
        assert found("cpu") == [True, True]
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(products, name, value)
