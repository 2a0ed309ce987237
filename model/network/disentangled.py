"""Disentangled attention: scores between contents and relative positions (He et al. 2021, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from triptych.model.attention.base import SegmentGroup
from triptych.model.config.attention import AttentionConfig, DisentangledConfig, NormConfig
from triptych.model.linear.base import Linear, LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.norms import build_norm


class RelativeTable(nn.Module):
    """A vector for each relative position, which the layers of a stack project to keys and queries of their own."""

    def __init__(self, span: int, norm: NormConfig | None, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * span, size))
        self.norm = build_norm(norm, size)

    def forward(self) -> Tensor:  # [2 span, d]
        vectors: Tensor = self.norm(self.weight)
        return vectors


@dataclass(frozen=True, slots=True)
class RelativeVectors:
    """The vectors of relative positions: one key and one query per head for each row of the table."""

    config: AttentionConfig
    keys: Tensor | None  # [2 span, H, D]; None: no scores from content to position
    queries: Tensor | None  # [2 span, H, D]; None: none from position to content

    def __call__(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        """`[B, H, Q, S]`, scaled, of queries `[B, Q, H, D]` and keys `[B, S, H, D]`."""
        rows = relative_rows(self._position, group.q_positions[:, :, None] - group.k_positions)  # [B, Q, S]
        rows = rows[:, None].expand(-1, self.config.num_heads, -1, -1)
        scores = torch.zeros((), dtype=query.dtype, device=query.device)
        if self.keys is not None:
            scores = scores + torch.einsum("bqhd,rhd->bhqr", query, self.keys).gather(-1, rows)
        if self.queries is not None:
            by_key = torch.einsum("bshd,rhd->bhsr", key, self.queries).gather(-1, rows.transpose(2, 3))
            scores = scores + by_key.transpose(2, 3)
        return scores * self.config.scale

    def by_reach(self, reach: int) -> tuple[Tensor | None, Tensor | None]:
        """Keys and queries `[2 reach, H, D]` for the distances from 1 - reach to reach.

        Of keys that is the distance from query to key, `key - query`; of queries it is `query - key`.
        """
        distances = torch.arange(1 - reach, reach + 1)
        keys = None if self.keys is None else self.keys[relative_rows(self._position, -distances)]
        queries = None if self.queries is None else self.queries[relative_rows(self._position, distances)]
        return keys, queries

    @property
    def _position(self) -> DisentangledConfig:
        assert isinstance(self.config.position, DisentangledConfig)
        return self.config.position


class DisentangledBias(nn.Module):
    """The projections of a layer from relative positions to their keys and queries."""

    def __init__(self, config: AttentionConfig, hidden_size: int, linear: LinearFactory) -> None:
        super().__init__()
        position = config.position
        assert isinstance(position, DisentangledConfig)
        self.config = config
        self.shared = position.shared
        self.key = self.query = None
        if not position.shared and position.content_to_position:
            self.key = linear(self._spec("key", hidden_size, position.key_bias))
        if not position.shared and position.position_to_content:
            self.query = linear(self._spec("query", hidden_size, True))

    def vectors(self, table: Tensor, qkv: Linear) -> RelativeVectors:
        """Return the keys and queries of the table's rows `[2 span, d]`; `qkv` projects contents."""
        config, heads = self.config, (self.config.num_heads, self.config.head_dim)
        if not self.shared:
            projected = [None if project is None else project(table) for project in (self.key, self.query)]
        else:
            position = config.position
            assert isinstance(position, DisentangledConfig)
            queries, keys, _ = qkv(table).split((config.query_size, config.kv_size, config.kv_size), dim=-1)
            projected = [
                keys if position.content_to_position else None,
                queries if position.position_to_content else None,
            ]
        keys, queries = (None if rows is None else rows.unflatten(-1, heads) for rows in projected)
        return RelativeVectors(config, keys, queries)

    def _spec(self, name: str, hidden_size: int, bias: bool) -> LinearSpec:
        return LinearSpec(name, hidden_size, (Part(self.config.num_heads, self.config.head_dim),), bias, Split.OUTPUTS)


def relative_rows(config: DisentangledConfig, distance: Tensor) -> Tensor:
    """Return the table's row of each `query - key`: logarithmic buckets beyond half of the span, as in DeBERTa-v2."""
    if config.max_distance is not None:
        middle = config.span // 2
        far = distance.abs().clamp(min=middle)
        # In float32 as in `transformers`: a distance at the edge of a bucket depends on the rounding.
        ratio = torch.log(far / middle) / torch.log(torch.tensor((config.max_distance - 1) / middle))
        bucket = (torch.ceil(ratio * (middle - 1)) + middle).long() * distance.sign()
        distance = torch.where(distance.abs() <= middle, distance, bucket)
    return (distance + config.span).clamp(0, 2 * config.span - 1)
