"""Checks of small steps between products, of one row times a matrix, and of the row that recorded steps read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.functional import linear

from triptych.model.config.layer import Activation
from triptych.model.engine.execution.batch import BatchLayout
from triptych.model.engine.execution.static_row import fill_row
from triptych.model.kernel_check.check import BOUNDS, WrongNumbersError, compare, repeated
from triptych.model.kernel_check.step_problems import StepProblem, step_problems
from triptych.model.system import kernel_faults

_ROWS = (1, 33)


@dataclass(frozen=True, slots=True)
class StepCheck:
    """A function of `triptych.model.network.fused_ops`, over rows of `width`; of gates with one activation."""

    function: str
    width: int
    dtype: torch.dtype
    activation: Activation | None = None

    @property
    def part(self) -> str:
        return kernel_faults.step_part(self.function)

    def run(self, device: torch.device) -> None:
        from triptych.model.network import fused_kernels

        kernel = getattr(fused_kernels, self.function)
        for rows in _ROWS:
            for problem in step_problems(rows, self.width, self.dtype, device):
                if not self._is_of(problem):
                    continue
                expected = problem.by_torch()
                for found in repeated(partial(kernel, *problem.arguments), device):
                    if found is NotImplemented:  # torch computes it by design
                        break
                    of_each = zip(found if isinstance(found, tuple) else (found,), expected, strict=True)
                    for ours, theirs in of_each:
                        compare(f"{problem.name} of {rows} rows", ours, theirs.float(), BOUNDS[self.dtype])

    def _is_of(self, problem: StepProblem) -> bool:
        return problem.kernel == self.function and self.activation in (None, problem.arguments[1])


@dataclass(frozen=True, slots=True)
class RowProductCheck:
    """One row times a matrix of floats."""

    outputs: int
    inputs: int
    bias: bool
    dtype: torch.dtype

    @property
    def part(self) -> str:
        return kernel_faults.ROW_PRODUCT

    def run(self, device: torch.device) -> None:
        from triptych.model.linear import triton_floats

        generator = torch.Generator(device).manual_seed(0)
        x, weight, bias = (
            torch.randn(shape, device=device, generator=generator).to(self.dtype)
            for shape in ((1, self.inputs), (self.outputs, self.inputs), (self.outputs,))
        )
        added = bias if self.bias else None
        expected = linear(x.float(), weight.float(), added if added is None else added.float())
        for found in repeated(partial(triton_floats.multiply_row, x, weight, added), device):
            compare("a product of one row", found, expected, BOUNDS[self.dtype])


@dataclass(frozen=True, slots=True)
class StaticRowCheck:
    """The row of integers that a recorded step reads."""

    pools: int
    has_sources: bool

    @property
    def part(self) -> str:
        return kernel_faults.STATIC_ROW

    def run(self, device: torch.device) -> None:
        from triptych.model.engine.execution import triton_static_row

        sources = 5 if self.has_sources else 0
        recorded = BatchLayout(16, 16, blocks=9, source_blocks=sources, pools=self.pools, state_columns=3)
        used = replace(recorded, blocks=4, source_blocks=min(sources, 2))
        generator = torch.Generator().manual_seed(0)
        packed = torch.randint(0, 1000, (sum(used.sizes),), generator=generator)
        sampled = torch.randint(1000, 2000, (16,), generator=generator)
        fields = used.split(packed)
        fields.placeholders.copy_(torch.randint(-1, 16, (16,), generator=generator))
        if not self.has_sources:  # lengths of sources are then neither copied by torch nor read
            fields.source_lens.zero_()
        for tokens in (None, sampled):
            expected = torch.zeros(sum(recorded.sizes), dtype=torch.int64)
            fill_row(expected, recorded, packed, used, tokens)  # by torch, as nothing is on a GPU
            given = packed.to(device), used, None if tokens is None else tokens.to(device)
            row = torch.zeros(expected.shape, dtype=torch.int64, device=device)
            for _ in repeated(partial(triton_static_row.fill, row, recorded, *given), device):
                if not torch.equal(row.cpu(), expected):
                    raise WrongNumbersError("the row of a recorded step is wrong")
