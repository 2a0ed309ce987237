"""How much scratch memory the stacks of a model will take in C, before any of its weights is there."""

from __future__ import annotations

import ctypes

import torch

from model.attention.native import shape_of
from model.config.model import ModelConfig, StackConfig
from model.native.library import KINDS, Kind, Layer, Library, Linear, Memory
from model.native.library import Stack as StackData
from model.native.library import Step as StepData
from model.network.native_stack import NativeStack


def planned_scratch(
    library: Library, config: ModelConfig, dtype: torch.dtype, kind: Kind | None, *, rows: int, context: int
) -> int:
    """Bytes that a step of `rows` tokens over up to `context` keys takes, of the stack that takes most.

    `dtype` is the network's, `kind` how its matrices are packed where that is not it.
    """
    stacks = [stack for stack in config.stacks.values() if NativeStack.supports(stack)]
    kind = KINDS[dtype] if kind is None else kind
    return max((_of_stack(library, stack, dtype, kind, rows, context) for stack in stacks), default=0)


def _of_stack(library: Library, config: StackConfig, dtype: torch.dtype, kind: Kind, rows: int, context: int) -> int:
    layer = _layer(config, kind)
    stack = StackData(
        hidden=config.hidden_size,
        layers=1,
        distinct=1,
        layer_data=(Layer * 1)(layer),
        shape=shape_of(config.attention),
        dtype=KINDS[dtype],
        tiles=library.tiles,
    )
    if not config.causal:  # its keys are the step's own rows
        step = StepData(rows=rows, longest=min(rows, context))
        return library.scratch_bytes(stack, step)
    memory = Memory()
    step = StepData(rows=rows, longest=context, memory=ctypes.addressof(memory))
    step.self.causal = True
    return library.scratch_bytes(stack, step)


def _layer(config: StackConfig, kind: Kind) -> Layer:
    """A layer of which only the sizes are there."""
    hidden, query, kv = config.hidden_size, config.attention.query_size, config.attention.kv_size
    inner = config.mlp.intermediate_size

    def matrix(n: int, k: int) -> Linear:
        return Linear(int(kind), n, k)

    layer = Layer(qkv=matrix(query + 2 * kv, hidden), out=matrix(hidden, query), parallel=config.parallel)
    layer.up, layer.down = matrix(inner * (2 if config.mlp.gated else 1), hidden), matrix(hidden, inner)
    if config.cross_attention:
        layer.has_cross, layer.cross_q, layer.cross_proj = True, matrix(query, hidden), matrix(hidden, query)
    return layer
