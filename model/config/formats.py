"""Number formats of matrices, as data: what they are kept as, and what their rows are multiplied as. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NumberKind(StrEnum):
    """A type of numbers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a matrix is kept and multiplied.

    INT8 weights have a scale for each row, INT8 activations one for each token, computed as they come; both are
    symmetric about zero.
    """

    weight: NumberKind
    activation: NumberKind
