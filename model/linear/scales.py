"""Scales and offsets of a matrix that is stored as numbers times scales, while it is read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from triptych.model.config.formats import Storage
from triptych.model.config.sharding import Index
from triptych.model.linear.base import Linear, LinearSpec, TensorShape


class StoredScales:
    """The scales of a projection's matrix, and its offsets if it has any, which come before its rows.

    Both are float32 `[outputs, blocks of inputs]`. Each output has its own here, also where a checkpoint has one for
    several.
    """

    def __init__(self, spec: LinearSpec, storage: Storage, device: torch.device) -> None:
        assert storage.scale is not None
        self._name = f"{spec.name}.{storage.scale}"
        self._offset_name = None if storage.offset is None else f"{spec.name}.{storage.offset}"
        self._shape = (spec.num_outputs, storage.scales_of(spec.inputs))
        self._inputs = storage.block[1]  # of a scale; 0: all
        self._device = device
        self._rows_left = spec.num_outputs  # to be multiplied
        self.values: Tensor | None = None
        self.offsets: Tensor | None = None

    def tensors(self) -> Mapping[str, TensorShape]:
        """Return the tensors of scales and offsets, by their names in the network."""
        inputs = 1 if self._inputs else None
        shape = TensorShape(self._shape, outputs=0, inputs=inputs, block=self._inputs or 1)
        return {name: shape for name in (self._name, self._offset_name) if name is not None}

    def fill(self, name: str, into: Index, values: Tensor) -> None:
        """Put scales or offsets at `into`."""
        if name == self._offset_name:
            self.offsets = self._filled(self.offsets, into, values)
        else:
            self.values = self._filled(self.values, into, values)

    def _filled(self, kept: Tensor | None, into: Index, values: Tensor) -> Tensor:
        if kept is None:
            kept = torch.full(self._shape, torch.nan, dtype=torch.float32, device=self._device)
        kept[into] = values.to(kept.device, torch.float32)
        return kept

    def multiplied(self, into: Index, numbers: Tensor) -> Tensor:
        """Numbers of rows `into`, `[count, inputs]`, times their scales plus their offsets, as float32; each row once.

        Both are dropped after the last row: those of all matrices together would need much memory.
        """
        assert self.values is not None, f"{self._name} comes before the weight"
        rows = numbers.to(self._device).float() * self._spread(self.values[into[0]], numbers.shape[1])
        if self._offset_name is not None:
            assert self.offsets is not None, f"{self._offset_name} comes before the weight"
            rows += self._spread(self.offsets[into[0]], numbers.shape[1])
        self._rows_left -= len(rows)
        if self._rows_left == 0:
            self.values = self.offsets = None
        return rows

    def _spread(self, factors: Tensor, width: int) -> Tensor:
        """One for each input, or one that is broadcast."""
        return factors.repeat_interleave(self._inputs, dim=1)[:, :width] if self._inputs else factors


class DequantizedWhileRead(Linear):
    """A projection whose matrix is stored as numbers times scales, and multiplied while it is read.

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
        if name in self._stored:
            self._scales.fill(name, into, values)
        elif name == self.spec.weight:
            super().fill(name, into, self._scales.multiplied(into, values))
        else:
            super().fill(name, into, values)

    def finish(self) -> None:
        super().finish()
        self._scales = None
