"""Low-rank adapters as C reads them: a table of each adapter's matrices for a stack, and a step's runs of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from triptych.model.linear.native import NativeLinear
from triptych.model.native.structures import AdapterRun, Addition, LowRank
from triptych.model.native.structures import Step as StepData
from triptych.model.network.lora import ADAPTED, AdapterRuns, LoraAdapter, LowRankPart

if TYPE_CHECKING:
    from triptych.model.network.stack import Stack

_ALIGNMENT = 32  # ranks of a part's place in a row, as in low_rank.c


def fill_runs(step: StepData, stack: Stack, adapters: AdapterRuns) -> None:
    """Describe which rows of a step have which adapter."""
    tables = [_table(adapter, stack) for _, _, adapter in adapters.runs]
    step.num_runs, step.runs = len(tables), (AdapterRun * len(tables))()
    for place, ((first, last, _), table) in enumerate(zip(adapters.runs, tables, strict=True)):
        step.runs[place] = AdapterRun(first, last, table.additions)
    step.rank_width = max((table.rank_width for table in tables), default=0)


class AdapterTable:
    """The parts of an adapter for each projection of each layer of a stack."""

    def __init__(self, adapter: LoraAdapter, stack: Stack) -> None:
        self.rank_width = 0
        self.additions = (Addition * (stack.config.num_layers * len(ADAPTED)))()
        arrays: dict[str, ctypes.Array[LowRank]] = {}  # layers that share weights share them
        for index in range(stack.config.num_layers):
            prefix = stack.layer(index).mlp.up.spec.name.removesuffix("mlp.up")
            for place, name in enumerate(ADAPTED):
                parts = adapter.parts.get(prefix + name, ())
                if parts:
                    array = arrays.setdefault(prefix + name, _low_ranks(parts))
                    self.additions[index * len(ADAPTED) + place] = Addition(len(parts), array)
                    self.rank_width = max(self.rank_width, sum(map(_width, parts)))


def _table(adapter: LoraAdapter, stack: Stack) -> AdapterTable:
    table = adapter.tables.get(id(stack))
    if not isinstance(table, AdapterTable):
        table = adapter.tables[id(stack)] = AdapterTable(adapter, stack)
    return table


def _low_ranks(parts: Sequence[LowRankPart]) -> ctypes.Array[LowRank]:
    found = (LowRank * len(parts))()
    for place, part in enumerate(parts):
        assert isinstance(part.down, NativeLinear)
        assert isinstance(part.up, NativeLinear)
        found[place] = LowRank(part.down.matrix, part.up.matrix, part.first, part.scale)
    return found


def _width(part: LowRankPart) -> int:
    """Floats of a row that a part takes: its ranks, and the same as its second product reads them."""
    return 2 * (part.rank + -part.rank % _ALIGNMENT)
