"""Position schemes: tables added to embeddings, rotations of queries and keys (Su et al. 2021), biases of scores."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from triptych.model.attention.base import ScoreBias, SegmentGroup, distance_table
from triptych.model.config.attention import AlibiConfig, AttentionConfig, BucketBiasConfig, RopeScaling, RotaryConfig
from triptych.model.linear.base import LinearSpec, Part, Split
from triptych.model.linear.factory import LinearFactory

# -- Rotary positions: queries and keys are rotated by their position (Su et al. 2021); sinusoids of distances. The
# frequencies are kept as long as the process: recorded steps read them where they lie.


@cache
def inverse_frequencies(base: float, size: int, device: torch.device) -> Tensor:
    """Return `base^(-2k / size)`, k < size / 2, in float64; not kept in a module, whose dtype may change."""
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    return torch.pow(base, -exponent).to(device)


@cache
def rotary_frequencies(config: RotaryConfig, device: torch.device) -> Tensor:
    """Return radians per position for each pair of dimensions, `[R / 2]`, with the model's scaling; 0: not rotated.

    With LONGROPE they are `[2, R / 2]`, for short contexts and for long ones.
    """
    theta, factor, dim = config.theta, config.factor, config.dim
    if config.scaling is RopeScaling.DYNAMIC and config.length > config.original_max_positions:
        stretch = factor * config.length / config.original_max_positions - (factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    if config.scaling is RopeScaling.NTK:
        theta *= factor
    plain = inverse_frequencies(theta, dim, device)
    if config.frequencies_again:
        plain = inverse_frequencies(theta, dim // len(config.sections), device).repeat(len(config.sections))
    if config.frequencies_in_turn:
        plain = plain.view(-1, len(config.sections)).T.flatten()
    if config.scaling is RopeScaling.LINEAR:
        plain = plain / factor
    elif config.scaling is RopeScaling.NTK:
        plain = plain / factor ** (2 / dim)
    elif config.scaling is RopeScaling.LLAMA3:
        plain = _llama3(config, plain)
    elif config.scaling is RopeScaling.YARN:
        plain = _yarn(config, plain)
    elif config.scaling is RopeScaling.LONGROPE:
        factors = torch.tensor((config.short_factors, config.long_factors), dtype=plain.dtype, device=device)
        plain = plain / factors
    if config.rotated is not None:
        plain = plain.clone()
        plain[..., config.rotated // 2 :] = 0.0
    return plain.float()


def _llama3(config: RotaryConfig, plain: Tensor) -> Tensor:
    """Return the frequencies of Llama 3.1: wavelengths over the original context / `low_freq_factor` are stretched,
    those below it / `high_freq_factor` are kept, those between are blended."""
    turns = config.original_max_positions * plain / (2 * math.pi)  # of the original context
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / config.factor


def _yarn(config: RotaryConfig, plain: Tensor) -> Tensor:
    """Return the frequencies of YaRN: dimensions that rotate more than `beta_fast` times in the original context are
    kept, fewer than `beta_slow` stretched, with a linear ramp between (Peng et al. 2023, section 3.2)."""

    def dimension(turns: float) -> float:
        spread = config.original_max_positions / (turns * 2 * math.pi)
        return config.dim * math.log(spread) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    at = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    stretched = ((at - low) / (high - low or 0.001)).clamp(0, 1)
    return stretched * plain / config.factor + (1 - stretched) * plain


@cache
def section_of_pairs(sections: tuple[int, ...], pairs: int, *, in_turn: bool, device: torch.device) -> Tensor:
    """Return the index of the coordinate that rotates each pair of dimensions, `[pairs]`."""
    if not in_turn:
        return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections)).to(device)
    found = torch.zeros(pairs, dtype=torch.int64)
    for place, count in enumerate(sections[1:], 1):
        found[place : count * len(sections) : len(sections)] = place
    return found.to(device)


def turns(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, `[T, 1, R]` each, of R rotary dimensions for `rotate` (Su et al. 2021).

    Positions are `[T]`, or `[T, R / 2]` if the pairs of a row have different ones. Frequencies are `[R / 2]`, or
    `[T, R / 2]` if rows have different ones. A pair is two neighbours with `interleaved`, else k and k + R / 2 (Llama).
    """
    each = positions if positions.ndim == 2 else positions[:, None]
    angles = each.float() * frequencies  # [T, R / 2]
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    angles = angles[:, None]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def query_growth(config: RotaryConfig, positions: Tensor) -> Tensor:
    """Return the factors `[T]`, float32, of queries at positions `[T]` (Llama 4)."""
    return 1 + config.growth * torch.log1p(torch.floor(positions.float() / config.original_max_positions))


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """Return `x` `[T, H, D]` rotated by its positions, so that scores depend only on differences of positions."""
    cos, sin = rotary
    part, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    if interleaved:
        first, second = part.unflatten(-1, (-1, 2)).unbind(-1)
        across = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    rotated = part * cos + across * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def sinusoids_of_distances(length: int, size: int, device: torch.device) -> Tensor:
    """Return `[sin(t w_k) | cos(t w_k)]` of distances t from `1 - length` to `length - 1`, `[2 length - 1, size]`."""
    angles = torch.arange(1 - length, length, device=device)[:, None] * inverse_frequencies(10_000.0, size, device)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


# -- Biases of attention scores by position.


class BucketBias(nn.Module):
    """T5's relative bias: one scalar per head and bucket of `key - query`, logarithmic beyond half of the buckets."""

    def __init__(self, config: BucketBiasConfig, num_heads: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.num_buckets = config.num_buckets
        self.max_distance = config.max_distance
        self.bidirectional = bidirectional
        self.weight = nn.Parameter(torch.empty(config.num_buckets, num_heads))
        self._near: Tensor | None = None  # buckets of the distances up to `max_distance`

    def forward(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        buckets = self.bucket(group.k_positions[None, None, :] - group.q_positions[:, :, None])  # [B, Q, S]
        return self.weight[buckets].permute(0, 3, 1, 2)  # [B, H, Q, S]

    def by_distance(self) -> Tensor:
        """Return the biases `[H, 2 R + 1]` of distances -R to R; beyond `max_distance` each side has one bucket."""
        if self._near is None or self._near.device != self.weight.device:
            reach = self.max_distance
            self._near = self.bucket(torch.arange(-reach, reach + 1, device=self.weight.device))
        return self.weight.T.index_select(1, self._near)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each `key - query` (Raffel et al. 2020, section 2.1)."""
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
    """Each head's slope times `key - query`, which is negative for earlier keys (Press et al. 2022)."""

    def __init__(self, config: AlibiConfig) -> None:
        self.config = config

    def __call__(self, query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
        distance = group.k_positions[None, None, :] - group.q_positions[:, :, None]  # [B, Q, S]
        return distance[:, None] * self.slopes(distance.device)[:, None, None]  # [B, H, Q, S]

    def slopes(self, device: torch.device) -> Tensor:
        """Return the slopes `[H]` in float32."""
        return _slopes(self.config, device)


@cache  # as long as the process: recorded steps read them where they lie
def _slopes(config: AlibiConfig, device: torch.device) -> Tensor:
    return torch.tensor(config.slopes, device=device)


class StepBias:
    """A bias that is computed once for each step, because all layers of a stack share its table and positions."""

    def __init__(self, bias: ScoreBias) -> None:
        self._bias = bias
        # The group is kept with its result, so that no other group gets its id while that is a key.
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
