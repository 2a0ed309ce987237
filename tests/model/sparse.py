"""Checkpoints of any size that take no disk space: a header and a sparse file that reads as zeros."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from triptych.model.attention.reference import ReferenceBackend
from triptych.model.checkpoint.load_plan import wanted_shape
from triptych.model.families import config_from_raw, family_for
from triptych.model.network.build import build_model, tensor_shapes

_BYTES = {"F32": 4, "BF16": 2}


def qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, *, vocab: int = 151_936, tied: bool
) -> dict[str, Any]:
    """Return the config.json of a Qwen3 with 8 key heads."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


QWEN3_4B = qwen3(2560, 9728, 36, 32, tied=True)
QWEN3_8B = qwen3(4096, 12_288, 36, 32, tied=False)


def sparse_checkpoint(folder: Path, raw: dict[str, Any], kind: str = "BF16") -> Path:
    """Write a checkpoint folder in which every number is zero."""
    config = config_from_raw(raw)
    shapes = tensor_shapes(build_model(config, ReferenceBackend()))
    header, end = {}, 0
    for rule in family_for(config).tensor_rules(config):
        shape = wanted_shape(rule, shapes)
        begin, end = end, end + math.prod(shape) * _BYTES[kind]
        header[rule.source] = {"dtype": kind, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
