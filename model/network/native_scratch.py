"""How much scratch memory the stacks of a model will take in C, before any of its weights is there."""

from __future__ import annotations

import torch

from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import pool_of_layers
from triptych.model.config.formats import QUANTIZED_LAYERS, kept_as_stored, nearest_kept
from triptych.model.config.layer import LayerConfig
from triptych.model.config.model import ModelConfig
from triptych.model.config.stack import StackConfig
from triptych.model.linear.native import kernel_of
from triptych.model.native.library import KINDS, Kind, Library
from triptych.model.native.structures import KVPages, Layer, PackedMatrix, Segments
from triptych.model.native.structures import Step as StepData
from triptych.model.network.native_stack import NativeStack, layer_structure, stack_structure
from triptych.model.network.native_structures import plan_delta, plan_feed_forward, relative_bytes


def planned_scratch(
    library: Library,
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str,
    *,
    rows: int,
    context: int,
    patches: int = 0,
) -> int:
    """Bytes that a step of `rows` tokens over up to `context` keys takes, of the stack that takes most, and those of
    relative positions that are made for such steps. `patches` are those of the largest picture in a prompt.

    `dtype` is the network's, in which its matrices are packed unless `quantization` says otherwise.
    """
    stacks = {name: stack for name, stack in config.stacks.items() if NativeStack.unsupported(stack) is None}
    sizes = {name: (patches, patches) if name == "tower" else (rows, context) for name in stacks}
    formats = {(KINDS[dtype], 0)}
    if quantization in QUANTIZED_LAYERS:
        layers = QUANTIZED_LAYERS[quantization][0]
        formats = {(kernel_of(layers), layers.group)}
    kept = [kept_as_stored(storage) or nearest_kept(storage) for storage in set(config.stored_as.values())]
    formats |= {(kernel_of(one), one.group) for one in kept if one is not None}
    found = (
        _of_stack(library, stack, dtype, *form, *sizes[name]) for name, stack in stacks.items() for form in formats
    )
    return max(found, default=0) + sum(relative_bytes(stack, dtype, min(rows, context)) for stack in stacks.values())


def _of_stack(
    library: Library, config: StackConfig, dtype: torch.dtype, kind: Kind, group: int, rows: int, context: int
) -> int:
    stack = stack_structure(config, [_layer(layer, config, kind, group) for layer in config.distinct_layers])
    stack.dtype, stack.tiles = KINDS[dtype], library.tiles
    pools = max(pool_of_layers(config)) + 1
    segments = (Segments * (pools * (2 if config.has_cross_attention else 1)))()
    step = StepData(rows=rows, num_segments=len(segments), segments=segments)
    if config.causal:
        step.pages, step.planned_keys = (KVPages * 1)(), context
        for pool in range(pools):
            segments[pool].causal = True
    else:  # its keys are the step's own rows
        step.planned_keys = min(rows, context)
    return library.scratch_bytes(stack, step)


def _layer(config: LayerConfig, stack: StackConfig, kind: Kind, group: int) -> Layer:
    """A layer whose matrices have sizes and no data."""
    hidden, mixer = stack.hidden_size, config.mixer

    def matrix(n: int, k: int) -> PackedMatrix:
        return PackedMatrix(int(kind), n, k, group=group)

    layer = layer_structure(config, stack)
    if isinstance(mixer, AttentionConfig):
        inputs, query = sum(mixer.projected_sizes), mixer.query_size
        layer.self.input, layer.self.output = matrix(inputs, hidden), matrix(hidden, query)
    else:
        plan_delta(layer.delta.contents, mixer, hidden, matrix)
    plan_feed_forward(layer.mlp, config.feed_forward, hidden, matrix)
    if config.embedding is not None:
        size = config.embedding.size
        layer.vectors.up, layer.vectors.down = matrix(size, hidden), matrix(hidden, size)
    if config.cross is not None:
        query = config.cross.query_size
        layer.cross.input, layer.cross.output = matrix(query, hidden), matrix(hidden, query)
    return layer
