"""Four tiny launches for compute-sanitizer: `python -m lab.bench.gpu.launches`."""

from __future__ import annotations

import torch

from lab.bench.gpu.recurrent import TOY
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import StateTables
from triptych.model.kernel_check.attention_problems import Problem, RecurrentProblem, RecurrentStep, make_tensors

PROBLEMS = (
    Problem(((1, 700), (1, 1)), heads=4, kv_heads=2, dim=80),
    Problem(((33, 40), (1, 9)), heads=6, kv_heads=2, dim=64, int8=True),
    Problem(((17, 17), (3, 3)), heads=2, kv_heads=2, dim=64, causal=False, paged=False, biased=True),
)


def main() -> None:
    device = torch.device("cuda")
    for problem in PROBLEMS:
        make_tensors(problem, device, torch.bfloat16).forward(TritonBackend())
    step = RecurrentStep(RecurrentProblem((1, 35, 2), TOY), device, torch.bfloat16)
    step.by_kernels(StateTables.of(step.spans, TritonBackend.chunk, device))
    torch.cuda.synchronize()
    print(f"launched {len(PROBLEMS) + 1}", flush=True)


if __name__ == "__main__":
    main()
