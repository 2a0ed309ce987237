"""Matrix products as decode steps have them, few rows over weights that no cache holds: cuBLAS against Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from loadtest.bench.gpu.cases import Case
from loadtest.bench.gpu.compiling import in_parallel
from loadtest.bench.gpu.figures import Figures
from loadtest.bench.gpu.machine import Bench

ROWS = (1, 2, 4, 8, 16, 64, 256)
FEW = 16  # rows that the Triton kernels take
_BEYOND_CACHE = 256 << 20  # bytes of weights that take turns: an H200's L2 holds 60 MB
SHAPES = {  # name: (outputs, inputs)
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b gate, up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b out": (1024, 2048),
    "0.6b gate, up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
_TINY = {"toy": (96, 64)}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a launch is cut."""

    outputs: int  # BLOCK_N
    inputs: int  # BLOCK_K
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs}, {self.warps} warps, {self.stages} stages"


_ONE = [
    Cut(n, k, w, s)
    for n, k, w, s in ((4, 512, 4, 3), (8, 512, 4, 3), (8, 1024, 8, 3), (16, 256, 4, 4), (2, 1024, 4, 2))
]
_SEVERAL = [
    Cut(n, k, w, s)
    for n, k, w, s in ((16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4), (128, 64, 4, 5))
]


def cases(bench: Bench) -> list[Case]:
    shapes = _TINY if bench.tiny else SHAPES
    compiled = [Case("compile products", _compile, 25)] if bench.cuda else []
    return compiled + [Case(f"product, {name}", partial(_product, shape=shape), 8) for name, shape in shapes.items()]


def cuts(rows: int, bench: Bench) -> list[Cut]:
    found = _ONE if rows == 1 else _SEVERAL
    return [Cut(16, 32, 4, 2)] if bench.tiny else found


def _product(bench: Bench, *, shape: tuple[int, int]) -> Figures:
    """For each number of rows: microseconds of both, and the share of the bandwidth at which weights are read."""
    outputs, inputs = shape
    dtype = bench.dtype
    count = 1 if bench.tiny else max(1, -(-_BEYOND_CACHE // (outputs * inputs * dtype.itemsize)))
    weights = [torch.randn(outputs, inputs, device=bench.device).to(dtype) / 16 for _ in range(count)]
    table = []
    for rows in ROWS[:3] if bench.tiny else ROWS:
        x = torch.randn(rows, inputs, device=bench.device).to(dtype)
        theirs = _timed(bench, weights, partial(torch.nn.functional.linear, x))
        found: Figures = {"rows": rows, "cublas_us": 1e6 * theirs}
        if rows <= FEW:
            found |= _ours(bench, weights, x)
        best = min(theirs, found.get("triton_us", 1e6 * theirs) / 1e6)
        read = weights[0].nbytes / bench.ceilings.bytes_per_second
        table.append({**found, "cublas_of_bandwidth": read / theirs, "best_of_bandwidth": read / best})
    return {"shape": f"{outputs} x {inputs}", "table": table}


def _ours(bench: Bench, weights: list[Tensor], x: Tensor) -> Figures:
    """The fastest cut, and the largest error against torch's product."""
    timed = []
    expected = torch.nn.functional.linear(x.float(), weights[0].float())
    error = 0.0
    for cut in cuts(len(x), bench):
        try:
            out = launch(x, weights[0], cut)
            seconds = _timed(bench, weights, partial(launch, x, cut=cut))
        except Exception as problem:  # more shared memory than there is, say: another cut will do
            bench.warnings.append(f"{cut}: {type(problem).__name__}: {problem}"[:200])
            continue
        error = max(error, float((out.float() - expected).abs().max() / expected.abs().max()))
        timed.append((seconds, str(cut)))
    if not timed:
        return {}
    seconds, cut_name = min(timed)
    return {"triton_us": 1e6 * seconds, "cut": cut_name, "error": error}


def _timed(bench: Bench, weights: list[Tensor], product: Callable[[Tensor], object]) -> float:
    """Seconds of a product, the weights taking turns."""
    turn = cycle(weights)
    return bench.device_seconds(lambda: product(next(turn)), calls=max(10, len(weights)), rounds=5)


def launch(x: Tensor, weight: Tensor, cut: Cut) -> Tensor:
    """`x [M, K] @ weight [N, K].T`, M at most `FEW`."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _kernel(x, weight, out, cut, warm=False)
    return out


def _kernel(x: Tensor, weight: Tensor, out: Tensor, cut: Cut, *, warm: bool) -> None:
    """Launch, or only compile."""
    from loadtest.bench.gpu import gemv

    columns, width = weight.shape
    one = len(x) == 1
    sizes = (columns, width) if one else (len(x), columns, width)
    blocks = {} if one else {"BLOCK_M": FEW}
    named = {
        **blocks,
        "BLOCK_N": cut.outputs,
        "BLOCK_K": cut.inputs,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    kernel, grid = gemv.one_row if one else gemv.few_rows, (-(-columns // cut.outputs),)
    if warm:
        kernel.warmup(x, weight, out, *sizes, grid=grid, **named)
    else:
        kernel[grid](x, weight, out, *sizes, **named)


def _compile(bench: Bench) -> Figures:
    """All cuts, in processes beside each other."""
    # 16 divides all sizes but the fewer rows, so one matrix is enough.
    jobs = [(rows, SHAPES["0.6b out"], cut) for rows in (1, 2, FEW) for cut in cuts(rows, bench)]
    return in_parallel(bench, compile_one, jobs)


def compile_one(job: tuple[int, tuple[int, int], Cut]) -> None:
    """In a process of its own."""
    rows, (outputs, inputs), cut = job
    device = torch.device("cuda")
    x, weight, out = (
        torch.empty(shape, dtype=torch.bfloat16, device=device)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    _kernel(x, weight, out, cut, warm=True)
