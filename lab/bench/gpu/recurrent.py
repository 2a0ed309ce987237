"""Recurrent layers of the GPU benchmark: their kernels checked and measured, eager and captured."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, need_triton
from triptych.model.cache.kv_cache import StateTables
from triptych.model.config.attention import GatedDeltaConfig
from triptych.model.config.cache import NO_STATE
from triptych.model.kernel_check.attention_problems import RecurrentProblem, RecurrentStep
from triptych.model.kernel_check.product_problems import difference

TOY = GatedDeltaConfig(2, 4, 12, 8, 4, 1e-6)
# Of outputs, relative to their largest, and of states: rows of 16 bits are multiplied by TF32.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


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


def _check(bench: Bench, *, problem: RecurrentProblem, dtype: torch.dtype) -> Figures:
    """Compare a step with torch in float32 on the same device, also captured and replayed over other slots."""
    need_triton(bench)
    from triptych.model.attention import triton_delta

    step = RecurrentStep(problem, bench.device, dtype)
    tables = StateTables.of(step.spans, triton_delta.CHUNK, bench.device)
    expected, states = step.expected(step.spans)
    found: Figures = {"eager_error": difference(step.by_kernels(tables), expected, least=1.0)}
    found["state_error"] = difference(step.states.recurrent, states.recurrent, least=1.0)
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
    worst = difference(out, expected, least=1.0)
    if tables.singles is None or tables.chunks is not None:
        return worst
    slots = [span.source for span in step.spans]
    spans = [one._replace(source=slot) for one, slot in zip(step.spans, [NO_STATE, *slots[:-1]], strict=True)]
    tables.singles[1].copy_(torch.tensor([span.source for span in spans]))
    expected, _ = step.expected(spans)
    replay()
    return max(worst, difference(out, expected, least=1.0))
