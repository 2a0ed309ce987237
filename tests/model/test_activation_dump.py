"""The dump of hidden states holds those of `transformers`, whether C or torch computes the layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.model.checkpoints import prompt, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.llm import LLM
from triptych.model.network.activation_dump import VARIABLE


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_dump_holds_the_hidden_states_of_each_layer(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    ids, folder = prompt(9), saved("llama").path
    engine = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=4 << 20, attention_backend=backend)
    with LLM(folder, engine) as llm:
        llm.generate([ids], SamplingParams(max_tokens=2, ignore_eos=True))
    names = sorted(path.name for path in (tmp_path / folder.name).iterdir())
    assert names == ["decoder-000000.safetensors", "decoder-000001.safetensors"]
    dumped = load_file(tmp_path / folder.name / names[0])
    with torch.inference_mode():
        expected = saved("llama").reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    layers = [f"layers.{index}" for index in range(len(expected) - 2)]
    assert set(dumped) == {"input_ids", "embed", *layers, "output"}
    assert dumped["input_ids"].tolist() == list(ids)
    for name, hidden in zip(("embed", *layers, "output"), expected, strict=True):
        torch.testing.assert_close(dumped[name], hidden[0], rtol=1e-4, atol=1e-4)
