"""Attention through torch's scaled_dot_product_attention, one dense batch for each group of equal segments.

Prompts without cached keys attend to their own rows; other segments gather their pages first. The gather costs a
copy of the cache each step: the native backends exist to avoid it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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


class SdpaBackend:
    """The backend for every device of torch; it has gradients where there is no cache."""

    name = "sdpa"
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
        output: Tensor | None = None
        for group in metadata.groups:
            q = _take(query, group.rows, group.size)  # [B, Q, H, D]
            if cache is not None and metadata.block_tables is not None:
                read = cache.read(metadata.block_tables[group.segments], group.kv_len)
                k, v = (pages.to(query.dtype) for pages in read)  # pages of 8 bits become float32
            else:
                key, value = given(key), given(value)
                k, v = _take(key, group.key_rows, group.size), _take(value, group.key_rows, group.size)
            mixed = _attend(q, k, v, group, metadata.causal, config, bias, sinks).flatten(0, 1)  # [B * Q, H, D]
            if group.rows is None:
                return mixed
            output = torch.empty_like(query) if output is None else output
            output = (
                output.index_copy(0, group.rows, mixed)
                if mixed.requires_grad
                else output.index_copy_(0, group.rows, mixed)
            )
        return query if output is None else output


def _take(packed: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """Return packed rows as `[size, L, heads, D]`."""
    taken = packed if rows is None else packed.index_select(0, rows)
    return taken.unflatten(0, (size, -1))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: SegmentGroup,
    causal: bool,
    config: AttentionConfig,
    bias: ScoreBias | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention `[B, Q, H, D]` of q `[B, Q, H, D]` to k, v `[B, S, K, D]`."""
    plain = bias is None and not group.ragged and (config.window is None or config.window >= group.kv_len)
    plain = plain and (group.key_ends is None or not causal)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # heads before length
    if config.softcap is not None or sinks is not None:
        mixed = _written_out(q, k, v, config, _mask(q, k, group, causal, config, bias), sinks)
    elif plain and (group.q_len == 1 or not causal):
        mixed = _sdpa(q, k, v, config, None, False)
    elif plain and group.q_len == group.kv_len:
        mixed = _sdpa(q, k, v, config, None, True)
    else:
        mixed = _sdpa(q, k, v, config, _mask(q, k, group, causal, config, bias), False)
    return mixed.transpose(1, 2)


def _mask(
    q: Tensor, k: Tensor, group: SegmentGroup, causal: bool, config: AttentionConfig, bias: ScoreBias | None
) -> Tensor:
    """Return a mask `[B, 1, Q, S]`, or scores to add `[B, H, Q, S]`."""
    seen = visible(group, causal=causal, window=config.window)
    if bias is None:
        return seen[:, None]
    scores = bias(q.transpose(1, 2), k.transpose(1, 2), group).to(q.dtype)
    return scores.masked_fill(~seen[:, None], float("-inf"))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Tensor | None, causal: bool) -> Tensor:
    """Return attention `[B, H, Q, D]` of q `[B, H, Q, D]` to k, v `[B, K, S, D]`."""
    heads_per_kv = config.num_heads // config.num_kv_heads
    if heads_per_kv > 1 and q.shape[2] == 1:
        # A single query: its heads become the queries of their shared key head, and no key is repeated.
        grouped = q.unflatten(1, (config.num_kv_heads, heads_per_kv)).squeeze(3)  # [B, K, G, D]
        if mask is not None and mask.shape[1] > 1:
            mask = mask.unflatten(1, (config.num_kv_heads, heads_per_kv)).squeeze(3)
        mixed = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=config.scale)
        return mixed.flatten(1, 2).unsqueeze(2)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=config.scale, enable_gqa=heads_per_kv > 1
    )


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, config: AttentionConfig, mask: Tensor, sinks: Tensor | None
) -> Tensor:
    """Compute `_sdpa` with a softcap or sinks, which torch's function lacks."""
    heads_per_kv = config.num_heads // config.num_kv_heads
    k, v = (x.repeat_interleave(heads_per_kv, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * config.scale  # [B, H, Q, S]
    if config.softcap is not None:
        scores = softcapped(scores, config.softcap)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    return weights_of(scores, sinks).to(v.dtype) @ v
