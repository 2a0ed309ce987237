"""Matrix products of decode steps, with few rows over weights larger than the cache: cuBLAS, Triton, integers, fp8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lab.bench.gpu import fp8, integers
from lab.bench.gpu.cases import Case
from lab.bench.gpu.compiling import in_parallel
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench

ROWS = (1, 2, 4, 8, 16, 64, 256)
FEW = 16  # maximum rows of the Triton kernels
_BEYOND_CACHE = 256 << 20  # bytes of weights used in turn: an H200's L2 cache has 60 MB
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
class TileSizes:
    """Holds the tile sizes of a launch."""

    outputs: int  # BLOCK_N
    inputs: int  # BLOCK_K
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.outputs}x{self.inputs}, {self.warps} warps, {self.stages} stages"


_ONE = [
    TileSizes(n, k, w, s)
    for n, k, w, s in ((4, 512, 4, 3), (8, 512, 4, 3), (8, 1024, 8, 3), (16, 256, 4, 4), (2, 1024, 4, 2))
]
_SEVERAL = [
    TileSizes(n, k, w, s)
    for n, k, w, s in ((16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4), (128, 64, 4, 5))
]


def cases(bench: Bench) -> list[Case]:
    shapes = _TINY if bench.tiny else SHAPES
    compiled = [Case("compile products", _compile, 25)] if bench.cuda else []
    own = [Case(f"product, {name}", partial(_product, shape=shape), 8) for name, shape in shapes.items()]
    return [*compiled, *own, *integers.product_cases(bench, shapes), *fp8.product_cases(bench, shapes)]


def tile_sizes(rows: int, bench: Bench) -> list[TileSizes]:
    found = _ONE if rows == 1 else _SEVERAL
    return [TileSizes(16, 32, 4, 2)] if bench.tiny else found


def _product(bench: Bench, *, shape: tuple[int, int]) -> Figures:
    """Return, for each number of rows, microseconds of both, and the share of the bandwidth for reading weights."""
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
    """Return the fastest tile sizes, and the largest error relative to torch's product."""
    timed = []
    expected = torch.nn.functional.linear(x.float(), weights[0].float())
    error = 0.0
    for sizes in tile_sizes(len(x), bench):
        try:
            out = launch(x, weights[0], sizes)
            seconds = _timed(bench, weights, partial(launch, x, sizes=sizes))
        except Exception as problem:  # for example too little shared memory: other sizes may work
            bench.warnings.append(f"{sizes}: {type(problem).__name__}: {problem}"[:200])
            continue
        error = max(error, float((out.float() - expected).abs().max() / expected.abs().max()))
        timed.append((seconds, str(sizes)))
    if not timed:
        return {}
    seconds, cut_name = min(timed)
    return {"triton_us": 1e6 * seconds, "sizes": cut_name, "error": error}


def _timed(bench: Bench, weights: list[Tensor], product: Callable[[Tensor], object]) -> float:
    """Return the seconds of a product, with weights used in turn."""
    turn = cycle(weights)
    return bench.device_seconds(lambda: product(next(turn)), calls=max(10, len(weights)), rounds=5)


def launch(x: Tensor, weight: Tensor, sizes: TileSizes) -> Tensor:
    """Compute `x [M, K] @ weight [N, K].T` for M of at most `FEW`."""
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _kernel(x, weight, out, sizes, warm=False)
    return out


def _kernel(x: Tensor, weight: Tensor, out: Tensor, sizes: TileSizes, *, warm: bool) -> None:
    """Launch the kernel, or only compile it."""
    from lab.bench.gpu import gemv

    columns, width = weight.shape
    one = len(x) == 1
    dimensions = (columns, width) if one else (len(x), columns, width)
    blocks = {} if one else {"BLOCK_M": FEW}
    named = {
        **blocks,
        "BLOCK_N": sizes.outputs,
        "BLOCK_K": sizes.inputs,
        "num_warps": sizes.warps,
        "num_stages": sizes.stages,
    }
    kernel, grid = gemv.one_row if one else gemv.few_rows, (-(-columns // sizes.outputs),)
    if warm:
        kernel.warmup(x, weight, out, *dimensions, grid=grid, **named)
    else:
        kernel[grid](x, weight, out, *dimensions, **named)


def _compile(bench: Bench) -> Figures:
    """Compile all tile sizes in parallel processes."""
    # 16 divides all sizes except the number of rows, so one matrix is enough.
    jobs = [(rows, SHAPES["0.6b out"], sizes) for rows in (1, 2, FEW) for sizes in tile_sizes(rows, bench)]
    return in_parallel(bench, compile_one, jobs)


def compile_one(job: tuple[int, tuple[int, int], TileSizes]) -> None:
    """Compile one variant, in a process of its own."""
    rows, (outputs, inputs), sizes = job
    device = torch.device("cuda")
    x, weight, out = (
        torch.empty(shape, dtype=torch.bfloat16, device=device)
        for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    _kernel(x, weight, out, sizes, warm=True)
