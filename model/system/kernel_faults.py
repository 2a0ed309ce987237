"""Names the parts of a model whose GPU kernels may be replaced by torch's. Stdlib only.

The self-check (`triptych.model.kernel_check`) compares kernels with torch. What is wrong is a `Faults`: the reason by
the part.
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
ROW_PRODUCT = "products of one row"
SAMPLING = "sampling"
STATIC_ROW = "rows of recorded steps"
_ATTENTION = "attention of "
_STEP = "step "


def attention_part(layer: object) -> str:
    """Return the name of the attention of all layers with the configuration `layer`."""
    return f"{_ATTENTION}{layer!r}"


def step_part(function: str) -> str:
    """Return the name of a function of `triptych.model.network.fused_ops`."""
    return f"{_STEP}{function}"


def step_of(part: str) -> str | None:
    """Return the function that `step_part` was given; None: the part is another one."""
    return part.removeprefix(_STEP) if part.startswith(_STEP) else None


def is_attention(part: str) -> bool:
    return part.startswith(_ATTENTION)
