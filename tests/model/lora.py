"""LoRA adapters of tiny checkpoints, written as PEFT writes them, and the models that come of merging them."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def modules_of(model: nn.Module, targets: str) -> dict[str, nn.Module]:
    """Return the projections whose names a pattern fits, Conv1D ones included."""
    found = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and re.search(targets, name)
    }
    assert found, f"no module fits {targets}"
    return found


def matrices(
    model: nn.Module, targets: str, rank: int, seed: int, std: float = 0.2
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return random A and B of every module that fits."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in modules_of(model, targets).items():
        outputs, inputs = module.weight.shape
        if type(module).__name__ == "Conv1D":
            outputs, inputs = inputs, outputs
        down, up = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
        found[name] = (down * std, up * std)
    return found


def write_adapter(
    folder: Path,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    *,
    pickled: bool = False,
    saved: Mapping[str, Tensor] | None = None,
    **settings: Any,
) -> Path:
    """Write a folder as PEFT's save_pretrained does; `saved` are tensors of modules that it has whole."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    known = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "inference_mode": True,
        "lora_dropout": 0.05,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "runtime_config": {"ephemeral_gpu_offload": False},
    }
    (folder / "adapter_config.json").write_text(json.dumps(known | settings))
    stored = {f"base_model.model.{name}": tensor for name, tensor in (saved or {}).items()}
    for name, (down, up) in pairs.items():
        stored[f"base_model.model.{name}.lora_A.weight"] = down.contiguous()
        stored[f"base_model.model.{name}.lora_B.weight"] = up.contiguous()
    if pickled:
        torch.save(stored, folder / "adapter_model.bin")
    else:
        save_file(stored, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def merged(model: Any, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float | Mapping[str, float] = 2.0) -> Any:
    """Return a copy of a model with the products of the matrices added to its weights."""
    changed = copy.deepcopy(model)
    for name, (down, up) in pairs.items():
        module = changed.get_submodule(name)
        added = up @ down * (scale if isinstance(scale, float) else scale[name])
        module.weight += added.T if type(module).__name__ == "Conv1D" else added
    return changed


def root_scale(alpha: float, rank: int) -> float:
    """Return the factor of rank-stabilised adapters."""
    return alpha / math.sqrt(rank)
