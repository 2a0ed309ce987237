"""Which stored tensor fills which parameter: a bijection, planned before anything is read. Pure; opens no file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

from model.config.formats import FLOAT, Storage
from model.config.model import ModelConfig
from model.errors import CheckpointError
from model.families.table.rules import Family, LinearRule, Shape, TensorRule, ZeroRule


def plan_load(
    family: Family, config: ModelConfig, sources: Mapping[str, Shape], targets: Mapping[str, Shape]
) -> list[tuple[str, TensorRule]]:
    """Pairs of stored tensor name and rule, duplicates last; raises `CheckpointError` unless they are a bijection.

    `sources` are the stored tensors' shapes, `targets` the parameters'.
    """
    stored = family.by_rule_name(sources, tied=config.is_tied)  # a rule may take what is dropped otherwise
    rules = list(family.tensor_rules(config))
    present = [rule for rule in rules if rule.source in stored]
    missing = [rule.source for rule in rules if rule.source not in stored and not rule.duplicate]
    served = {stored[rule.source] for rule in present}
    patterns = {pattern for storage in config.stored_as.values() for pattern in storage.passed_over}
    unused = tuple(family.unused(config))
    extra = [
        name
        for name in sources
        if name not in served
        and not family.drops(family.canonical(name))
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
        and not any(fnmatchcase(family.canonical(name), pattern) for pattern in unused)
    ]
    shapes = [
        f"{stored[rule.source]}: found {list(sources[stored[rule.source]])}, expected {list(wanted)}"
        for rule in present
        if not _fits(sources[stored[rule.source]], wanted := wanted_shape(rule, targets))
    ]
    unfilled = _unfilled([*(rule for rule in rules if not rule.duplicate), *family.zero_rules(config)], targets)
    whole = {rule.source for rule in present if rule.part is None}  # or what is left of it is of no use
    extra += _unread(rule for rule in present if rule.source not in whole and not family.drops(rule.source))
    _raise_all({"missing": missing, "extra": extra, "misshaped": shapes, "parameters without a rule": unfilled})
    return [(stored[rule.source], rule) for rule in sorted(present, key=lambda rule: rule.duplicate)]


def stored_projections(
    family: Family, config: ModelConfig, storage: Storage, names: Collection[str]
) -> dict[str, Storage]:
    """Which projections a checkpoint with these tensors stores as `storage`: it has more of them than a weight."""
    stored = {family.canonical(name) for name in names}
    marks = storage.tensors.keys() - FLOAT.tensors.keys()
    rules = [rule for rule in family.rules(config) if isinstance(rule, LinearRule)]
    return {rule.target: storage for rule in rules if any(f"{rule.source}.{mark}" in stored for mark in marks)}


def wanted_shape(rule: TensorRule, targets: Mapping[str, Shape]) -> Shape:
    """Of the tensor that `rule` takes, as it is stored; `targets` are the parameters' shapes."""
    if rule.shape is not None:
        return rule.shape
    shape = targets[rule.target]
    if rule.rows is not None:
        shape = (rule.rows[1] - rule.rows[0], *shape[1:])
    if rule.repeat != 1:
        return (-(-shape[0] // rule.repeat), *shape[1:]) if rule.repeat else ()
    return shape[::-1] if rule.transpose else shape


def _fits(found: Shape, wanted: Shape) -> bool:
    """A single number may be stored with any number of dimensions."""
    return found == wanted or (wanted == () and math.prod(found) == 1)


def _unfilled(rules: Iterable[TensorRule | ZeroRule], targets: Mapping[str, Shape]) -> list[str]:
    rows = dict.fromkeys(targets, 0)
    for rule in rules:
        rows[rule.target] += rule.rows[1] - rule.rows[0] if rule.rows else targets[rule.target][0]
    return [f"{name} ({rows[name]} of {shape[0]} rows)" for name, shape in targets.items() if rows[name] != shape[0]]


def _unread(rules: Iterable[TensorRule]) -> list[str]:
    """Tensors of which no rule takes some of the rows."""
    rows: dict[str, list[int]] = {}
    for rule in rules:
        if rule.part is not None and rule.shape is not None:
            left = rows.setdefault(rule.source, list(range(rule.shape[0])))
            rows[rule.source] = [row for row in left if not rule.part[0] <= row < rule.part[1]]
    return [f"{name} ({len(left)} rows)" for name, left in rows.items() if left]


def _raise_all(problems: Mapping[str, list[str]]) -> None:
    found = [f"{kind}: {', '.join(sorted(names))}" for kind, names in problems.items() if names]
    if found:
        raise CheckpointError(f"the tensors do not fit config.json; {'; '.join(found)}")
