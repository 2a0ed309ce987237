"""The command `check`: one launch for each dtype, the kernels eager and captured, the engine, and memcheck."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lab.bench.gpu import experts, fp8, integers, parity, recurrent
from lab.bench.gpu.cases import Case
from lab.bench.gpu.compiling import in_parallel
from lab.bench.gpu.figures import Figures, Skip
from lab.bench.gpu.machine import Bench, need_triton
from triptych.model.attention.base import AttentionMetadata
from triptych.model.attention.reference import ReferenceBackend
from triptych.model.kernel_check.attention_problems import Problem, ProblemTensors, make_tensors
from triptych.model.kernel_check.product_problems import difference

_COMPILE_S = 180.0  # that the checks' compilers may take together
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # for outputs of order 1

_RAGGED = tuple((1, 37 * at + 1) for at in range(64))
_MIXED = ((700, 700), (1, 3000), (300, 4000), (1, 1), (33, 33))
_SOURCES = ((1, 260), (1, 440), (1, 3))
_PROMPTS = ((400, 400), (7, 7), (130, 130))
_KERNELS = {  # name: problem
    "decode, keys in parts": Problem(((1, 8000), (1, 5))),
    "decode, many sequences": Problem(((1, 300),) * 200),
    "decode, ragged": Problem(_RAGGED),
    "decode, window": Problem(_RAGGED, window=512),
    "mixed": Problem(_MIXED),
    "mixed, decodes in front": Problem(tuple(sorted(_MIXED))),  # a launch of their own, as in the engine
    "cross": Problem(_SOURCES, heads=16, kv_heads=16, dim=64, causal=False, writes=False),
    "int8 pages, decode": Problem(_RAGGED, int8=True),
    "int8 pages, mixed": Problem(_MIXED, int8=True),
    "fp8 pages, decode": Problem(_RAGGED, fp8=True),
    "fp8 pages, mixed": Problem(_MIXED, fp8=True),
    "T5 bias, decode": Problem(_SOURCES, heads=32, kv_heads=32, dim=64, biased=True),
    "T5 bias, packed": Problem(_PROMPTS, heads=32, kv_heads=32, dim=64, causal=False, paged=False, biased=True),
    "encoder, packed": Problem(_PROMPTS, heads=12, kv_heads=12, dim=64, causal=False, paged=False),
    "head 64": Problem(_MIXED, heads=14, kv_heads=2, dim=64),
    "head 80": Problem(_MIXED, heads=32, kv_heads=32, dim=80),
    "head 256": Problem(_MIXED, heads=8, kv_heads=1, dim=256),
    "Gemma 2, window": Problem(_MIXED, heads=8, kv_heads=4, dim=256, window=512, softcap=5.0),
    "Gemma 2, decode": Problem(_RAGGED, heads=8, kv_heads=4, dim=256, softcap=5.0),
}
_TINY = {
    "decode, keys in parts": Problem(((1, 600), (1, 5)), heads=4, kv_heads=2, dim=16),
    "mixed": Problem(((20, 20), (1, 30)), heads=4, kv_heads=2, dim=16),
    "mixed, decodes in front": Problem(((1, 30), (20, 20)), heads=4, kv_heads=2, dim=16),
    "int8 pages, decode": Problem(((1, 33), (1, 5)), heads=4, kv_heads=2, dim=16, int8=True),
    "fp8 pages, decode": Problem(((1, 33), (1, 5)), heads=4, kv_heads=2, dim=16, fp8=True),
    "T5 bias, packed": Problem(((9, 9),), heads=2, kv_heads=2, dim=16, causal=False, paged=False, biased=True),
}


def cases(bench: Bench) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    launches = [Case(f"launch, {_named(dtype)}", partial(_launch, dtype=dtype), 5) for dtype in dtypes]
    kernels = [
        Case(f"kernel, {name}, {_named(dtype)}", partial(_kernel, problem=problem, dtype=dtype), 8)
        for dtype in (dtypes[1:2] if bench.cuda else dtypes[:1])
        for name, problem in (_TINY if bench.tiny else _KERNELS).items()
    ]
    if not bench.tiny:  # the kernels' variant without tensor cores
        kernels += [
            Case(f"kernel, {name}, float32", partial(_kernel, problem=_KERNELS[name], dtype=torch.float32), 8)
            for name in ("decode, keys in parts", "mixed", "head 256")
        ]
    kernels += recurrent.check_cases(bench)
    kernels += [case for kind in (integers, fp8, experts) for case in kind.check_cases(bench)]
    compiled = [Case("compile checks", partial(_compile, kernels=kernels), 60)] if bench.cuda else []
    return [*launches, *compiled, *kernels, *parity.cases(bench), Case("memcheck", _memcheck, 60)]


def _compile(bench: Bench, *, kernels: Sequence[Case]) -> Figures:
    """Compile what the checks launch in parallel processes: one after the other they would take most of the time."""
    names = [*parity.to_compile(), *(case.name for case in kernels)]  # the longest first
    return in_parallel(bench, compile_one, [(name, bench.tiny) for name in names], _COMPILE_S)


def compile_one(job: tuple[str, bool]) -> None:
    """Compile what a case launches, in a process of its own."""
    torch.set_num_threads(1)
    name, tiny = job
    bench = Bench.here(Path(tempfile.gettempdir()), tiny=tiny, ends=math.inf)
    if name.startswith("engine, "):
        parity.compile_case(bench, name)
    else:
        next(case for case in cases(bench) if case.name == name).run(bench)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _launch(bench: Bench, *, dtype: torch.dtype) -> Figures:
    """Run the kernels with one query and one key."""
    need_triton(bench)
    from triptych.model.attention.triton import try_out

    try_out(bench.device, dtype)
    return {"ok": True}


def _kernel(bench: Bench, *, problem: Problem, dtype: torch.dtype) -> Figures:
    """Compare a kernel with the reference in float32 on the same device, also captured and replayed."""
    need_triton(bench)
    from triptych.model.attention.triton import TritonBackend

    if problem.fp8:
        fp8.need_fp8(bench)
    backend, given = TritonBackend(), make_tensors(problem, bench.device, dtype)
    expected = given.copied(torch.float32).forward(ReferenceBackend())
    found: Figures = {"eager_error": difference(given.forward(backend), expected, least=1.0)}
    if bench.cuda:
        found["captured_error"] = _replayed(bench, given, expected)
        seconds = bench.device_seconds(lambda: given.forward(backend))
        found |= {"us": 1e6 * seconds, "tb_per_s": problem.kv_bytes / seconds / 1e12}
        found["tflops"] = problem.flops / seconds / 1e12
    errors = [value for key, value in found.items() if "error" in key]
    return {"ok": max(errors) <= _BOUNDS[dtype], **found}


def _replayed(bench: Bench, given: ProblemTensors, expected: torch.Tensor) -> float:
    """Return the error of a recorded launch with its own lengths and, for single queries, with shorter ones."""
    from triptych.model.attention.triton import TritonBackend

    backend, out = TritonBackend(), torch.empty_like(given.query)
    replay = bench.captured(lambda: out.copy_(given.forward(backend)))
    out.zero_()
    replay()
    worst = difference(out, expected, least=1.0)
    known, lengths = given.metadata, given.metadata.device_lengths
    if lengths is None or lengths.max_q_len > 1:
        return worst
    before = lengths.kv_lens.clone()
    shorter = tuple(max(1, kv_len // 2) for kv_len in known.kv_lens)
    lengths.kv_lens.copy_(torch.tensor(shorter))
    replay()  # its key goes to the slot after the last, which is not read
    read = AttentionMetadata(known.q_lens, shorter, known.causal, known.device, known.block_tables)
    copied = replace(given.copied(torch.float32), metadata=read)
    lengths.kv_lens.copy_(before)
    return max(worst, difference(out, copied.forward(ReferenceBackend()), least=1.0))


def _memcheck(bench: Bench) -> Figures:
    """Run four tiny launches under compute-sanitizer, with separate allocations so that none hides an overrun."""
    tool = shutil.which("compute-sanitizer")
    if not bench.cuda or tool is None:
        raise Skip("compute-sanitizer is not installed" if bench.cuda else "there is no CUDA device")
    command = [
        tool,
        "--tool",
        "memcheck",
        "--report-api-errors",
        "no",
        "--target-processes",
        "all",
        sys.executable,
        "-m",
    ]
    done = subprocess.run(
        [*command, "lab.bench.gpu.launches"],
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=max(1.0, min(180.0, bench.left - 20)),
    )
    said = done.stdout + done.stderr
    with (bench.folder / "profiles.txt").open("a") as file:
        file.write(f"\nmemcheck:\n{said[-4000:]}\n")
    clean = done.returncode == 0 and "ERROR SUMMARY: 0 errors" in said and "launched 4" in said
    return {"ok": clean, "said": said[-300:]}
