"""How tools lay the integers of a projection out in a folder, and which storage they are read as. No torch.

A layout is found by a projection's own tensors. What it holds beyond a scale for each group is looked at before
anything is planned: zero points that are all in the middle of the range are none, and inputs that are in the order of
activations (`g_idx`, GPTQ's act-order) share scales in no groups that lie together, so their products are read instead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from triptych.model.checkpoint.coded_layouts import CodedLayout
from triptych.model.config.formats import FLOAT, GROUPS, Storage, integers_in_groups, joined
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.rules import Family, LinearRule

_SHAPE = "weight_shape"  # compressed-tensors: outputs and inputs
_NEAREST = (8, 128)  # bits and group that C keeps what it cannot keep as it is stored in


class Along(Enum):
    """The axis along which numbers share a word of 32 bits."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"


@dataclass(frozen=True, slots=True)
class IntegerLayout:
    """Integers of a projection [outputs, inputs] in words of 32 bits or in bytes, with scales and zero points.

    weight = (integer - zero point) * scale of its group. Numbers in words are unsigned, the first in the lowest bits;
    bytes are signed.
    """

    tool: str  # for people
    bits: int
    group: int  # inputs that share a scale; 0: all of them
    weight: str  # names of the tensors
    scale: str
    zeros: str | None = None
    order: str | None = None  # the group of each input, where they do not follow each other
    others: tuple[str, ...] = ()  # tensors that say nothing new
    words: Along | None = Along.INPUTS  # None: bytes
    zero_words: Along | None = Along.OUTPUTS
    inputs_first: bool = False  # tensors are transposed
    interleaved: bool = False  # eight numbers of a word lie as 0 2 4 6 1 3 5 7 (AWQ)
    zeros_less: int = 0  # what zero points are stored less (GPTQ's first version: 1)
    inputs: int = 0  # of the projection, where they do not fill the last word; 0: they do
    zero_bias: bool = False  # a bias is stored that is zero, as AutoGPTQ once did for projections without one
    padded_groups: bool = False  # scales and zero points have room for more groups than there are (AWQ's gemv)
    described: bool = False  # bits and group are what the file's metadata says (torchao)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that become others when they are read."""
        own = (self.weight, self.scale, self.zeros, self.order, *self.others)
        return tuple(name for name in own if name is not None)

    @property
    def marks(self) -> tuple[str, ...]:
        """The tensors by which a projection is known to be stored so."""
        return tuple(name for name in (self.weight, self.scale) if name != "weight")

    @property
    def per_word(self) -> int:
        return 32 // self.bits

    @property
    def midst(self) -> int:
        """The unsigned number that stands for zero."""
        return 1 << (self.bits - 1)

    def storage(self) -> Storage:
        """Return the storage that is read: groups that C lacks are cut into smaller ones, or dequantised."""
        kept = next((size for size in reversed(GROUPS) if self.group % size == 0), None)
        if self.order is not None or kept is None:
            return self.dequantised()
        return integers_in_groups(self.bits, kept, offsets=self.zeros is not None)

    def dequantised(self) -> Storage:
        """Return the storage of the numbers meant by integers, which C keeps in the nearest format that it has."""
        cut = f" in groups of {self.group}" if self.group else " by row"
        order = " in the order of activations" if self.order is not None else ""
        return Storage(f"{self.tool} int{self.bits}{cut}{order}", nearest=_NEAREST)


Layout = IntegerLayout | CodedLayout


@dataclass(frozen=True, slots=True)
class Packed:
    """A projection's layout, and the storage that its tensors are read as: floats, or integers in groups."""

    layout: Layout
    storage: Storage


def find_layouts(layouts: Mapping[str, Layout], names: Collection[str], files: Iterable[Path]) -> dict[str, Layout]:
    """Return the layouts of projections, by their stored names, as they really are; raises `ConfigError`.

    `layouts` are what the settings say of them, `names` the stored tensors.
    """
    if any(file.suffix != ".safetensors" for file in files):
        raise ConfigError("packed integers are read from safetensors alone")
    found: dict[str, Layout] = {}
    with _Peek(files) as peek:
        for stem, layout in layouts.items():
            if isinstance(layout, CodedLayout):
                found[stem] = layout.found(stem, names, peek.find)
                continue
            missing = [f"{stem}.{name}" for name in (layout.weight, layout.scale) if f"{stem}.{name}" not in names]
            if missing:
                raise ConfigError(f"quantization_config says {layout.tool}, but {', '.join(missing)} is missing")
            if layout.described:
                layout = _described(stem, layout, peek.metadata(f"{stem}.weight"))
            if layout.zeros is not None and f"{stem}.{layout.zeros}" not in names:
                layout = replace(layout, zeros=None)
            if layout.order is not None and _follows(peek.find(f"{stem}.{layout.order}"), layout.group):
                layout = replace(layout, order=None, others=(*layout.others, layout.order))
            if layout.zeros is not None and _are_midst(peek, f"{stem}.{layout.zeros}", layout):
                layout = replace(layout, zeros=None, others=(*layout.others, layout.zeros))
            bias = peek.find(f"{stem}.bias")
            no_bias = bias is not None and not bias.any()
            found[stem] = replace(layout, zero_bias=no_bias, inputs=_inputs(peek, stem, layout))
    return found


def _described(stem: str, layout: IntegerLayout, told: str | None) -> IntegerLayout:
    """Return the layout that torchao's metadata describe: bytes, so a scale's integers may be of any number of bits."""
    try:
        described = json.loads(told or "")
        kind, data, tensors = described["_type"], described["_data"], sorted(map(str, described["_tensor_data_names"]))
        outputs, group = data["block_size"]
        bits = 8 if kind == "Int8Tensor" else int(data["target_dtype"]["_data"].removeprefix("int"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{stem}.weight: torchao's metadata of it cannot be read: {error}") from None
    if kind not in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        raise ConfigError(f"{stem}.weight: torchao's {kind} is not served, only Int8Tensor or IntxUnpackedToInt8Tensor")
    if not set(tensors) <= {"qdata", "scale", "zero_point"}:
        raise ConfigError(f"{stem}.weight: torchao's {kind} with {', '.join(tensors)} is not served")
    if outputs != 1 or type(group) is not int or group < 1 or not 1 <= bits <= 8:
        raise ConfigError(
            f"{stem}.weight: torchao's {kind} of {bits} bits in blocks of {outputs} x {group} is not served"
        )
    return replace(layout, bits=4 if bits <= 4 else 8, group=group)


def _inputs(peek: _Peek, stem: str, layout: IntegerLayout) -> int:
    """Return how many inputs a projection has if they do not fill their last word, else 0."""
    shape = peek.find(f"{stem}.{_SHAPE}") if _SHAPE in layout.others and layout.words is not None else None
    if shape is None or shape.size != 2 or shape.dtype.kind not in "iu":
        return 0
    inputs = int(shape.reshape(-1)[-1])
    return inputs if inputs % layout.per_word else 0


def _follows(order: NDArray[Any] | None, group: int) -> bool:
    """Whether each group's inputs follow each other; -1 is written where no order was found."""
    if order is None or (order < 0).any():
        return True
    return bool(np.array_equal(order, np.arange(len(order)) // (group or len(order))))


def _are_midst(peek: _Peek, name: str, layout: IntegerLayout) -> bool:
    """Whether all zero points are in the middle of the range, so that weights are integers times scales."""
    midst = 0 if layout.zero_words is None else layout.midst - layout.zeros_less
    byte = midst | midst << 4 if layout.bits == 4 and layout.zero_words is not None else midst
    zeros = peek.find(name)
    return zeros is not None and bool((zeros.reshape(-1).view(np.uint8) == byte).all())


class _Peek:
    """Reads single small tensors; a context manager."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._open = [safe_open(file, framework="numpy") for file in files]
        self._places: dict[str, Any] = {}

    def __enter__(self) -> _Peek:
        for tensors in self._open:
            tensors.__enter__()
            self._places |= dict.fromkeys(tensors.keys(), tensors)
        return self

    def __exit__(self, *error: object) -> None:
        for tensors in self._open:
            tensors.__exit__(*error)

    def metadata(self, name: str) -> str | None:
        """Return what any of the files says of a name."""
        return next((told[name] for tensors in self._open if name in (told := tensors.metadata() or {})), None)

    def find(self, name: str) -> NDArray[Any] | None:
        """A tensor; None if there is none, or numpy has not its dtype (bfloat16)."""
        try:
            return self._places[name].get_tensor(name) if name in self._places else None
        except TypeError:
            return None


def pack_projections(
    family: Family, config: ModelConfig, layouts: Mapping[str, Layout]
) -> tuple[dict[str, Storage], dict[str, Packed]]:
    """Return which storage the network's projections have, and how each stored one is read.

    What is fused into one projection gets one storage: that which holds all of it, else the numbers themselves.
    """
    stems = {family.canonical(f"{stem}.weight").removesuffix(".weight"): stem for stem in layouts}
    rules: dict[str, list[LinearRule]] = {}
    for rule in family.rules(config):
        if isinstance(rule, LinearRule):
            rules.setdefault(rule.target, []).append(rule)
    stored_as: dict[str, Storage] = {}
    packed = {stem: Packed(layout, FLOAT) for stem, layout in layouts.items()}  # a table of embeddings is floats
    for target, parts in rules.items():
        found = [stems.get(rule.source) for rule in parts]
        here = [stem for stem in found if stem is not None]
        if not here:
            continue
        storages = dict.fromkeys(layouts[stem].storage() for stem in here)  # in an order that all ranks have
        storage = joined(storages) if len(here) == len(found) else None
        if storage is None:
            storage = next((one for one in storages if one.nearest is not None), layouts[here[0]].dequantised())
            if len(here) < len(found):  # the rest is floats
                storage = replace(storage, nearest=None)
        stored_as[target] = storage
        for rule, stem in zip(parts, found, strict=True):
            if stem is not None:
                layout = layouts[stem]
                if layout.zero_bias and not rule.bias:
                    layout = replace(layout, others=(*layout.others, "bias"))
                packed[stem] = Packed(layout, storage)
    return stored_as, packed


def consumed_names(layouts: Mapping[str, Layout]) -> set[str]:
    """Return the stored tensors that are read as others."""
    return {f"{stem}.{name}" for stem, layout in layouts.items() for name in layout.names}


def logical_names(names: Collection[str], layouts: Mapping[str, Layout]) -> frozenset[str]:
    """Return the stored tensors as they are read: with a weight for what is packed."""
    return frozenset({*names} - consumed_names(layouts) | {f"{stem}.weight" for stem in layouts})
