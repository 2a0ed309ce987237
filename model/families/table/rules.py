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
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The order of heads in a stored matrix of q, k and v: group after group, each with some heads of all three.

    The network has all heads of q, then of k, then of v. `widths` are the heads of each stored part in a group; stored
    part `order[i]` is the network's i-th.
    """

    groups: int
    widths: tuple[int, ...] = (1, 1, 1)
    order: tuple[int, ...] = (0, 1, 2)

    def stored_heads(self) -> list[int]:
        """Return the index of the stored head for each head of the network."""
        each, starts = sum(self.widths), [sum(self.widths[:part]) for part in range(len(self.widths))]
        return [
            group * each + starts[part] + head
            for part in self.order
            for group in range(self.groups)
            for head in range(self.widths[part])
        ]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """The stored tensor `source` fills `target`, or its `rows` `[start, stop)` if several tensors are fused in it."""

    source: str
    target: str
    rows: tuple[int, int] | None = None
    transpose: bool = False  # rows and columns are swapped in the file (Conv1D)
    shape: Shape | None = None  # the stored shape, if it is not the target's
    part: tuple[int, int] | None = None  # the rows of a source that fills several targets; needs `shape`
    interleaved: Interleaved | None = None  # the stored order of heads (GPT-NeoX)
    duplicate: bool = False  # may be absent; if present it must equal what fills the target (tied weights)
    holds: NumberKind | None = None  # the kind of numbers; None: floats of any kind
    repeat: int = 1  # rows of the target for each stored row; 0: all of them


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
        """Yield the rules of a matrix in this storage; `in_order`: its rows and columns have the network's order."""
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
    """The `rows` of `target` are not stored but zeros (the bias of DeBERTa's keys, fused with others)."""

    target: str
    rows: tuple[int, int]


Rule = TensorRule | LinearRule | ZeroRule


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """A stored tensor with the matrices `[experts, outputs, inputs]`, or the biases, of all experts of a layer.

    It is read as one tensor for each expert and part. `parts` are the names of these in the family's rules, with {} in
    place of the expert's number.
    """

    source: str  # within the layer
    parts: tuple[str, ...]  # in the order of their outputs
    interleaved: bool = False  # the parts' outputs alternate instead
    transposed: bool = False  # [experts, inputs, outputs]
    either_way: bool = False  # transposed or not, as the sizes show
    written: bool = False  # the family's published folders have it

    def part_names(self, name: str, experts: int) -> list[tuple[str, ...]]:
        """Return what is read of the stored tensor `name`: the names of each expert's parts.

        Raises `ConfigError` for more experts than a layer may have.
        """
        if experts > MOST_EXPERTS:
            raise ConfigError(f"{name} has {experts} experts, of at most {MOST_EXPERTS}")
        layer = name.removesuffix(self.source)
        return [tuple(layer + part.format(expert) for part in self.parts) for expert in range(experts)]


@dataclass(frozen=True, slots=True)
class ClassifierTable:
    """What a family's classification head reads, and the names of its matrices."""

    out: str
    input: ClassifierInput
    dense: str = ""  # a layer before; empty: there is none
    activation: Activation | None = None
    bias: bool = True
    norm: str = ""  # after that layer; empty: there is none
    wraps: bool = False  # a decoder that begins with the last token of the source, its language (mBART)


@dataclass(frozen=True, slots=True)
class Family:
    """The table of one family: config.json to `ModelConfig`, and `ModelConfig` to the rules of the stored tensors.

    `config` also gets the names of the stored tensors, or None without weights: they show what settings only claim (a
    tied head, a pooler). Tensors that share memory are stored under one of their names, and which one is not fixed.
    """

    config: Callable[[Settings, Collection[str] | None], ModelConfig]
    rules: Callable[[ModelConfig], Iterable[Rule]]
    prefix: str | tuple[str, ...] = ""  # of the base model's names in a model with a head; the first that fits counts
    dropped: tuple[str, ...] = ()  # patterns (fnmatch) of tensors that are not needed
    renamed: Mapping[str, str] = field(default_factory=dict)  # by a second stored name of a part: the rules' name
    fused: tuple[FusedExperts, ...] = ()  # tensors that are read in parts
    spelled: Mapping[str, str] = field(default_factory=dict)  # by a piece of stored names: the rules' spelling
    # Patterns of tensors that may be stored although the network has none such (keys of layers that read others').
    unused: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    tables: tuple[str, ...] = ("embed_tokens.weight",)  # the names of the token table; the rules have the first
    heads: tuple[str, ...] = ("lm_head.weight",)  # the names of an output that is tied to the token table
    aliases: Mapping[str, str] = field(default_factory=dict)  # by another name of a bias: the rules' name

    def fused_as(self, name: str) -> FusedExperts | None:
        """Return the entry of `fused` for the stored tensor `name`; None: there is none."""
        return next((one for one in self.fused if name.endswith(f".{one.source}")), None)

    def tensor_rules(self, config: ModelConfig) -> Iterator[TensorRule]:
        """Yield a rule for each stored tensor of a model; those of projections follow from the stored format."""
        for rule in self.rules(config):
            if isinstance(rule, TensorRule):
                yield rule
            elif isinstance(rule, LinearRule):
                storage = config.stored_as.get(rule.target, FLOAT)
                yield from rule.tensors(storage, in_order=rule.target in config.in_order)

    def zero_rules(self, config: ModelConfig) -> list[ZeroRule]:
        """Return the rules of the parts of parameters that are always zero."""
        return [rule for rule in self.rules(config) if isinstance(rule, ZeroRule)]

    def canonical(self, name: str) -> str:
        """Return a stored name as the rules have it: without prefix and `torch.nn.utils.parametrize`'s additions."""
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
        """Return the stored names, by the rules' names.

        A token table may be stored under one of its other names (`tables`), and with a `tied` output under that of the
        output (`heads`). If a bias is stored under two names, the alias counts: the output reads that one.
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
