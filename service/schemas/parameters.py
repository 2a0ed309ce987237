"""Makes fields of bodies from the table of parameters (`triptych.model.api.request.PARAMETERS`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, create_model

from triptych.model.api.parameters import EXTRA, Column, Taken
from triptych.model.api.request import PARAMETERS
from triptych.service.schemas.types import Body, TextOrTexts, TokenId

B = TypeVar("B", bound=Body)
Never = Literal["never"]

_KINDS: Final[Mapping[Any, Any]] = {  # type of a parameter: type of its field, without bounds
    **{kind: kind for kind in (int, float, bool, str, int | None)},
    tuple[int, ...]: list[TokenId],
    tuple[str, ...]: TextOrTexts,
    dict[int, float]: dict[TokenId, float],
    bool | Never: Literal[True, False, "never"],
}


class Parameters(Body):
    """The base of bodies that get fields from the table."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Dialect:
    """Another API, and the parameters that it has: a column of the table.

    A cell of the column says that the field is the same as in /generate, or gives its name in the API; then the API's
    body declares it and the dialect translates it. `owner` is the API's owner, for the descriptions of fields that the
    API itself lacks. `within` is the object of a body that contains the fields.
    """

    def __init__(self, column: str, owner: str, within: str = "") -> None:
        found = {name: getattr(one.row, column) for name, one in PARAMETERS.items()}
        self._owner = owner
        self._cells: dict[str, Taken | str] = {name: cell for name, cell in found.items() if cell is not None}
        self._taken = [name for name, cell in self._cells.items() if isinstance(cell, Taken)]
        self.same = [*self._taken, *(name for name, cell in self._cells.items() if cell == name)]
        self.drawing = [name for name in self._cells if PARAMETERS[name].row.draws]
        places = {n: f"{within}{n if isinstance(cell, Taken) else cell}" for n, cell in self._cells.items()}
        self.names = {native: place for native, place in places.items() if native != place}  # for errors

    def fields(self, body: object) -> dict[str, Any]:
        """Return the fields of a body that are the same as in /generate."""
        return {name: getattr(body, name) for name in self._taken}

    def body(self, declared: type[B]) -> type[B]:
        """Add the fields of the column to a body; raises if a cell names a field that the body does not declare."""
        made: dict[str, Any] = {}
        for name, cell in self._cells.items():
            if isinstance(cell, str):
                if cell not in declared.model_fields:
                    raise TypeError(f"{declared.__name__} has no field {cell}, which the table names for {name}")
                continue
            text = f"As in /generate. Not {self._owner}." if cell is EXTRA else "As in /generate."
            column = PARAMETERS[name]
            made[name] = (_kind(column) | None, Field(None, description=text, examples=[*column.row.examples][:1]))
        return _with_fields(declared, made)


OPENAI = Dialect("openai", "OpenAI's")
RESPONSES = Dialect("responses", "OpenAI's")
MESSAGES = Dialect("messages", "Anthropic's")
HUGGING_FACE = Dialect("huggingface", "Hugging Face's", "parameters.")
LLAMA_CPP = Dialect("llama_cpp", "llama.cpp's")
TEXT2TEXT = Dialect("text2text", "Hugging Face's", "parameters.")
OLLAMA = Dialect("ollama", "Ollama's", "options.")


def native_body(declared: type[B]) -> type[B]:
    """Add every parameter that clients can send to the body of /generate."""
    return _with_fields(declared, {name: _native(one) for name, one in PARAMETERS.items() if one.row.sent})


def bounded(name: str, text: str, *examples: Any) -> Any:
    """Return an optional field of another native body, with the bounds of a parameter."""
    return Field(None, description=text, examples=[*examples], **_bounds(PARAMETERS[name]))


def _native(column: Column) -> tuple[Any, Any]:
    """Return the type and the definition of a field of /generate."""
    kind, row = _kind(column), column.row
    if column.type == dict[int, float]:
        kind, bounds = dict[TokenId, Annotated[float, Field(**_bounds(column))]], {}
    else:
        bounds = _bounds(column)
    shown = {"description": row.description, "examples": [*row.examples], **bounds}
    if row.is_optional:
        return kind | None, Field(None, **shown)
    if column.is_tokens:
        return kind, Field(default_factory=dict if column.type == dict[int, float] else list, **shown)
    return kind, Field(column.default, **shown)


def _kind(column: Column) -> Any:
    if column.type not in _KINDS:
        raise TypeError(f"{column.name}: a body has no fields of the type {column.type}")
    return _KINDS[column.type]


def _bounds(column: Column) -> dict[str, Any]:
    row = column.row
    if column.type in (str, tuple[int, ...]):
        found = {"min_length": row.least, "max_length": row.most}
    else:
        found = {"ge": row.least, "gt": row.above, "le": row.most}
    return {name: bound for name, bound in found.items() if bound is not None}


def _with_fields(declared: type[B], made: Mapping[str, Any]) -> type[B]:
    return create_model(
        declared.__name__, __base__=declared, __doc__=declared.__doc__, __module__=declared.__module__, **made
    )
