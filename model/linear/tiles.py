"""The tiles into which a launch of a Triton product is cut."""

from __future__ import annotations

from dataclasses import dataclass

FEW = 16  # rows of the smallest tile: the least that tensor cores multiply
SEVERAL = 64  # rows of the next one


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program multiplies `rows` rows, for `outputs` columns of the result, in steps of `inputs` inputs.

    `warps` compute it, and `stages` steps are read ahead, as Triton's launch options of these names say.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
