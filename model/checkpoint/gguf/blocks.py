"""Blocks of GGUF's number formats as whole numbers, scales and offsets; what these stand for, as ggml computes it.

A number is `integer * scale + offset`, computed in float32 in this order, of groups of 16 or 32 that share a scale. The
layouts are those of ggml's `ggml-common.h` and `ggml-quants.c` (`dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.model.checkpoint.gguf import grid_blocks as grids

# The values of the 4 bits of IQ4_NL and IQ4_XS.
_NONLINEAR = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
# Twice the values of the 4 bits of MXFP4: a sign, 2 bits of exponent and 1 of fraction.
_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)

Factors = tuple[Tensor, Tensor | None]  # scales and offsets, float32 [N, groups]; None: there are no offsets


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How blocks of a format, uint8 `[N, bytes]`, are read."""

    group: int  # numbers that share a scale
    bits: int  # that hold an integer, less `centre`
    centre: int
    offsets: bool
    integers: Callable[[Tensor], Tensor]  # int8 [N, groups, group]
    factors: Callable[[Tensor], Factors]

    def values(self, blocks: Tensor) -> Tensor:
        """Return the numbers that blocks stand for, float32 `[N, numbers]`."""
        scale, offset = self.factors(blocks)
        found = self.integers(blocks).float() * scale.unsqueeze(-1)
        if offset is not None:
            found += offset.unsqueeze(-1)
        return found.flatten(1)


def _floats(part: Tensor) -> Tensor:
    """Float16 numbers that lie in bytes `[N, 2 * count]`, as float32."""
    return part.contiguous().view(torch.float16).float()


def _nibbles(part: Tensor, run: int) -> Tensor:
    """Bytes `[N, count]` as `[N, 2 * count / run, run]`: the lower halves of each run of bytes, then the upper ones."""
    runs = part.reshape(len(part), -1, run)
    found = torch.empty(len(part), runs.shape[1], 2, run, dtype=torch.uint8)
    torch.bitwise_and(runs, 15, out=found[:, :, 0])
    torch.bitwise_right_shift(runs, 4, out=found[:, :, 1])
    return found.flatten(1, 2)


def _shifted(part: Tensor, run: int, shifts: range) -> Tensor:
    """Bytes `[N, count]` as `[N, count / run * shifts, run]`: each run shifted to the right by each of these."""
    by = torch.tensor(list(shifts), dtype=torch.uint8).view(1, 1, -1, 1)
    return (part.reshape(len(part), -1, 1, run) >> by).flatten(1, 2)


def _signed(numbers: Tensor, centre: int = 0) -> Tensor:
    """Numbers of up to 7 bits in bytes, less `centre`, in their place."""
    return numbers.view(torch.int8).sub_(centre) if centre else numbers.view(torch.int8)


def _one(blocks: Tensor) -> Factors:
    """A scale in front."""
    return _floats(blocks[:, :2]), None


def _two(blocks: Tensor) -> Factors:
    """A scale and an offset in front."""
    return _floats(blocks[:, :2]), _floats(blocks[:, 2:4])


def _q4_0(blocks: Tensor) -> Tensor:
    return _signed(_nibbles(blocks[:, 2:], 16).reshape(-1, 1, 32), 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _signed(_nibbles(blocks[:, 4:], 16).reshape(-1, 1, 32))


def _fifth_bits(part: Tensor) -> Tensor:
    """32 bits in 4 bytes `[N, 4]`, each as the fifth bit of a number, `[N, 1, 32]`."""
    by = torch.arange(8, dtype=torch.uint8)
    return ((part.unsqueeze(-1) >> by & 1) << 4).reshape(-1, 1, 32)


def _q5_0(blocks: Tensor) -> Tensor:
    return _signed(_nibbles(blocks[:, 6:], 16).reshape(-1, 1, 32) | _fifth_bits(blocks[:, 2:6]), 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _signed(_nibbles(blocks[:, 8:], 16).reshape(-1, 1, 32) | _fifth_bits(blocks[:, 4:8]))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).unsqueeze(1)


def _k_factors(blocks: Tensor) -> Factors:
    """Q4_K and Q5_K: scales and minima of 6 bits, 8 of each in 12 bytes, both with a scale of their own."""
    low, minimum, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), dim=1).float()
    minima = torch.cat((minimum & 63, (high >> 4) | (minimum >> 2 & 48)), dim=1).float()
    return _floats(blocks[:, :2]) * scales, -(_floats(blocks[:, 2:4]) * minima)


def _q4_k(blocks: Tensor) -> Tensor:
    return _signed(_nibbles(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    fifth = (_shifted(blocks[:, 16:48], 32, range(8)) & 1) << 4
    return _signed(_nibbles(blocks[:, 48:], 32) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 128:192], 32, range(0, 8, 2)) & 3
    return _signed(low | high << 4, 32).view(-1, 16, 16)


def _q6_k_factors(blocks: Tensor) -> Factors:
    return _floats(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float(), None


def _q2_k(blocks: Tensor) -> Tensor:
    return _signed(_shifted(blocks[:, 16:80], 32, range(0, 8, 2)) & 3).view(-1, 16, 16)


def _q2_k_factors(blocks: Tensor) -> Factors:
    scales, minima = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    return _floats(blocks[:, 80:82]) * scales, -(_floats(blocks[:, 82:]) * minima)


def _q3_k(blocks: Tensor) -> Tensor:
    low = _signed(_shifted(blocks[:, 32:96], 32, range(0, 8, 2)) & 3)
    four = ((_shifted(blocks[:, :32], 32, range(8)) & 1) ^ 1) << 2  # a set bit means that nothing is subtracted
    return (low - _signed(four)).view(-1, 16, 16)


def _q3_k_factors(blocks: Tensor) -> Factors:
    four = _nibbles(blocks[:, 96:104], 8).flatten(1)
    two = _shifted(blocks[:, 104:108], 4, range(0, 8, 2)).flatten(1) & 3
    return _floats(blocks[:, 108:]) * _signed(four | two << 4, 32).float(), None


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _NONLINEAR[_nibbles(blocks[:, 2:], 16).reshape(-1, 1, 32).int()]


def _iq4_xs(blocks: Tensor) -> Tensor:
    return _NONLINEAR[_nibbles(blocks[:, 8:], 16).reshape(-1, 8, 32).int()]


def _iq4_xs_factors(blocks: Tensor) -> Factors:
    four = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    two = (blocks[:, 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8)).flatten(1) & 3
    return _floats(blocks[:, :2]) * _signed(four | two << 4, 32).float(), None


def _mxfp4(blocks: Tensor) -> Tensor:
    return _E2M1[_nibbles(blocks[:, 1:], 16).reshape(-1, 1, 32).int()]


def _mxfp4_factors(blocks: Tensor) -> Factors:
    """A power of two, by its exponent; the integers are twice the numbers of 4 bits."""
    return torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128), None


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 4, 0, False, _q4_0, _one),
    "Q4_1": BlockFormat(32, 4, 8, True, _q4_1, _two),
    "Q5_0": BlockFormat(32, 8, 0, False, _q5_0, _one),
    "Q5_1": BlockFormat(32, 8, 0, True, _q5_1, _two),
    "Q8_0": BlockFormat(32, 8, 0, False, _q8_0, _one),
    "Q2_K": BlockFormat(16, 8, 0, True, _q2_k, _q2_k_factors),
    "Q3_K": BlockFormat(16, 8, 0, False, _q3_k, _q3_k_factors),
    "Q4_K": BlockFormat(32, 4, 8, True, _q4_k, _k_factors),
    "Q5_K": BlockFormat(32, 8, 0, True, _q5_k, _k_factors),
    "Q6_K": BlockFormat(16, 8, 0, False, _q6_k, _q6_k_factors),
    "IQ4_NL": BlockFormat(32, 8, 0, False, _iq4_nl, _one),
    "IQ4_XS": BlockFormat(32, 8, 0, False, _iq4_xs, _iq4_xs_factors),
    "IQ2_XXS": BlockFormat(32, 8, 0, False, grids.iq2_xxs, grids.iq2_xxs_factors),
    "IQ2_XS": BlockFormat(16, 8, 0, False, grids.iq2_xs, grids.iq2_xs_factors),
    "IQ2_S": BlockFormat(16, 8, 0, False, grids.iq2_s, grids.iq2_xs_factors),
    "IQ3_XXS": BlockFormat(32, 8, 0, False, grids.iq3_xxs, grids.iq3_xxs_factors),
    "IQ3_S": BlockFormat(32, 8, 0, False, grids.iq3_s, grids.iq3_s_factors),
    "IQ1_S": BlockFormat(32, 8, 0, False, grids.iq1_s, grids.iq1_s_factors),
    "IQ1_M": BlockFormat(16, 8, 0, False, grids.iq1_m, grids.iq1_m_factors),
    "TQ1_0": BlockFormat(32, 4, 0, False, grids.tq1_0, grids.last_for_all),
    "TQ2_0": BlockFormat(32, 4, 0, False, grids.tq2_0, grids.last_for_all),
    "MXFP4": BlockFormat(32, 8, 0, False, _mxfp4, _mxfp4_factors),
}
