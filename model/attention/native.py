"""Attention by the C kernels, which read pages in place."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionMetadata, ScoreBias, distance_table, given, refuse_gradients, slopes
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import AttentionConfig, XLNetRelativeConfig
from triptych.model.config.cache import PagedSpec
from triptych.model.native.library import KINDS, Kind, Library
from triptych.model.native.structures import AttentionShape, KVPages, Segments
from triptych.model.native.structures import ScoreBias as BiasTable

_MARGIN = 32  # kernels score up to 32 keys at once, so they read the bias this far beyond the last key


class NativeBackend:
    """The backend for CPUs, without gradients; stacks in C call the same kernels directly."""

    name = "native"
    graph_safe = False
    gathers_pages = False

    def __init__(self, library: Library) -> None:
        self.library = library

    def unsupported(self, layer: AttentionConfig, dtype: torch.dtype, cache: PagedSpec | None) -> str | None:
        if isinstance(layer.position, XLNetRelativeConfig):  # DeBERTa's stacks run in C as a whole
            return "the native kernels add no bias that depends on the query"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the native kernels do not compute in {str(dtype).removeprefix('torch.')}"
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        refuse_gradients(self, query)
        shape, segments = shape_of(config), Segments()
        kept = list(fill_segments(segments, metadata, cache))
        if sinks is not None:
            kept.append(sinks.float().contiguous())
            shape.sinks = kept[-1].data_ptr()
        rows = [None if tensor is None else tensor.float().contiguous() for tensor in (query, key, value)]
        if cache is not None and metadata.block_tables is not None:
            pages = kv_pages(cache)
        else:
            key, value = given(rows[1]), given(rows[2])
            stride = config.kv_size
            pages = KVPages(Kind.F32, key.data_ptr(), value.data_ptr(), None, None, stride, stride)
        out = torch.empty(query.shape, dtype=torch.float32)
        table, described = None, None
        if bias is not None and (table := slopes(bias, query.device)) is not None:
            described = BiasTable(slopes=table.data_ptr())
        elif bias is not None:
            table = _bias_table(bias, max(metadata.kv_lens))
            described = BiasTable(table.data_ptr(), table.shape[1])
        given_rows = (given(rows[0]), rows[1], rows[2])
        narrow = query.dtype is torch.bfloat16
        self.library.run_attention(shape, segments, pages, *given_rows, out, described, narrow=narrow)
        del kept, table  # the description pointed into them
        return out.to(query.dtype)


def bias_width(longest: int) -> int:
    """Return the width of a table of biases for keys up to `longest`; `key - query` is at `width / 2 + key - query`."""
    return 2 << (longest + _MARGIN).bit_length()


def _bias_table(bias: ScoreBias, longest: int) -> Tensor:
    """Return the bias by distance, `[H, width]` float32."""
    near = distance_table(bias)  # [H, 2 R + 1]
    if near is None:
        raise ValueError("the native kernels add no bias that depends on more than the distance")
    half, reach = bias_width(longest) // 2, near.shape[1] // 2
    return near[:, torch.arange(-half, half).clamp(-reach, reach) + reach].float().contiguous()


def shape_of(config: AttentionConfig) -> AttentionShape:
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.window or 0)
    return AttentionShape(*sizes, config.scale, config.softcap or 0.0)


def kv_pages(layer: LayerCache) -> KVPages:
    """Describe one layer's pages to C, as rows of slots."""
    strides = (pages.shape[2] * pages.shape[3] for pages in (layer.keys, layer.values))
    scales = (None, None) if layer.scales is None else (scale.data_ptr() for scale in layer.scales)
    return KVPages(KINDS[layer.keys.dtype], layer.keys.data_ptr(), layer.values.data_ptr(), *scales, *strides)


def write_rows(library: Library, cache: LayerCache, slots: Tensor, rows: Tensor, config: AttentionConfig) -> None:
    """Write the keys and values of `rows` `[T, 2 K D]` to `slots` `[T]`, as `LayerCache.write` does."""
    library.write_pages(shape_of(config), kv_pages(cache), _indices("slots", slots), rows.float().contiguous())


def fill_segments(segments: Segments, metadata: AttentionMetadata, cache: LayerCache | None) -> Iterator[Tensor]:
    """Describe a step's segments; yields the tensors that must live as long as the description."""
    starts = torch.tensor(metadata.cu_seqlens_q, dtype=torch.int64)
    lens = torch.tensor(metadata.kv_lens, dtype=torch.int64)
    key_starts = torch.tensor(metadata.cu_seqlens_k, dtype=torch.int64)
    segments.segments, segments.causal = len(metadata.q_lens), metadata.causal
    segments.q_starts, segments.kv_lens, segments.k_starts = starts.data_ptr(), lens.data_ptr(), key_starts.data_ptr()
    yield from (starts, lens, key_starts)
    if cache is not None and metadata.block_tables is not None:
        keys = cache.keys
        segments.block_size = keys.shape[-3]
        tables = _indices("block_tables", metadata.block_tables)
        segments.tables, segments.table_width = tables.data_ptr(), tables.shape[1]
        yield tables
    if metadata.key_ends is not None:
        ends = _indices("key_ends", metadata.key_ends)
        segments.key_ends = ends.data_ptr()
        yield ends
    if cache is not None and metadata.slot_mapping is not None:
        slots = _indices("slot_mapping", metadata.slot_mapping)
        segments.slots = slots.data_ptr()
        yield slots


def _indices(name: str, tensor: Tensor) -> Tensor:
    """Return indices as C reads them: contiguous, int64, on the CPU."""
    if tensor.dtype is not torch.int64 or tensor.device.type != "cpu":
        raise TypeError(f"{name} must be int64 on the CPU, found {tensor.dtype} on {tensor.device}")
    return tensor.contiguous()
