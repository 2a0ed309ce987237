"""Scaled dot-product attention written out (Vaswani et al. 2017, eq. 1), with which the fast backends are compared."""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.model.attention.base import (
    AttentionMetadata,
    ScoreBias,
    SegmentGroup,
    given,
    softcapped,
    visible,
    weights_of,
)
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import PagedSpec


class ReferenceBackend:
    """Computes one segment at a time, with scores in float32."""

    name = "reference"
    graph_safe = False
    gathers_pages = True

    def unsupported(self, layer: AttentionConfig, dtype: torch.dtype, cache: PagedSpec | None) -> str | None:
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
        if cache is not None and metadata.slot_mapping is not None:
            key, value = given(key), given(value)
            cache.write(metadata.slot_mapping, key, value)
        outputs = []
        for segment, (q_len, kv_len) in enumerate(zip(metadata.q_lens, metadata.kv_lens, strict=True)):
            if cache is not None and metadata.block_tables is not None:
                keys, values = cache.read(metadata.block_tables[segment : segment + 1], kv_len)
                k, v = keys[0], values[0]  # [S, K, D]
            else:
                key, value = given(key), given(value)
                rows = slice(metadata.cu_seqlens_k[segment], metadata.cu_seqlens_k[segment + 1])
                k, v = key[rows], value[rows]
            start = metadata.cu_seqlens_q[segment]
            q = query[start : start + q_len]  # [Q, H, D]
            group = metadata.group_of([segment])
            weights = self.weights(q, k, group, metadata.causal, config, bias, sinks)  # [H, Q, S]
            v = v.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)  # [S, H, D]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype))
        return torch.cat(outputs)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        group: SegmentGroup,
        causal: bool,
        config: AttentionConfig,
        bias: ScoreBias | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention weights `[H, Q, S]` of one segment's q `[Q, H, D]` to its k `[S, K, D]`."""
        k = k.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)  # [S, H, D]
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * config.scale  # [H, Q, S]
        if config.softcap is not None:
            scores = softcapped(scores, config.softcap)
        if bias is not None:
            scores = scores + bias(q[None], k[None], group)[0].float()
        mask = visible(group, causal=causal, window=config.window)
        return weights_of(scores.masked_fill(~mask, float("-inf")), sinks)
