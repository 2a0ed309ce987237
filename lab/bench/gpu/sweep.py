"""The command `sweep`: tile sizes of matrix products with few rows, and of attention."""

from __future__ import annotations

from lab.bench.gpu import products, tiles
from lab.bench.gpu.cases import Case
from lab.bench.gpu.machine import Bench


def cases(bench: Bench) -> list[Case]:
    return [*tiles.cases(bench), *products.cases(bench)]
