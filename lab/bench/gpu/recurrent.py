"""Recurrent layers of the GPU benchmark: their kernels checked and measured, eager and captured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, need_triton
from model.attention.layer_backends import Recurrence
from model.cache.kv_cache import StateCache, StateSpan, StateTables
from model.config.attention import GatedDeltaConfig
from model.config.cache import NO_STATE
from model.network.delta_net import recur

_QWEN = GatedDeltaConfig(16, 32, 128, 128, 4, 1e-6)  # Qwen3-Next, Qwen3.5
TOY = GatedDeltaConfig(2, 4, 12, 8, 4, 1e-6)
# Of outputs, relative to their largest, and of states: rows of 16 bits are multiplied by TF32.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class RecurrentProblem:
    """Describes a step of one layer: each segment of these lengths reads a slot and writes another."""

    lengths: tuple[int, ...]
    config: GatedDeltaConfig = _QWEN

    @property
    def state_bytes(self) -> int:
        """Return the bytes of states that are read and written."""
        return 8 * len(self.lengths) * self.config.state_elements


_PROBLEMS = {
    "decode, one sequence": RecurrentProblem((1,)),
    "decode, 128 sequences": RecurrentProblem((1,) * 128),
    "prompts with decoding": RecurrentProblem((*(1,) * 30, 700, 33, 3)),
    "prompt of 8192": RecurrentProblem((8192,)),
}
_TINY = {
    "decode, one sequence": RecurrentProblem((1,), TOY),
    "prompts with decoding": RecurrentProblem((1, 1, 35), TOY),
}


def check_cases(bench: Bench) -> list[Case]:
    dtypes = {"float32": torch.float32} | ({"bfloat16": torch.bfloat16} if bench.cuda else {})
    return [
        Case(f"recurrent layer, {name}, {told}", partial(_check, problem=one, dtype=dtype), 10)
        for told, dtype in dtypes.items()
        for name, one in (_TINY if bench.tiny else _PROBLEMS).items()
    ]


class RecurrentStep:
    """Holds a layer and the rows and slots of a step."""

    def __init__(self, problem: RecurrentProblem, device: torch.device, dtype: torch.dtype) -> None:
        config, rows, count = problem.config, sum(problem.lengths), len(problem.lengths)
        draw = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=draw, device=device, dtype=torch.float32).to(of)

        heads = config.num_value_heads
        shapes = (config.channels, config.kernel), (heads,), (heads,), (config.value_dim,)
        self.layer = Recurrence(config, *(normal(*shape) for shape in shapes))
        self.inputs, self.gates = normal(rows, config.channels + config.value_size), normal(rows, 2 * heads)
        states = (normal(2 * count, *shape, of=torch.float32) for shape in config.state_shapes)
        self.states = StateCache(*states)
        self.spans, first = list[StateSpan](), 0
        for place, length in enumerate(problem.lengths):
            self.spans.append(StateSpan(first, first + length, place, count + place))
            first += length

    def expected(self, spans: Iterable[StateSpan]) -> tuple[Tensor, StateCache]:
        """Return outputs and states by torch in float32, and leave the step as it is."""
        states = StateCache(self.states.recurrent.clone(), self.states.convolution.clone())
        return recur(self.layer, self.inputs.float(), self.gates.float(), spans, states), states

    def by_kernels(self, tables: StateTables) -> Tensor:
        from model.attention import triton_delta

        return triton_delta.compute(self.layer, self.inputs, self.gates, tables, self.states)


def _check(bench: Bench, *, problem: RecurrentProblem, dtype: torch.dtype) -> Figures:
    """Compare a step with torch in float32 on the same device, also captured and replayed over other slots."""
    need_triton(bench)
    from model.attention import triton_delta

    step = RecurrentStep(problem, bench.device, dtype)
    tables = StateTables.of(step.spans, triton_delta.CHUNK, bench.device)
    expected, states = step.expected(step.spans)
    found: Figures = {"eager_error": _apart(step.by_kernels(tables), expected)}
    found["state_error"] = _apart(step.states.recurrent, states.recurrent)
    if bench.cuda:
        found["captured_error"] = _replayed(bench, step, tables, expected)
        seconds = bench.device_seconds(lambda: step.by_kernels(tables))
        found |= {"us": 1e6 * seconds, "state_tb_per_s": problem.state_bytes / seconds / 1e12}
        found["tokens_per_s"] = len(step.inputs) / seconds
    worst = max(value for key, value in found.items() if "error" in key)
    return {"ok": worst <= _BOUNDS[dtype], **found}


def _replayed(bench: Bench, step: RecurrentStep, tables: StateTables, expected: Tensor) -> float:
    """Return the error of a recorded step, and of single tokens with the slots read in another order."""
    out = torch.empty_like(step.inputs[:, : step.layer.config.value_size])
    replay = bench.captured(lambda: out.copy_(step.by_kernels(tables)))
    out.zero_()
    replay()
    worst = _apart(out, expected)
    if tables.singles is None or tables.chunks is not None:
        return worst
    slots = [span.source for span in step.spans]
    spans = [one._replace(source=slot) for one, slot in zip(step.spans, [NO_STATE, *slots[:-1]], strict=True)]
    tables.singles[1].copy_(torch.tensor([span.source for span in spans]))
    expected, _ = step.expected(spans)
    replay()
    return max(worst, _apart(out, expected))


def _apart(found: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest expected value; infinity for nan."""
    worst = ((found.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()
    return worst if worst == worst else float("inf")
