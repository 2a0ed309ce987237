"""Folders in the formats of AWQ, GPTQ and compressed-tensors, packed one number at a time as the formats define.

Each folder comes with a second one that has the floats that the integers stand for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.checkpoints import VOCAB, edit_json, randomise

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ: dict[str, Any] = {  # as GPTQModel and AutoGPTQ write it
    **{"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False, "lm_head": False},
    **{"damp_percent": 0.01, "true_sequential": True, "static_groups": False, "checkpoint_format": "gptq"},
    **{"pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:1.0"]}, "model_name_or_path": ""},
}
AWQ: dict[str, Any] = {
    **{"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    **{"modules_to_not_convert": None},
}


def compressed(
    form: str = "pack-quantized", activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """Return the `quantization_config` that llm-compressor writes."""
    args = {
        **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64, "dynamic": False},
        **{"actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}},
        **weights,
    }
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"ignore": ["lm_head"], "kv_cache_scheme": None, "global_compression_ratio": None, "sparsity_config": {}},
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True)
class Case:
    """A format: how integers are packed, and its `quantization_config`."""

    settings: dict[str, Any]
    tool: str
    bits: int = 4
    group: int = 64  # 0: all inputs
    symmetric: bool = False
    order: str = ""  # of inputs: "" in order, "sorted" in order with explicit indices, "shuffled"
    extra: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "w4a16": Case(compressed(), "compressed", symmetric=True),
    "w4a16 asymmetric": Case(compressed(symmetric=False, group_size=32), "compressed", group=32),
    "w4a16 channel": Case(compressed(strategy="channel", group_size=None), "compressed", group=0, symmetric=True),
    "w4a16 act-order": Case(compressed(actorder="group"), "compressed", symmetric=True, order="shuffled"),
    "w8a16": Case(compressed(num_bits=8, group_size=128), "compressed", 8, 128, symmetric=True),
    "w8a16 channel asymmetric": Case(
        compressed(num_bits=8, strategy="channel", group_size=None, symmetric=False), "compressed", 8, 0
    ),
    "w8a8 groups": Case(
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
            num_bits=8,
            symmetric=False,
        ),
        "bytes",
        8,
    ),
    "gptq": Case(GPTQ, "gptq", order="sorted"),
    "gptq v2, 8 bits": Case({**GPTQ, "bits": 8, "group_size": 128, "checkpoint_format": "gptq_v2"}, "gptq", 8, 128),
    "gptq symmetric": Case({**GPTQ, "sym": True, "group_size": -1}, "gptq", group=0, symmetric=True, order="sorted"),
    "gptq wide groups": Case({**GPTQ, "group_size": 256}, "gptq", group=256, order="sorted"),
    "gptq act-order": Case({**GPTQ, "desc_act": True, "group_size": 32}, "gptq", group=32, order="shuffled"),
    "gptq narrow groups": Case({**GPTQ, "group_size": 16}, "gptq", group=16, order="sorted"),
    "awq": Case(AWQ, "awq"),
    "awq gemv": Case({**AWQ, "version": "gemv"}, "gemv"),
}


def words(numbers: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Pack unsigned numbers `[rows, count]` into 32-bit words, the first in the lowest bits unless `order` is given."""
    per = 32 // bits
    found = np.zeros((len(numbers), -(-numbers.shape[1] // per)), dtype=np.uint32)
    for place in range(found.shape[1] * per):
        word, at = divmod(place, per)
        column = word * per + (order[at] if order else at)
        if column < numbers.shape[1]:
            found[:, word] |= numbers[:, column].numpy().astype(np.uint32) << np.uint32(bits * at)
    return torch.from_numpy(found.view(np.int32).copy())


@dataclass(frozen=True)
class Quantised:
    """A matrix [n, k] as unsigned integers, with zero points and scales [n, groups], and the group of each input."""

    integers: Tensor
    zeros: Tensor
    scales: Tensor
    order: Tensor

    @property
    def floats(self) -> Tensor:
        exact = (self.integers - self.zeros[:, self.order]).double() * self.scales[:, self.order].double()
        assert torch.equal(exact, exact.float().double())
        return exact.float()


def quantise(weight: Tensor, case: Case) -> Quantised:
    """Quantise a matrix from the minimum to the maximum of each group, or symmetrically."""
    n, k = weight.shape
    group = case.group or k
    order = torch.arange(k) // group
    if case.order == "shuffled":
        order = order[torch.randperm(k)]
    most, midst = (1 << case.bits) - 1, 1 << (case.bits - 1)
    groups = int(order.max()) + 1
    integers = torch.empty(n, k, dtype=torch.int64)
    zeros, scales = torch.empty(n, groups, dtype=torch.int64), torch.empty(n, groups, dtype=torch.float16)
    for g in range(groups):
        values = weight[:, order == g]
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        if case.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, g] = ((high - low) / most).half()
        zeros[:, g] = midst if case.symmetric else (-low / scales[:, g].float()).round().clamp(1, most)
        scaled = (values / scales[:, g, None].float()).round() + zeros[:, g, None]
        integers[:, order == g] = scaled.clamp(0, most).long()
    return Quantised(integers, zeros, scales, order)


def tensors_of(case: Case, name: str, found: Quantised) -> dict[str, Tensor]:
    """Return the tensors that the tool stores for a projection."""
    bits, midst = case.bits, 1 << (case.bits - 1)
    integers, zeros, scales, order = found.integers, found.zeros, found.scales, found.order.int()
    tensors: dict[str, Tensor]
    if case.tool == "compressed":
        tensors = {"weight_packed": words(integers, bits), "weight_scale": scales.bfloat16()}
        tensors["weight_shape"] = torch.tensor(integers.shape)
        if not case.symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if case.order:
            tensors["weight_g_idx"] = order
    elif case.tool == "bytes":
        tensors = {"weight": (integers - midst).to(torch.int8), "weight_scale": scales}
        tensors["weight_zero_point"] = (zeros - midst).to(torch.int8)
    elif case.tool == "gptq":
        less = 1 if case.settings["checkpoint_format"] == "gptq" else 0
        tensors = {"qweight": words(integers.T.T, bits).T.contiguous(), "scales": scales.T.contiguous()}
        tensors |= {"qzeros": words((zeros - less).T, bits), "g_idx": order}
    elif case.tool == "awq":
        tensors = {"qweight": words(integers.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER)}
        tensors["scales"] = scales.T.contiguous()
    else:
        room = 8 * -(-scales.shape[1] // 8) * (2 if case.group == 64 else 1)
        padded = torch.zeros(len(scales), room, dtype=torch.float16)
        padded[:, : scales.shape[1]] = scales
        packed = torch.zeros(len(scales), room // 8, dtype=torch.int32)
        packed[:, : -(-scales.shape[1] // 8)] = words(zeros, 4)
        tensors = {"qweight": words(integers, 4), "qzeros": packed, "scales": padded}
    return {f"{name}.{tensor}": values for tensor, values in tensors.items()}


@cache
def _source(into: Path, inner: int) -> Path:
    """Write a small decoder with rows of 1.5 groups of 128, and fused projections with biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        hidden_size=128, intermediate_size=inner, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB
    )
    model = Qwen2ForCausalLM(
        Qwen2Config(num_hidden_layers=1, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    )
    randomise(model, std=0.1)
    model.save_pretrained(into)
    return into


def describe(folder: Path, settings: object) -> None:
    edit_json(folder / "config.json", quantization_config=settings)


def folders(case: Case, root: Path, inner: int = 192) -> tuple[Path, Path]:
    """Return a folder as the tool writes it, and one with the floats that it stores; the MLP has `inner` columns."""
    source = _source(root / "source", inner)
    stored, plain = root / "stored", root / "floats"
    packed, floats = {}, {}
    torch.manual_seed(1)
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        packed[name] = floats[name] = tensor
        if stem != name and stem.rpartition(".")[2] in LAYERS:
            found = quantise(tensor, case)
            if case.tool == "compressed":  # its scales have the model's dtype
                found = Quantised(found.integers, found.zeros, found.scales.bfloat16().half(), found.order)
            floats[name] = found.floats
            del packed[name]
            packed |= tensors_of(case, stem, found)
    config = json.loads((source / "config.json").read_text())
    for folder, tensors, settings in ((stored, packed, case.settings), (plain, floats, None)):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return stored, plain
