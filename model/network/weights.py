"""Weights from safetensors into a Transformer, by the family's plan; and back, for the trainer.

The network is built without memory. What it will hold is known before a weight is read (`plan_weights`); then each
parameter is made once in its final form, dtype and device, filled a few rows at a time, so that no second copy of the
weights is ever there: a matrix that C multiplies with goes straight into its panels.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from model.attention.base import AttentionBackend
from model.checkpoint.folder import Checkpoint
from model.checkpoint.load_plan import plan_load
from model.checkpoint.tensor_files import BUFFER_BYTES, StoredTensor, TensorReader, read_headers
from model.config.model import ModelConfig
from model.config.sharding import WHOLE, Index, Shard, ShardSlice, cuts, local_shape
from model.errors import CheckpointError
from model.families import FAMILIES
from model.families.table.rules import Shape, WeightRule
from model.linear.native import PackedLinear
from model.network.build import build_model, parameter_shapes
from model.network.embeddings import TokenTable
from model.network.native_stack import Packing, pack_linears
from model.network.transformer import Transformer

PROGRESS_SECONDS = 5.0  # between two words of how far loading is

logger = logging.getLogger(__name__)

Network = TypeVar("Network", bound=Transformer)


def load_model(
    checkpoint: Checkpoint,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None = None,
) -> Transformer:
    """The checkpoint's network with its weights; raises `CheckpointError` listing every tensor that does not fit.

    With `packing` the matrices that C multiplies with are packed as they are read.
    """
    return load_weights(build_model(checkpoint.config, backend), checkpoint, dtype, device, packing=packing)


def load_weights(
    model: Network,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard = WHOLE,
    packing: Packing | None = None,
) -> Network:
    """Fill a network without storage, which is the checkpoint's or `shard`'s part of it; raises `CheckpointError`.

    Of tensors that are stored as they are kept, only the part that is kept is read.
    """
    config = checkpoint.config
    shapes = parameter_shapes(model if shard == WHOLE else build_model(config, model.backend))
    stored = read_headers(checkpoint.weight_files)
    plan = plan_tensors(config, stored, shapes)
    table_dtype = dtype
    if packing is not None:
        pack_linears(model.to(dtype), packing)
        table_dtype = kept_table_dtype(stored, plan, dtype)
    if table_dtype is not dtype and isinstance(model.tokens, TokenTable):
        model.tokens.vector_dtype = dtype
    places = _Places(model, dtype, table_dtype, device)
    progress = _Progress(checkpoint.path.name, {name: tensor.shape for name, tensor in stored.items()})
    with TensorReader(stored) as reader:
        for name, rule in plan:
            whole = shapes[rule.target]
            _fill(places, reader, name, rule, whole, shard.shard_slice(config, rule.target, whole))
            progress.read(name)
    model.load_state_dict(places.state, assign=True)
    return model.requires_grad_(False).eval()


def plan_tensors(
    config: ModelConfig, stored: Mapping[str, StoredTensor], shapes: Mapping[str, Shape]
) -> list[tuple[str, WeightRule]]:
    """Which stored tensor fills which parameter, from headers alone; raises `CheckpointError` if any does not fit."""
    plan = plan_load(
        FAMILIES[config.model_type], config, {name: tensor.shape for name, tensor in stored.items()}, shapes
    )
    strange = [f"{name} ({stored[name].kind})" for name, _ in plan if not stored[name].holds_numbers]
    if strange:
        raise CheckpointError(f"expected floating point, found {', '.join(strange)}")
    return plan


def largest_in_flight(stored: Mapping[str, StoredTensor], plan: Sequence[tuple[str, WeightRule]]) -> int:
    """Bytes that are read before they are put where they are kept: the buffer, or a tensor that is transposed."""
    return max([BUFFER_BYTES, *(stored[name].nbytes for name, rule in plan if rule.transpose)])


def kept_table_dtype(
    stored: Mapping[str, StoredTensor], plan: Sequence[tuple[str, WeightRule]], dtype: torch.dtype
) -> torch.dtype:
    """Of a token table that nothing multiplies with: as it is stored where that takes less and loses nothing."""
    kinds = [stored[name].dtype for name, rule in plan if rule.target == "tokens.weight" and not rule.duplicate]
    narrow = dtype is torch.float32 and kinds and all(kind in (torch.bfloat16, torch.float16) for kind in kinds)
    return kinds[0] if narrow else dtype


class _Places:
    """Where what is read goes: parameters, each made when its first rows come, and packed matrices."""

    def __init__(self, model: Transformer, dtype: torch.dtype, table_dtype: torch.dtype, device: torch.device) -> None:
        self.state: dict[str, Tensor] = {}
        self._dtype = dtype
        self._table_dtype = table_dtype
        self._device = device
        self._packed: dict[str, Callable[[int, Tensor], None]] = {}
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                of = name.removesuffix(".packed")  # the head's matrix stands beside the head's own parameters
                self._packed |= {f"{of}.weight": module.pack_rows, f"{of}.bias": module.set_bias}
        if model.config.head is not None and model.config.head.tied and "head.weight" in self._packed:
            self._packed["tokens.weight"] = self._packed.pop("head.weight")

    def put(self, name: str, shape: Shape, into: Index, values: Tensor) -> None:
        """`values` at `into` of the parameter `name`, of which `shape` is kept."""
        pack = self._packed.get(name)
        if pack is not None:  # bfloat16 becomes float32 on the way, without loss
            pack(into[0].start, values if values.dtype is torch.bfloat16 else values.to(self._dtype))
        if pack is None or name == "tokens.weight":
            if name not in self.state:
                dtype = self._table_dtype if name == "tokens.weight" else self._dtype
                self.state[name] = torch.empty(shape, dtype=dtype, device=self._device)
            self.state[name][into].copy_(values)

    def holds(self, name: str, into: Index, values: Tensor) -> bool:
        """Whether `values` are what is there, in the dtype that it is kept in."""
        return torch.equal(self.state[name][into], values.to(self._device, self.state[name].dtype))


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
        yield name, torch.cat([tensor for _, tensor in sorted(found, key=lambda shard_slice: shard_slice[0])])


def _swap_rows(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Rows `[outer, inner, ...]` in the order `[inner, outer, ...]`."""
    return tensor.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def _fill(
    places: _Places, reader: TensorReader, name: str, rule: WeightRule, whole: Shape, shard_slice: ShardSlice | None
) -> None:
    """Put what `rule` takes of the stored tensor `name` into a `shard_slice` of its target, whose shape is `whole`."""
    shape = local_shape(whole, shard_slice)
    for into, values in _parts(reader, name, rule, whole, shard_slice):
        values = values.reshape(*(index.stop - index.start for index in into), *shape[len(into) :])
        if not rule.duplicate:
            places.put(rule.target, shape, into, values)
        elif not places.holds(rule.target, into, values):
            raise CheckpointError(f"{rule.source} differs from the tensor that it is tied to")


def _parts(
    reader: TensorReader, name: str, rule: WeightRule, whole: Shape, shard_slice: ShardSlice | None
) -> Iterator[tuple[Index, Tensor]]:
    """A few rows after the other, and where in the piece they go; transposed ones all at once."""
    rows, width = rule.rows or (0, whole[0]), math.prod(whole[1:])
    for source, into in cuts(whole, rows, shard_slice):
        assert len(source) <= 2, "no parameter is split by a later dimension"
        first, last, at = source[0].start, source[0].stop, into[0].start
        columns = slice(0, width)
        if len(source) == 2:
            element = math.prod(whole[2:])
            columns = slice(source[1].start * element, source[1].stop * element)
        if rule.transpose:
            stored = reader.region(name, rows[1] - rows[0], source[0], columns.start, columns.stop)
            yield into, stored.t()
            continue
        for start, stop, offset in _runs(rule, rows[1] - rows[0], first, last):
            for begin, values in reader.columns(name, width, columns, start, stop):
                to = at + offset + begin - start
                yield (slice(to, to + len(values)), *into[1:]), values


def _runs(rule: WeightRule, total: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Stored rows `[start, stop)` that stay together, and where they begin behind the target's row `first`.

    The rule takes `total` rows of the stored tensor, of which `[first, last)` are wanted.
    """
    if rule.interleaved is None:
        start = rule.part[0] if rule.part is not None else 0
        yield start + first, start + last, 0
        return
    heads, parts = rule.interleaved
    dim = total // (heads * parts)
    for block in range(first // dim, -(-last // dim)):
        part, head = divmod(block, heads)
        begin, end = max(first, block * dim), min(last, (block + 1) * dim)
        start = (head * parts + part) * dim + begin - block * dim
        yield start, start + end - begin, begin - first
