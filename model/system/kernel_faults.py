"""Names the parts of a model whose GPU kernels may be replaced by torch's. Stdlib only.

The self-check (`model.kernel_check`) compares kernels with torch. What is wrong is a `Faults`: the reason by the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Faults = Mapping[str, str]
NO_FAULTS: Faults = MappingProxyType({})

TRITON = "triton"  # nothing can be compiled or launched
PREPARATION = "preparation of heads"  # norms and rotation of queries and keys in one launch
RECURRENCE = "recurrent layers"
EXPERTS = "products of experts"
INTEGERS = "products of integers"
FP8 = "products of fp8"
SAMPLING = "sampling"
_ATTENTION = "attention of "
_FUSED = "fused "


def attention_part(layer: object) -> str:
    """Return the name of the attention of all layers with the configuration `layer`."""
    return f"{_ATTENTION}{layer!r}"


def fused_part(function: str) -> str:
    """Return the name of a function of `model.network.fused_ops`."""
    return f"{_FUSED}{function}"


def is_attention(part: str) -> bool:
    return part.startswith(_ATTENTION)
