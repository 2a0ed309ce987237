"""The structures of the C interface as ctypes, field by field as in model/native/kernels; docs/kernels.md explains.

Pointers are plain addresses unless they point to another structure. The caller keeps the tensors alive.
`Library` compares all sizes with the compiled ones when it loads.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p


class PackedMatrix(ctypes.Structure):  # matrix.h
    _fields_ = (
        ("dtype", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("data", c_void_p),
        ("bias", c_void_p),
        ("scale", c_void_p),
        ("row_sums", c_void_p),
        ("tiles", c_int64),
        ("group", c_int64),
        ("offset", c_void_p),
        ("bounds", c_void_p),
    )


class KVPages(ctypes.Structure):  # attention.h
    _fields_ = (
        ("kind", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
    )


class Segments(ctypes.Structure):
    _fields_ = (
        ("segments", c_int64),
        ("causal", c_int64),
        ("block_size", c_int64),
        ("table_width", c_int64),
        ("q_starts", c_void_p),
        ("k_starts", c_void_p),
        ("kv_lens", c_void_p),
        ("tables", c_void_p),
        ("slots", c_void_p),
        ("key_ends", c_void_p),
    )


class AttentionShape(ctypes.Structure):
    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    )


class ScoreBias(ctypes.Structure):
    _fields_ = (("values", c_void_p), ("width", c_int64), ("slopes", c_void_p))


class RelativePositions(ctypes.Structure):
    _fields_ = (("keys", PackedMatrix), ("queries", PackedMatrix), ("reach", c_int64))


class Attention(ctypes.Structure):
    _fields_ = (
        ("shape", POINTER(AttentionShape)),
        ("segments", POINTER(Segments)),
        ("pages", POINTER(KVPages)),
        ("bias", POINTER(ScoreBias)),
        ("queries", c_void_p),
        ("query_stride", c_int64),
        ("out", c_void_p),
        ("form", c_int64),
    )


class Norm(ctypes.Structure):  # rowwise.h
    _fields_ = (("kind", c_int64), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p))


class SublayerNorms(ctypes.Structure):  # stack.h
    _fields_ = (("pre", Norm), ("output", Norm), ("post", Norm))


class AttentionLayer(ctypes.Structure):
    _fields_ = (
        ("norms", SublayerNorms),
        ("shape", AttentionShape),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("v_norm", Norm),
        ("norm_span", c_int64),
        ("input", PackedMatrix),
        ("keys_as_values", c_int64),
        ("reads_keys", c_int64),
        ("output_gate", c_int64),
        ("output", PackedMatrix),
        ("segments", c_int64),
        ("rotary", c_int64),
        ("score_bias", c_int64),
        ("relative", c_int64),
        ("scale", c_float),
    )


class DeltaLayer(ctypes.Structure):
    _fields_ = (
        ("norms", SublayerNorms),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("kernel", c_int64),
        ("input", PackedMatrix),
        ("gates", PackedMatrix),
        ("output", PackedMatrix),
        ("taps", c_void_p),
        ("decay", c_void_p),
        ("dt_bias", c_void_p),
        ("norm", Norm),
        ("scale", c_float),
    )


class Expert(ctypes.Structure):
    _fields_ = (("up", PackedMatrix), ("down", PackedMatrix))


class ExpertsLayer(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("active", c_int64),
        ("of_chosen", c_int64),
        ("router", PackedMatrix),
        ("experts", POINTER(Expert)),
        ("has_shared", c_int64),
        ("shared_gate", PackedMatrix),
        ("scales", c_void_p),
        ("router_norm", Norm),
        ("norms", SublayerNorms),
        ("mlp_norms", SublayerNorms),
    )


class MLPLayer(ctypes.Structure):
    _fields_ = (
        ("norms", SublayerNorms),
        ("up", PackedMatrix),
        ("down", PackedMatrix),
        ("gated", c_int64),
        ("activation", c_int64),
        ("limit", c_float),
        ("gain", c_float),
        ("scale", c_float),
        ("experts", POINTER(ExpertsLayer)),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("self", AttentionLayer),
        ("cross", AttentionLayer),
        ("delta", POINTER(DeltaLayer)),
        ("mlp", MLPLayer),
        ("has_cross", c_int64),
        ("parallel", c_int64),
        ("vectors", MLPLayer),
        ("has_vectors", c_int64),
        ("scale", c_void_p),
    )


class Stack(ctypes.Structure):
    _fields_ = (
        ("hidden", c_int64),
        ("num_layers", c_int64),
        ("layers", POINTER(POINTER(Layer))),
        ("dtype", c_int64),
        ("tiles", c_int64),
        ("final", Norm),
    )


class RotaryTable(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64), ("interleaved", c_int64), ("growth", c_void_p))


class LayerStates(ctypes.Structure):
    _fields_ = (("recurrent", c_void_p), ("channels", c_void_p))


class StateSpan(ctypes.Structure):
    _fields_ = (("first", c_int64), ("last", c_int64), ("source", c_int64), ("target", c_int64))


class LowRank(ctypes.Structure):
    _fields_ = (("up", PackedMatrix), ("first_output", c_int64), ("first_rank", c_int64), ("scale", c_float))


class Addition(ctypes.Structure):
    _fields_ = (("down", PackedMatrix), ("count", c_int64), ("parts", POINTER(LowRank)))


class AdapterRun(ctypes.Structure):
    _fields_ = (("first", c_int64), ("last", c_int64), ("additions", POINTER(Addition)))


class Step(ctypes.Structure):
    _fields_ = (
        ("rows", c_int64),
        ("first_layer", c_int64),
        ("last_layer", c_int64),
        ("num_segments", c_int64),
        ("segments", POINTER(Segments)),
        ("pages", POINTER(KVPages)),
        ("rotary", POINTER(RotaryTable)),
        ("score_biases", POINTER(ScoreBias)),
        ("relative", POINTER(RelativePositions)),
        ("vectors", c_void_p),
        ("states", POINTER(LayerStates)),
        ("num_spans", c_int64),
        ("spans", POINTER(StateSpan)),
        ("planned_keys", c_int64),
        ("cross_queries", POINTER(c_void_p)),
        ("num_runs", c_int64),
        ("runs", POINTER(AdapterRun)),
        ("rank_width", c_int64),
    )


STRUCTURES: tuple[type[ctypes.Structure], ...] = (  # in the order of the C function structure_sizes
    *(PackedMatrix, KVPages, Segments, AttentionShape, ScoreBias, RelativePositions, Attention, Norm, SublayerNorms),
    *(AttentionLayer, DeltaLayer, Expert, ExpertsLayer, MLPLayer, Layer, Stack),
    *(RotaryTable, LayerStates, StateSpan, LowRank, Addition, AdapterRun, Step),
)
