"""What is declared of one parameter of a request. Stdlib only.

The table of parameters is `SamplingParams` with two fields of `Request`: each field has a name, a type and a default,
and a `Parameter` as its metadata. Bodies, their checks, the dialects, the defaults of folders, the flags of
`triptych generate` and docs/fields.md are made from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum, auto
from typing import Any, get_type_hints

MAX_INT = 2**31 - 1


class Beams(Enum):
    """Whether a parameter has a meaning with beam search."""

    ANY = auto()
    UNREAD = auto()  # it has none; the engine ignores it
    NEVER = auto()  # it has none; the engine cannot compute both
    ONLY = auto()  # it has none without


class Taken(Enum):
    """How a dialect has a field with the native name, type and meaning."""

    OWN = auto()  # the API has it
    EXTRA = auto()  # only servers of the API have it


OWN, EXTRA = Taken.OWN, Taken.EXTRA
_INTERNAL = "internal"  # the metadata of fields that are no parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The row of a parameter. A dialect that has it by another name or meaning has that name in its column."""

    help: str  # one sentence
    examples: tuple[Any, ...] = ()
    otherwise: str = ""  # the default in words, where it is no constant
    least: float | None = None  # of a number, of the length of a text or ids, of the values of an object
    above: float | None = None  # in place of `least`
    most: float | None = None
    limit: str = ""  # the operator's setting for the largest value, or the most entries
    optional: bool = False  # a body tells "not given" from the default
    sent: bool = True  # by clients; False: only a folder sets it
    folder: bool = False  # generation_config.json may have it
    draws: bool = False  # decides which tokens are drawn, and with which probability
    beams: Beams = Beams.ANY
    flag: bool = False  # of `triptych generate`
    openai: Taken | str | None = None
    responses: Taken | str | None = None
    messages: Taken | str | None = None
    huggingface: Taken | str | None = None
    text2text: Taken | str | None = None
    ollama: Taken | str | None = None
    llama_cpp: Taken | str | None = None

    @property
    def description(self) -> str:
        """The text for /docs."""
        return f"{self.help} Default: {self.otherwise}." if self.otherwise else self.help

    @property
    def is_optional(self) -> bool:
        """Whether a body without the field differs from one with its default."""
        return self.optional or self.folder or self.draws or self.beams is not Beams.ANY

    @property
    def bounds(self) -> str:
        """The bounds of a number in words; empty for none."""
        if self.above is not None:
            return f"above {self.above} and at most {self.most}"
        return "" if self.least is None or self.most is None else f"{self.least} to {self.most}"

    def holds(self, number: float) -> bool:
        """Return whether a number is within the bounds; NaN never is."""
        if self.above is not None and not number > self.above:
            return False
        return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)


def parameter(default: Any, help: str, *examples: Any, **row: Any) -> Any:
    """Declare a field of a dataclass as a parameter; `row` has fields of `Parameter`."""
    metadata = {"parameter": Parameter(help=help, examples=examples, **row)}
    if isinstance(default, Callable):  # type: ignore[arg-type]
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def internal(default: Any) -> Any:
    """Declare a field of a dataclass that no client and no folder sets."""
    return field(default=default, metadata={"parameter": _INTERNAL})


@dataclass(frozen=True, slots=True)
class Column:
    """A parameter with its field: what the dataclass says of it."""

    name: str
    type: Any
    default: Any
    row: Parameter

    @property
    def is_number(self) -> bool:
        return self.type in (int, float, int | None)

    @property
    def is_tokens(self) -> bool:
        """Whether it has token ids, alone or as keys."""
        return self.type in (tuple[int, ...], dict[int, float])


def parameters_of(dataclass: type, *, partly: bool = False) -> dict[str, Column]:
    """Return the parameters of a dataclass by name. Without `partly`, a field that is not declared raises."""
    found, types = {}, get_type_hints(dataclass)
    for one in fields(dataclass):
        row = one.metadata.get("parameter")
        if isinstance(row, Parameter):
            found[one.name] = Column(one.name, types[one.name], _default(one), row)
        elif row is None and not partly:
            raise TypeError(f"{dataclass.__name__}.{one.name} must be declared by parameter() or internal()")
    return found


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()
