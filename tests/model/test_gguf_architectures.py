"""GGUF files of architectures with special rules: the right configuration, and errors for wrong files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.gguf_files import Blocks, conversions, converted, write_gguf
from tests.model.parity import decoder_logits
from tests.model.test_gguf_weights import in_blocks
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.gguf.architectures import ARCHITECTURES
from triptych.model.config.attention import RotaryConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import FAMILIES
from triptych.model.gguf.container import read_gguf
from triptych.model.network.weights import load_model

IDS = tuple(range(1, 40))


def position(config: ModelConfig) -> RotaryConfig:
    assert config.decoder is not None
    found = config.decoder.layers[0].attention.position
    assert isinstance(found, RotaryConfig)
    return found


def test_every_architecture_is_of_a_family() -> None:
    assert {one.model_type for one in ARCHITECTURES.values()} <= FAMILIES.keys()


@pytest.mark.parametrize(("gate", "up"), [("Q8_0", "MXFP4"), ("Q8_0", None), (None, "MXFP4")])
def test_gate_and_up_of_a_shared_expert_become_one_matrix(gate: str | None, up: str | None, tmp_path: Path) -> None:
    """GraniteMoeShared stores them in one tensor; in a file each may have its own format, or floats."""
    kinds = {"ffn_gate_shexp": gate, "ffn_up_shexp": up}

    def blocks(name: str, tensor: Tensor) -> Blocks | Tensor:
        kind = kinds.get(name.split(".")[-2])
        return tensor if kind is None else (kind, tuple(tensor.shape), in_blocks(kind, name, tuple(tensor.shape))[0])

    def numbers(name: str, tensor: Tensor) -> Tensor:
        kind = kinds.get(name.split(".")[-2])
        return tensor if kind is None else in_blocks(kind, name, tuple(tensor.shape))[1]

    models = (
        load_model(read_checkpoint(converted("granitemoeshared", tmp_path, one)), SdpaBackend())
        for one in (blocks, numbers)
    )
    found, expected = (decoder_logits(model, [IDS]) for model in models)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_shared_expert_without_an_up_is_refused(tmp_path: Path) -> None:
    path = converted("granitemoeshared", tmp_path)
    data = path.read_bytes().replace(b"blk.1.ffn_up_shexp.weight", b"blk.1.ffn_xx_shexp.weight")
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"ffn_xx_shexp|shared_mlp\.input_linear"):
        load_model(read_checkpoint(path), SdpaBackend())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("FLOAT32", [0.5]), "xielu.alpha_p has 1 numbers, expected one for each of 2 layers"),
        (("FLOAT32", []), "xielu.alpha_p has 0 numbers, expected one for each of 2 layers"),
        (("INT32", [1, 2]), r"xielu.alpha_p must be an array of float32, found \[1, 2\]"),
    ],
)
def test_numbers_of_xielu_must_be_one_for_each_layer(value: Any, message: str, tmp_path: Path) -> None:
    metadata = {key: (kind, one) for key, (kind, one) in conversions()["apertus"]["metadata"].items()}
    metadata["xielu.alpha_p"] = ("ARRAY", value)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": torch.ones(97, 32)}))


def test_hunyuan_has_its_base_stretched_already(tmp_path: Path) -> None:
    """The same value as by Tencent's rule for a folder's `alpha`: 10,000 * 50^(d / (d - 2)) for heads with d = 12."""
    found = position(read_checkpoint(converted("hunyuan", tmp_path)).config)
    assert found.theta == pytest.approx(10_000 * 50 ** (12 / 10), rel=1e-6)


def test_phi_moe_has_one_temperature(tmp_path: Path) -> None:
    found = position(read_checkpoint(converted("phimoe", tmp_path)).config)
    assert (found.attention_factor, found.long_attention_factor) == (1.3228756, None)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("glm4-moe", {"expert_gating_func": ("UINT32", 1)}, "glm4moe.expert_gating_func 1 is not served, only 2"),
        ("dots1", {"expert_gating_func": ("UINT32", 1)}, "dots1.expert_gating_func 1 is not served, only 2"),
        ("minimax-m2", {"expert_gating_func": ("UINT32", 3)}, "minimax-m2.expert_gating_func 3 is not served"),
        ("hunyuan-moe", {"expert_shared_count": ("UINT32", 2)}, "hunyuan-moe.expert_shared_count 2 is not served"),
        ("phimoe", {"expert_used_count": ("UINT32", 3)}, "num_experts_per_tok = 3"),
    ],
)
def test_another_choice_of_experts_is_refused(kind: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(converted(kind, tmp_path, **changes))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """GLM-4.5's files count them among the layers."""
    config = read_checkpoint(converted("glm4-moe", tmp_path, nextn_predict_layers=("UINT32", 1))).config
    assert config.decoder is not None and config.decoder.num_layers == 2


def test_a_width_of_heads_that_a_file_does_not_say_is_the_hidden_size_over_heads(tmp_path: Path) -> None:
    """As in llama.cpp, whatever a folder's class assumes: 128 in Qwen3."""
    known = json.loads(json.dumps(conversions()["qwen2"]["metadata"]).replace('"qwen2', '"qwen3'))
    metadata = {key: (kind, one) for key, (kind, one) in known.items()}
    path = write_gguf(tmp_path / "x.gguf", metadata, {"token_embd.weight": torch.ones(97, 32)})
    config = read_checkpoint(path).config
    assert config.decoder is not None and config.decoder.layers[0].attention.head_dim == 8


def test_a_llama_with_biases_of_q_k_and_v_alone_is_read(tmp_path: Path) -> None:
    """Llama's class has biases of the output too, or none."""
    path = converted("llama-gqa", tmp_path)
    plain = read_checkpoint(path)
    sizes = {name: one.shape[0] for name, one in read_gguf(path).tensors.items()}
    parts = [f"blk.{layer}.attn_{part}" for layer in range(2) for part in "qkv"]
    biases = {f"{part}.bias": torch.randn(sizes[f"{part}.weight"]) for part in parts}
    metadata = {key: (kind, one) for key, (kind, one) in conversions()["llama-gqa"]["metadata"].items()}
    weights = dict[str, Tensor]()
    converted("llama-gqa", tmp_path, lambda name, one: weights.setdefault(name, one))
    read = read_checkpoint(write_gguf(tmp_path / "x.gguf", metadata, {**weights, **biases}))
    assert read.config.decoder is not None and plain.config.decoder is not None
    mixer = read.config.decoder.layers[0].attention
    assert (mixer.qkv_bias, mixer.out_bias) == (True, False)
    found, without = (decoder_logits(load_model(one, SdpaBackend()), [IDS]) for one in (read, plain))
    assert not torch.allclose(found, without)
    zeros = {name: torch.zeros_like(one) for name, one in biases.items()}
    read = read_checkpoint(write_gguf(tmp_path / "y.gguf", metadata, {**weights, **zeros}))
    assert torch.equal(decoder_logits(load_model(read, SdpaBackend()), [IDS]), without)


def test_a_llama_with_biases_of_its_mlp_is_read(tmp_path: Path) -> None:
    weights = dict[str, Tensor]()
    path = converted("llama", tmp_path, lambda name, one: weights.setdefault(name, one))
    sizes = {
        name: one.shape[0] for name, one in read_gguf(path).tensors.items() if ".ffn_" in name and "norm" not in name
    }
    biases = {name.replace("weight", "bias"): torch.randn(size) for name, size in sizes.items()}
    metadata = {key: (kind, one) for key, (kind, one) in conversions()["llama"]["metadata"].items()}
    config = read_checkpoint(write_gguf(tmp_path / "x.gguf", metadata, {**weights, **biases})).config
    assert config.decoder is not None and config.decoder.layers[0].mlp.bias


def test_the_docs_have_all_architectures() -> None:
    text = (Path(__file__).parents[2] / "docs" / "stored-formats.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| architectures |"))
    named = set(re.findall(r"[\w-]+", re.sub(r"\(.*?\)", "", row)))
    assert ARCHITECTURES.keys() <= named
    assert named - ARCHITECTURES.keys() <= {"architectures", "and", "too", "the", "language", "models", "of"}
