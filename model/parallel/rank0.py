"""Rank 0's Transformer sends each call to the other ranks before making it.

    encode engine -- decode, encode, logits, ... --> Rank0Transformer
                                                         |  the call as data, its tensors by broadcast
                                                         v
                                                     ranks 1 and up, which make the same call

Steps of the generate engine are no calls (`triptych.model.engine.execution.step_program`). Requests, scheduling and
sampling exist on rank 0 only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionBackend
from triptych.model.attention.selection import Selection
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.config.model import ModelConfig
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.inputs import CrossInput, StackInput
from triptych.model.network.transformer import Transformer
from triptych.model.network.weights import load_weights
from triptych.model.parallel.group import Group

if TYPE_CHECKING:
    from triptych.model.parallel.rank_processes import RankProcesses


class Rank0Transformer(Transformer):
    """Rank 0 of a split model: callers use it as a Transformer and get complete hidden states and logits."""

    can_pause = False  # the other ranks are sent whole forward passes only

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, linear: LinearFactory, rank_processes: RankProcesses
    ) -> None:
        super().__init__(config, backend, linear)
        self.rank_processes = rank_processes
        self.gpu_memory: list[tuple[int, int]] = []  # (free, total) bytes of each other rank's GPU

    def encode(self, inputs: StackInput) -> Tensor:
        self._check_ids(inputs, self.config.source_vocab_size)
        with self.rank_processes.call("encode", inputs):
            return super().encode(inputs)

    def decode(self, inputs: StackInput, cache: KVCache | None = None, cross: CrossInput | None = None) -> Tensor:
        self._check_ids(inputs, self.config.embedding.vocab_size)
        with self.rank_processes.call("decode", inputs, cache is not None, cross):
            return super().decode(inputs, cache, cross)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.rank_processes.call("logits", hidden):
            return super().logits(hidden)

    def masked_logits(self, hidden: Tensor) -> Tensor:
        with self.rank_processes.call("masked_logits", hidden):
            return super().masked_logits(hidden)

    def _check_ids(self, inputs: StackInput, size: int) -> None:
        """Raise `IndexError` for an invalid token id before the call, which would break the group.

        On a GPU this is not checked: it would cost a synchronisation.
        """
        ids = inputs.input_ids
        if inputs.pixels is None and ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise IndexError(f"a token id is outside the vocabulary of {size}")


def load_rank0(
    name: str,
    checkpoint: Checkpoint,
    selection: Selection,
    linear: LinearFactory,
    *,
    max_model_len: int,
    pickle: bool,
) -> Rank0Transformer:
    """Load rank 0 of the group in `linear`, and start and connect the other ranks.

    `pickle`: whether weights may be read from pytorch_model.bin, here and on the other ranks.

    Raises `CheckpointError` as `load_model` does, `EngineDeadError` if a rank does not start.
    """
    from triptych.model.parallel.messages import Load, dtype_name
    from triptych.model.parallel.rank_processes import RankProcesses  # a machine with one rank needs no msgspec

    preferred = selection.preferred or selection.backend.name  # each rank chooses by layer what this one does
    group, path, dtype = linear.collective, str(checkpoint.path), dtype_name(linear.dtype)
    assert isinstance(group, Group)
    loads = [
        Load(
            path,
            pickle,
            max_model_len,
            dtype,
            device,
            preferred,
            linear.fp8,
            linear.integers,
            linear.quantization,
            dict(linear.faults),
        )
        for device in (str(rank_device(group.device, rank)) for rank in range(1, group.shard.size))
    ]
    rank_processes = RankProcesses(name, group, loads)
    try:
        with torch.device("meta"):
            model = Rank0Transformer(checkpoint.config, selection.backend, linear, rank_processes)
        load_weights(model, checkpoint)
        model.gpu_memory = rank_processes.connect()
    except BaseException:
        rank_processes.close()
        raise
    return model


def rank_device(first: torch.device, rank: int) -> torch.device:
    """Return a rank's device: ranks use consecutive GPUs, from rank 0's on."""
    return first if first.type != "cuda" else torch.device("cuda", (first.index or 0) + rank)


def rank_processes_of(model: Transformer) -> RankProcesses | None:
    """Return the processes of a model's other ranks; None: it has none."""
    return model.rank_processes if isinstance(model, Rank0Transformer) else None
