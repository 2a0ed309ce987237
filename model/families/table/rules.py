"""How tensors of a checkpoint become parameters of the Transformer: rules and the plan they make. Pure; opens no file.

A family lists one `WeightRule` for each tensor it stores. `plan_load` matches the rules with what the folder holds and
what the network needs, and is a bijection: no tensor unused, no parameter unfilled, every shape equal; otherwise one
`CheckpointError` lists all offenders. `Family` ties a family's two functions together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from model.config.model import Activation, ClassifierInput, ConfigError, ModelConfig
from model.families.table.raw_config import Settings

Shape = tuple[int, ...]
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


class CheckpointError(ConfigError):
    """A checkpoint whose tensors do not fit its configuration."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The tensor `source` fills `target`, or its rows `[start, stop)` where several tensors are fused into one.

    `shape` is how it is stored where that is not the target's own. `transpose` swaps rows and columns (Conv1D);
    `interleaved` (heads, parts) is stored head by head, `[heads, parts, dim]` rows, and wanted part by part (GPT-NeoX).
    Of a tensor that fills several targets each rule takes a `part` of its rows (nn.MultiheadAttention), and has a
    `shape`. A `duplicate` may be absent; where present it must equal what fills the target (tied weights stored twice).
    """

    source: str
    target: str
    rows: tuple[int, int] | None = None
    transpose: bool = False
    shape: Shape | None = None
    part: tuple[int, int] | None = None
    interleaved: tuple[int, int] | None = None
    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class ClassifierTable:
    """Where a family's classification head reads, and what its matrices are called."""

    out: str
    input: ClassifierInput
    dense: str = ""  # a layer in between; empty: there is none
    activation: Activation | None = None
    bias: bool = True


@dataclass(frozen=True, slots=True)
class Family:
    """One table: config.json -> ModelConfig, ModelConfig -> rules.

    `config` gets the raw config.json and the tensor names, which tell what a config only claims (tied head, pooler);
    names are None where a config is looked at without weights. `prefix` is what a headed model puts before its base
    model's names, `dropped` patterns (fnmatch) are tensors that carry nothing to serve.
    """

    config: Callable[[Settings, Collection[str] | None], ModelConfig]
    rules: Callable[[ModelConfig], Iterable[WeightRule]]
    prefix: str = ""
    dropped: tuple[str, ...] = ()

    def canonical(self, name: str) -> str:
        """Without the prefix; the gain and shift of a norm were once called gamma and beta."""
        stem, _, kind = name.removeprefix(self.prefix).rpartition(".")
        kind = _OLD_NAMES.get(kind, kind)
        return f"{stem}.{kind}" if stem else kind

    def drops(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.dropped)


def plan_load(
    family: Family, config: ModelConfig, sources: Mapping[str, Shape], targets: Mapping[str, Shape]
) -> list[tuple[str, WeightRule]]:
    """Pairs of stored tensor name and rule, duplicates last; raises `CheckpointError` unless they are a bijection.

    `sources` are the stored tensors' shapes, `targets` the parameters'.
    """
    stored = {family.canonical(name): name for name in sources if not family.drops(family.canonical(name))}
    rules = list(family.rules(config))
    present = [rule for rule in rules if rule.source in stored]
    missing = [rule.source for rule in rules if rule.source not in stored and not rule.duplicate]
    served = {stored[rule.source] for rule in present}
    extra = [name for name in sources if name not in served and not family.drops(family.canonical(name))]
    shapes = [
        f"{stored[rule.source]}: found {list(sources[stored[rule.source]])}, expected {list(wanted)}"
        for rule in present
        if sources[stored[rule.source]] != (wanted := wanted_shape(rule, targets))
    ]
    unfilled = _unfilled([rule for rule in rules if not rule.duplicate], targets)
    extra += _unread(present)
    _raise_all({"missing": missing, "extra": extra, "misshaped": shapes, "parameters without a rule": unfilled})
    return [(stored[rule.source], rule) for rule in sorted(present, key=lambda rule: rule.duplicate)]


def wanted_shape(rule: WeightRule, targets: Mapping[str, Shape]) -> Shape:
    """Of the tensor that `rule` takes, as it is stored; `targets` are the parameters' shapes."""
    if rule.shape is not None:
        return rule.shape
    shape = targets[rule.target]
    if rule.rows is not None:
        shape = (rule.rows[1] - rule.rows[0], *shape[1:])
    return shape[::-1] if rule.transpose else shape


def _unfilled(rules: Iterable[WeightRule], targets: Mapping[str, Shape]) -> list[str]:
    rows = dict.fromkeys(targets, 0)
    for rule in rules:
        rows[rule.target] += rule.rows[1] - rule.rows[0] if rule.rows else targets[rule.target][0]
    return [f"{name} ({rows[name]} of {shape[0]} rows)" for name, shape in targets.items() if rows[name] != shape[0]]


def _unread(rules: Iterable[WeightRule]) -> list[str]:
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
