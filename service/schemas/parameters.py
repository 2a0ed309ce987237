"""The fields of bodies that the table of parameters has (`model.api.request.PARAMETERS`), as Pydantic reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import Field, create_model

from model.api.parameters import EXTRA, Column, Taken
from model.api.request import PARAMETERS
from service.schemas.types import Body, TextOrTexts, TokenId

B = TypeVar("B", bound=Body)
Never = Literal["never"]

_KINDS: Final[Mapping[Any, Any]] = {  # by the type of a parameter: that of its field, without bounds
    **{kind: kind for kind in (int, float, bool, str, int | None)},
    tuple[int, ...]: list[TokenId],
    tuple[str, ...]: TextOrTexts,
    dict[int, float]: dict[TokenId, float],
    bool | Never: Literal[True, False, "never"],
}


class Parameters(Body):
    """Is the base of bodies that get fields of the table."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Dialect:
    """Another API, which has parameters by a column of the table.

    A cell of the column says that the field is as in /generate, or what the API calls it. Those fields the API's own
    body declares, and its translation reads. `owner` is whose API it is, in the text of fields that it does not have;
    `within` is the object of a body that has the fields.
    """

    def __init__(self, column: str, owner: str, within: str = "") -> None:
        found = {name: getattr(one.row, column) for name, one in PARAMETERS.items()}
        self._owner = owner
        self._cells: dict[str, Taken | str] = {name: cell for name, cell in found.items() if cell is not None}
        self._taken = [name for name, cell in self._cells.items() if isinstance(cell, Taken)]
        self.same = [*self._taken, *(name for name, cell in self._cells.items() if cell == name)]
        self.drawing = [name for name in self._cells if PARAMETERS[name].row.draws]
        places = {n: f"{within}{n if isinstance(cell, Taken) else cell}" for n, cell in self._cells.items()}
        self.names = {native: place for native, place in places.items() if native != place}  # in a body, for errors

    def fields(self, body: object) -> dict[str, Any]:
        """Return the native fields that a body has as they are in /generate."""
        return {name: getattr(body, name) for name in self._taken}

    def body(self, declared: type[B]) -> type[B]:
        """Return a body with the fields of the column; raises for a name that neither it nor the table declares."""
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
TEXT2TEXT = Dialect("text2text", "Hugging Face's", "parameters.")


def native_body(declared: type[B]) -> type[B]:
    """Return the body of /generate: what is declared, and every parameter that clients can send."""
    return _with_fields(declared, {name: _native(one) for name, one in PARAMETERS.items() if one.row.sent})


def bounded(name: str, text: str, *examples: Any) -> Any:
    """Return an optional field with the bounds of a parameter, for another native body."""
    return Field(None, description=text, examples=[*examples], **_bounds(PARAMETERS[name]))


def _native(column: Column) -> tuple[Any, Any]:
    """Return the type of a field of /generate, and the rest of it."""
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
