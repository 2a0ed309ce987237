"""Number formats of projections, as data: how they are stored, kept and multiplied. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NumberKind(StrEnum):
    """A type of numbers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"


class Storage(StrEnum):
    """How a checkpoint stores the matrix of a projection; `STORED_TENSORS` has the tensors."""

    FLOAT = "floats"
    INT8_ROWS = "int8 by row"  # symmetric, with a scale for each row: compressed-tensors' "int-quantized"


# The tensors of a stored projection beside its bias, and what they hold; None: floating-point numbers of any kind.
STORED_TENSORS: dict[Storage, dict[str, NumberKind | None]] = {
    Storage.FLOAT: {"weight": None},
    Storage.INT8_ROWS: {"weight": NumberKind.INT8, "weight_scale": None},
}


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a matrix is stored in the checkpoint, kept in memory and multiplied.

    INT8 weights have a scale for each row, INT8 activations one for each token, computed as they come; both are
    symmetric about zero. What is stored as floats is converted while it is read.
    """

    weight: NumberKind
    activation: NumberKind
    stored_as: Storage = Storage.FLOAT
