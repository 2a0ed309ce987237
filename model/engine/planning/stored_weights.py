"""Describes how weights are served that a checkpoint stores quantised."""

from __future__ import annotations

import torch

from triptych.model.config.formats import FORMATS, NumberKind, Storage, kept_as_stored, nearest_kept
from triptych.model.config.model import ModelConfig
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.fp8 import keeps

_ROUNDING = {
    torch.float32: "which holds them exactly",
    torch.bfloat16: "each rounded by at most 1/512 of itself",
    torch.float16: "each rounded by at most 1/4096 of itself",
}
_NEAREST = {
    NumberKind.INT8: "each rounded by at most 1/254 of the largest in its group",
    NumberKind.INT4: "each rounded by at most 1/14 of the largest in its group",
}


def stored_formats(config: ModelConfig) -> tuple[Storage, ...]:
    """Return the quantised formats of a checkpoint's projections."""
    return tuple(dict.fromkeys(config.stored_as.values()))


def conversions(config: ModelConfig, linear: LinearFactory) -> list[str]:
    """Return a sentence for each stored format that `linear` converts."""
    found = []
    for storage in stored_formats(config):
        in_integers = bool(linear.native) or linear.integers is not None
        if (in_integers and kept_as_stored(storage) is not None) or (linear.fp8 is not None and keeps(storage)):
            continue
        if (linear.native or linear.integers) and linear.quantization != "none":
            kept = f"{linear.quantization}, {FORMATS[linear.quantization].loss}"
        elif in_integers and (nearest := nearest_kept(storage)) is not None:
            kept = f"{nearest.weight} in groups of {nearest.group}, {_NEAREST[nearest.weight]}"
        else:
            kept = f"{str(linear.dtype).removeprefix('torch.')}, {_ROUNDING[linear.dtype]}"
        count = sum(one == storage for one in config.stored_as.values())
        found.append(f"{count} projections are stored as {storage.name} and served in {kept}")
    return found
