"""The number formats of GGUF's tensors: names, and how many bytes a block of numbers takes.

The formats are those of ggml (`ggml.h`, `ggml-common.h`). A row of a tensor is a whole number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockType:
    """A format: `block` numbers take `bytes` bytes."""

    name: str
    block: int
    bytes: int
    served: bool = True


_SERVED = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
# Named where one is refused; their sizes are not needed for that.
_OTHERS = {
    **{9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0"},
}
# Formats that ggml no longer has, and what the same model can be had in.
_REMOVED = {
    **{4: ("Q4_2", "Q4_0"), 5: ("Q4_3", "Q4_1"), 31: ("Q4_0_4_4", "Q4_0"), 32: ("Q4_0_4_8", "Q4_0")},
    **{33: ("Q4_0_8_8", "Q4_0"), 36: ("IQ4_NL_4_4", "IQ4_NL"), 37: ("IQ4_NL_4_8", "IQ4_NL")},
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
_REPLACED_BY = dict(_REMOVED.values())
_NAMES = _OTHERS | {number: name for number, (name, _) in _REMOVED.items()}
BLOCK_TYPES = _SERVED | {number: BlockType(name, 1, 1, served=False) for number, name in _NAMES.items()}
SERVED_NAMES = tuple(kind.name for kind in _SERVED.values())
FLOATS = ("F32", "F16", "BF16")


def reason(kind: BlockType) -> str:
    """Return why a format is refused: what follows "which"."""
    if kind.name not in _REPLACED_BY:
        return "is not served"
    return f"llama.cpp no longer has: take the file in {_REPLACED_BY[kind.name]}"
