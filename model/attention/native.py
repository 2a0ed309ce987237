"""Attention by the C kernels, which read pages where they lie; what they do not know goes to torch."""

from __future__ import annotations

import torch
from torch import Tensor

from model.attention.base import AttentionMetadata, ScoreBias, given
from model.attention.sdpa import SdpaBackend
from model.cache.paged import LayerCache
from model.config.layer import AttentionConfig
from model.native.library import Kind, Library, Memory, Segments
from model.network.native_stack import fill_segments, memory_of, shape_of


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
            memory = memory_of(cache)
        else:
            key, value = given(rows[1]), given(rows[2])
            stride = config.kv_size
            memory = Memory(Kind.F32, key.data_ptr(), value.data_ptr(), None, None, stride, stride)
        out = torch.empty(query.shape, dtype=torch.float32)
        self.library.run_attention(shape, segments, memory, given(rows[0]), rows[1], rows[2], out)
        del kept  # the description pointed into them
        return out.to(query.dtype)
