"""Attention by the C kernels, which read pages where they lie; what they do not know goes to torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from model.attention.base import AttentionMetadata, ScoreBias, given
from model.attention.sdpa import SdpaBackend
from model.cache.paged import KVCache, LayerCache
from model.config.layer import AttentionConfig
from model.native.library import KINDS, Kind, Library
from model.native.structures import AttentionShape, KVPages, Segments


class NativeBackend(SdpaBackend):
    """Scores without a bias, on the CPU, without gradients; the stacks in C call the same kernels by themselves."""

    name = "native"

    def __init__(self, library: Library) -> None:
        self.library = library

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
    ) -> Tensor:
        if bias is not None or query.requires_grad:
            return super().forward(query, key, value, cache, metadata, config, bias)
        shape, segments = shape_of(config), Segments()
        kept = list(fill_segments(segments, metadata, cache))
        rows = [None if tensor is None else tensor.float().contiguous() for tensor in (query, key, value)]
        if cache is not None and metadata.block_tables is not None:
            pages = kv_pages(cache)
        else:
            key, value = given(rows[1]), given(rows[2])
            stride = config.kv_size
            pages = KVPages(Kind.F32, key.data_ptr(), value.data_ptr(), None, None, stride, stride)
        out = torch.empty(query.shape, dtype=torch.float32)
        self.library.run_attention(shape, segments, pages, given(rows[0]), rows[1], rows[2], out)
        del kept  # the description pointed into them
        return out.to(query.dtype)


def shape_of(config: AttentionConfig) -> AttentionShape:
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, config.window or 0)
    return AttentionShape(*sizes, config.scale, config.softcap or 0.0)


def kv_pages(layer: LayerCache) -> KVPages:
    """One layer's pool as rows of slots."""
    stride = layer.keys.shape[2] * layer.keys.shape[3]
    scales = (None, None) if layer.scales is None else (scale.data_ptr() for scale in layer.scales)
    return KVPages(KINDS[layer.keys.dtype], layer.keys.data_ptr(), layer.values.data_ptr(), *scales, stride, stride)


def fill_segments(
    segments: Segments, metadata: AttentionMetadata, cache: KVCache | LayerCache | None
) -> Iterator[Tensor]:
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
    if cache is not None and metadata.slot_mapping is not None:
        slots = _indices("slot_mapping", metadata.slot_mapping)
        segments.slots = slots.data_ptr()
        yield slots


def _indices(name: str, tensor: Tensor) -> Tensor:
    """As C reads indices: int64, one after the other, in the CPU's memory."""
    if tensor.dtype is not torch.int64 or tensor.device.type != "cpu":
        raise TypeError(f"{name} must be int64 on the CPU, found {tensor.dtype} on {tensor.device}")
    return tensor.contiguous()
