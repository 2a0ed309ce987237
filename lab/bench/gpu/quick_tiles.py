"""The command `quick_tiles`: attention by the chosen tiles, those before them, and a few others, in 25 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from lab.bench.gpu.cases import Case
from lab.bench.gpu.figures import Figures
from lab.bench.gpu.machine import Bench, need_triton
from lab.bench.gpu.tiles import beyond_cache, chosen_for, in_turn, named
from triptych.model.kernel_check.attention_problems import Problem, make_tensors

if TYPE_CHECKING:
    from triptych.model.attention.triton import Tiles

_EIGHT, _BART, _BERT, _GEMMA = (32, 8, 128), (16, 16, 64), (12, 12, 64), (4, 1, 256)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A problem and tiles for it, each (rows, keys, warps, stages): those chosen until 2026-11, and others."""

    problem: Problem
    before: tuple[int, int, int, int]
    others: tuple[tuple[int, int, int, int], ...] = ()


_DECODE_OTHERS = ((16, 32, 4, 5), (16, 64, 8, 5), (16, 128, 8, 5), (16, 64, 2, 3), (16, 32, 2, 5))
_SMALL_OTHERS = ((16, 64, 4, 5), (16, 32, 4, 3), (16, 64, 2, 3), (16, 64, 2, 5), (16, 32, 2, 5), (16, 128, 4, 3))
COMPARISONS = {
    "decode, 8b, 128 x 1k": Comparison(Problem(((1, 1024),) * 128, *_EIGHT), (16, 64, 4, 3), _DECODE_OTHERS),
    "decode, 8b, 1 x 1k": Comparison(Problem(((1, 1024),), *_EIGHT), (16, 64, 4, 3), _DECODE_OTHERS),
    "decode, 8b, 128 x 1k, int8": Comparison(
        Problem(((1, 1024),) * 128, *_EIGHT, int8=True),
        (16, 64, 4, 3),
        ((16, 64, 4, 5), (16, 32, 4, 7), (16, 64, 8, 5), (16, 128, 8, 5)),
    ),
    "decode, bart, 128 x 350": Comparison(Problem(((1, 350),) * 128, *_BART), (16, 64, 4, 3), _SMALL_OTHERS),
    "decode, gemma3, 128 x 1k": Comparison(
        Problem(((1, 1024),) * 128, *_GEMMA), (16, 32, 4, 3), ((16, 64, 4, 3), (16, 32, 8, 5), (16, 16, 4, 5))
    ),
    "prompt, 8b, 2k, pages": Comparison(
        Problem(((2048, 2048),), *_EIGHT),
        (128, 64, 8, 3),
        ((128, 32, 8, 5), (128, 64, 8, 7), (128, 128, 8, 3), (64, 64, 4, 5)),
    ),
    "prompt, 8b, 2k, packed": Comparison(
        Problem(((2048, 2048),), *_EIGHT, paged=False),
        (128, 64, 8, 2),
        ((128, 64, 8, 4), (128, 128, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3)),
    ),
    "prompt, gemma3, 2k, pages": Comparison(
        Problem(((2048, 2048),), *_GEMMA), (64, 32, 4, 3), ((64, 32, 8, 5), (64, 32, 4, 5), (128, 16, 8, 5))
    ),
    "encode, bert, 32 x 512": Comparison(
        Problem(((512, 512),) * 32, *_BERT, causal=False, paged=False),
        (128, 64, 8, 2),
        ((128, 64, 8, 4), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)),
    ),
}


def cases(bench: Bench) -> list[Case]:
    found = {"toy": _toy()} if bench.tiny else COMPARISONS
    return [Case(f"tiles, {name}", partial(_compare, comparison=one), 3) for name, one in found.items()]


def launches() -> Iterator[tuple[Problem, Tiles, int]]:
    """Yield small problems with the tiles and parts of all comparisons, to compile them."""
    from triptych.model.attention.triton import Tiles

    for comparison in COMPARISONS.values():
        problem = comparison.problem
        decodes = problem.segments[0][0] == 1
        small = replace(problem, segments=((1, 40),) * 2 if decodes else ((300, 300),))
        chosen, _ = chosen_for(small, torch.device("cpu"), torch.bfloat16)
        for tiles in (chosen, *(Tiles(*one) for one in (comparison.before, *comparison.others))):
            yield from ((small, tiles, parts) for parts in ((1, 8) if decodes else (1,)))


def _toy() -> Comparison:
    return Comparison(Problem(((1, 40),), 4, 2, 16), (16, 16, 4, 1), ((16, 32, 4, 1),))


def _compare(bench: Bench, *, comparison: Comparison) -> Figures:
    """Return the microseconds of all tiles; a factor above 1 says that the chosen ones are faster than those before."""
    from lab.bench.gpu.tiled_backend import TiledBackend
    from triptych.model.attention.triton import Tiles

    need_triton(bench)
    problem = comparison.problem
    copies = beyond_cache(problem, bench) if problem.paged else 1
    given = [make_tensors(problem, bench.device, bench.dtype, seed) for seed in range(copies)]
    chosen, parts = chosen_for(problem, bench.device, bench.dtype)
    seconds: dict[Tiles, float] = {}
    problems: list[str] = []
    for tiles in (chosen, *(Tiles(*one) for one in (comparison.before, *comparison.others))):
        try:
            seconds[tiles] = bench.device_seconds(in_turn(given, TiledBackend(tiles, parts)), rounds=3)
        except Exception as error:
            problems.append(f"{named(tiles)}: {type(error).__name__}: {error}"[:200])
    before, best = Tiles(*comparison.before), min(seconds, key=seconds.__getitem__)
    found: Figures = {"us": 1e6 * seconds[chosen], "tiles": named(chosen), "parts": parts}
    if before in seconds:
        found |= {"before_us": 1e6 * seconds[before], "faster": seconds[before] / seconds[chosen]}
    found |= {"best_us": 1e6 * seconds[best], "best": named(best)}
    if problem.segments[0][0] == 1:
        found["of_bandwidth"] = problem.kv_bytes / bench.ceilings.bytes_per_second / seconds[chosen]
    else:
        found["tflops"] = problem.flops / seconds[chosen] / 1e12
    return found | {"table": {named(one): 1e6 * spent for one, spent in seconds.items()}, "problems": problems}
