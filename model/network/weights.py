"""Fills a Transformer with a checkpoint's tensors, by the family's plan; and names its tensors again, for the trainer.

The network is built without memory, so its size is known before a weight is read (`plan_weights`). Then each
parameter is allocated once, in its final form, dtype and device, and filled a few rows at a time. So there is never a
second copy of the weights: a matrix that C multiplies is read straight into its panels.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from triptych.model.attention.base import AttentionBackend
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.fused_experts import joined
from triptych.model.checkpoint.load_plan import few, plan_load
from triptych.model.checkpoint.progress import Meter
from triptych.model.checkpoint.tensor_files import BUFFER_BYTES, TensorReader, TensorSource, bytes_in_flight
from triptych.model.checkpoint.tensor_sources import tensor_sources
from triptych.model.config.model import ModelConfig
from triptych.model.config.sharding import WHOLE, Index, ShardSlice, cuts, local_shape
from triptych.model.errors import CheckpointError
from triptych.model.families import family_for
from triptych.model.families.table.rules import Family, Shape, TensorRule, ZeroRule
from triptych.model.linear.base import linears
from triptych.model.linear.factory import LinearFactory
from triptych.model.linear.native import NativeLinear
from triptych.model.network.build import FLOAT32, build_model, plain_parameters, shard_slices, tensor_shapes
from triptych.model.network.embeddings import TokenTable
from triptych.model.network.transformer import Transformer

TOKEN_TABLES = ("tokens.weight", "source_tokens.weight")  # the second: of an encoder with a token table of its own

logger = logging.getLogger(__name__)

Network = TypeVar("Network", bound=Transformer)


def load_model(checkpoint: Checkpoint, backend: AttentionBackend, linear: LinearFactory = FLOAT32) -> Transformer:
    """Return the checkpoint's network with its weights; raises `CheckpointError` with all tensors that do not fit."""
    return load_weights(build_model(checkpoint.config, backend, linear), checkpoint)


def load_weights(model: Network, checkpoint: Checkpoint) -> Network:
    """Fill a network without storage, which is the checkpoint's or a rank's part of it; raises `CheckpointError`.

    A rank reads only its part of a tensor, if the tensor is kept as it is stored.
    """
    return fill_weights(model, checkpoint.path.name, plan_sources(model, checkpoint))


@dataclass(frozen=True, slots=True)
class WeightSources:
    """The plan that says which stored tensors fill a network, made from headers alone."""

    stored: Mapping[str, TensorSource]
    rules: Sequence[tuple[str, TensorRule]]  # by name of the stored tensor
    zeros: Sequence[ZeroRule]  # parts that no stored tensor fills
    shapes: Mapping[str, Shape]  # of the whole network's tensors
    slices: Mapping[str, ShardSlice | None]  # the part of each that this rank has
    table_dtype: torch.dtype  # of the token table


def plan_sources(model: Transformer, checkpoint: Checkpoint) -> WeightSources:
    """Plan how the checkpoint fills a network without storage; raises `CheckpointError`."""
    config, linear = checkpoint.config, model.linear
    alone = linear.shard == WHOLE
    whole = model if alone else build_model(config, model.backend, replace(linear, collective=None))
    shapes, slices = tensor_shapes(whole), shard_slices(whole, linear.shard)
    stored = tensor_sources(checkpoint)
    rules = plan_tensors(config, stored, shapes, checkpoint.described_by)
    zeros = family_for(config).zero_rules(config)
    return WeightSources(stored, rules, zeros, shapes, slices, kept_table_dtype(stored, rules, linear))


def fill_weights(model: Network, name: str, sources: WeightSources) -> Network:
    """Fill a network without storage by a plan; `name` is the checkpoint's, for the log."""
    filler = _Filler(model, sources.table_dtype)
    meter, left = Meter(name, "read"), {one: sources.stored[one].nbytes for one, _ in sources.rules}
    total = sum(left.values())
    unbounded = dict[str, None]()
    with TensorReader(sources.stored) as reader:
        for source, rule in sources.rules:
            if not _fill(filler, reader, source, rule, sources.shapes[rule.target], sources.slices[rule.target]):
                unbounded[source] = None
            left.pop(source, None)
            meter.update(total - sum(left.values()), total)
    meter.close()
    if unbounded:
        found = f"{len(unbounded)} tensors of float16 hold infinities or NaN, {few(unbounded)}"
        logger.warning("%s: %s: they were beyond float16's range when they were stored", name, found)
    for zero in sources.zeros:
        for _, into in cuts(sources.shapes[zero.target], zero.rows, sources.slices[zero.target]):
            filler.put(zero.target, into, torch.zeros([index.stop - index.start for index in into]))
    filler.finish()
    return model.requires_grad_(False).eval()


def adopt_parameters(model: Transformer, parameters: Mapping[str, Tensor], table_dtype: torch.dtype) -> None:
    """Give a network its parameters other than those of projections."""
    model.load_state_dict(parameters, strict=False, assign=True)
    for table in (model.tokens, model.source_tokens):
        if isinstance(table, TokenTable) and table_dtype is not model.linear.dtype:
            table.vector_dtype = model.linear.dtype


def plan_tensors(
    config: ModelConfig,
    stored: Mapping[str, TensorSource],
    shapes: Mapping[str, Shape],
    settings: str = "config.json",
) -> list[tuple[str, TensorRule]]:
    """Return which stored tensor fills which parameter, by headers; raises `CheckpointError` if any does not fit."""
    found = {name: tensor.shape for name, tensor in stored.items()}
    plan = plan_load(family_for(config), config, found, shapes, settings)
    for holds in dict.fromkeys(rule.holds for _, rule in plan):
        strange = [name for name, rule in plan if rule.holds is holds and not stored[name].holds(holds)]
        if strange:
            kinds = few([f"{name} ({stored[name].kind})" for name in strange])
            raise CheckpointError(f"expected {holds or 'floating point'}, found {kinds}")
    bare = [name for name, rule in plan if rule.holds is None and stored[name].kind.startswith("F8")]
    if bare and config.stored_as:
        raise CheckpointError(f"numbers of 8 bits have no scales: {few(bare)}")
    return plan


def largest_in_flight(stored: Mapping[str, TensorSource], plan: Sequence[tuple[str, TensorRule]]) -> int:
    """Return the most bytes in memory between the file and a parameter: the buffer, or a tensor that is transposed."""
    whole = [stored[name].nbytes for name, rule in plan if rule.transpose]
    return max([BUFFER_BYTES, *whole, *(bytes_in_flight(stored[name]) for name, _ in plan)])


def kept_table_dtype(
    stored: Mapping[str, TensorSource], plan: Sequence[tuple[str, TensorRule]], linear: LinearFactory
) -> torch.dtype:
    """Return the dtype of the token table: if C has its own copy, the stored one if that is narrower and exact."""
    kinds = [stored[name].dtype for name, rule in plan if rule.target in TOKEN_TABLES and not rule.duplicate]
    narrow = linear.dtype is torch.float32 and kinds and all(kind in (torch.bfloat16, torch.float16) for kind in kinds)
    return kinds[0] if linear.native and narrow else linear.dtype


class _Filler:
    """Copies rows into projections, and into parameters that are allocated when their first rows arrive."""

    def __init__(self, model: Transformer, table_dtype: torch.dtype) -> None:
        self._model = model
        self._table_dtype = table_dtype
        self._linears = {name: linear for linear in linears(model) for name in linear.tensors()}
        self._shapes = {name: parameter.shape for name, parameter in plain_parameters(model).items()}
        self._parameters: dict[str, Tensor] = {}
        for linear in linears(model):
            linear.reserve()

    def put(self, name: str, into: Index, values: Tensor) -> None:
        """Copy `values` to the slice `into` of the tensor `name`; a table that a head is tied to may fill both."""
        if name in self._linears:
            self._linears[name].fill(name, into, values)
        if name in self._shapes:
            if name not in self._parameters:
                linear = self._model.linear
                dtype = self._table_dtype if name in TOKEN_TABLES else linear.dtype
                self._parameters[name] = torch.empty(*self._shapes[name], dtype=dtype, device=linear.device)
            self._parameters[name][into].copy_(values)

    def holds(self, name: str, into: Index, values: Tensor) -> bool:
        """Return whether the tensor has these values already, in its own dtype."""
        if name in self._parameters:
            there = self._parameters[name][into]
        else:
            head = self._linears[name]  # its packed matrix is the token table
            assert isinstance(head, NativeLinear)
            there = head.rows(torch.arange(into[0].start, into[0].stop))[(slice(None), *into[1:])]
        return torch.equal(there, values.to(there.device, there.dtype))

    def finish(self) -> None:
        """Give the network its parameters, and finish all projections."""
        adopt_parameters(self._model, self._parameters, self._table_dtype)
        for linear in linears(self._model):
            linear.finish()


def stored_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's tensors under its family's published names: the load plan, reversed."""
    family = family_for(model.config)
    return joined(family, _by_rules(model, family))


def _by_rules(model: Transformer, family: Family) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    for rule in family.tensor_rules(replace(model.config, in_order=frozenset())):
        if rule.duplicate:
            continue
        tensor = parameters[rule.target].detach()
        if rule.rows is not None:
            tensor = tensor[rule.rows[0] : rule.rows[1]]
        if rule.interleaved is not None:
            tensor = _as_stored(tensor, rule.interleaved.stored_heads())
        tensor = (tensor.t() if rule.transpose else tensor).contiguous()
        if rule.part is not None:
            pieces.setdefault(rule.source, []).append((rule.part[0], tensor))
        else:
            yield rule.source, tensor if rule.shape is None else tensor.view(rule.shape)
    for name, found in pieces.items():
        yield name, torch.cat([tensor for _, tensor in sorted(found, key=lambda shard_slice: shard_slice[0])])


def _as_stored(tensor: Tensor, stored_heads: list[int]) -> Tensor:
    """Return the rows of heads in stored order; `stored_heads` has each head's place."""
    heads = tensor.unflatten(0, (len(stored_heads), -1))
    return torch.empty_like(heads).index_copy_(0, torch.tensor(stored_heads), heads).flatten(0, 1)


def _fill(
    filler: _Filler, reader: TensorReader, name: str, rule: TensorRule, whole: Shape, shard_slice: ShardSlice | None
) -> bool:
    """Fill a `shard_slice` of the rule's target, of shape `whole`, with its part of the stored tensor `name`.

    Returns whether all numbers of float16 are finite; those that overflowed when a model was stored are not.
    """
    shape, finite = local_shape(whole, shard_slice), True
    for into, values in stored_parts(reader, name, rule, whole, shard_slice):
        values = values.reshape(*(index.stop - index.start for index in into), *shape[len(into) :])
        if not rule.duplicate:
            filler.put(rule.target, into, values)
        elif not filler.holds(rule.target, into, values):
            raise CheckpointError(f"{rule.source} differs from the tensor that it is tied to")
        if values.dtype is torch.float16 and values.numel():
            finite &= all(map(math.isfinite, torch.stack(values.aminmax()).tolist()))
    return finite


def stored_parts(
    reader: TensorReader, name: str, rule: TensorRule, whole: Shape, shard_slice: ShardSlice | None
) -> Iterator[tuple[Index, Tensor]]:
    """Yield a few rows at a time with their place in the piece; a transposed tensor is read at once."""
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
        if rule.repeat != 1:
            values = _repeated(reader, name, rule, rows[1] - rows[0], width)[:, columns]
            for start, stop, offset in _runs(rule, rows[1] - rows[0], first, last):
                yield (slice(at + offset, at + offset + stop - start), *into[1:]), values[start:stop]
            continue
        for start, stop, offset in _runs(rule, rows[1] - rows[0], first, last):
            for begin, values in reader.columns(name, width, columns, start, stop):
                to = at + offset + begin - start
                yield (slice(to, to + len(values)), *into[1:]), values


def _repeated(reader: TensorReader, name: str, rule: TensorRule, total: int, width: int) -> Tensor:
    """Return the stored rows, each repeated as the rule says, `[total, width]`."""
    repeat = rule.repeat or total
    stored = reader.region(name, width, slice(0, width), 0, -(-total // repeat))
    return stored.repeat_interleave(repeat, dim=0)[:total]


def _runs(rule: TensorRule, total: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield stored rows `[start, stop)` that stay together, and where they begin after the target's row `first`.

    The rule takes `total` rows of the stored tensor; `[first, last)` are wanted.
    """
    if rule.interleaved is None:
        start = rule.part[0] if rule.part is not None else 0
        yield start + first, start + last, 0
        return
    heads = rule.interleaved.stored_heads()
    dim = total // len(heads)
    for head in range(first // dim, -(-last // dim)):
        begin, end = max(first, head * dim), min(last, (head + 1) * dim)
        start = heads[head] * dim + begin - head * dim
        yield start, start + end - begin, begin - first
