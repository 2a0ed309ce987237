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
    INT4 = "int4"
    FLOAT8 = "float8_e4m3fn"  # 4 bits of exponent, 3 of fraction, up to 448


@dataclass(frozen=True, slots=True)
class Storage:
    """How a checkpoint stores the matrix of a projection: as floats, or as numbers times scales.

    One scale is for a block of `block` outputs and inputs; 0 means all of them.
    """

    name: str  # for people
    numbers: NumberKind | None = None  # of the tensor "weight"; None: floating-point numbers of any kind
    scale: str | None = None  # the tensor beside it
    block: tuple[int, int] = (1, 0)
    passed_over: tuple[str, ...] = ()  # tensors that are not needed, as patterns: scales of activations

    @property
    def tensors(self) -> dict[str, NumberKind | None]:
        """What is stored beside a bias; scales come first, so that rows are multiplied as they are read."""
        return ({} if self.scale is None else {self.scale: None}) | {"weight": self.numbers}

    def scales_of(self, inputs: int) -> int:
        """Scales of one output."""
        return -(-inputs // self.block[1]) if self.block[1] else 1


FLOAT = Storage("floats")
INT8_ROWS = Storage("int8 by row", NumberKind.INT8, "weight_scale")  # symmetric: compressed-tensors' "int-quantized"


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a matrix is stored in the checkpoint, kept in memory and multiplied.

    INT8 weights have a scale for each row, INT8 activations one for each token, computed as they come; both are
    symmetric about zero. With a `group`, as INT4 weights always, so many inputs share a scale, of a row and of a token.
    What is stored as floats is converted while it is read, and so is what is stored in another format than it is kept
    in.
    """

    weight: NumberKind
    activation: NumberKind
    stored_as: Storage = FLOAT
    group: int = 0  # inputs that share a scale; 0: all of a row


def integers(weight: NumberKind, group: int = 0) -> NumberFormat:
    """Weights in these integers, multiplied with activations of 8 bits."""
    return NumberFormat(weight, NumberKind.INT8, group=group)


# What C keeps the matrices of layers in, and the head, by the setting that asks for it.
QUANTIZED_LAYERS: dict[str, tuple[NumberFormat, NumberFormat]] = {
    "int8": (integers(NumberKind.INT8), integers(NumberKind.INT8)),
    "int8-g128": (integers(NumberKind.INT8, 128), integers(NumberKind.INT8, 128)),
    "int4": (integers(NumberKind.INT4, 64), integers(NumberKind.INT8, 128)),
    "int4-g32": (integers(NumberKind.INT4, 32), integers(NumberKind.INT8, 128)),
    "int4-g128": (integers(NumberKind.INT4, 128), integers(NumberKind.INT8, 128)),
}
