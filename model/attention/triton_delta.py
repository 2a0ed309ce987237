"""Recurrent layers on a GPU, between their projections: how the kernels of `triton_delta_kernels` are launched.

Single tokens take one launch. It depends on no value on the device, so it can be captured and replayed over other
slots. Prompts take three: what their chunks need no state for, all at once; the states through the chunks of
each segment; norms and gates. Imported only where Triton is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.model.attention.layer_backends import Recurrence
from triptych.model.attention.triton_delta_kernels import gate_outputs, scan_chunks, solve_chunks, step_states
from triptych.model.attention.triton_kernels import INTERPRETED
from triptych.model.cache.kv_cache import StateCache, StateTables
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.system.held_kernels import cdiv, next_power_of_2

CHUNK = 32  # tokens that are solved for together
_MOST = 128 * 128  # elements of a head's state, which a program has in registers
_STEP_WARPS = 8
_SOLVE_WARPS = 8
_SCAN_WARPS = {4: 8, 2: 4}  # by bytes of an element of the rows
_SCAN_STAGES = 2
_SCAN_VALUES = 16  # of a head's values, that a program takes through the chunks


def unsupported(config: GatedDeltaConfig) -> str | None:
    """Why the kernels cannot compute a layer; None: they can."""
    if _padded(config.key_dim) * _padded(config.value_dim) > _MOST:
        return f"states of {config.key_dim} x {config.value_dim} are larger than the Triton kernels' 128 x 128"
    return None


def compute(layer: Recurrence, inputs: Tensor, gates: Tensor, tables: StateTables, states: StateCache | None) -> Tensor:
    """Return what the layer's last projection reads, `[T, H V]` of projected rows `[T, C + H V]` and `[T, 2 H]`."""
    inputs, gates = (x if x.stride(-1) == 1 else x.contiguous() for x in (inputs, gates))
    out = inputs.new_empty(len(inputs), layer.config.value_size)
    if tables.singles is not None:
        _step(layer, inputs, gates, tables.singles, states, out)
    if tables.segments is not None and tables.chunks is not None:
        _prompts(layer, inputs, gates, tables.segments, tables.chunks, states, out)
    return out


def _padded(size: int) -> int:
    return max(16, next_power_of_2(size))


def _step(
    layer: Recurrence, inputs: Tensor, gates: Tensor, spans: Tensor, states: StateCache | None, out: Tensor
) -> None:
    config = layer.config
    step_states[(config.num_value_heads, spans.shape[1])](
        inputs,
        gates,
        layer.convolution,
        layer.decay,
        layer.dt_bias,
        layer.gain,
        spans,
        *((states.recurrent, states.convolution) if states is not None else (None, None)),
        out,
        spans.shape[1],
        inputs.stride(0),
        gates.stride(0),
        config.eps,
        KEY_HEADS=config.num_key_heads,
        HEADS=config.num_value_heads,
        KEY_DIM=config.key_dim,
        VALUE_DIM=config.value_dim,
        TAPS=config.kernel,
        BLOCK_K=_padded(config.key_dim),
        BLOCK_V=_padded(config.value_dim),
        num_warps=_STEP_WARPS,
    )


def _prompts(
    layer: Recurrence,
    inputs: Tensor,
    gates: Tensor,
    segments: Tensor,
    chunks: Tensor,
    states: StateCache | None,
    out: Tensor,
) -> None:
    config, rows, count = layer.config, len(inputs), chunks.shape[1]
    key_heads, heads, key_dim, value_dim = (
        *(config.num_key_heads, config.num_value_heads),
        *(config.key_dim, config.value_dim),
    )
    queries, keys, weights, changes, sums = (
        torch.empty(shape, dtype=torch.float32, device=inputs.device)
        for shape in (
            *((rows, key_heads, key_dim),) * 2,
            (rows, heads, key_dim),
            (rows, heads, value_dim),
            (2, rows, heads),
        )
    )
    block_k, block_v = _padded(key_dim), _padded(value_dim)
    recurrent, kept = (states.recurrent, states.convolution) if states is not None else (None, None)
    # Rows of 16 bits are multiplied in TF32 (11 bits); in the inverse, where errors add up, in all bits of float32.
    exact = inputs.dtype is torch.float32
    heads_of = {"KEY_HEADS": key_heads, "HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "CHUNK": CHUNK}
    solve_chunks[(count, heads)](
        inputs,
        gates,
        layer.convolution,
        layer.decay,
        layer.dt_bias,
        chunks,
        kept,
        queries,
        keys,
        sums,
        weights,
        changes,
        count,
        rows,
        inputs.stride(0),
        gates.stride(0),
        TAPS=config.kernel,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        PRECISION="ieee" if exact else "tf32",
        FINE="ieee" if exact or INTERPRETED else "tf32x3",
        **heads_of,
        num_warps=_SOLVE_WARPS,
        num_stages=1,
    )
    values = min(block_v, _SCAN_VALUES)
    scan_chunks[(segments.shape[1], heads, cdiv(value_dim, values))](
        segments,
        chunks,
        recurrent,
        queries,
        keys,
        sums,
        weights,
        changes,
        count,
        segments.shape[1],
        rows,
        BLOCK_K=block_k,
        BLOCK_V=values,
        PRECISION="ieee" if exact else "tf32",
        **heads_of,
        num_warps=_SCAN_WARPS[inputs.dtype.itemsize],
        num_stages=_SCAN_STAGES,
    )
    gate_outputs[(count, heads)](
        inputs,
        changes,
        layer.gain,
        chunks,
        out,
        count,
        inputs.stride(0),
        config.eps,
        CHANNELS=config.channels,
        HEADS=heads,
        VALUE_DIM=value_dim,
        CHUNK=CHUNK,
        BLOCK_V=block_v,
        num_warps=_STEP_WARPS,
    )
