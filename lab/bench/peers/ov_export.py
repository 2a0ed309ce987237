"""Export of a transformers model to OpenVINO: `python -m lab.bench.peers.ov_export MODEL FOLDER [int4|int8]`.

Decoders are exported for OpenVINO GenAI: keys and values are states of the model, and `beam_idx` selects the row that
each sequence continues; GenAI replaces them by its paged attention. The file has float32 weights, which the plugin
packs in its own number format, or integers of 4 or 8 bits, which nncf makes of weights in bfloat16. optimum-intel does
the same for older versions of transformers. The models are traced with a mask of four dimensions, so that no length is
fixed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor, nn

from lab.bench.peers.static import load_model

_GROUP = 128  # inputs that share a scale, nncf's default
_LEAST = float(torch.finfo(torch.float32).min)


class _Past:
    """Holds keys and values `[B, H, T, D]` of each layer, with the interface of a cache that a traced model uses."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = list(tensors)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        at = slice(2 * layer, 2 * layer + 2)
        self.tensors[at] = [torch.cat(pair, 2) for pair in zip(self.tensors[at], (keys, values), strict=True)]
        return self.tensors[2 * layer], self.tensors[2 * layer + 1]

    def get_seq_length(self, *_: Any) -> int:
        return self.tensors[0].shape[2]


class _Decoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return logits `[B, S, V]` and the extended past for `input_ids` `[B, S]`, `attention_mask` `[B, T + S]`."""
        new, total = input_ids.shape[1], attention_mask.shape[1]
        causal = torch.arange(total)[None] <= torch.arange(new)[:, None] + (total - new)
        seen = causal[None, None] & attention_mask[:, None, None].bool()  # [B, 1, S, T + S]
        cache = _Past(past)
        logits = self.model(
            input_ids=input_ids,
            attention_mask=torch.where(seen, 0.0, _LEAST),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return (logits, *cache.tensors)


class _Encoder(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the mean of the last hidden states `[B, D]` of ids and mask `[B, L]`."""
        mask: Any = torch.where(attention_mask[:, None, None].bool(), 0.0, _LEAST)
        if "sliding_attention" in (getattr(self.model.config, "layer_types", None) or ()):  # ModernBERT
            places = torch.arange(input_ids.shape[1])
            near = (places[:, None] - places).abs() <= self.model.config.sliding_window
            mask = {"full_attention": mask, "sliding_attention": torch.where(near, mask, _LEAST)}
        hidden = self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state
        seen = attention_mask[..., None].to(hidden.dtype)
        mean: Tensor = (hidden * seen).sum(1) / seen.sum(1)
        return mean


class _Pictures(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the vectors `[B, D]` of pictures `[B, 3, H, W]`."""
        vectors: Tensor = self.model.get_image_features(pixel_values).pooler_output
        return vectors


def export(path: Path, folder: Path, bits: str = "") -> None:
    """Write `openvino_model.xml` and its other files into `folder`; `bits`: a decoder's weights, `int4` or `int8`."""
    model = load_model(path, {"dtype": "bfloat16" if bits else "float32"})
    if bits:
        from openvino.frontend.pytorch import patch_model

        patch_model.__make_16bit_traceable(model)
    if hasattr(model, "get_image_features"):
        made = _pictures(model)
    else:
        made = _decoder(model) if hasattr(model, "lm_head") else _encoder(model)
    if bits:
        made = _compressed(made, bits)
    making = folder.with_name(f".{folder.name}-{os.getpid()}")
    making.mkdir(parents=True)
    openvino.save_model(made, making / "openvino_model.xml", compress_to_fp16=False)
    shutil.copy(path / "config.json", making)
    making.rename(folder)


def _compressed(made: Any, bits: str) -> Any:
    import nncf

    if bits == "int8":
        return nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT8_SYM)
    return nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT4_SYM, ratio=1.0, group_size=_GROUP)


def _pictures(model: Any) -> Any:
    size = model.config.vision_config.image_size
    made = openvino.convert_model(_Pictures(model), example_input={"pixel_values": torch.zeros(2, 3, size, size)})
    made.reshape({0: [-1, 3, size, size]})
    return made


def _encoder(model: Any) -> Any:
    ids = torch.full((2, 7), 100)
    return openvino.convert_model(
        _Encoder(model), example_input={"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    )


def _decoder(model: Any) -> Any:
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    ids = torch.full((2, 3), 100)
    example = {
        "input_ids": ids,
        "attention_mask": torch.ones(2, 7, dtype=torch.int64),
        "position_ids": torch.arange(4, 7).expand_as(ids),
        "past": tuple(torch.zeros(2, heads, 4, size) for _ in range(2 * config.num_hidden_layers)),
    }
    made = openvino.convert_model(_Decoder(model), example_input=example)
    for name, given in zip(("input_ids", "attention_mask", "position_ids"), made.inputs, strict=False):
        given.get_tensor().set_names({name})
    made.outputs[0].get_tensor().set_names({"logits"})
    _make_stateful(made, heads, size)
    return made


def _make_stateful(made: Any, heads: int, size: int) -> None:
    """Turn inputs and outputs of past keys and values into states; an unwritten state is empty."""
    row = ops.parameter(openvino.PartialShape([-1]), openvino.Type.i32, name="beam_idx")
    row.output(0).get_tensor().add_names({"beam_idx"})
    pairs = {}
    for number, (past, present) in enumerate(zip(made.inputs[3:], made.outputs[1:], strict=True)):
        names = (f"past_key_values.{number}", f"present.{number}")
        past.get_tensor().set_names({names[0]})
        past.node.set_partial_shape(openvino.PartialShape([-1, heads, -1, size]))
        present.get_tensor().set_names({names[1]})
        pairs[names[0]] = names[1]
        users = list(past.get_target_inputs())
        reordered = ops.gather(past.node, row, ops.constant(0, openvino.Type.i64))
        for user in users:
            user.replace_source_output(reordered.output(0))
    made.add_parameters([row])
    made.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made, pairs)
    first, zero = np.array([0], dtype=np.int64), ops.constant(0, openvino.Type.i64)
    batch = ops.gather(ops.shape_of(made.input("input_ids")), ops.constant(first), zero)
    for node in made.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = ops.concat([batch, ops.constant(np.array([heads, 0, size], dtype=np.int64))], 0)
            empty = ops.broadcast(ops.constant(0.0, openvino.Type.f32), shape)
            node.set_arguments([empty.output(0)])
    made.validate_nodes_and_infer_types()


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
