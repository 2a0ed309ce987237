"""The GPU benchmark: commands with a deadline, to check and measure the engine on a machine with a GPU.

    python -m lab.bench.gpu check --out out/gpu        # versions, kernels, the engine against the CPU, memcheck
    python -m lab.bench.gpu sweep workloads --out out/gpu
    python -m lab.bench.gpu report out/gpu             # one page of all results

They need torch, triton, tokenizers and safetensors. `cli` parses arguments, `supervisor` enforces the deadline and
writes the results, `child` is the process that runs the cases of `check`, `sweep`, `workloads`, `tests` and `peer`.
"""
