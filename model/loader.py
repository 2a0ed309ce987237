"""Weights from safetensors into a Transformer, by the family's plan; and back, for the trainer.

The network is built without memory, then each parameter is made once in its final dtype and device. Files are
memory-mapped. Only the `safetensors` package reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.attention.base import AttentionBackend
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.families import FAMILIES
from model.transformer import Transformer
from model.weights import CheckpointError, WeightRule, plan_load


def load_model(
    checkpoint: Checkpoint, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """The checkpoint's network with its weights; raises `CheckpointError` listing every tensor that does not fit."""
    model = build_model(checkpoint.config, backend)
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in checkpoint.weight_files]
        owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)
        sources = {name: tuple(file.get_slice(name).get_shape()) for name, file in owner.items()}
        family = FAMILIES[checkpoint.config.model_type]
        plan = plan_load(family, checkpoint.config, sources, parameter_shapes(model))
        state: dict[str, Tensor] = {}
        for name, rule in plan:
            _fill(state, rule, owner[name].get_tensor(name), model, dtype, device)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def build_model(config: ModelConfig, backend: AttentionBackend) -> Transformer:
    """The network without storage: every parameter is on torch's meta device."""
    with torch.device("meta"):
        return Transformer(config, backend)


def parameter_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stored_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The model under its family's published tensor names: the load plan read backwards."""
    family = FAMILIES[model.config.model_type]
    parameters = dict(model.named_parameters())
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for rule in family.rules(model.config):
        if rule.duplicate:
            continue
        tensor = parameters[rule.target].detach()
        if rule.rows is not None:
            tensor = tensor[rule.rows[0] : rule.rows[1]]
        if rule.interleaved is not None:
            heads, parts = rule.interleaved
            tensor = _swap_rows(tensor, parts, heads)
        tensor = (tensor.t() if rule.transpose else tensor).contiguous()
        if rule.part is not None:
            pieces.setdefault(rule.source, []).append((rule.part[0], tensor))
        else:
            yield rule.source, tensor if rule.shape is None else tensor.view(rule.shape)
    for name, found in pieces.items():
        yield name, torch.cat([tensor for _, tensor in sorted(found, key=lambda piece: piece[0])])


def _swap_rows(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Rows `[outer, inner, ...]` in the order `[inner, outer, ...]`."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None


def _fill(
    state: dict[str, Tensor], rule: WeightRule, tensor: Tensor, model: Transformer, dtype: torch.dtype, device: Any
) -> None:
    shape = model.get_parameter(rule.target).shape
    if not tensor.is_floating_point():
        raise CheckpointError(f"{rule.source}: expected floating point, found {tensor.dtype}")
    if rule.part is not None:
        tensor = tensor[rule.part[0] : rule.part[1]]
    if rule.interleaved is not None:
        tensor = _swap_rows(tensor, *rule.interleaved)
    if rule.target not in state:
        state[rule.target] = torch.empty(shape, dtype=dtype, device=device)
    target = state[rule.target]
    if rule.rows is not None:
        target = target[rule.rows[0] : rule.rows[1]]
    tensor = tensor.reshape(target.shape[::-1]).t() if rule.transpose else tensor.reshape(target.shape)
    if not rule.duplicate:
        target.copy_(tensor)
    elif not torch.equal(target, tensor.to(device, dtype)):
        raise CheckpointError(f"{rule.source} differs from the tensor that it is tied to")
