"""Which tensor of a GGUF file a published name means, and in which number formats projections are kept.

Integers in groups of 32 stay as they are stored. What has groups of 16 (Q6_K, Q3_K, Q2_K), or is fused with it, is read
as the numbers that it stands for, which C keeps in the nearest integers of 8 bits in groups of 32. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.checkpoint.gguf.architectures import DROPPED_TENSORS, Architecture
from model.checkpoint.gguf.settings import architecture_of
from model.config.formats import Storage, integers_in_groups, joined
from model.config.layer import MOST_EXPERTS
from model.config.model import ModelConfig
from model.errors import ConfigError
from model.families import FAMILIES, config_from_raw
from model.families.table.rules import LinearRule
from model.gguf.container import GGUFModel, GGUFTensor
from model.gguf.types import FLOATS

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
}
_NEAREST = (8, _GROUP)  # bits and group that C keeps what has smaller groups in


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor comes from, and what has to be undone."""

    tensor: GGUFTensor
    paired: int = 0  # rows of a head whose two halves are in turns; 0: rows are in their order
    less: float = 0.0  # what was added to every number


def origins(model: GGUFModel, raw: Mapping[str, Any]) -> dict[str, Origin]:
    """Return the tensors by the names that `transformers` has for them; others keep theirs.

    `raw` are the settings. A tied head whose table is quantised is there by a name of its own: in C it is kept as the
    file has it, while the table is read as floats.
    """
    architecture = architecture_of(model)
    found: dict[str, Origin] = {}
    for name, tensor in model.tensors.items():
        if name in DROPPED_TENSORS:
            continue
        published = published_name(architecture, model, name)
        if "{}" in published and len(tensor.shape) == 3:
            experts = _each_expert(tensor)
            found |= {published.format(at): _origin(architecture, model, raw, name, one) for at, one in experts}
        else:
            found[published] = _origin(architecture, model, raw, name, tensor)
    table = model.tensors.get("token_embd.weight")
    head = architecture.names.get("output")
    if head and f"{head}.weight" not in found and table is not None and _unties(architecture) and table.type.block > 1:
        found[f"{head}.weight"] = Origin(table)
    return found


def _each_expert(tensor: GGUFTensor) -> Iterator[tuple[int, GGUFTensor]]:
    """Yield each expert's matrix of a tensor that has all of a layer."""
    count, *shape = tensor.shape
    if count > MOST_EXPERTS:
        raise ConfigError(f"{tensor.path.name}: {tensor.name} has {count} experts, of at most {MOST_EXPERTS}")
    for expert in range(count):
        yield expert, replace(tensor, shape=tuple(shape), offset=tensor.offset + expert * tensor.nbytes // count)


def _unties(architecture: Architecture) -> bool:
    """Whether a head may be a matrix of its own: T5's outputs have a scale where it is tied."""
    return "token_embd" in architecture.names and architecture.names["token_embd"].startswith("model.")


def _origin(
    architecture: Architecture, model: GGUFModel, raw: Mapping[str, Any], name: str, tensor: GGUFTensor
) -> Origin:
    part, kind = name.split(".")[-2:] if "." in name else (name, "")
    paired = 0
    if part in architecture.paired and kind in ("weight", "bias"):
        heads = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        count = raw.get(heads) or raw.get("num_attention_heads")
        if type(count) is not int or count < 1 or tensor.shape[0] % (2 * count):
            raise ConfigError(
                f"{model.name}: {name} has {tensor.shape[0]} rows, which {count} heads do not divide evenly"
            )
        paired = tensor.shape[0] // count
    less = 1.0 if architecture.norms_plus_one and part.endswith("norm") and kind == "weight" else 0.0
    return Origin(tensor, paired, less)


def published_name(architecture: Architecture, model: GGUFModel, name: str) -> str:
    """Return the published name of a tensor; its own if the table has none, so that an error names it."""
    stem, _, kind = name.rpartition(".")
    parts = stem.split(".")
    layer = next((part for part in parts if part.isdecimal()), None)
    pattern = ".".join("{}" if part == layer else part for part in parts)
    theirs = architecture.names.get(pattern)
    if theirs is None:
        return name
    found = theirs if layer is None else theirs.format(layer)
    if found.endswith(".DenseReluDense.wi_1") and name.replace("ffn_up", "ffn_gate") not in model.tensors:
        found = found.removesuffix("_1")  # the first T5 has no gate
    return f"{found}.{kind}"


def gguf_config(raw: Mapping[str, Any], found: Mapping[str, Origin]) -> ModelConfig:
    """Return the network, and how its projections are kept; raises `ConfigError`."""
    config = config_from_raw(dict(raw), found, strict=True)
    return replace(config, stored_as=dict(_stored_as(config, found)))


def _stored_as(config: ModelConfig, found: Mapping[str, Origin]) -> Iterator[tuple[str, Storage]]:
    family = FAMILIES[config.model_type]
    by_stem = {family.canonical(name).removesuffix(".weight"): origin for name, origin in found.items()}
    kinds: dict[str, list[str]] = {}
    turned = set()
    for rule in family.rules(config):
        if isinstance(rule, LinearRule):
            origin = by_stem.get(rule.source)
            kinds.setdefault(rule.target, []).append("F32" if origin is None else origin.tensor.type.name)
            turned |= {rule.target} if rule.transpose or rule.interleaved is not None else set()
    for target, found_kinds in kinds.items():
        if any(kind in FLOATS for kind in found_kinds):
            continue
        exact = [_EXACT[kind] for kind in found_kinds if kind in _EXACT and target not in turned]
        whole = joined(exact) if len(exact) == len(found_kinds) else None
        yield target, whole or Storage(" and ".join(dict.fromkeys(found_kinds)), nearest=_NEAREST)
