"""Outlier channels planted into a checkpoint, which leave the function of its network as it was.

Large language models have a few channels whose activations are a hundred times those of others (Dettmers et al. 2022,
LLM.int8()), and no such checkpoint is small. Here some outputs of what comes before a projection are multiplied by a
power of two, and the projection's columns of the same channels divided by it: in floats nothing changes, bit for bit,
but a scale for a whole row of activations, or of weights, then spans both.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from triptych.model.checkpoint.json_files import read_json

CHANNELS = 1  # of each projection that is planted into
# By `model_type`: tensors of a layer whose outputs are multiplied, and projections that read them. Gated MLPs are
# linear in `up_proj`, ReLU lets a positive factor through, and so does attention of its values.
_CHAINS: dict[str, Sequence[tuple[str, tuple[str, ...]]]] = {
    "llama": (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ("mlp.up_proj", ("mlp.down_proj",)),
    ),
    "marian": (
        ("self_attn.v_proj", ("self_attn.out_proj",)),
        ("encoder_attn.v_proj", ("encoder_attn.out_proj",)),
        ("fc1", ("fc2",)),
    ),
    "bert": (("attention.self.value", ("attention.output.dense",)),),
}


def plant(folder: Path, out: Path, times: int) -> Path:
    """Write the checkpoint in `folder` with outliers of `times` the others' size, a power of two, in float32."""
    if times & (times - 1):
        raise ValueError(f"outliers are a power of two times the others' size, found {times}")
    shutil.copytree(folder, out)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    generator = torch.Generator().manual_seed(0)
    for producer, readers in _CHAINS[read_json(folder / "config.json")["model_type"]]:
        for name in sorted(tensors):
            layer, found, _ = name.partition(f".{producer}.weight")
            if found:
                channels = torch.randperm(len(tensors[name]), generator=generator)[:CHANNELS]
                _multiply(tensors, f"{layer}.{producer}", [f"{layer}.{reader}" for reader in readers], channels, times)
    save_file(tensors, out / "model.safetensors")
    return out


def _multiply(
    tensors: Mapping[str, Tensor], producer: str, readers: Sequence[str], channels: Tensor, times: int
) -> None:
    for tensor in (f"{producer}.weight", f"{producer}.bias"):
        if tensor in tensors:
            tensors[tensor][channels] *= times
    for reader in readers:
        tensors[f"{reader}.weight"][:, channels] /= times
