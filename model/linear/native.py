"""Matrices packed once for the C products; and a layer that stands where an `nn.Linear` stood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model.native.library import KINDS, Kind, Library
from model.native.structures import PackedMatrix
from model.system.huge_pages import reserve

PANEL_WIDTH = 16  # outputs of a panel
_STEPS = {Kind.F32: 1, Kind.BF16: 2, Kind.INT8: 4}  # of k that lie together, in 4 bytes
_DEPTHS = {Kind.F32: 1, Kind.BF16: 32, Kind.INT8: 64}  # k is padded to a multiple: a row of a tile


def packed_bytes(n: int, k: int, kind: Kind, *, bias: bool) -> int:
    """What a matrix `[n, k]` takes once it is packed."""
    sizes = (_data_bytes(n, k, kind), 4 * _padded(n) * bias, 8 * _padded(n) * (kind is Kind.INT8))
    return sum(sizes)


def _padded(n: int) -> int:
    return n + -n % PANEL_WIDTH


def _data_bytes(n: int, k: int, kind: Kind) -> int:
    return _padded(n) * (k + -k % _DEPTHS[kind]) * 4 // _STEPS[kind]


class PackedLinear(nn.Module):
    """`x W^T + b` by the C product, which computes in float32 or, of bfloat16 matrices, as the CPU can.

    AMX tiles, where there are any, multiply every number of rows: they sum bfloat16 in another order than the vectors,
    and a row's bits must not depend on how many there are. Sums of integers are exact either way.
    """

    def __init__(
        self,
        library: Library,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind | None = None,
    ) -> None:
        """Of a weight `[n, k]`; one on the meta device gives room that `pack_rows` and `set_bias` fill."""
        super().__init__()
        self.library = library
        self.dtype = weight.dtype  # of the network, which a quantised matrix does not have
        n, k = weight.shape
        self.kind = KINDS[weight.dtype] if kind is None else kind
        self.matrix = PackedMatrix(int(self.kind), n, k)
        self.matrix.tiles = library.tiles
        self._kept = {"data": reserve(_data_bytes(n, k, self.kind))}  # zero where no row and no column will be
        if bias is not None:
            self._kept["bias"] = torch.zeros(_padded(n))
        if self.kind is Kind.INT8:
            self._kept |= {"scale": torch.zeros(_padded(n)), "row_sums": torch.zeros(_padded(n), dtype=torch.int32)}
        for name, tensor in self._kept.items():
            setattr(self.matrix, name, tensor.data_ptr())
        if not weight.is_meta:
            self.pack_rows(0, weight.detach())
            if bias is not None:
                self.set_bias(0, bias.detach())

    def pack_rows(self, first: int, rows: Tensor) -> None:
        """Fill the rows `[count, k]` from `first` on; they may come in any order, each one once."""
        if rows.shape[1] != self.matrix.k or not 0 <= first <= first + len(rows) <= self.matrix.n:
            raise ValueError(f"rows {first} to {first + len(rows)} of {rows.shape[1]} are not the matrix's")
        if self.kind is Kind.BF16 or rows.dtype not in KINDS:
            rows = rows.to(torch.bfloat16 if self.kind is Kind.BF16 else torch.float32)
        self.library.pack_rows(self.matrix, first, rows if rows.stride(1) == 1 else rows.contiguous())

    def set_bias(self, first: int, values: Tensor) -> None:
        """Fill the bias from `first` on."""
        self._kept["bias"][first : first + len(values)] = values

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept.values())

    def forward(self, x: Tensor) -> Tensor:  # [T, k] -> [T, n] in the dtype of x
        rows = x.float().contiguous()
        out = torch.empty(rows.shape[0], self.matrix.n)
        self.library.run_linear(self.matrix, rows, out)
        return out.to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        raise RuntimeError("packed weights stay where they are")
