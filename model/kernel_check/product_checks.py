"""Checks of products with packed weights and with the matrices of experts, and of sampling."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from triptych.model.api.sampling_params import SamplingParams
from triptych.model.kernel_check.check import BOUNDS, WrongNumbersError, compare, repeated
from triptych.model.kernel_check.product_problems import (
    ExpertsShape,
    Fp8Shape,
    IntegerShape,
    experts_projection,
    experts_reference,
    fp8_projection,
    integer_projection,
    routes_of,
)
from triptych.model.linear.base import CompiledLinear
from triptych.model.sampling.random_sampling import LIKELIEST_PARTS, likeliest, sample_rows
from triptych.model.system import kernel_faults


@dataclass(frozen=True, slots=True)
class ProductCheck:
    """A projection with weights in integers or in fp8."""

    shape: IntegerShape | Fp8Shape
    dtype: torch.dtype

    @property
    def part(self) -> str:
        return kernel_faults.FP8 if isinstance(self.shape, Fp8Shape) else kernel_faults.INTEGERS

    def run(self, device: torch.device) -> None:
        shape, generator = self.shape, torch.Generator(device).manual_seed(0)
        linear: CompiledLinear
        if isinstance(shape, Fp8Shape):
            linear = fp8_projection(shape, device, self.dtype)
        else:
            linear = integer_projection(shape, device, self.dtype)
        for rows in (*linear.tiled_rows, 7):
            x = torch.randn(rows, linear.spec.inputs, device=device, generator=generator).to(self.dtype)
            expected = linear.reference(x).float()
            for found in repeated(partial(linear.by_kernels, x), device):
                compare(f"a product of {shape} with {rows} rows", found, expected, BOUNDS[self.dtype])


@dataclass(frozen=True, slots=True)
class ExpertsCheck:
    """The matrices of experts, by which rows are multiplied in the order of their experts."""

    shape: ExpertsShape
    dtype: torch.dtype

    @property
    def part(self) -> str:
        return kernel_faults.EXPERTS

    def run(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        linear = experts_projection(self.shape, device, self.dtype)
        for rows in (*linear.tiled_rows, 7):
            x = torch.randn(rows, self.shape.inputs, device=device, generator=generator).to(self.dtype)
            experts = torch.randint(self.shape.experts, (rows,), device=device, generator=generator)
            starts = routes_of(experts, self.shape.experts)
            expected = experts_reference(linear, x, starts)
            for found in repeated(partial(linear.of_experts, x, starts), device):
                compare(f"{self.shape} with {rows} rows", found, expected, BOUNDS[self.dtype])


# -- Sampling.

_SAMPLED = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=1.2, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.05, top_k=50, top_p=0.95),
)
_TIMES = 4  # rows for each


@dataclass(frozen=True, slots=True)
class SamplingCheck:
    """The kernel that samples a token for each row of logits."""

    vocabulary: int
    dtype: torch.dtype

    @property
    def part(self) -> str:
        return kernel_faults.SAMPLING

    def run(self, device: torch.device) -> None:
        from triptych.model.sampling import triton_sampling

        params = list(_SAMPLED) * _TIMES
        generator = torch.Generator().manual_seed(0)
        logits = (4 * torch.randn(len(params), self.vocabulary, generator=generator)).to(device, self.dtype)
        uniforms = torch.rand(len(params), generator=generator).tolist()
        found = torch.zeros(len(params), dtype=torch.int64, device=device)
        launch = partial(triton_sampling.launch_sampling, logits, found, range(len(params)), params, uniforms)
        deque(repeated(launch, device), maxlen=0)
        self._check_greedy(logits)
        expected = sample_rows(logits.float(), params, uniforms)
        wrong = int((found != expected).sum())
        if wrong > 1:  # one may be at a boundary that rounding moves
            raise WrongNumbersError(f"{wrong} of {len(params)} sampled tokens are not those of torch")

    @staticmethod
    def _check_greedy(logits: Tensor) -> None:
        """Compare the first of the largest logits, for each division of a row over programs."""
        from triptych.model.sampling import triton_sampling

        for least, parts in LIKELIEST_PARTS.items():
            rows = logits[torch.arange(least, device=logits.device) % len(logits)]
            found = torch.zeros(least, dtype=torch.int64, device=logits.device)
            for _ in repeated(partial(triton_sampling.launch_greedy, rows, found, parts), logits.device):
                wrong = int((found.cpu() != likeliest(rows.cpu())).sum())
                if wrong:
                    raise WrongNumbersError(f"{wrong} of {least} largest logits are not those of torch")
