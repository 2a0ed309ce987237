"""Number formats of projections, as data: how they are stored, kept and multiplied. Without torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum


class NumberKind(StrEnum):
    """A type of numbers."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"
    INT4 = "int4"
    FLOAT8 = "float8_e4m3fn"  # 4 bits of exponent, 3 of fraction, up to 448

    @property
    def bits(self) -> int:
        return {"float32": 32, "bfloat16": 16, "float16": 16, "int4": 4}.get(self, 8)


STORED_BYTES = {  # bytes of a number, by safetensors' names of dtypes
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True, slots=True)
class Storage:
    """How a checkpoint stores the matrix of a projection: floats, or numbers * scales + offsets.

    A block of `block` outputs and inputs has one scale, and one offset if there are offsets; 0 means all of them.
    """

    name: str  # for messages
    numbers: NumberKind | None = None  # of the tensor "weight"; None: floating-point numbers of any kind
    scale: str | None = None  # the tensor of scales
    block: tuple[int, int] = (1, 0)
    passed_over: tuple[str, ...] = ()  # patterns of tensors that are not needed: scales of activations
    offset: str | None = None  # the tensor of offsets
    bits: int = 8  # of a number; integers of 4 bits, -8 to 7, are read as INT8 too
    # Bits and group in which C keeps numbers that it cannot keep as stored, unless the settings name a format.
    nearest: tuple[int, int] | None = None

    @property
    def tensors(self) -> dict[str, NumberKind | None]:
        """The tensors of the matrix; scales come first, so that rows are multiplied while they are read."""
        return dict.fromkeys(self.factors) | {"weight": self.numbers}

    @property
    def factors(self) -> tuple[str, ...]:
        """The tensors that have one number for each block."""
        return tuple(name for name in (self.scale, self.offset) if name is not None)

    def scales_of(self, inputs: int) -> int:
        """Return the number of scales of one output."""
        return -(-inputs // self.block[1]) if self.block[1] else 1


FLOAT = Storage("floats")
INT8_ROWS = Storage("int8 by row", NumberKind.INT8, "weight_scale")  # symmetric: compressed-tensors' "int-quantized"
GROUPS = (32, 64, 128)  # numbers of inputs that can share a scale in C


def integers_in_groups(bits: int, group: int, *, offsets: bool) -> Storage:
    """Return the storage of integers of 4 or 8 bits whose scale `group` inputs share: integer * scale + offset."""
    name = f"int{bits} in groups of {group}" + (" with offsets" if offsets else "")
    offset = "weight_offset" if offsets else None
    return Storage(name, NumberKind.INT8, "weight_scale", (1, group), offset=offset, bits=bits)


def joined(storages: Collection[Storage]) -> Storage | None:
    """Return the storage that holds all of these exactly, for projections that are fused into one.

    None if there is none, because some are not integers in groups.
    """
    first, *others = dict.fromkeys(storages)
    if not others:
        return first
    if any(kept_as_stored(storage) is None or not storage.block[1] for storage in (first, *others)):
        return None
    return integers_in_groups(
        max(storage.bits for storage in (first, *others)),
        min(storage.block[1] for storage in (first, *others)),  # which divides the larger ones
        offsets=any(storage.offset is not None for storage in (first, *others)),
    )


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How a matrix is stored in the checkpoint, kept in memory and multiplied.

    INT8 weights have a scale for each row, INT8 activations one for each token, computed in the step; both are
    symmetric about zero. With a `group`, which INT4 weights always have, `group` inputs of a row or token share a
    scale. Floats, and numbers in another format, are converted while they are read.
    """

    weight: NumberKind
    activation: NumberKind
    stored_as: Storage = FLOAT
    group: int = 0  # inputs that share a scale; 0: all of a row


def kept_as_stored(storage: Storage) -> NumberFormat | None:
    """Return how C keeps and multiplies numbers as they are stored; None if it cannot."""
    if storage == INT8_ROWS:
        return NumberFormat(NumberKind.INT8, NumberKind.INT8, storage)
    if storage.numbers is not NumberKind.INT8 or storage.block[0] != 1 or storage.block[1] not in GROUPS:
        return None
    kept = NumberKind.INT4 if storage.bits == 4 else NumberKind.INT8
    return NumberFormat(kept, NumberKind.INT8, storage, storage.block[1])


def nearest_kept(storage: Storage) -> NumberFormat | None:
    """Return the default format of numbers that C cannot keep as they are stored; None: the network's floats."""
    if storage.nearest is None:
        return None
    bits, group = storage.nearest
    return replace(integers(NumberKind.INT4 if bits == 4 else NumberKind.INT8, group), stored_as=storage)


def integers(weight: NumberKind, group: int = 0) -> NumberFormat:
    """Return the format of weights in these integers, multiplied with activations of 8 bits."""
    return NumberFormat(weight, NumberKind.INT8, group=group)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A value of `--quantization`: the formats of the layers' matrices and of the head."""

    layers: NumberFormat
    head: NumberFormat | None  # None: the network's floats
    loss: str  # the rounding of the weights, for messages
    is_planned: bool = False  # `inspect` and errors about memory list the model's size in it

    @property
    def bits(self) -> float:
        """Bits of a weight of the layers, with its share of a scale in float32."""
        return self.layers.weight.bits + (32 / self.layers.group if self.layers.group else 0)


_I8, _I4 = NumberKind.INT8, NumberKind.INT4
_ROW, _GROUP = (f"each rounded by at most 1/254 of the largest in its {where}" for where in ("row", "group"))
_HEAD, _LOST = integers(_I8, 128), "which loses about {} % of the norm of weights"
# Every format that can be asked for, by the name of the setting.
FORMATS = {
    "int8": WeightFormat(integers(_I8), integers(_I8), _ROW, is_planned=True),
    "int8-g128": WeightFormat(integers(_I8, 128), integers(_I8, 128), _GROUP, is_planned=True),
    "int8-g32": WeightFormat(integers(_I8, 32), integers(_I8, 32), _GROUP),
    "int4": WeightFormat(integers(_I4, 64), _HEAD, _LOST.format(9), is_planned=True),
    "int4-g32": WeightFormat(integers(_I4, 32), _HEAD, _LOST.format(8)),
    "int4-g128": WeightFormat(integers(_I4, 128), _HEAD, _LOST.format(10)),
    "fp8": WeightFormat(NumberFormat(NumberKind.FLOAT8, NumberKind.FLOAT8), None, ""),
}
# The formats of layers and head that C and Triton multiply as integers, and that `triptych quantize` writes.
QUANTIZED_LAYERS = {name: (one.layers, one.head) for name, one in FORMATS.items() if one.head is not None}
