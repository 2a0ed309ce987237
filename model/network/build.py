"""Builds a network without storage for its weights, and says which tensors fill it."""

from __future__ import annotations

import torch
from torch import nn

from triptych.model.attention.base import AttentionBackend
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import Shape, Shard, ShardSlice
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.transformer import Transformer

FLOAT32 = LinearFactory()


def build_model(config: ModelConfig, backend: AttentionBackend, linear: LinearFactory = FLOAT32) -> Transformer:
    """Return the network, or one rank's part of it, with all parameters on torch's meta device."""
    with torch.device("meta"):
        return Transformer(config, backend, linear)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are not part of a projection: norms, tables and others, by name."""
    owned = {id(parameter) for linear in linears(model) for parameter in linear.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in owned}


def tensor_shapes(model: Transformer) -> dict[str, Shape]:
    """Return the shape of each tensor that fills the network, by name."""
    shapes = {name: tuple(parameter.shape) for name, parameter in plain_parameters(model).items()}
    for linear in linears(model):
        shapes |= {name: tensor.shape for name, tensor in linear.tensors().items()}
    return shapes


def shard_slices(whole: Transformer, shard: Shard) -> dict[str, ShardSlice | None]:
    """Return which slice of each tensor of the whole network a rank has; None: all of it."""
    slices = {name: shard.shard_slice(whole.config, name) for name in plain_parameters(whole)}
    for linear in linears(whole):
        slices |= {name: linear.spec.shard_slice(shard, tensor) for name, tensor in linear.tensors().items()}
    return slices
