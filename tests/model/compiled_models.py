"""Compiles what warm-up, recording and steps of models launch on an absent GPU; prints resources as JSON lines.

`python -m tests.model.compiled_models CAPABILITY MODEL...`, in a process without TRITON_INTERPRET. Models are those of
`lab.bench.gpu.precompile`; `attention` stands for three launches of attention.
"""

from __future__ import annotations

import json
import sys

import torch

from lab.bench.gpu.pretended import compiled, pretend, take_meta_for_gpu
from tests.model.compiled import taken
from triptych.model.attention.triton import TritonBackend
from triptych.model.kernel_check.attention_problems import Problem, make_tensors
from triptych.model.network import fused_ops
from triptych.model.system import fallbacks

ATTENTION = (Problem(((1, 40),) * 2), Problem(((1, 40),) * 2, fp8=True), Problem(((70, 70),), paged=False))


def main(capability: int, models: list[str]) -> None:
    pretend(capability)
    take_meta_for_gpu(capability)
    for model in models:
        with compiled() as found:
            if model == "attention":
                for problem in ATTENTION:
                    make_tensors(problem, torch.device("cpu"), torch.bfloat16).forward(TritonBackend())
            else:
                from lab.bench.gpu.precompile import launch_model  # takes seconds

                launch_model(model)
        assert not fused_ops.broken and not fallbacks.found(), fallbacks.found()
        for kernel in found:
            print(json.dumps({"case": model, **taken(kernel)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
