"""Matrices packed once for the C products; and a layer that stands where an `nn.Linear` stood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from model.native.library import KINDS, Kind, Library, Linear

LANES = 16  # outputs of a panel
_STEPS = {Kind.F32: 1, Kind.BF16: 2, Kind.INT8: 4}  # of k that lie together
_DEPTHS = {Kind.F32: 1, Kind.BF16: 32, Kind.INT8: 64}  # k is padded to a multiple: a row of a tile


def pack(weight: Tensor, bias: Tensor | None, kind: Kind) -> tuple[Linear, list[Tensor]]:
    """`weight` `[n, k]` as gemm.h describes it, and the tensors that it points into."""
    n, k = weight.shape
    scale = None
    if kind is Kind.INT8:
        scale = weight.float().abs().amax(dim=1) / 127  # [n]
        weight = (weight.float() / scale.clamp(min=1e-30)[:, None]).round().to(torch.int8)
    padded = pad(weight, (0, -k % _DEPTHS[kind], 0, -n % LANES))
    panels = (
        padded.unflatten(0, (-1, LANES)).unflatten(2, (-1, _STEPS[kind])).transpose(1, 2)
    )  # [panels, k / step, 16, step]
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

    AMX tiles multiply 16 rows and more, where there are any. They sum bfloat16 in another order than the vectors, which
    multiply fewer rows: `batch_invariant` does without them, so that a row's bits never depend on how many there are.
    Sums of integers are exact either way.
    """

    def __init__(
        self,
        library: Library,
        weight: Tensor,
        bias: Tensor | None,
        kind: Kind | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.library = library
        kind = KINDS[weight.dtype] if kind is None else kind
        self.matrix, self._kept = pack(weight.detach(), bias, kind)
        self.matrix.tiles = library.tiles and (kind is Kind.INT8 or not batch_invariant)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)

    def forward(self, x: Tensor) -> Tensor:  # [T, k] -> [T, n] in the dtype of x
        rows = x.float().contiguous()
        out = torch.empty(rows.shape[0], self.matrix.n)
        self.library.run_linear(self.matrix, rows, out)
        return out.to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        raise RuntimeError("packed weights stay where they are")
