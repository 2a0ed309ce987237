"""Reads the weights of a low-rank adapter for a loaded network, by the family's plan for the base model's tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from triptych.model.checkpoint.adapter_folder import check_base
from triptych.model.checkpoint.adapter_tensors import AdaptedModule, AdapterFolder
from triptych.model.checkpoint.tensor_files import StoredTensor, TensorReader
from triptych.model.config.attention import AttentionConfig, DisentangledConfig
from triptych.model.config.layer import ExpertsConfig
from triptych.model.config.model import ModelConfig
from triptych.model.errors import CheckpointError, ConfigError, listed
from triptych.model.families import family_for
from triptych.model.families.table.rules import Family, LinearRule, Shape
from triptych.model.linear.base import linears
from triptych.model.linear.native import PANEL_WIDTH, NativeLinear, packed_linear
from triptych.model.network.lora import (
    ADAPTED,
    OF_SOURCES,
    LoraAdapter,
    LowRankPart,
    LowRankProjection,
    PlainMatrix,
    Product,
)
from triptych.model.network.native_adapters import RankMatrix
from triptych.model.network.saved_head import head_bytes, plan_head, read_head
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import Work, finish
from triptych.model.system.huge_pages import reserve

_LINE = 64  # bytes of a line of the caches
_LAYER = re.compile(r"layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A stored module, and its place in the network."""

    module: AdaptedModule
    target: str
    first: int
    order: tuple[int, ...] | None  # the stored rows of B in the network's order; None: as they are


def plan_adapter(folder: AdapterFolder, model: Transformer) -> dict[str, list[_Planned]]:
    """Return which projections an adapter changes, by headers alone; raises `CheckpointError` if it does not fit."""
    check_base(model.config, split=model.linear.collective is not None)
    family, config = family_for(model.config), model.config
    rules: dict[str, list[LinearRule]] = {}
    for rule in family.rules(config):
        if isinstance(rule, LinearRule):
            rules.setdefault(rule.source, []).append(rule)
    shapes = {one.spec.name: (one.spec.num_outputs, one.spec.inputs) for one in linears(model)}
    planned, strange = dict[str, list[_Planned]](), list[str]()
    for name, module in folder.modules.items():
        stem = _stem(family, name)
        found = rules.get(stem, [])
        if not found and not _is_unread(stem, rules, family, config):
            strange.append(name)
        for rule in found:
            planned.setdefault(rule.target, []).append(_fitted(name, module, rule, shapes, config))
    if folder.modules and not planned and not strange:
        raise CheckpointError("the adapter changes only what reads pictures, which the base model does not read here")
    if strange:
        raise CheckpointError(
            f"the base model has no projection {listed(strange, most=2, longest=100)}"
            + (f"; the adapter was trained for {listed([folder.base])}" if folder.base else "")
        )
    return planned


def _is_unread(stem: str, rules: Collection[str], family: Family, config: ModelConfig) -> bool:
    """Whether no result depends on a projection: of a tower where pictures are not read, or after the layer that is."""
    if not family.drops(f"{stem}.weight"):
        return False
    return config.pictures is None or ".head." in stem or _LAYER.sub("layers.0.", stem) in rules


def _stem(family: Family, module: str) -> str:
    return family.canonical(f"{module}.weight").removesuffix(".weight")


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
    if (place.startswith("attn.") and getattr(mixer, "bounded", False)) or (
        place.startswith("mlp.") and getattr(layer.feed_forward, "bounded", False)
    ):
        return "projections whose outputs have bounds"
    if place == "attn.qkv" and isinstance(mixer, AttentionConfig) and isinstance(mixer.position, DisentangledConfig):
        return "queries and keys that relative positions are compared with (DeBERTa)"
    if place in (*ADAPTED, OF_SOURCES):
        return ""
    return "recurrent layers" if place.startswith("delta.") else f"the network's {place}"


def planned_bytes(planned: Mapping[str, Sequence[_Planned]], model: Transformer) -> int:
    """Return the most bytes that the matrices will take in memory, as the network keeps them."""
    panel, step = _rounding(model)
    size = 0
    for one in (one for found in planned.values() for one in found):
        (rank, inputs), (outputs, _) = one.module.down.shape, one.module.up.shape
        ranks = rank + -rank % step
        size += (ranks + -ranks % panel) * (inputs + -inputs % 32) + (outputs + 2 * (panel - 1)) * ranks
    return size * model.linear.dtype.itemsize


def _rounding(model: Transformer) -> tuple[int, int]:
    """Return how many outputs a panel of C has, and to a multiple of what it rounds ranks up."""
    library, dtype = model.linear.library, model.linear.dtype
    if library is None:
        return 1, 1
    return PANEL_WIDTH, 32 if library.tiles and dtype is torch.bfloat16 else 2


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
    projections: dict[str, LowRankProjection] = {}
    with TensorReader(stored) as reader:
        for target, found in planned.items():
            projections[target] = _projection(reader, sorted(found, key=lambda one: one.first), model)
            yield None
    _in_one_piece(projections.values())
    classifier = read_head(folder.saved, head, model) if head else None
    return LoraAdapter(name, projections, classifier=classifier, classifier_bytes=size)


def load_adapter(name: str, folder: AdapterFolder, model: Transformer) -> LoraAdapter:
    """Read an adapter at once."""
    return finish(loading_adapter(name, folder, model))


def _projection(reader: TensorReader, planned: Sequence[_Planned], model: Transformer) -> LowRankProjection:
    """Read the matrices of a projection; in C they begin at whole panels, with ranks in pairs or as tiles have them."""
    (panel, step), dtype = _rounding(model), model.linear.dtype
    in_c = step == 2 and _place(planned[0].target) in ADAPTED
    downs, parts, ranks = list[Tensor](), list[LowRankPart](), 0
    for one in planned:
        module, up = one.module, _read(reader, one.module.up)
        if one.order is not None:
            up = up[torch.tensor(one.order)]
        before = one.first % panel
        up = functional.pad(up, (0, 0, before, 0)).to(dtype)
        product = RankMatrix(up) if in_c else _product(up, model)
        parts.append(LowRankPart(one.first - before, len(up), ranks, module.rank, module.scale, product))
        downs.append(functional.pad(_read(reader, module.down), (0, 0, 0, -module.rank % step)).to(dtype))
        ranks += len(downs[-1])
    return LowRankProjection(ranks, _product(torch.cat(downs), model), tuple(parts))


def _place(target: str) -> str:
    """Return a projection's name within its layer; "" outside of layers."""
    return target.partition(".layers.")[2].partition(".")[2]


def _in_one_piece(projections: Iterable[LowRankProjection]) -> None:
    """Move packed matrices to one piece of memory: a large one gets huge pages, which streams of weights need."""
    found = [one for each in projections for one in (each.down, *(part.up for part in each.parts))]
    packed = [one for one in found if isinstance(one, (NativeLinear, RankMatrix))]
    taken, memory = 0, reserve(sum(_aligned(array) for one in packed for array in one.arrays.values()))
    for one in packed:
        moved = dict[str, Tensor]()
        for name, array in one.arrays.items():
            moved[name] = memory[taken : taken + len(array)].copy_(array)
            taken += _aligned(array)
        one.adopt(moved)


def _aligned(array: Tensor) -> int:
    return array.nbytes + -array.nbytes % _LINE


def _read(reader: TensorReader, tensor: StoredTensor) -> Tensor:
    rows, columns = tensor.shape
    found = reader.region(tensor.name, columns, slice(0, columns), 0, rows)
    if not bool(found.float().isfinite().all()):
        raise CheckpointError(f"{tensor.name}: it has numbers that are infinite or NaN")
    return found


def _product(matrix: Tensor, model: Transformer) -> Product:
    """Return the product with a matrix in the network's dtype, packed if the network's are."""
    library = model.linear.library
    return PlainMatrix(matrix.to(model.device)) if library is None else packed_linear(library, matrix)
