"""Rotary positions: queries and keys turned by their position (Su et al. 2021); sinusoids of distances.

Frequencies are kept as long as the process: recorded steps read them where they lie.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from model.config.layer import RopeScaling, RotaryConfig


@cache
def inverse_frequencies(base: float, size: int, device: torch.device) -> Tensor:
    """`base^(-2k / size)` for k < size / 2, float64. Kept outside of modules: a change of dtype must not round it."""
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    return torch.pow(base, -exponent).to(device)


@cache
def rotary_frequencies(config: RotaryConfig, device: torch.device) -> Tensor:
    """Radians a position for each pair of dimensions `[R / 2]`, stretched as the model was; 0 of those that stand.

    LONGROPE: `[2, R / 2]`, for short contexts and for long ones.
    """
    theta, factor, dim = config.theta, config.factor, config.dim
    if config.scaling is RopeScaling.DYNAMIC and config.length > config.original_max_positions:
        stretch = factor * config.length / config.original_max_positions - (factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    if config.scaling is RopeScaling.NTK:
        theta *= factor
    plain = inverse_frequencies(theta, dim, device)
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
    if config.turning is not None:
        plain = plain.clone()
        plain[..., config.turning // 2 :] = 0.0
    return plain.float()


def _llama3(config: RotaryConfig, plain: Tensor) -> Tensor:
    """Wavelengths beyond the original context over `low_freq_factor` are stretched, those below it over
    `high_freq_factor` are not, those between are blended."""
    turns = config.original_max_positions * plain / (2 * math.pi)  # of the original context
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / config.factor


def _yarn(config: RotaryConfig, plain: Tensor) -> Tensor:
    """Dimensions that turn more than `beta_fast` times in the original context are kept, fewer than `beta_slow`
    stretched, a linear ramp over the dimensions between (Peng et al. 2023, section 3.2)."""

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


def turns(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position `[T]` for `rotate` (Su et al. 2021; halves rotated as Llama does).

    Two of `[T, 1, R]` for the R dimensions that turn by `frequencies` (`[R / 2]`, or each row by its own `[T, R / 2]`),
    to be broadcast over heads; with `interleaved` pairs are neighbours.
    """
    angles = positions[:, None].float() * frequencies  # [T, R / 2]
    angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    angles = angles[:, None]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def query_growth(config: RotaryConfig, positions: Tensor) -> Tensor:
    """What queries at positions `[T]` are multiplied by, `[T]` float32."""
    return 1 + config.growth * torch.log1p(torch.floor(positions.float() / config.original_max_positions))


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """`x` `[T, H, D]` turned by its positions: scores then depend on differences of positions only."""
    cos, sin = rotary
    turning, still = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
    if interleaved:
        first, second = turning.unflatten(-1, (-1, 2)).unbind(-1)
        across = torch.stack((-second, first), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        across = torch.cat((-second, first), dim=-1)
    turned = turning * cos + across * sin
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


def sinusoids_of_distances(length: int, size: int, device: torch.device) -> Tensor:
    """`[sin(t w_k) | cos(t w_k)]` of the distances t from `1 - length` to `length - 1`: `[2 length - 1, size]`."""
    angles = torch.arange(1 - length, length, device=device)[:, None] * inverse_frequencies(10_000.0, size, device)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
