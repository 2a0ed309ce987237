"""Matrices packed once for the C products; and a layer that stands where an `nn.Linear` stood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from model.native.library import KINDS, Kind, Library, Linear

LANES = 16  # outputs of a panel
AMX_ROWS = 128  # from so many rows on tiles beat vectors


def prefers_torch(dtype: torch.dtype, kind: Kind | None) -> bool:
    """Whether matrices of this dtype meet many rows in AMX tiles, which torch's oneDNN uses and the C code does not."""
    return dtype is torch.bfloat16 and kind is None and torch.cpu._is_amx_tile_supported()


def pack(weight: Tensor, bias: Tensor | None, kind: Kind) -> tuple[Linear, list[Tensor]]:
    """`weight` `[n, k]` as gemm.h describes it, and the tensors that it points into."""
    n, k = weight.shape
    step = {Kind.F32: 1, Kind.BF16: 2, Kind.INT8: 4}[kind]
    scale = None
    if kind is Kind.INT8:
        scale = weight.float().abs().amax(dim=1) / 127  # [n]
        weight = (weight.float() / scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    padded = pad(weight, (0, -k % step, 0, -n % LANES))
    panels = padded.unflatten(0, (-1, LANES)).unflatten(2, (-1, step)).transpose(1, 2)  # [panels, k / step, 16, step]
    data = panels.to({Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.INT8: torch.int8}[kind]).contiguous()
    kept = [data]
    matrix = Linear(int(kind), n, k, data.data_ptr())
    for name, values in (("bias", bias), ("scale", scale)):
        if values is not None:
            kept.append(pad(values.float(), (0, -n % LANES)).contiguous())
            setattr(matrix, name, kept[-1].data_ptr())
    if kind is Kind.INT8:
        kept.append(padded.sum(dim=1, dtype=torch.int32))
        matrix.sums = kept[-1].data_ptr()
    return matrix, kept


class PackedLinear(nn.Module):
    """`x W^T + b` by the C product, which computes in float32 or, of bfloat16 matrices, as the CPU can.

    Where the CPU has AMX, torch's own product is faster for many rows: then the matrix is kept as it was too.
    """

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, kind: Kind | None = None) -> None:
        super().__init__()
        self.library = library
        self.matrix, self._kept = pack(weight.detach(), bias, KINDS[weight.dtype] if kind is None else kind)
        plain = prefers_torch(weight.dtype, kind)
        self._plain: tuple[Tensor, Tensor | None] | None = (weight.detach(), bias) if plain else None

    def keep_to_c(self) -> None:
        """Never use torch's product, whose order of additions depends on the number of rows."""
        self._plain = None

    @property
    def nbytes(self) -> int:
        plain = 0 if self._plain is None else self._plain[0].nbytes
        return plain + sum(tensor.nbytes for tensor in self._kept)

    def forward(self, x: Tensor) -> Tensor:  # [T, k] -> [T, n] in the dtype of x
        if self._plain is not None and len(x) >= AMX_ROWS:
            return torch.nn.functional.linear(x.to(self._plain[0].dtype), *self._plain).to(x.dtype)
        rows = x.float().contiguous()
        out = torch.empty(rows.shape[0], self.matrix.n)
        self.library.run_linear(self.matrix, rows, out)
        return out.to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        raise RuntimeError("packed weights stay where they are")
