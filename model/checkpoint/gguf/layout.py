"""Which tensor of a GGUF file a published name means, and in which number formats projections are kept.

Integers in groups of 32 stay as they are stored. What has groups of 16 (Q6_K, IQ2_S ...), or is fused with it, is read
as the numbers that it stands for, which C keeps in the nearest integers of 8 bits in groups of 32. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.model.checkpoint.gguf.architectures import DROPPED_TENSORS
from triptych.model.checkpoint.gguf.settings import architecture_of
from triptych.model.checkpoint.gguf.table import Architecture, Change, Order
from triptych.model.config.formats import Storage, integers_in_groups, joined
from triptych.model.config.layer import MOST_EXPERTS
from triptych.model.config.model import ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families import config_from_raw, family_for
from triptych.model.families.table.rules import LinearRule
from triptych.model.gguf.container import GGUFModel, GGUFTensor
from triptych.model.gguf.types import FLOATS

_GROUP = 32
# Bits of an integer, and whether groups have offsets, of formats whose groups have 32 numbers.
_EXACT = {
    "Q4_0": integers_in_groups(4, _GROUP, offsets=False),
    "Q4_1": integers_in_groups(4, _GROUP, offsets=True),
    "Q4_K": integers_in_groups(4, _GROUP, offsets=True),
    "Q5_0": integers_in_groups(8, _GROUP, offsets=False),
    "Q5_1": integers_in_groups(8, _GROUP, offsets=True),
    "Q5_K": integers_in_groups(8, _GROUP, offsets=True),
    "Q8_0": integers_in_groups(8, _GROUP, offsets=False),
    "IQ4_NL": integers_in_groups(8, _GROUP, offsets=False),
    "IQ4_XS": integers_in_groups(8, _GROUP, offsets=False),
    "MXFP4": integers_in_groups(8, _GROUP, offsets=False),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S"), integers_in_groups(8, _GROUP, offsets=False)),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), integers_in_groups(4, _GROUP, offsets=False)),
}
_MOST_DIGITS = 6  # of a layer's number
_NEAREST = (8, _GROUP)  # bits and group that C keeps what has smaller groups in


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor comes from, and what has to be undone."""

    tensor: GGUFTensor
    change: Change = field(default_factory=Change)
    rest: tuple[GGUFTensor, ...] = ()  # whose rows follow
    in_order: bool = False  # it is as it is multiplied with, whatever published folders do

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the published shape."""
        if self.change.shape is not None:
            return self.change.shape
        rows = self.change.rows
        count = sum(one.shape[0] for one in (self.tensor, *self.rest)) if rows is None else rows.count
        return (count, *self.tensor.shape[1:])


def origins(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Origin]:
    """Return the tensors by the names that `transformers` has for them; others keep theirs.

    `raw` are the settings. A tied head whose table is quantised is there by a name of its own: in C it is kept as the
    file has it, while the table is read as floats.
    """
    architecture, found = architecture_of(model), dict[str, Origin]()
    changes = architecture.changes(raw)
    for name, expert, tensor in _pieces(architecture, model, raw):
        published = published_name(architecture, model, name)
        published = published if expert is None else published.format(expert)
        found[published] = _origin(architecture, changes, raw, name, tensor)
        _, part, _ = _split(name)
        if part in architecture.followed:
            other = model.tensors.get(name.replace(part, architecture.followed[part]))
            found[published] = replace(found[published], rest=() if other is None else (other,))
    for key, (pattern, shape) in architecture.arrays.items():
        if (numbers := model.numbers(key)) is not None:
            count = raw["num_hidden_layers"]
            if numbers.shape != (count,):
                raise ConfigError(
                    f"{model.name}: {key} has {numbers.shape[0]} numbers, expected one for each of {count} layers"
                )
            pieces = enumerate(_rows_of(numbers, (1,) * count))
            found |= {pattern.format(at): Origin(one, Change(shape=shape)) for at, one in pieces}
    table = model.tensors.get("token_embd.weight")
    head = architecture.names.get("output")
    untied = architecture.head_of_table and table is not None and table.type.block > 1
    if head and f"{head}.weight" not in found and table is not None and untied:
        found[f"{head}.weight"] = Origin(table)
    return found


def _pieces(
    architecture: Architecture, model: GGUFModel, raw: Mapping[str, Any]
) -> Iterator[tuple[str, int | None, GGUFTensor]]:
    """Yield what there is to read: GGUF's name of what is not fused, which expert's it is, and where it lies."""
    last = raw.get("num_hidden_layers") if model.get(f"{model.architecture}.nextn_predict_layers") else None
    for name, tensor in model.tensors.items():
        layer, part, kind = _split(name)
        if name in DROPPED_TENSORS or (last is not None and layer is not None and layer >= last):
            continue
        stem = name.removesuffix(f"{part}.{kind}")
        if part in architecture.followed.values():
            continue
        if part in architecture.parts:
            yield from ((f"{stem}{one}.{kind}", None, tensor) for one in architecture.parts[part])
        elif part == "attn_qkv" and "blk.{}.attn_qkv" not in architecture.names:
            pieces = _rows_of(tensor, _projected_sizes(model, raw, name, tensor))
            yield from ((f"{stem}attn_{one}.{kind}", None, piece) for one, piece in zip("qkv", pieces, strict=True))
        elif part == "ffn_gate_up_exps":
            for expert, one in _each_expert(tensor):
                halves = _rows_of(one, (one.shape[0] // 2,) * 2)
                yield from (
                    (f"{stem}ffn_{half}_exps.{kind}", expert, piece)
                    for half, piece in zip(("gate", "up"), halves, strict=True)
                )
        elif part.endswith("_exps") and kind in ("weight", "bias"):
            yield from ((name, expert, one) for expert, one in _each_expert(tensor))
        else:
            yield name, None, tensor


def _split(name: str) -> tuple[int | None, str, str]:
    """Return the layer, what a tensor is called within it, and its kind ("weight", "bias"), which some have not."""
    words = name.split(".")
    layer = next((int(word) for word in words if word.isdecimal() and len(word) < _MOST_DIGITS), None)
    named = len(words) == 1 or words[-2].isdecimal()
    return (layer, words[-1], "") if named else (layer, words[-2], words[-1])


def _projected_sizes(model: GGUFModel, raw: Mapping[str, Any], name: str, tensor: GGUFTensor) -> tuple[int, int, int]:
    """Return the rows of queries, keys and values of a matrix that has all of a layer."""
    heads = raw.get("num_attention_heads")
    keys = raw.get("num_key_value_heads") or heads
    if type(heads) is not int or type(keys) is not int or min(heads, keys) < 1 or tensor.shape[0] % (heads + 2 * keys):
        raise ConfigError(f"{model.name}: {name} has {tensor.shape[0]} rows, which are not those of {heads} heads")
    dim = tensor.shape[0] // (heads + 2 * keys)
    return heads * dim, keys * dim, keys * dim


def _rows_of(tensor: GGUFTensor, sizes: Iterable[int]) -> Iterator[GGUFTensor]:
    """Yield the given numbers of rows, one part after the other."""
    offset, row = tensor.offset, tensor.nbytes // tensor.shape[0]
    for size in sizes:
        yield replace(tensor, shape=(size, *tensor.shape[1:]), offset=offset)
        offset += size * row


def _each_expert(tensor: GGUFTensor) -> Iterator[tuple[int, GGUFTensor]]:
    """Yield each expert's matrix, or bias, of a tensor that has all of a layer."""
    count, *shape = tensor.shape
    if not shape:
        raise ConfigError(f"{tensor.path.name}: {tensor.name} has one dimension, expected a matrix for each expert")
    if count > MOST_EXPERTS:
        raise ConfigError(f"{tensor.path.name}: {tensor.name} has {count} experts, of at most {MOST_EXPERTS}")
    for expert in range(count):
        yield expert, replace(tensor, shape=tuple(shape), offset=tensor.offset + expert * tensor.nbytes // count)


def _origin(
    architecture: Architecture, changes: Mapping[str, Change], raw: Mapping[str, Any], name: str, tensor: GGUFTensor
) -> Origin:
    _, part, kind = _split(name)
    change = changes.get(part, Change())
    if part in architecture.paired and kind in ("weight", "bias"):
        change = replace(change, rows=_pairs(raw, part, name, tensor))
    shifted = architecture.norms_plus_one and part.endswith("norm") and part not in architecture.norms_as_they_are
    if shifted and kind == "weight":
        change = replace(change, less=1.0)
    return Origin(tensor, change, in_order=part in architecture.in_order)


def _pairs(raw: Mapping[str, Any], part: str, name: str, tensor: GGUFTensor) -> Order:
    """Return the order of rows of heads whose two halves are stored in turns."""
    heads = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
    count = raw.get(heads) or raw.get("num_attention_heads")
    if type(count) is not int or count < 1 or tensor.shape[0] % (2 * count):
        raise ConfigError(
            f"{tensor.path.name}: {name} has {tensor.shape[0]} rows, which {count} heads do not divide evenly"
        )
    dim = tensor.shape[0] // count
    return Order((count, 2, dim // 2), (dim, 1, 2))


def published_name(architecture: Architecture, model: GGUFModel, name: str) -> str:
    """Return the published name of a tensor; its own if the table has none, so that an error names it."""
    layer, _, _ = _split(name)
    parts = name.split(".")
    pattern = ".".join("{}" if layer is not None and part == str(layer) else part for part in parts)
    stem, _, kind = pattern.rpartition(".")
    whole, theirs = architecture.names.get(pattern), architecture.names.get(stem)
    if whole is None and theirs is None:
        return name
    found = whole or f"{theirs}.{kind}"
    found = found if layer is None else found.format(layer)
    if found.endswith(".DenseReluDense.wi_1.weight") and name.replace("ffn_up", "ffn_gate") not in model.tensors:
        found = found.replace(".wi_1.", ".wi.")  # the first T5 has no gate
    return found


def gguf_config(raw: Mapping[str, Any], found: Mapping[str, Origin]) -> ModelConfig:
    """Return the network, and how its projections are kept; raises `ConfigError`."""
    config = config_from_raw(dict(raw), found, strict=True)
    heads = [found[name].tensor.name for name in family_for(config).heads if name in found]
    if config.head is not None and heads == ["token_embd.weight"]:
        config = replace(config, head=replace(config.head, repeats_table=True))
    by_stem = _by_stem(config, found)
    in_order = {
        rule.target
        for rule in _projections(config)
        if (origin := by_stem.get(rule.source)) is not None and origin.in_order
    }
    return replace(config, in_order=frozenset(in_order), stored_as=dict(_stored_as(config, by_stem)))


def _projections(config: ModelConfig) -> Iterator[LinearRule]:
    return (rule for rule in family_for(config).rules(config) if isinstance(rule, LinearRule))


def _by_stem(config: ModelConfig, found: Mapping[str, Origin]) -> dict[str, Origin]:
    family = family_for(config)
    return {family.canonical(name).removesuffix(".weight"): origin for name, origin in found.items()}


def _stored_as(config: ModelConfig, by_stem: Mapping[str, Origin]) -> Iterator[tuple[str, Storage]]:
    stored: dict[str, list[tuple[str, bool]]] = {}
    for rule in _projections(config):
        origin = by_stem.get(rule.source)
        names = ["F32"] if origin is None else [one.type.name for one in (origin.tensor, *origin.rest)]
        whole = origin is None or _keeps_groups(origin)
        stored.setdefault(rule.target, []).extend((name, whole) for name in names)
    for target, found in stored.items():
        if any(kind in FLOATS for kind, _ in found):
            continue
        exact = [_EXACT[kind] for kind, whole in found if kind in _EXACT and whole]
        together = joined(exact) if len(exact) == len(found) else None
        kinds = dict.fromkeys(kind for kind, _ in found)
        yield target, together or Storage(" and ".join(kinds), nearest=_NEAREST)


def _keeps_groups(origin: Origin) -> bool:
    """Whether the numbers that share a scale in the file still do when its columns are in their order."""
    return origin.change.columns is None or origin.change.columns.sizes[-1] % _GROUP == 0
