"""Low-rank adapters as C reads them: a table of each adapter's matrices for a stack, and a step's runs of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from triptych.model.linear.native import PANEL_WIDTH, NativeLinear
from triptych.model.native.library import KINDS
from triptych.model.native.structures import AdapterRun, Addition, LowRank, PackedMatrix
from triptych.model.native.structures import Step as StepData
from triptych.model.network.lora import ADAPTED, AdapterRuns, LoraAdapter, LowRankProjection

if TYPE_CHECKING:
    from triptych.model.network.stack import Stack


def fill_runs(step: StepData, stack: Stack, adapters: AdapterRuns) -> None:
    """Describe which rows of a step have which adapter."""
    tables = [_table(adapter, stack) for _, _, adapter in adapters.runs]
    step.num_runs, step.runs = len(tables), (AdapterRun * len(tables))()
    for place, ((first, last, _), table) in enumerate(zip(adapters.runs, tables, strict=True)):
        step.runs[place] = AdapterRun(first, last, table.additions)
    step.rank_width = max((table.rank_width for table in tables), default=0)


class RankMatrix:
    """The second matrix of a low-rank product in panels whose ranks are not rounded up as those of products are."""

    def __init__(self, weight: Tensor) -> None:
        n, rank = weight.shape
        step = 2 if weight.dtype is torch.bfloat16 else 1
        padded = functional.pad(weight, (0, -rank % step, 0, -n % PANEL_WIDTH))
        panels = padded.view(-1, PANEL_WIDTH, padded.shape[1] // step, step).transpose(1, 2)  # [n / 16, ranks, 16, 1]
        self.matrix = PackedMatrix(int(KINDS[weight.dtype]), n, rank)
        self._kept = panels.shape, weight.dtype
        self.adopt({"data": panels.contiguous().flatten().view(torch.uint8)})

    def adopt(self, arrays: Mapping[str, Tensor]) -> None:
        self.arrays = dict(arrays)
        self.matrix.data = self.arrays["data"].data_ptr()

    @property
    def nbytes(self) -> int:
        return self.arrays["data"].nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product by torch, for layers that C does not compute."""
        shape, dtype = self._kept
        weight = self.arrays["data"].view(dtype).view(shape).transpose(1, 2).flatten(2).flatten(0, 1)
        return functional.linear(x.to(dtype).float(), weight[: self.matrix.n, : self.matrix.k].float())


class AdapterTable:
    """The parts of an adapter for each projection of each layer of a stack."""

    def __init__(self, adapter: LoraAdapter, stack: Stack) -> None:
        self.rank_width = 0
        self.additions = (Addition * (stack.config.num_layers * len(ADAPTED)))()
        found: dict[str, Addition] = {}  # layers that share weights share them
        for index in range(stack.config.num_layers):
            prefix = stack.layer(index).mlp.up.spec.name.removesuffix("mlp.up")
            for place, name in enumerate(ADAPTED):
                projection = adapter.projections.get(prefix + name)
                if projection is not None:
                    addition = found.setdefault(prefix + name, _addition(projection))
                    self.additions[index * len(ADAPTED) + place] = addition
                    self.rank_width = max(self.rank_width, projection.ranks)


def _table(adapter: LoraAdapter, stack: Stack) -> AdapterTable:
    table = adapter.tables.get(id(stack))
    if not isinstance(table, AdapterTable):
        table = adapter.tables[id(stack)] = AdapterTable(adapter, stack)
    return table


def _addition(projection: LowRankProjection) -> Addition:
    parts = (LowRank * len(projection.parts))()
    for place, part in enumerate(projection.parts):
        assert isinstance(part.up, (NativeLinear, RankMatrix))
        parts[place] = LowRank(part.up.matrix, part.first, part.first_rank, part.scale)
    assert isinstance(projection.down, NativeLinear)
    return Addition(projection.down.matrix, len(parts), parts)
