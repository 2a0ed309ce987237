"""The tensors of a checkpoint by the names that its family's table has for them, from the headers of its files."""

from __future__ import annotations

from dataclasses import replace

from triptych.model.checkpoint.decoders import unpacked
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.fused_experts import parted
from triptych.model.checkpoint.gguf.tensors import gguf_tensors
from triptych.model.checkpoint.tensor_files import TensorSource, read_headers
from triptych.model.families import family_for
from triptych.model.gguf.paths import is_gguf


def tensor_sources(checkpoint: Checkpoint) -> dict[str, TensorSource]:
    """Return what can be read of a checkpoint, by name; raises `CheckpointError`.

    Files may be invalid, and the tensors of a packed projection may not fit each other.
    """
    if is_gguf(checkpoint.weight_files[0]):
        return gguf_tensors(checkpoint.weight_files[0], checkpoint.config)
    headers = read_headers(checkpoint.weight_files)
    if wrapping := checkpoint.wrapping:
        renamed = (replace(tensor, name=wrapping.unwrapped(name)) for name, tensor in headers.items())
        headers = {tensor.name: tensor for tensor in renamed}
    hidden_size = next(iter(checkpoint.config.stacks.values())).hidden_size
    stored = parted(family_for(checkpoint.config), headers, hidden_size)
    return unpacked(stored, checkpoint.packed)
