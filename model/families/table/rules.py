"""How tensors of a checkpoint become parameters of the Transformer: rules and the plan they make. Pure; opens no file.

A family lists a `LinearRule` for each projection and a `TensorRule` for every other tensor that it stores. `plan_load`
matches the rules with what the folder holds and what the network needs, and is a bijection: no tensor unused, no
parameter unfilled, every shape equal; otherwise one `CheckpointError` lists all offenders. `Family` ties a family's two
functions together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from triptych.model.config.formats import FLOAT, NumberKind, Storage
from triptych.model.config.layer import MOST_EXPERTS, Activation
from triptych.model.config.model import ClassifierInput, ModelConfig
from triptych.model.errors import ConfigError
from triptych.model.families.table.raw_config import Settings

Shape = tuple[int, ...]
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Rows that are stored group by group, each a part of q, of k and of v, and wanted part by part.

    `widths` are the heads of each part in a group, as they are stored; the part `order[i]` of these is the i-th wanted.
    """

    groups: int
    widths: tuple[int, ...] = (1, 1, 1)
    order: tuple[int, ...] = (0, 1, 2)

    def stored_heads(self) -> list[int]:
        """For each wanted head in turn, which of the stored ones it is."""
        each, starts = sum(self.widths), [sum(self.widths[:part]) for part in range(len(self.widths))]
        return [
            group * each + starts[part] + head
            for part in self.order
            for group in range(self.groups)
            for head in range(self.widths[part])
        ]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """The tensor `source` fills `target`, or its rows `[start, stop)` where several tensors are fused into one.

    `shape` is how it is stored where that is not the target's own. `transpose` swaps rows and columns (Conv1D);
    `interleaved` is stored head by head of q, k and v, and wanted part by part (GPT-NeoX).
    Of a tensor that fills several targets each rule takes a `part` of its rows (nn.MultiheadAttention), and has a
    `shape`. A `duplicate` may be absent; where present it must equal what fills the target (tied weights stored twice).
    `holds` says which numbers are stored; None: floating-point numbers of any kind. One stored row is for `repeat` rows
    of the target; 0: a single number for all of them.
    """

    source: str
    target: str
    rows: tuple[int, int] | None = None
    transpose: bool = False
    shape: Shape | None = None
    part: tuple[int, int] | None = None
    interleaved: Interleaved | None = None
    duplicate: bool = False
    holds: NumberKind | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class LinearRule:
    """The projection `source` fills `target`, or its `rows` where several are fused, in whatever format it is stored.

    For a checkpoint it stands for one `TensorRule` for each stored tensor: weight, scales, bias.
    """

    source: str
    target: str
    bias: bool = True
    rows: tuple[int, int] | None = None
    transpose: bool = False
    interleaved: Interleaved | None = None

    def tensors(self, storage: Storage, *, in_order: bool = False) -> Iterator[TensorRule]:
        """The rules of a matrix that is stored so; `in_order`: as it is multiplied with, whatever folders have."""
        kinds = storage.tensors | ({"bias": None} if self.bias else {})
        for tensor, holds in kinds.items():
            yield TensorRule(
                f"{self.source}.{tensor}",
                f"{self.target}.{tensor}",
                self.rows,
                transpose=self.transpose and storage == FLOAT and tensor == "weight" and not in_order,
                interleaved=None if in_order else self.interleaved,
                holds=holds,
                repeat=storage.block[0] if tensor in storage.factors else 1,
            )


@dataclass(frozen=True, slots=True)
class ZeroRule:
    """The `rows` of `target` are stored nowhere: they are zeros (the bias of DeBERTa's keys, fused with others)."""

    target: str
    rows: tuple[int, int]


Rule = TensorRule | LinearRule | ZeroRule


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A stored tensor with the matrices of all experts of a layer, `[experts, outputs, inputs]`; or their biases.

    It is read as one tensor for each expert and part, by the names that the family's rules have for these: `parts` with
    the number of the expert in place of {}. `written` tells whether the family's folders have it.
    """

    source: str  # within the layer
    parts: tuple[str, ...]  # which share the outputs, one after the other
    interleaved: bool = False  # not so, but in turn
    transposed: bool = False  # [experts, inputs, outputs]
    either_way: bool = False  # so or transposed, which sizes tell
    written: bool = False

    def part_names(self, name: str, experts: int) -> list[tuple[str, ...]]:
        """Return what is read of the stored tensor `name`: the names of each expert's parts.

        Raises `ConfigError` where a header tells of more experts than there can be.
        """
        if experts > MOST_EXPERTS:
            raise ConfigError(f"{name} has {experts} experts, of at most {MOST_EXPERTS}")
        layer = name.removesuffix(self.source)
        return [tuple(layer + part.format(expert) for part in self.parts) for expert in range(experts)]


@dataclass(frozen=True, slots=True)
class ClassifierTable:
    """Where a family's classification head reads, and what its matrices are called."""

    out: str
    input: ClassifierInput
    dense: str = ""  # a layer in between; empty: there is none
    activation: Activation | None = None
    bias: bool = True
    norm: str = ""  # after that layer; empty: there is none
    wraps: bool = False  # a decoder that begins with the last token of the source, its language (mBART)


@dataclass(frozen=True, slots=True)
class Family:
    """One table: config.json -> ModelConfig, ModelConfig -> rules.

    `config` gets the raw config.json and the tensor names, which tell what a config only claims (tied head, pooler);
    names are None where a config is looked at without weights. `prefix` is what a headed model puts before its base
    model's names (of several the first that fits), `dropped` patterns (fnmatch) are of tensors that carry nothing.
    `renamed` has the parts of the network that are stored under another name too, by that name (DeBERTa's heads);
    `spelled` what a piece of any name is called by the rules. `fused` are tensors that are read in parts, `unused`
    patterns of those that a model may have stored and does not read (keys of layers that read others').

    Tensors that share memory are stored under one of their names, and which one is not fixed. `tables` are the names of
    the token table, `heads` those of an output that is tied to it; `aliases` are other names of biases, by that name.
    """

    config: Callable[[Settings, Collection[str] | None], ModelConfig]
    rules: Callable[[ModelConfig], Iterable[Rule]]
    prefix: str | tuple[str, ...] = ""
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[FusedExperts, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    unused: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    tables: tuple[str, ...] = ("embed_tokens.weight",)
    heads: tuple[str, ...] = ("lm_head.weight",)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def fused_as(self, name: str) -> FusedExperts | None:
        """Return what the stored tensor `name` has of all experts of a layer; None: it is no such tensor."""
        return next((one for one in self.fused if name.endswith(f".{one.source}")), None)

    def tensor_rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        """Every rule of a model, projections by the format that they are stored in."""
        for rule in self.rules(config):
            if isinstance(rule, TensorRule):
                yield rule
            elif isinstance(rule, LinearRule):
                storage = config.stored_as.get(rule.target, FLOAT)
                yield from rule.tensors(storage, in_order=rule.target in config.in_order)

    def zero_rules(self, config: ModelConfig) -> list[ZeroRule]:
        """Every part of a parameter that is zero whatever the checkpoint."""
        return [rule for rule in self.rules(config) if isinstance(rule, ZeroRule)]

    def canonical(self, name: str) -> str:
        """Without the prefix and what `torch.nn.utils.parametrize` adds; norms had a gamma and a beta once."""
        prefixes = (self.prefix,) if isinstance(self.prefix, str) else self.prefix
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        name = name.removeprefix(prefix)
        for piece, ours in self.spelled.items():
            name = name.replace(piece, ours)
        stem, _, kind = name.rpartition(".")
        if kind == "original":
            stem, _, kind = stem.replace("parametrizations.", "").rpartition(".")
        kind, stem = _OLD_NAMES.get(kind, kind), self.renamed.get(stem, stem)
        return f"{stem}.{kind}" if stem else kind

    def by_rule_name(self, names: Iterable[str], *, tied: bool) -> dict[str, str]:
        """Return the stored names by the names that the rules have for them.

        A token table that is stored only as one of its other names is found by these. With a `tied` output that may be
        the output's name. Where a bias is stored under two names, the alias counts: the output reads that one.
        Raises `ConfigError` for two stored tensors of one name.
        """
        found: dict[str, str] = {}
        for name in names:
            rule_name = self.canonical(name)
            if rule_name in found and not self.drops(rule_name):
                raise ConfigError(f"{found[rule_name]} and {name} are two tensors for one parameter")
            found[rule_name] = name
        table, *others = self.tables
        for other in (*others, *(self.heads if tied else ())):
            if table not in found and other in found:
                found[table] = found.pop(other)
        for alias, own in self.aliases.items():
            if alias in found:
                found[own] = found.pop(alias)
        return found

    def drops(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.dropped)
