"""Attention tile sizes: the backend's choice against others, and prompts against torch's kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

import torch

from lab.bench.gpu.cases import Case
from lab.bench.gpu.compiling import in_parallel
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, need_triton
from triptych.model.attention.base import AttentionBackend
from triptych.model.kernel_check.attention_problems import Problem, ProblemTensors, make_tensors

if TYPE_CHECKING:
    from triptych.model.attention.triton import Tiles

HEADS = {"8b": (32, 8, 128), "0.6b": (16, 8, 128), "bart": (16, 16, 64)}
CONTEXTS = (256, 1024, 8192)
SEQUENCES = (1, 32, 256)
PROMPTS = {
    "1 x 2k": ((2048, 2048),),
    "8 x 2k": ((2048, 2048),) * 8,
    "32 x 256": ((256, 256),) * 32,
    "1 x 8k": ((8192, 8192),),
}
_MAX_PAGE_BYTES = 24e9  # of a problem
_BEYOND_CACHE = 256 << 20  # bytes of pages used in turn: an H200's L2 cache has 60 MB
_MIN_PART = 64  # keys


def cases(bench: Bench) -> list[Case]:
    compiled = [Case("compile tiles", _compile, 45)] if bench.cuda else []
    if bench.tiny:
        cells = [("toy", (4, 2, 16), 130, 2)]
    else:
        cells = [
            (name, heads, context, count)
            for (name, heads), context, count in product(HEADS.items(), CONTEXTS, SEQUENCES)
            if 4 * heads[1] * heads[2] * context * count < _MAX_PAGE_BYTES
        ]
    return [
        *compiled,
        *(
            Case(f"decode, {name}, {c} x {k}", partial(_decode, heads=h, context=k, count=c), 6)
            for name, h, k, c in cells
        ),
        *(Case(f"prompts, {name}", partial(_prompts, problem=problem), 6) for name, problem in prompts(bench).items()),
    ]


def prompts(bench: Bench) -> dict[str, Problem]:
    """Return problems of prompts in pages, and of an encoder's packed texts."""
    if bench.tiny:
        return {"toy, 2 x 12": Problem(((12, 12),) * 2, 4, 2, 16)}
    found = {
        f"{name}, {kind}": Problem(lens, *heads)
        for (name, heads), (kind, lens) in product(HEADS.items(), PROMPTS.items())
    }
    return {**found, "bert, texts of 32 x 512": Problem(((512, 512),) * 32, 12, 12, 64, causal=False, paged=False)}


def decode_tiles(chosen: Tiles, bench: Bench) -> Iterator[Tiles]:
    """Return tiles for single queries, the chosen one first. Pages are fetched (stages - 1) // 2 blocks ahead."""
    yield chosen
    keys, warps, stages = ((16,), (4,), (1,)) if bench.tiny else ((32, 64, 128), (2, 4, 8), (3, 5, 7))
    for k, w, s in product(keys, warps, stages):
        if (tiles := replace(chosen, keys=k, warps=w, stages=s)) != chosen:
            yield tiles


def prompt_tiles(chosen: Tiles, bench: Bench) -> Iterator[Tiles]:
    """Return tiles for prompts; 128 rows exceed the registers of 4 warps."""
    yield chosen
    if bench.tiny:
        return
    for (rows, warps), keys, stages in product(((64, 4), (64, 8), (128, 8)), (32, 64, 128), (2, 3, 4, 5)):
        if (tiles := replace(chosen, rows=rows, keys=keys, warps=warps, stages=stages)) != chosen:
            yield tiles


def chosen_for(problem: Problem, device: torch.device, dtype: torch.dtype) -> tuple[Tiles, int]:
    """Return the tiles and parts that the backend chooses, recorded at its call."""
    from lab.bench.gpu.tiled_backend import TiledBackend

    seen: list[Tiles] = []
    parts: list[int] = []

    class Seeing(TiledBackend):
        def tiles(self, *arguments: object, **named: object) -> Tiles:
            seen.append(super().tiles(*arguments, **named))
            return seen[-1]

        def parts(self, *arguments: object, **named: object) -> int:
            parts.append(super().parts(*arguments, **named))
            return parts[-1]

    make_tensors(problem, device, dtype).forward(Seeing())
    return seen[-1], parts[-1]


def _decode_problem(heads: tuple[int, int, int], context: int, count: int) -> Problem:
    return Problem(((1, context),) * count, *heads)


def _decode(bench: Bench, *, heads: tuple[int, int, int], context: int, count: int) -> Figures:
    """Compare the chosen tiles and parts with others, by the bandwidth of reading pages."""
    from lab.bench.gpu.tiled_backend import TiledBackend

    need_triton(bench)
    problem = _decode_problem(heads, context, count)
    copies = beyond_cache(problem, bench)
    given = [make_tensors(problem, bench.device, bench.dtype, seed) for seed in range(copies)]
    chosen, parts = chosen_for(problem, bench.device, bench.dtype)
    timed = _all(bench, given, list(decode_tiles(chosen, bench)))
    others = [1 << power for power in range(7) if (1 << power) <= context // _MIN_PART]
    by_parts = {n: 1e6 * bench.device_seconds(in_turn(given, TiledBackend(chosen, n)), rounds=3) for n in others}
    read = problem.kv_bytes / bench.ceilings.bytes_per_second
    found = _found(timed) | {"of_bandwidth": read / timed[0][0], "best_of_bandwidth": read / min(timed)[0]}
    best = min(by_parts, key=by_parts.__getitem__, default=parts)
    return found | {"parts": parts, "best_parts": best, "us_by_parts": {str(n): us for n, us in by_parts.items()}}


def _prompts(bench: Bench, *, problem: Problem) -> Figures:
    """Compare prompts without a past, or texts, with torch's kernels over packed rows."""
    need_triton(bench)
    given = make_tensors(problem, bench.device, bench.dtype)
    timed = _all(bench, [given], list(prompt_tiles(chosen_for(problem, bench.device, bench.dtype)[0], bench)))
    found = _found(timed) | {"tflops": problem.flops / timed[0][0] / 1e12}
    packed = make_tensors(replace(problem, paged=False), bench.device, bench.dtype)
    for name, work in (("sdpa", _sdpa), ("varlen", _varlen)):
        try:
            found[f"{name}_us"] = 1e6 * bench.device_seconds(work(packed))
        except Exception as error:
            found[f"{name}_problem"] = f"{type(error).__name__}: {error}"[:200]
    return found


def beyond_cache(problem: Problem, bench: Bench) -> int:
    """Return how many copies of a problem's pages do not fit into the device's cache."""
    return 1 if bench.tiny else min(10, -(-_BEYOND_CACHE // problem.kv_bytes))


def in_turn(given: list[ProblemTensors], backend: AttentionBackend) -> Callable[[], object]:
    """Return calls over several copies in turn, so that pages are read from memory and not from the cache."""
    turn = cycle(given)
    return lambda: next(turn).forward(backend)


def _all(bench: Bench, given: list[ProblemTensors], tiles: list[Tiles]) -> list[tuple[float, str]]:
    """Return seconds for each tiling, the chosen one first; those that do not fit are omitted."""
    from lab.bench.gpu.tiled_backend import TiledBackend

    timed: list[tuple[float, str]] = []
    for one in tiles:
        try:
            seconds = bench.device_seconds(in_turn(given, TiledBackend(one)), rounds=3)
        except Exception as error:
            if not timed:  # the chosen one must work
                raise
            bench.warnings.append(f"{named(one)}: {type(error).__name__}"[:200])
            continue
        timed.append((seconds, named(one)))
    return timed


def _found(timed: list[tuple[float, str]]) -> Figures:
    best = min(timed)
    rows = [{"tiles": name, "us": 1e6 * seconds} for seconds, name in sorted(timed)[:5]]
    figures: Figures = {"us": 1e6 * timed[0][0], "tiles": timed[0][1], "best_us": 1e6 * best[0], "best": best[1]}
    return {**figures, "could_be": best[0] / timed[0][0], "table": rows}


def named(tiles: Tiles) -> str:
    return f"{tiles.rows}x{tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"


def _sdpa(given: ProblemTensors) -> Callable[[], object]:
    """Time torch's scaled_dot_product_attention over prompts of one length."""
    assert given.key is not None and given.value is not None
    count = len(given.problem.segments)
    q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (given.query, given.key, given.value))
    attend = torch.nn.functional.scaled_dot_product_attention
    causal, scale = given.problem.causal, given.problem.config.scale
    return lambda: attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def _varlen(given: ProblemTensors) -> Callable[[], object]:
    """Time torch's attention over packed rows; without grouped heads, key heads are repeated."""
    from torch.nn.attention.varlen import varlen_attn

    assert given.key is not None and given.value is not None
    window = (-1, 0) if given.problem.causal else (-1, -1)
    lengths, named = given.metadata.on_device(), dict[str, Any](window_size=window, scale=given.problem.config.scale)
    starts = lengths.cu_seqlens_q.to(torch.int32)
    k, v = given.key, given.value
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        named["enable_gqa"] = True
    else:
        group = given.problem.heads // given.problem.kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return lambda: varlen_attn(given.query, k, v, starts, starts, lengths.max_q_len, lengths.max_q_len, **named)


Job = tuple[Problem, "Tiles", int]


def _compile(bench: Bench) -> Figures:
    """Compile all tiles of all head sizes, with and without parts, in parallel processes."""
    jobs: list[Job] = []
    for heads in HEADS.values():
        single = _decode_problem(heads, 600, 1)
        for tiles in decode_tiles(chosen_for(single, bench.device, bench.dtype)[0], bench):
            jobs += [(single, tiles, 1), (single, tiles, 2)]
    # One short prompt compiles the same variant as many long ones.
    for short in {replace(problem, segments=((300, 300),)) for problem in prompts(bench).values()}:
        jobs += [(short, tiles, 1) for tiles in prompt_tiles(chosen_for(short, bench.device, bench.dtype)[0], bench)]
    return in_parallel(bench, compile_one, jobs)


def compile_one(job: Job) -> None:
    """Compile one variant, in a process of its own."""
    from lab.bench.gpu.tiled_backend import TiledBackend

    problem, tiles, parts = job
    make_tensors(problem, torch.device("cuda"), torch.bfloat16).forward(TiledBackend(tiles, parts))
    torch.cuda.synchronize()
