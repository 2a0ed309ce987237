"""Everything there is to learn on a machine with a GPU, as commands that end by themselves.

    python -m loadtest.bench.gpu check --out out/gpu        # versions, kernels, the engine against the CPU, memcheck
    python -m loadtest.bench.gpu sweep workloads --out out/gpu
    python -m loadtest.bench.gpu report out/gpu             # the page of it all

They need torch, triton, tokenizers and safetensors. `cli` reads arguments, `supervisor` keeps the time and writes the
folder, `child` is the process in which the cases of `check`, `sweep`, `workloads`, `tests` and `peer` run.
"""
