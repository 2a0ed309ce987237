"""Which small steps, products of one row and recorded steps a model has, as checks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import Activation, ExpertsConfig, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.kernel_check.check import Check
from triptych.model.kernel_check.step_checks import RowProductCheck, StaticRowCheck, StepCheck
from triptych.model.linear.base import Linear
from triptych.model.linear.float import row_kernel_kind

_ROTATED = 64  # the width that turns are checked with: it is that of a head


def planned_steps(config: ModelConfig, dtype: torch.dtype) -> Iterator[Check]:
    """Yield the checks of the small steps of a model, or of what a rank holds of it."""
    for stack in config.stacks.values():
        for layer in stack.layers:
            for norms in layer.norms:
                yield from _norms(norms, stack.hidden_size, dtype)
            yield from _attention(layer, dtype)
            yield from _feed_forward(layer, stack.hidden_size, dtype)
        if stack.layers and stack.final_norm is not None:
            yield from _norm(stack.final_norm, stack.hidden_size, dtype)
    if config.can_generate and config.decoder is not None:
        windows = {layer.mixer.window for layer in config.decoder.layers if isinstance(layer.mixer, AttentionConfig)}
        yield StaticRowCheck(max(1, len(windows)), has_sources=config.encoder is not None)


def row_product(linear: Linear, dtype: torch.dtype) -> Check | None:
    """Return the check of a projection of one row, with the same remainders; None if no kernel is for that."""
    if row_kernel_kind(linear) is None or dtype is torch.float32:
        return None
    spec = linear.spec
    outputs, inputs = (base + (5 if size % 16 else 0) for base, size in ((1024, spec.num_outputs), (2048, spec.inputs)))
    return RowProductCheck(outputs, inputs, spec.bias, dtype)


def _norms(norms: Norms, width: int, dtype: torch.dtype) -> Iterator[Check]:
    for norm in (norms.pre, norms.post):
        if norm is not None:
            yield from _norm(norm, width, dtype)
    if norms.output is not None and norms.output.unit_offset and norms.output.kind is NormKind.RMS:
        yield StepCheck("norm_add_norm", width, dtype)


def _norm(norm: NormConfig, width: int, dtype: torch.dtype) -> Iterator[Check]:
    if norm.kind is NormKind.LAYER:
        if not norm.unit_offset:
            yield StepCheck("add_layer", width, dtype)
    else:
        yield StepCheck("add_offset_rms" if norm.unit_offset else "add_rms", width, dtype)


def _attention(layer: LayerConfig, dtype: torch.dtype) -> Iterator[Check]:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionConfig):
        return
    if isinstance(mixer.position, RotaryConfig):
        yield StepCheck("turns", _ROTATED, dtype)
        yield StepCheck("rotate_both", _ROTATED, dtype)
    if mixer.output_gate:
        yield StepCheck("sigmoid_gated", mixer.query_size, dtype)


def _feed_forward(layer: LayerConfig, width: int, dtype: torch.dtype) -> Iterator[Check]:
    found = layer.feed_forward
    if isinstance(found, ExpertsConfig):
        yield StepCheck("weighted_sums", width, dtype)
        yield from _gate(found.mlp, dtype)
        if found.shared is not None:
            yield from _gate(found.shared, dtype)
    else:
        yield from _gate(found, dtype)


def _gate(mlp: MLPConfig, dtype: torch.dtype) -> Iterator[Check]:
    if mlp.clamp is not None:
        yield StepCheck("clamped", mlp.intermediate_size, dtype)
    elif mlp.gated:
        yield StepCheck("gated", mlp.intermediate_size, dtype, Activation(mlp.activation))
