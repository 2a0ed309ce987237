"""Position schemes: tables added to embeddings, rotations of queries and keys, biases of scores."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from model.attention.base import ScoreBias, SegmentGroup, distance_table
from model.config.layer import (
    AlibiConfig,
    AttentionConfig,
    BucketBiasConfig,
)
from model.linear.base import LinearSpec, Part, Split
from model.linear.factory import LinearFactory


class BucketBias(nn.Module):
    """T5's relative bias: one scalar per head and bucket of `key - query`, logarithmic beyond half of the buckets."""

    def __init__(self, config: BucketBiasConfig, num_heads: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.num_buckets = config.num_buckets
        self.max_distance = config.max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(config.num_buckets, num_heads))
        self._near: Tensor | None = None  # buckets of the distances that differ

    def forward(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        buckets = self.bucket(group.k_positions[None, None, :] - group.q_positions[:, :, None])  # [B, Q, S]
        return self.weight[buckets].permute(0, 3, 1, 2)  # [B, H, Q, S]

    def by_distance(self) -> Tensor:
        """`[H, 2 R + 1]` of the distances -R to R: from `max_distance` on there is one bucket a side."""
        if self._near is None or self._near.device != self.weight.device:
            reach = self.max_distance
            self._near = self.bucket(torch.arange(-reach, reach + 1, device=self.weight.device))
        return self.weight.T.index_select(1, self._near)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each `key - query` (Raffel et al. 2020, section 2.1)."""
        count = self.num_buckets
        offset = torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            offset = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = -distance.clamp(max=0)
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return offset + torch.where(distance < exact, distance, far)


class AlibiBias:
    """A slope of each head times `key - query`, which is negative for what came before (Press et al. 2022)."""

    def __init__(self, config: AlibiConfig) -> None:
        self.config = config

    def __call__(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        distance = group.k_positions[None, None, :] - group.q_positions[:, :, None]  # [B, Q, S]
        return distance[:, None] * self.slopes(distance.device)[:, None, None]  # [B, H, Q, S]

    def slopes(self, device: torch.device) -> Tensor:
        """`[H]` float32."""
        return _slopes(self.config, device)


@cache  # as long as the process: recorded steps read them where they lie
def _slopes(config: AlibiConfig, device: torch.device) -> Tensor:
    return torch.tensor(config.slopes, device=device)


class StepBias:
    """A bias computed once a step: all layers of a stack share the table and the positions."""

    def __init__(self, bias: ScoreBias) -> None:
        self._bias = bias
        # The group is kept beside its result, so that no other can take its id while that is a key.
        self._known: dict[int, tuple[SegmentGroup, Tensor]] = {}
        self._by_distance: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        if id(group) not in self._known:
            self._known[id(group)] = (group, self._bias(query, key, group))
        return self._known[id(group)][1]

    def by_distance(self) -> Tensor | None:
        if self._by_distance is None:
            self._by_distance = distance_table(self._bias)
        return self._by_distance


class RelativeBias(nn.Module):
    """XLNet's scores of position and segment (Dai et al. 2019, section 3.3; Yang et al. 2019, section 2.5).

    A query `q`, which has the content offset u in it already, adds `(q - u + v) . W_r R(i - j)` for the sinusoid R of
    its distance to each key, and `(q - u + w) . s` for one of two vectors s: same segment or another.
    """

    def __init__(self, config: AttentionConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        heads = (config.num_heads, config.head_dim)
        self.config = config
        self.project = linear(LinearSpec("project", hidden_size, (Part(*heads),), bias=False, split=Split.OUTPUTS))
        self.position_offset = nn.Parameter(torch.empty(heads))
        self.segment_offset = nn.Parameter(torch.empty(heads))
        self.segments = nn.Parameter(torch.empty(2, *heads))

    def scores(
        self, query: Tensor, group: SegmentGroup, content_offset: Tensor, sinusoids: Tensor, types: Tensor | None
    ) -> Tensor:
        """`[B, H, Q, S]` of queries `[B, Q, H, D]`.

        `sinusoids` `[2 S - 1, d]` are of the distances of every query to every key, `types` `[T]` the packed tokens'
        segments (None: all one).
        """
        plain = query - content_offset
        by_position = self._by_position(plain + self.position_offset, group, sinusoids)
        choice = torch.einsum("bqhd,shd->bhqs", plain + self.segment_offset, self.segments)  # [B, H, Q, 2]
        return (by_position + self._by_segment(choice, group, types)) * self.config.scale

    def _by_position(self, query: Tensor, group: SegmentGroup, sinusoids: Tensor) -> Tensor:
        keys = self.project(sinusoids).unflatten(-1, (self.config.num_heads, self.config.head_dim))
        scores = torch.einsum("bqhd,rhd->bhqr", query, keys)
        at = group.q_positions[:, :, None] - group.k_positions + group.kv_len - 1  # [B, Q, S]
        return scores.gather(-1, at[:, None].expand(-1, scores.shape[1], -1, -1))

    def _by_segment(self, choice: Tensor, group: SegmentGroup, types: Tensor | None) -> Tensor:
        if types is None:
            return choice[..., :1]
        own = (types if group.rows is None else types[group.rows]).view(group.size, -1)  # [B, L]
        differs = (own[:, :, None] != own[:, None, :])[:, None]  # [B, 1, Q, S]
        return torch.where(differs, choice[..., 1:], choice[..., :1])
