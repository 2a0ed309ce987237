"""Which kernels a model launches on a GPU, as checks. Nothing is launched and no weight is read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.layer_backends import backend_of, recurrent_backend
from triptych.model.config.attention import AttentionConfig, NormConfig, NormKind, RotaryConfig
from triptych.model.config.layer import Activation, ExpertsConfig, LayerConfig, MLPConfig, Norms
from triptych.model.config.model import ModelConfig
from triptych.model.kernel_check.attention_checks import AttentionCheck, PreparationCheck, RecurrenceCheck
from triptych.model.kernel_check.check import Check, LaunchCheck
from triptych.model.kernel_check.product_checks import ExpertsCheck, ProductCheck, SamplingCheck
from triptych.model.kernel_check.product_problems import ExpertsShape, Fp8Shape, IntegerShape
from triptych.model.kernel_check.step_checks import RowProductCheck, StaticRowCheck, StepCheck
from triptych.model.linear.base import Linear, linears
from triptych.model.linear.factory import LinearFactory, ParallelLinear
from triptych.model.linear.float import ExpertsLinear, row_kernel_kind
from triptych.model.linear.fp8 import Fp8Linear
from triptych.model.linear.integers import IntegerLinear
from triptych.model.network.attention import prepares_heads
from triptych.model.network.build import build_model

_WIDE = 1 << 15  # outputs from which on a product has other tiles, on every card
_MATRIX = 1 << 23  # weights of a checked product, at most some times this number


def planned_checks(
    config: ModelConfig,
    backend: AttentionBackend,
    linear: LinearFactory,
    *,
    pages: torch.dtype,
    block_size: int,
    most_queries: int,
    most_keys: int,
) -> tuple[Check, ...]:
    """Return the checks of all kernels that a model launches, the one of any launch first; none without kernels.

    `config` is the whole model's. `pages` is the dtype of the KV cache, `most_queries` the longest piece of a prompt,
    `most_keys` the context.
    """
    own = linear.shard.config(config)
    sizes = (block_size, most_queries, most_keys)
    found: list[Check] = [
        *_attention(own, backend, linear.dtype, pages, sizes),
        *_recurrences(own, backend, linear.dtype),
        *_products(config, backend, linear),
    ]
    if linear.device.type == "cuda":
        found += planned_steps(own, linear.dtype)
    if config.can_generate and linear.device.type == "cuda":
        types = dict.fromkeys((linear.dtype, torch.float32))  # penalties and grammars give float32
        found += [SamplingCheck(config.embedding.vocab_size, dtype) for dtype in types]
    return (LaunchCheck(), *dict.fromkeys(found)) if found else ()


def _attention(
    config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype, pages: torch.dtype, sizes: tuple[int, int, int]
) -> Iterator[Check]:
    """Yield the checks of all layers whose attention Triton computes."""
    block_size, most_queries, most_keys = sizes
    for name, stack in config.stacks.items():
        kinds: list[tuple[torch.dtype | None, int]] = []  # dtype of pages, most keys
        if name != "decoder" or config.encoder is None:
            kinds.append((None, most_queries))
        if name == "decoder" and config.can_generate:
            kinds.append((pages, most_keys))
        for layer in stack.layers:
            if isinstance(layer.mixer, AttentionConfig) and _is_triton(backend, layer.mixer):
                for kept, keys in kinds:
                    yield AttentionCheck(layer.mixer, dtype, kept, stack.causal, False, block_size, most_queries, keys)
                    if prepares_heads(layer.mixer):
                        yield PreparationCheck(layer.mixer, dtype, kept, block_size)
            if layer.cross is not None and config.can_generate and _is_triton(backend, layer.cross):
                yield AttentionCheck(layer.cross, dtype, pages, False, True, block_size, most_queries, most_keys)


def _is_triton(backend: AttentionBackend, layer: AttentionConfig) -> bool:
    return backend_of(backend, layer).name == "triton"


def _recurrences(config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype) -> Iterator[Check]:
    for stack in config.stacks.values():
        for recurrence in stack.recurrences.values():
            if recurrent_backend(backend, recurrence, dtype) is not None:
                yield RecurrenceCheck(recurrence, dtype)


def _products(config: ModelConfig, backend: AttentionBackend, linear: LinearFactory) -> Iterator[Check]:
    """Yield a check of each kind of projection that Triton multiplies."""
    for one in linears(build_model(config, backend, linear)):
        product = one.product if isinstance(one, ParallelLinear) else one
        check = _product(product, linear.dtype)
        if check is not None:
            yield check


def _product(linear: Linear, dtype: torch.dtype) -> Check | None:
    """Return the check of a projection, of a smaller matrix with the same remainders; None: torch multiplies it."""
    spec = linear.spec
    outputs, bias = _cut(spec.outputs_of_expert, _WIDE), linear._parameters.get("bias") is not None
    inputs = _cut(spec.inputs, max(256, 1 << (_MATRIX // outputs).bit_length()))
    if isinstance(linear, IntegerLinear) and linear.kernels:
        zeros = linear.weight_offset is not None
        return ProductCheck(IntegerShape(outputs, inputs, linear.bits, linear.group, zeros, bias=bias), dtype)
    if isinstance(linear, Fp8Linear) and linear.kernels:
        block = linear.storage.block if linear.storage.block[1] else None
        return ProductCheck(Fp8Shape(outputs, inputs, block, bias), dtype)
    if isinstance(linear, ExpertsLinear) and linear.kernels:
        experts = _cut(spec.experts, 16)
        shape = ExpertsShape(experts, _cut(outputs, 256), _cut(spec.inputs, 1024), bias)
        return ExpertsCheck(shape, dtype)
    return row_product(linear, dtype)


def _cut(size: int, most: int) -> int:
    """Return a number below twice `most`, a power of two, with the same remainder by it."""
    return size if size < 2 * most else most + size % most


_ROTATED = 64  # the width that turns are checked with: it is that of a head


def planned_steps(config: ModelConfig, dtype: torch.dtype) -> Iterator[Check]:
    """Yield the checks of the small steps of a model, or of what a rank holds of it."""
    for stack in config.stacks.values():
        for layer in stack.layers:
            for norms in layer.norms:
                yield from _norms(norms, stack.hidden_size, dtype)
            yield from _head_checks(layer, dtype)
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


def _head_checks(layer: LayerConfig, dtype: torch.dtype) -> Iterator[Check]:
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
