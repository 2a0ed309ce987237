"""Scales of a matrix that is stored as numbers times scales, while it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from model.config.formats import Storage
from model.config.sharding import Index
from model.linear.base import Linear, LinearSpec, TensorShape


class StoredScales:
    """The scales of a projection's matrix, float32 `[outputs, blocks of inputs]`, which come before its rows.

    Each output has scales of its own here, also where a checkpoint has one for several.
    """

    def __init__(self, spec: LinearSpec, storage: Storage, device: torch.device) -> None:
        assert storage.scale is not None
        self.name = f"{spec.name}.{storage.scale}"
        self._shape = (spec.num_outputs, storage.scales_of(spec.inputs))
        self._inputs = storage.block[1]  # of a scale; 0: all
        self._device = device
        self._rows_left = spec.num_outputs  # to be multiplied
        self.values: Tensor | None = None

    def tensors(self) -> Mapping[str, TensorShape]:
        """The tensor of scales, by its name in the network."""
        if not self._inputs:
            return {self.name: TensorShape(self._shape, outputs=0)}
        return {self.name: TensorShape(self._shape, outputs=0, inputs=1, block=self._inputs)}

    def fill(self, into: Index, values: Tensor) -> None:
        """Put scales at `into`."""
        if self.values is None:
            self.values = torch.full(self._shape, torch.nan, dtype=torch.float32, device=self._device)
        self.values[into] = values.to(self.values.device, torch.float32)

    def multiplied(self, into: Index, numbers: Tensor) -> Tensor:
        """Numbers of rows `into`, `[count, inputs]`, times their scales, as float32; each row once.

        Behind the last row the scales are dropped: those of all matrices at once would take memory of their own.
        """
        assert self.values is not None, f"{self.name} comes before the weight"
        scales, rows = self.values[into[0]], numbers.to(self._device).float()
        self._rows_left -= len(rows)
        if self._rows_left == 0:
            self.values = None
        if not self._inputs:
            return rows * scales
        return rows * scales.repeat_interleave(self._inputs, dim=1)[:, : rows.shape[1]]


class DequantizedWhileRead(Linear):
    """What projections share whose matrix is stored as numbers times scales, and is multiplied as it is read.

    It stands before the class that keeps the products and computes with them.
    """

    _scales: StoredScales | None
    _stored: Mapping[str, TensorShape]

    def expect(self, storage: Storage) -> None:
        """Prepare for scales and rows as `storage` has them."""
        self._scales = StoredScales(self.spec, storage, self.device)
        self._stored = self._scales.tensors()

    def tensors(self) -> Mapping[str, TensorShape]:
        return {**super().tensors(), **self._stored}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Take scales, or rows, which are multiplied, or values of the bias."""
        assert self._scales is not None, f"{self.spec.name} is finished"
        if name == self._scales.name:
            self._scales.fill(into, values)
        elif name == self.spec.weight:
            super().fill(name, into, self._scales.multiplied(into, values))
        else:
            super().fill(name, into, values)

    def finish(self) -> None:
        self._scales = None
