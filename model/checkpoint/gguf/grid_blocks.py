"""Blocks of GGUF's formats of 1 to 3 bits: codes of groups in a grid (IQ1, IQ2, IQ3), and digits of base 3 (TQ).

Integers are the grid's numbers with their signs. In IQ1 they are eighths: each is a number of the grid, and 1 more or
less, as its group says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triptych.model.checkpoint.gguf.grids import grid

Factors = tuple[Tensor, Tensor | None]
_BITS = torch.arange(8, dtype=torch.uint8)


def _halves(part: Tensor) -> Tensor:
    """Float16 numbers that lie in bytes `[N, 2 * count]`, as float32."""
    return part.contiguous().view(torch.float16).float()


def _words(part: Tensor) -> Tensor:
    """Whole numbers of 16 bits that lie in bytes `[N, 2 * count]`, int32."""
    return part.contiguous().view(torch.int16).int() & 0xFFFF


def _long_words(part: Tensor) -> Tensor:
    """Whole numbers of 32 bits that lie in bytes `[N, 4 * count]`, int64."""
    return part.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _nibble_pairs(part: Tensor) -> Tensor:
    """Return the lower and the upper half of each byte `[N, count]`, one after the other, `[N, 2 * count]`."""
    return torch.stack((part & 15, part >> 4), dim=2).flatten(1)


def _signed(numbers: Tensor, signs: Tensor, group: int) -> Tensor:
    """Numbers of grids, int8, negative where the bit of a byte of `signs` is set, `[N, groups, group]`."""
    bits = (signs.to(torch.uint8).unsqueeze(-1) >> _BITS & 1).view(len(signs), -1)
    found = numbers.reshape(len(signs), -1)
    return torch.where(bits.bool(), -found, found).view(len(signs), -1, group)


def _eight_signs(sevens: Tensor) -> Tensor:
    """7 bits of signs with an eighth that makes the number of set bits even."""
    ones = sum(sevens >> bit & 1 for bit in range(7))
    return sevens | (ones & 1) << 7


def _packed_signs(words: Tensor) -> Tensor:
    """Return the bytes of signs that words of 32 bits `[N, count]` have in four times 7 bits, `[N, 4 * count]`."""
    return _eight_signs((words.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21]) & 127).flatten(1))


def iq2_xxs(blocks: Tensor) -> Tensor:
    words = _long_words(blocks[:, 2:]).view(len(blocks), -1, 2)
    codes = (words[..., :1] >> torch.tensor([0, 8, 16, 24]) & 255).flatten(1)
    return _signed(grid("iq2_xxs")[codes], _packed_signs(words[..., 1]), 32)


def iq2_xxs_factors(blocks: Tensor) -> Factors:
    words = _long_words(blocks[:, 2:]).view(len(blocks), -1, 2)
    return _halves(blocks[:, :2]) * (0.5 + (words[..., 1] >> 28).float()) * 0.25, None


def iq2_xs(blocks: Tensor) -> Tensor:
    words = _words(blocks[:, 2:66])
    return _signed(grid("iq2_xs")[words & 511], _eight_signs(words >> 9), 16)


def iq2_xs_factors(blocks: Tensor) -> Factors:
    return _halves(blocks[:, :2]) * (0.5 + _nibble_pairs(blocks[:, -8:]).float()) * 0.25, None


def iq2_s(blocks: Tensor) -> Tensor:
    high = (blocks[:, 66:74].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1)
    return _signed(grid("iq2_s")[blocks[:, 2:34].int() | high.int() << 8], blocks[:, 34:66], 16)


def iq3_xxs(blocks: Tensor) -> Tensor:
    return _signed(grid("iq3_xxs")[blocks[:, 2:66].int()], _packed_signs(_long_words(blocks[:, 66:])), 32)


def iq3_xxs_factors(blocks: Tensor) -> Factors:
    return _halves(blocks[:, :2]) * (0.5 + (_long_words(blocks[:, 66:]) >> 28).float()) * 0.5, None


def iq3_s(blocks: Tensor) -> Tensor:
    high = (blocks[:, 66:74].unsqueeze(-1) >> _BITS & 1).flatten(1)
    return _signed(grid("iq3_s")[blocks[:, 2:66].int() | high.int() << 8], blocks[:, 74:106], 32)


def iq3_s_factors(blocks: Tensor) -> Factors:
    return _halves(blocks[:, :2]) * (1 + 2 * _nibble_pairs(blocks[:, 106:]).float()), None


def _eighths(codes: Tensor, minus: Tensor, group: int) -> Tensor:
    """Eight times the numbers of IQ1's codes `[N, codes]`, and 1 more, or less where `minus` is set."""
    found = 8 * grid("iq1")[codes] + torch.where(minus.bool(), -1, 1).to(torch.int8).unsqueeze(-1)
    return found.view(len(codes), -1, group)


def iq1_s(blocks: Tensor) -> Tensor:
    words = _words(blocks[:, 34:])
    high = (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9]) & 7).flatten(1)
    minus = (words >> 15).repeat_interleave(4, dim=1)
    return _eighths(blocks[:, 2:34].int() | high << 8, minus, 32)


def iq1_s_factors(blocks: Tensor) -> Factors:
    return _halves(blocks[:, :2]) * (2 * (_words(blocks[:, 34:]) >> 12 & 7) + 1).float() / 8, None


def iq1_m(blocks: Tensor) -> Tensor:
    four = _nibble_pairs(blocks[:, 32:48]).int()
    return _eighths(blocks[:, :32].int() | (four & 7) << 8, four & 8, 16)


def iq1_m_factors(blocks: Tensor) -> Factors:
    """The scale of a block lies in the upper four bits of four words."""
    words = _words(blocks[:, 48:])
    bits = sum((words[:, place] & 0xF000) >> 12 - 4 * place for place in range(4))
    assert isinstance(bits, Tensor)
    scale = bits.to(torch.int16).unsqueeze(-1).view(torch.float16).float()
    return scale * (2 * (words.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9]) & 7) + 1).flatten(1).float() / 8, None


def _digits(part: Tensor, run: int, count: int) -> Tensor:
    """Return the first `count` digits of base 3 of bytes, which lie run by run."""
    powers = torch.tensor([3**place for place in range(count)], dtype=torch.uint8).view(1, 1, -1, 1)
    return (part.reshape(len(part), -1, 1, run) * powers).flatten(1)


def tq1_0(blocks: Tensor) -> Tensor:
    fifths = torch.cat((_digits(blocks[:, :32], 32, 5), _digits(blocks[:, 32:48], 16, 5)), dim=1)
    digits = torch.cat((fifths, _digits(blocks[:, 48:52], 4, 4)), dim=1)
    return ((digits.int() * 3 >> 8) - 1).to(torch.int8).view(len(blocks), 8, 32)


def tq2_0(blocks: Tensor) -> Tensor:
    by = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, -1, 1)
    bits = blocks[:, :64].reshape(len(blocks), -1, 1, 32) >> by & 3
    return (bits.to(torch.int8) - 1).view(len(blocks), 8, 32)


def last_for_all(blocks: Tensor) -> Factors:
    """One scale in the end, for all groups."""
    return _halves(blocks[:, -2:]).expand(-1, 8).contiguous(), None
