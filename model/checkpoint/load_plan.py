"""Plans which stored tensor fills which parameter, before anything is read. Pure; opens no file.

Every parameter is filled. Stored tensors that no rule reads are left over: `transformers` warns of them and computes
without them, and so do we. What belongs to a projection that is stored in integers or fp8 must be read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial

from triptych.model.config.formats import FLOAT, Storage
from triptych.model.config.model import ModelConfig
from triptych.model.errors import CheckpointError, listed
from triptych.model.families.table.rules import Family, LinearRule, Shape, TensorRule, ZeroRule

TABLE = "tokens.weight"  # the parameter that holds the vectors of tokens
few = partial(listed, most=2, longest=80)  # names of tensors


def plan_load(
    family: Family,
    config: ModelConfig,
    sources: Mapping[str, Shape],
    targets: Mapping[str, Shape],
    settings: str = "config.json",
) -> list[tuple[str, TensorRule]]:
    """Pairs of stored tensor name and rule, duplicates last; raises `CheckpointError` unless every parameter is filled.

    `sources` are the stored tensors' shapes, `targets` the parameters'; `settings` names what describes the network.
    """
    stored = family.by_rule_name(sources, tied=config.is_tied)  # a rule may take what is dropped otherwise
    rules = [rule for rule in family.tensor_rules(config) if rule.target in targets or not _kept_in_head(config, rule)]
    present = [rule for rule in rules if rule.source in stored]
    missing = [rule.source for rule in rules if rule.source not in stored and not rule.duplicate]
    extra = _of_quantised(family, config, leftover_tensors(family, config, sources))
    shapes = [
        f"{stored[rule.source]}: found {list(sources[stored[rule.source]])}, expected {list(wanted)}"
        for rule in present
        if not _fits(sources[stored[rule.source]], wanted := wanted_shape(rule, targets))
    ]
    unfilled = _unfilled([*(rule for rule in rules if not rule.duplicate), *family.zero_rules(config)], targets)
    whole = {rule.source for rule in present if rule.part is None}  # or what is left of it is of no use
    extra += _unread(rule for rule in present if rule.source not in whole and not family.drops(rule.source))
    problems = {"missing": missing, "extra": extra, "misshaped": shapes, "parameters without a rule": unfilled}
    _raise_all(settings, problems, _hint(missing, sources))
    return [(stored[rule.source], rule) for rule in sorted(present, key=lambda rule: rule.duplicate)]


def leftover_tensors(family: Family, config: ModelConfig, names: Collection[str]) -> list[str]:
    """Return the stored tensors that the network does not read, but for those that are known to carry nothing."""
    stored = family.by_rule_name(names, tied=config.is_tied)
    served = {stored[rule.source] for rule in family.tensor_rules(config) if rule.source in stored}
    passed_over = tuple({pattern for storage in config.stored_as.values() for pattern in storage.passed_over})
    unused = tuple(family.unused(config))
    return [
        name
        for name in names
        if name not in served
        and not family.drops(family.canonical(name))
        and not any(fnmatchcase(name, pattern) for pattern in passed_over)
        and not any(fnmatchcase(family.canonical(name), pattern) for pattern in unused)
    ]


def _kept_in_head(config: ModelConfig, rule: TensorRule) -> bool:
    """Return whether a table that the network lacks is the matrix of its head, which another rule fills."""
    return config.head is not None and config.head.repeats_table and rule.target == TABLE


def _of_quantised(family: Family, config: ModelConfig, names: Collection[str]) -> list[str]:
    """Return those of the tensors that belong to a projection stored in integers or fp8: without them it is another."""
    rules = (rule for rule in family.rules(config) if isinstance(rule, LinearRule))
    stems = {rule.source for rule in rules if config.stored_as.get(rule.target, FLOAT) != FLOAT}
    return [name for name in names if family.canonical(name).rpartition(".")[0] in stems]


def stored_projections(
    family: Family, config: ModelConfig, storage: Storage, names: Collection[str]
) -> dict[str, Storage]:
    """Return the projections stored as `storage`, told by tensors that a plain weight lacks."""
    stored = {family.canonical(name) for name in names}
    marks = storage.tensors.keys() - FLOAT.tensors.keys()
    rules = [rule for rule in family.rules(config) if isinstance(rule, LinearRule)]
    return {rule.target: storage for rule in rules if any(f"{rule.source}.{mark}" in stored for mark in marks)}


def wanted_shape(rule: TensorRule, targets: Mapping[str, Shape]) -> Shape:
    """Return the stored shape of the tensor that `rule` takes; `targets` are the shapes of parameters."""
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
    """Return the tensors with rows that no rule takes."""
    rows: dict[str, list[int]] = {}
    for rule in rules:
        if rule.part is not None and rule.shape is not None:
            left = rows.setdefault(rule.source, list(range(rule.shape[0])))
            rows[rule.source] = [row for row in left if not rule.part[0] <= row < rule.part[1]]
    return [f"{name} ({len(left)} rows)" for name, left in rows.items() if left]


def _raise_all(settings: str, problems: Mapping[str, list[str]], hint: str) -> None:
    longest = {"misshaped": 140}  # a name and two shapes
    found = [
        f"{kind}: {few(sorted(set(names)), longest=longest.get(kind, 80))}" for kind, names in problems.items() if names
    ]
    if found:
        raise CheckpointError(f"the tensors do not fit {settings}; {'; '.join(found)}{hint}")


def _hint(missing: Collection[str], names: Collection[str]) -> str:
    """Say what the stored names tell of a file that lacks tensors; "" where they tell nothing."""
    if not missing:
        return ""
    if any(".lora_A." in name or ".base_layer." in name for name in names):
        return "; it holds LoRA matrices that are not merged: merge them (PEFT: merge_and_unload) and save the model"
    if any(name.endswith((".qweight", ".SCB", ".absmax", ".weight_packed")) for name in names):
        return "; weights are packed as a quantised model's, and config.json has no quantization_config"
    wanted = tuple(f".{name}" for name in missing)
    found = sorted({name.partition(".")[0] + "." for name in names if name.endswith(wanted[:8])})
    if found:
        return f"; names begin with {few(found)}: save the model without what wraps it"
    return ""
