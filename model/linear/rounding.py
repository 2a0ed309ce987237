"""Rounding of floats to integers in groups that share a scale, by the rules of the C kernels (`quantise.c`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

# What the number with the largest absolute value becomes before it is rounded and cut off at -8 and 7.
_LARGEST = (-8, -7, -7.25, -7.5, -7.75, -8.25, -8.5, -8.75, -9, -9.25, -6.75, -6.5, 7, 6.75, 7.25, 7.5, 6.5, 7.75)
_LEAST = 1e-30  # a group without anything larger is zeros


def rounded_in_groups(rows: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Rows `[R, K]` as integers of 4 or 8 bits, int8 `[R, K]`, and a float32 scale for each `group` of a row; 0: one.

    In 8 bits the largest absolute value becomes 127. In 4 bits several scales are tried and that with the least
    squared error is kept. What is no number makes its scale NaN.
    """
    width = rows.shape[1]
    wide = pad(rows.float(), (0, -width % group if group else 0)).unflatten(1, (-1, group or width))
    numbers, scales = _rounded_to_4_bits(wide) if bits == 4 else _rounded_to_8_bits(wide)
    return numbers.to(torch.int8).flatten(1)[:, :width], scales


def _rounded_to_8_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    scales = wide.abs().amax(-1) / 127
    return (wide / scales.clamp(min=_LEAST)[..., None]).nan_to_num(0, 0, 0).round(), scales


def _rounded_to_4_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    """The best scale of integers q is sum(x q) / sum(q q), with the error sum(x x) - sum(x q)^2 / sum(q q)."""
    most = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    usable = most.isfinite() & (most.abs() >= _LEAST)
    whole = torch.where(usable, wide, 0)
    best, scale, inverse = (torch.zeros_like(most) for _ in range(3))
    for largest in _LARGEST:
        times = largest / torch.where(usable, most, 1)
        numbers = (whole * times).round().clamp(-8, 7)
        product, square = (whole * numbers).sum(-1, keepdim=True), (numbers * numbers).sum(-1, keepdim=True)
        found = product / square.clamp(min=1)
        better = found * product > best
        best = torch.where(better, found * product, best)
        scale, inverse = torch.where(better, found, scale), torch.where(better, times, inverse)
    scale = torch.where(usable, scale, most - most)
    return (whole * inverse).round().clamp(-8, 7), scale[..., 0]
