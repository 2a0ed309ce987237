"""Writes the hidden states of each pass to files, to find where two computations of a model part.

`TRIPTYCH_DUMP_ACTIVATIONS=FOLDER` turns it on. A pass through a stack becomes FOLDER/STACK-NUMBER.safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

VARIABLE = "TRIPTYCH_DUMP_ACTIVATIONS"
Write = Callable[[dict[str, Tensor]], None]


def dump_folder() -> Path | None:
    """Return the folder that activations are written to, or None."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


def dump_to(folder: Path, stack: str) -> Write:
    """Return what writes the tensors of one pass to the next file of `stack` in `folder`."""
    number = 0

    def write(tensors: dict[str, Tensor]) -> None:
        nonlocal number
        save_file(tensors, folder / f"{stack}-{number:06}.safetensors")
        number += 1

    return write


class PassDump:
    """The hidden states `[T, d]` of one pass: `embed`, what each layer gives (`layers.0`), and `output`.

    `output` is what the last layer gives, after the final norm. `input_ids` `[T]` say whose rows they are.
    """

    def __init__(self, write: Write, input_ids: Tensor, embedded: Tensor) -> None:
        self._write = write
        self._tensors = {"input_ids": _copy(input_ids), "embed": _copy(embedded)}

    def add_layer(self, index: int, hidden: Tensor) -> None:
        """Add what layer `index` gives."""
        self._tensors[f"layers.{index}"] = _copy(hidden)

    def finish(self, output: Tensor) -> None:
        """Add what the stack gives, and write the file."""
        self._write({**self._tensors, "output": _copy(output)})


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
