"""Weights from safetensors into a Transformer, by the family's plan; and back, for the trainer.

The network is built without memory, then each parameter is made once in its final dtype and device. Files are
memory-mapped. Only the `safetensors` package reads them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.attention.base import AttentionBackend
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.families import FAMILIES
from model.parallel.sharding import WHOLE, Index, Piece, Shard, cuts, local_shape
from model.transformer import Transformer
from model.weights import CheckpointError, Shape, WeightRule, plan_load

PROGRESS_SECONDS = 5.0  # between two words of how far loading is

logger = logging.getLogger(__name__)

Network = TypeVar("Network", bound=Transformer)


def load_model(
    checkpoint: Checkpoint, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """The checkpoint's network with its weights; raises `CheckpointError` listing every tensor that does not fit."""
    return load_weights(build_model(checkpoint.config, backend), checkpoint, dtype, device)


def load_weights(
    model: Network, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE
) -> Network:
    """Fill a network without storage, which is the checkpoint's or `shard`'s part of it; raises `CheckpointError`.

    Of tensors that are stored as they are kept, only the part that is kept is read.
    """
    config = checkpoint.config
    shapes = parameter_shapes(model if shard == WHOLE else build_model(config, model.backend))
    pieces = {name: shard.piece(config, name, shape) for name, shape in shapes.items()}
    with ExitStack() as stack:
        files = [stack.enter_context(_open(path)) for path in checkpoint.weight_files]
        owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)
        sources = {name: tuple(file.get_slice(name).get_shape()) for name, file in owner.items()}
        state: dict[str, Tensor] = {}
        progress = _Progress(checkpoint.path.name, sources)
        for name, rule in plan_load(FAMILIES[config.model_type], config, sources, shapes):
            shape, piece = shapes[rule.target], pieces[rule.target]
            if rule.target not in state:
                state[rule.target] = torch.empty(local_shape(shape, piece), dtype=dtype, device=device)
            _fill(state[rule.target], rule, _Stored(owner[name], name), shape, piece)
            progress.read(name)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


class _Progress:
    """Says from time to time how much of a large checkpoint is read."""

    def __init__(self, name: str, sources: Mapping[str, Shape]) -> None:
        self._name = name
        self._left = {source: math.prod(shape) for source, shape in sources.items()}
        self._total = sum(self._left.values())
        self._said = time.monotonic()

    def read(self, source: str) -> None:
        self._left.pop(source, None)
        if time.monotonic() - self._said >= PROGRESS_SECONDS:
            self._said = time.monotonic()
            share = 1 - sum(self._left.values()) / self._total
            logger.info("%s: %.0f %% of %.2f billion weights read", self._name, 100 * share, self._total / 1e9)


def build_model(config: ModelConfig, backend: AttentionBackend) -> Transformer:
    """The network without storage: every parameter is on torch's meta device."""
    with torch.device("meta"):
        return Transformer(config, backend)


def parameter_shapes(model: Transformer) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def stored_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The model under its family's published tensor names: the load plan read backwards."""
    family = FAMILIES[model.config.model_type]
    parameters = dict(model.named_parameters())
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for rule in family.rules(model.config):
        if rule.duplicate:
            continue
        tensor = parameters[rule.target].detach()
        if rule.rows is not None:
            tensor = tensor[rule.rows[0] : rule.rows[1]]
        if rule.interleaved is not None:
            heads, parts = rule.interleaved
            tensor = _swap_rows(tensor, parts, heads)
        tensor = (tensor.t() if rule.transpose else tensor).contiguous()
        if rule.part is not None:
            pieces.setdefault(rule.source, []).append((rule.part[0], tensor))
        else:
            yield rule.source, tensor if rule.shape is None else tensor.view(rule.shape)
    for name, found in pieces.items():
        yield name, torch.cat([tensor for _, tensor in sorted(found, key=lambda piece: piece[0])])


def _swap_rows(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Rows `[outer, inner, ...]` in the order `[inner, outer, ...]`."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path.name} is not a valid safetensors file: {error}") from None


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    file: Any
    name: str

    def read(self, rule: WeightRule, shape: Shape, index: Index | None) -> Tensor:
        """What `rule` takes of it in its target's layout `shape`, or the part `index` of that."""
        if index is not None and rule.part is None and rule.interleaved is None and rule.shape is None:
            part = self.file.get_slice(self.name)[index if not rule.transpose else _both(index)[::-1]]
            return part.t() if rule.transpose else part
        tensor = self.file.get_tensor(self.name)
        if rule.part is not None:
            tensor = tensor[rule.part[0] : rule.part[1]]
        if rule.interleaved is not None:
            tensor = _swap_rows(tensor, *rule.interleaved)
        tensor = tensor.reshape(shape[::-1]).t() if rule.transpose else tensor.reshape(shape)
        return tensor if index is None else tensor[index]


def _both(index: Index) -> Index:
    """An index of a matrix by rows and columns."""
    return (*index, slice(None))[:2]


def _fill(target: Tensor, rule: WeightRule, stored: _Stored, whole: Shape, piece: Piece | None) -> None:
    """Put what `rule` takes of a stored tensor into `target`, a `piece` of a parameter whose whole shape is given."""
    rows = rule.rows or (0, whole[0])
    shape = (rows[1] - rows[0], *whole[1:])
    for source, into in cuts(whole, rows, piece):
        tensor = stored.read(rule, shape, None if piece is None else source)
        if not tensor.is_floating_point():
            raise CheckpointError(f"{rule.source}: expected floating point, found {tensor.dtype}")
        if not rule.duplicate:
            target[into].copy_(tensor)
        elif not torch.equal(target[into], tensor.to(target.device, target.dtype)):
            raise CheckpointError(f"{rule.source} differs from the tensor that it is tied to")
