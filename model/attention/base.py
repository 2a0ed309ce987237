"""The interface of attention backends: packed queries, where their keys are, and what a backend computes.

Shapes: T query tokens of B segments, H query heads, K key/value heads, D head_dim, N pool blocks of `block_size` slots.
There is no padding: segment b has rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]`. A segment's last query is at its last
key (bottom-right alignment), so query j of b has position `kv_lens[b] - q_lens[b] + j` among the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import AttentionConfig
from triptych.model.config.cache import PagedSpec
from triptych.model.system import devices

UNEVEN_KEYS = 2048  # the least number of keys that is worth a second launch to divide them
UNEVEN_TIMES = 4  # the mean


@dataclass
class DeviceLengths:
    """The lengths of a step on the device, and bounds on them, which determine the size of a launch.

    A launch that is captured with these tensors may be replayed with other lengths in them, up to the bounds. A segment
    of padding has a kv_len of 0 (its output is zeros) and slot -1 (nothing is written).
    """

    cu_seqlens_q: Tensor  # [B + 1] int32 or int64
    kv_lens: Tensor  # [B]
    max_q_len: int  # 1: every segment has one query
    max_kv_len: int
    cu_seqlens_k: Tensor | None = None  # [B + 1] of keys that are packed rows
    singles: int = 0  # the number of first segments with one query (decoding); the others are prompts
    max_single_kv_len: int = 0  # of those
    uneven: bool = False  # a few segments with one query have nearly all keys, so work is divided as for one segment

    @cached_property
    def apart(self) -> tuple[DeviceLengths, DeviceLengths]:
        """The lengths of the first `singles` segments, and of the others; starts still count all rows."""
        count = self.singles
        return (
            DeviceLengths(
                self.cu_seqlens_q[: count + 1], self.kv_lens[:count], 1, self.max_single_kv_len, uneven=self.uneven
            ),
            DeviceLengths(self.cu_seqlens_q[count:], self.kv_lens[count:], self.max_q_len, self.max_kv_len),
        )


def are_uneven(kv_lens: Sequence[int]) -> bool:
    """Return whether one segment with a single query has most of the keys, so that the others would wait for it."""
    longest = max(kv_lens, default=0)
    return longest >= UNEVEN_KEYS and longest * len(kv_lens) > UNEVEN_TIMES * sum(kv_lens)


@dataclass
class AttentionMetadata:
    """Which rows attend to which keys in one step; all layers share it."""

    q_lens: tuple[int, ...]  # queries of each segment, B
    kv_lens: tuple[int, ...]  # keys of each segment, including those of this step
    causal: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    block_tables: Tensor | None = None  # [B, M] pool blocks of each segment; None: keys are the packed rows given
    slot_mapping: Tensor | None = None  # [T] pool slots for this step's keys; None: nothing is written
    device_lengths: DeviceLengths | None = None  # static buffers of the caller; None: made from the lens on first use
    # [T] of causal attention: the keys that each query sees; None: those up to itself. More if a picture's tokens see
    # each other both ways; never fewer than the query before in its segment. Triton's kernels do not read it.
    key_ends: Tensor | None = None

    @cached_property
    def cu_seqlens_q(self) -> tuple[int, ...]:
        return (0, *accumulate(self.q_lens))

    @cached_property
    def cu_seqlens_k(self) -> tuple[int, ...]:
        return (0, *accumulate(self.kv_lens))

    def on_device(self) -> DeviceLengths:
        """Return the lengths as tensors on the device, copied at once."""
        if self.device_lengths is None:
            count = len(self.q_lens)
            lens = [*self.cu_seqlens_q, *self.cu_seqlens_k, *self.kv_lens]
            on_device = devices.device_tensor(lens, self.device, torch.int32)
            queries, keys, kv_lens = on_device.split((count + 1, count + 1, count))
            self.device_lengths = DeviceLengths(
                queries, kv_lens, max(self.q_lens, default=0), max(self.kv_lens, default=0), keys
            )
        return self.device_lengths

    @cached_property
    def reading(self) -> AttentionMetadata:
        """The same for layers that read the keys of an earlier layer, and write none."""
        return replace(self, slot_mapping=None)

    @cached_property
    def groups(self) -> tuple[SegmentGroup, ...]:
        """Groups of segments for one batched product each: equal lengths, or single queries over any lengths."""
        members: dict[tuple[int, int], list[int]] = {}
        for index, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            key = (1, -1) if q_len == 1 and self.block_tables is not None else (q_len, kv_len)
            members.setdefault(key, []).append(index)
        return tuple(self.group_of(indices) for indices in members.values())

    def group_of(self, indices: list[int]) -> SegmentGroup:
        """Return these segments as one group; their lengths must allow it."""
        q_len = self.q_lens[indices[0]]
        kv_lens, ends = [self.kv_lens[index] for index in indices], self.key_ends
        rows = self._rows(indices, self.cu_seqlens_q, q_len)
        return SegmentGroup(
            rows=rows,
            key_rows=self._rows(indices, self.cu_seqlens_k, kv_lens[0]) if self.block_tables is None else None,
            segments=None if self.block_tables is None else self._tensor(indices),
            q_len=q_len,
            kv_len=max(kv_lens),
            kv_lens=self._tensor(kv_lens),
            ragged=min(kv_lens) != max(kv_lens),
            size=len(indices),
            key_ends=None if ends is None else (ends if rows is None else ends[rows]).view(len(indices), q_len),
        )

    def _rows(self, indices: list[int], starts: tuple[int, ...], length: int) -> Tensor | None:
        if len(indices) == len(self.q_lens):
            return None  # every row in order: no gather
        offsets = self._tensor([starts[index] for index in indices])
        return (offsets[:, None] + torch.arange(length, device=self.device)).flatten()

    def _tensor(self, values: list[int]) -> Tensor:
        return devices.device_tensor(values, self.device, torch.int64)


@dataclass
class SegmentGroup:
    """Segments that are computed together as a dense batch of `size`."""

    rows: Tensor | None  # [size * q_len] of the packed queries; None: all
    key_rows: Tensor | None  # [size * kv_len] of the packed keys; None: all, or keys lie in the pool
    segments: Tensor | None  # [size] of the block tables; None: keys are packed
    q_len: int
    kv_len: int  # the longest
    kv_lens: Tensor  # [size]
    ragged: bool  # kv_lens differ
    size: int
    key_ends: Tensor | None = None  # [size, q_len] how many keys each query sees; None: those up to itself

    @cached_property
    def q_positions(self) -> Tensor:
        """The position of each query among its segment's keys, `[size, q_len]`."""
        return self.kv_lens[:, None] - self.q_len + torch.arange(self.q_len, device=self.kv_lens.device)

    @cached_property
    def k_positions(self) -> Tensor:
        """The positions of keys, `[kv_len]`."""
        return torch.arange(self.kv_len, device=self.kv_lens.device)


class ScoreBias(Protocol):
    """A bias that is added to the scaled scores."""

    def __call__(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        """Return the bias `[B, H, Q, S]` of a group's queries `[B, Q, H, D]` and keys `[B, S, K, D]`."""


# Biases that kernels compute, recognised by their methods: `isinstance` of a protocol takes 20 us on each launch.


def distance_table(bias: ScoreBias) -> Tensor | None:
    """Return what a bias adds for each distance of a key from its query; None if it depends on more than that.

    `[H, 2 R + 1]`, for keys from R before to R after the query; beyond R it is as at R.
    """
    by_distance: Callable[[], Tensor | None] | None = getattr(bias, "by_distance", None)
    return None if by_distance is None else by_distance()


def slopes(bias: ScoreBias, device: torch.device) -> Tensor | None:
    """Return the slopes `[H]` float32 of a bias that is the head's slope times the distance (ALiBi), or None."""
    of_heads: Callable[[torch.device], Tensor] | None = getattr(bias, "slopes", None)
    return None if of_heads is None else of_heads(device)


class AttentionBackend(Protocol):
    """A way to compute attention; it has no state, so models may share it."""

    name: str
    graph_safe: bool  # a launch over static buffers may be captured, and replayed over other lengths in them
    gathers_pages: bool  # copies the pages of a layer each step, instead of reading them where they lie

    def unsupported(self, layer: AttentionConfig, dtype: torch.dtype, cache: PagedSpec | None) -> str | None:
        """Return why it cannot compute a layer's attention; None if it can.

        `dtype` is that of queries, and of keys and values in packed rows; `cache` describes the pages, None: there are
        none.
        """

    def forward(
        self,
        query: Tensor,  # [T, H, D]
        key: Tensor | None,  # [T', K, D]; None: all keys are in the pool (cross attention after its first step)
        value: Tensor | None,
        cache: LayerCache | None,
        metadata: AttentionMetadata,
        config: AttentionConfig,
        bias: ScoreBias | None = None,
        sinks: Tensor | None = None,  # [H]
    ) -> Tensor:
        """Return `softmax(softcap(q k^T * scale) + bias) v`, `[T, H, D]`; a sink is one more score, without a value.

        Writes the keys and values of all segments into the cache before any query reads: a segment's table may name
        blocks that another segment fills in the same step (`triptych.model.engine.scheduling.block_manager`).
        """


@runtime_checkable
class CompiledBackend(AttentionBackend, Protocol):
    """A backend that compiles each new kind of launch, which should happen before a request needs it."""

    def launch_bounds(
        self,
        config: AttentionConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        most_queries: int,
        most_keys: int,
        biased: bool,
        paged: bool,
    ) -> list[tuple[int, int]]:
        """Return (max_q_len, max_kv_len) of `DeviceLengths` for each kind of launch that steps may need.

        A launch depends on bounds alone, so one query in one segment with these compiles what real steps need.
        `most_queries` of a segment and `most_keys` are what a step has at most.
        """


def refuse_gradients(backend: AttentionBackend, query: Tensor) -> None:
    """Raise `RuntimeError` for a query that requires gradients, which the backend's kernels do not compute."""
    if query.requires_grad:
        raise RuntimeError(f"the {backend.name} backend computes no gradients: train with torch's (sdpa)")


def given(tensor: Tensor | None) -> Tensor:
    """Return the keys or values of this step; only metadata with all keys in the pool may leave them out."""
    assert tensor is not None, "keys and values are neither given nor in the pool"
    return tensor


def softcapped(scores: Tensor, softcap: float) -> Tensor:
    """Return `softcap * tanh(scores / softcap)`, which is near the scores while they are small, and bounded."""
    return torch.tanh(scores / softcap) * softcap


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores `[..., H, Q, S]` together with each head's sink `[H]` (Xiao et al. 2023)."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]


def visible(group: SegmentGroup, *, causal: bool, window: int | None) -> Tensor:
    """Return which keys the queries of a group see, `[B, Q, S]`."""
    q, k = group.q_positions[:, :, None], group.k_positions[None, None, :]
    mask = k < group.kv_lens[:, None, None]  # [B, 1, S]
    if causal:
        mask = mask & (k <= q if group.key_ends is None else k < group.key_ends[:, :, None])
    if window is not None:
        mask = mask & ((q - k if causal else (q - k).abs()) < window)
    return mask.expand(-1, q.shape[1], -1)


# -- Norms and rotations of queries and keys, for backends that compute these themselves.


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """The norm of each head's query or key."""

    gain: Tensor  # [D]
    bias: Tensor | None  # [D]
    eps: float
    centred: bool  # a LayerNorm, which subtracts the mean; else an RMS norm


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """A norm of queries and keys, then their rotation by position; at least one of the two."""

    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None  # given if the query's norm is
    rotary: tuple[Tensor, Tensor] | None = None  # cosine and sine [T, 1, R] for the first R of a head's dimensions
    interleaved: bool = False  # rotated pairs are neighbours, else they are R / 2 apart


class PreparingBackend:
    """A base class of backends that apply norms and rotations and write the pages at once."""

    prepares = True  # False if the kernel for it is broken

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
        """Compute `AttentionBackend.forward` with queries and keys after `preparation`."""
        raise NotImplementedError
