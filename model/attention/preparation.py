"""What happens to queries and keys between their projection and attention, for backends that do it themselves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from model.attention.base import AttentionMetadata, ScoreBias
from model.cache.paged import LayerCache
from model.config.layer import AttentionConfig


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """The norm of each head's query or key."""

    gain: Tensor  # [D]
    bias: Tensor | None  # [D]
    eps: float
    centred: bool  # a layer norm, which takes the mean off first; not: RMS


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """A norm of queries and keys, then their rotation by position; at least one of the two."""

    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None  # there is either none of these norms or both
    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine [T, 1, R] for the first R of a head's dimensions
    interleaved: bool = False  # pairs that turn are neighbours, not a half of R apart


class PreparingBackend:
    """A base class of backends that prepare queries and keys and write them into their pages at once."""

    def forward_unprepared(
        self,
        query: Tensor,  # [T, H, D]
        key: Tensor,  # [T, K, D]
        value: Tensor,
        preparation: Preparation,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`forward` (`model.attention.base.AttentionBackend`) of the queries and keys that `preparation` makes."""
        raise NotImplementedError
