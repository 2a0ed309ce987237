"""Reads the weights of a low-rank adapter for a loaded network, by the family's plan for the base model's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triptych.model.checkpoint.adapter_tensors import AdaptedModule, AdapterFolder
from triptych.model.checkpoint.tensor_files import StoredTensor, TensorReader
from triptych.model.config.attention import AttentionConfig, DisentangledConfig
from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import CheckpointError, ConfigError, listed
from triptych.model.families import family_for
from triptych.model.families.table.rules import Family, LinearRule, Shape
from triptych.model.linear.base import LinearSpec, Part, linears
from triptych.model.linear.native import NativeLinear, packed_linear
from triptych.model.native.library import KINDS
from triptych.model.network.lora import ADAPTED, OF_SOURCES, LoraAdapter, LowRankPart
from triptych.model.network.saved_head import head_bytes, plan_head, read_head
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import Work, finish


@dataclass(frozen=True, slots=True)
class _Planned:
    """Where a stored module is in the network."""

    module: AdaptedModule
    target: str
    first: int
    order: tuple[int, ...] | None  # the stored rows of B in the network's order; None: as they are


def plan_adapter(folder: AdapterFolder, model: Transformer) -> dict[str, list[_Planned]]:
    """Return which projections an adapter changes, by headers alone; raises `CheckpointError` if it does not fit."""
    _check_base(model)
    family, config = family_for(model.config), model.config
    rules: dict[str, list[LinearRule]] = {}
    for rule in family.rules(config):
        if isinstance(rule, LinearRule):
            rules.setdefault(rule.source, []).append(rule)
    shapes = {one.spec.name: (one.spec.num_outputs, one.spec.inputs) for one in linears(model)}
    planned, strange = dict[str, list[_Planned]](), list[str]()
    for name, module in folder.modules.items():
        found = rules.get(_stem(family, name), [])
        if not found:
            strange.append(name)
        for rule in found:
            planned.setdefault(rule.target, []).append(_fitted(name, module, rule, shapes, config))
    if strange:
        raise CheckpointError(
            f"the base model has no projection {listed(strange, most=2, longest=100)}"
            + (f"; the adapter was trained for {listed([folder.base])}" if folder.base else "")
        )
    return planned


def _stem(family: Family, module: str) -> str:
    return family.canonical(f"{module}.weight").removesuffix(".weight")


def _check_base(model: Transformer) -> None:
    config = model.config
    if model.linear.collective is not None:
        raise ConfigError("a model that is split over ranks (tensor_parallel_size) serves no adapters")
    if config.adapters is not None:
        raise ConfigError("the base model has adapters of its own (task), and serves no others")


def _fitted(
    name: str, module: AdaptedModule, rule: LinearRule, shapes: Mapping[str, Shape], config: ModelConfig
) -> _Planned:
    if what := _unserved(rule.target, config):
        raise ConfigError(f"{name}: adapters of {what} are not served: merge the adapter, and serve the result")
    whole = shapes[rule.target]
    first, last = rule.rows or (0, whole[0])
    wanted, found = (last - first, whole[1]), (module.up.shape[0], module.down.shape[1])
    if wanted != found:
        raise CheckpointError(
            f"{name}: the matrices are for [outputs, inputs] {list(found)}, the base model's is {list(wanted)}"
        )
    order = None
    if rule.interleaved is not None:
        heads = rule.interleaved.stored_heads()
        dim = wanted[0] // len(heads)
        order = tuple(head * dim + at for head in heads for at in range(dim))
    return _Planned(module, rule.target, first, order)


def _unserved(target: str, config: ModelConfig) -> str:
    """Say what a projection is that may not have an adapter; "" if it may."""
    stack, _, rest = target.partition(".layers.")
    index, _, place = rest.partition(".")
    if target == "pooler":
        return ""
    if stack == target:
        return "the output" if target == "head" else target
    layer = config.stacks[stack].distinct_layers[int(index)]
    if place.startswith("mlp") and isinstance(layer.feed_forward, ExpertsConfig):
        return "experts and their routers"
    mixer = layer.mixer
    if place == "attn.qkv" and isinstance(mixer, AttentionConfig) and isinstance(mixer.position, DisentangledConfig):
        return "queries and keys that relative positions are compared with (DeBERTa)"
    if place in (*ADAPTED, OF_SOURCES):
        return ""
    return "recurrent layers" if place.startswith("delta.") else f"the network's {place}"


def planned_bytes(planned: Mapping[str, Sequence[_Planned]], model: Transformer) -> int:
    """Return the bytes that the matrices will take in memory, as the network keeps them."""
    modules = [one.module for found in planned.values() for one in found]
    shapes = [tensor.shape for module in modules for tensor in (module.down, module.up)]
    dtype, library = model.linear.dtype, model.linear.library
    if library is None:
        return sum(dtype.itemsize * math.prod(shape) for shape in shapes)
    matrices = (LinearSpec("matrix", inputs, (Part(rows),), bias=False) for rows, inputs in shapes)
    return sum(NativeLinear(spec, KINDS[dtype], dtype, library).nbytes for spec in matrices)


def loading_adapter(
    name: str, folder: AdapterFolder, model: Transformer, check: Callable[[int], object] = lambda _: None
) -> Work[LoraAdapter]:
    """Read an adapter for a loaded network in parts; raises `CheckpointError` if it does not fit.

    `check` gets the planned bytes before a weight is read, and may raise.
    """
    planned, head = plan_adapter(folder, model), plan_head(folder.saved, model)
    size = head_bytes(head, model)
    check(planned_bytes(planned, model) + size)
    yield None
    stored = {one.name: one for module in folder.modules.values() for one in (module.down, module.up)}
    parts: dict[str, tuple[LowRankPart, ...]] = {}
    with TensorReader(stored) as reader:
        for target, found in planned.items():
            parts[target] = tuple(_part(reader, one, model) for one in sorted(found, key=lambda one: one.first))
            yield None
    classifier = read_head(folder.saved, head, model) if head else None
    return LoraAdapter(name, parts, classifier=classifier, classifier_bytes=size)


def load_adapter(name: str, folder: AdapterFolder, model: Transformer) -> LoraAdapter:
    """Read an adapter at once."""
    return finish(loading_adapter(name, folder, model))


def _part(reader: TensorReader, planned: _Planned, model: Transformer) -> LowRankPart:
    module = planned.module
    down, up = _read(reader, module.down), _read(reader, module.up)
    if planned.order is not None:
        up = up[torch.tensor(planned.order)]
    of_down, of_up = (_product(matrix, model) for matrix in (down, up))
    nbytes = sum(one[1] for one in (of_down, of_up))
    return LowRankPart(planned.first, len(up), module.rank, module.scale, of_down[0], of_up[0], nbytes)


def _read(reader: TensorReader, tensor: StoredTensor) -> Tensor:
    rows, columns = tensor.shape
    found = reader.region(tensor.name, columns, slice(0, columns), 0, rows)
    if not bool(found.float().isfinite().all()):
        raise CheckpointError(f"{tensor.name}: it has numbers that are infinite or NaN")
    return found


def _product(matrix: Tensor, model: Transformer) -> tuple[Callable[[Tensor], Tensor], int]:
    """Return the product with a matrix in the network's dtype, packed if the network's are, and its bytes."""
    matrix = matrix.to(model.linear.dtype)
    library = model.linear.library
    if library is not None:
        packed: NativeLinear = packed_linear(library, matrix)
        return packed, packed.nbytes
    kept = matrix.to(model.device)
    return (lambda x: functional.linear(x.to(kept.dtype), kept)), kept.nbytes
