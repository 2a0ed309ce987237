"""Paths of fields in a body, and limits on the number of entries in a body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

from triptych.model.api.request import PARAMETERS
from triptych.service.core.errors import from_validation, invalid, path_of, too_large
from triptych.service.core.json_bounds import json_size
from triptych.service.settings.service_settings import Limits

# -- The fields of bodies at every depth: their paths, and the known names next to an unknown one.

Location = Sequence[int | str]  # in Pydantic's errors: names, indices, and tags of union members such as `<text>`


class NotRead:
    """The base of marks of fields that are known and not read."""


def name_of(name: str, field: FieldInfo) -> str:
    """Return the name of a field in JSON."""
    return field.alias or name


def siblings(model: type[BaseModel], location: Location) -> list[str]:
    """Return the names that are read at `location` in place of its last part, to suggest a similar one."""
    found: list[Any] = [model]
    for part in location[:-1]:
        found = [inner for one in found for inner in _within(one, part)]
    return [name for one in found for kind in _models(one) for name in _names(kind)]


def walk(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every field of a body with its path, such as `messages[].content[].text`; alternatives share a path."""
    for name, field in model.model_fields.items():
        place = f"{path}.{name_of(name, field)}" if path else name_of(name, field)
        yield place, field
        for mark, inner in _inner_models(field.annotation):
            yield from walk(inner, place + mark)


def _inner_models(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the models inside an annotation, each with `[]` for every list around it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
        return
    is_list = get_origin(annotation) is list
    for one in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
        for mark, inner in _inner_models(one):
            yield ("[]" if is_list else "") + mark, inner


def _within(annotation: Any, part: int | str) -> list[Any]:
    """Return the possible annotations of the field or element `part` of a value."""
    if isinstance(part, str) and part.startswith("<"):
        tagged = [one for one in _members(annotation) if part in _tags(one)]
        return tagged or [annotation]
    found: list[Any] = []
    for one in _members(annotation):
        kind = _bare(one)
        if isinstance(part, int) and get_origin(kind) is list:
            found += get_args(kind)
        elif isinstance(part, str) and isinstance(kind, type) and issubclass(kind, BaseModel):
            found += [field.annotation for name, field in kind.model_fields.items() if name_of(name, field) == part]
    return found


def _members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union and of its nested unions; another annotation is its only alternative."""
    kind = _bare(annotation)
    if isinstance(kind, type) or get_origin(kind) in (list, dict):
        return [annotation]
    return [inner for one in get_args(kind) for inner in _members(one)]


def _models(annotation: Any) -> list[type[BaseModel]]:
    kinds = [_bare(one) for one in _members(annotation)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _names(model: type[BaseModel]) -> list[str]:
    fields = model.model_fields.items()
    return [name_of(*one) for one in fields if not any(isinstance(mark, NotRead) for mark in one[1].metadata)]


def _bare(annotation: Any) -> Any:
    """Return an annotation without its metadata."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _tags(annotation: Any) -> list[str]:
    found: list[str] = []
    while get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        found += [one.tag for one in metadata if isinstance(one, Tag)]
        annotation = inner
    return found


# -- Checks the number of entries of the lists and objects of a body before Pydantic validates it. The name of a field
# determines its limit, in every dialect (`MOST`). Only fields that a model reads are checked: a JSON schema or the
# arguments of a call may have any names.

MOST: Final[Mapping[str, str]] = {  # limit of a field that is a list, or an object of any names
    "messages": "max_chat_messages",
    "content": "max_content_parts",
    "system": "max_content_parts",
    "output": "max_content_parts",
    "summary": "max_content_parts",
    "tool_calls": "max_content_parts",
    "tools": "max_tools",
    **{name: one.row.limit for name, one in PARAMETERS.items() if one.row.limit and not one.is_number},
    "stop_sequences": "max_stop_strings",
    "choice": "max_choices",
    **dict.fromkeys(("input_extra", "response_fields", "chat_template_kwargs"), "max_content_parts"),
    "prompt": "max_prompts",
    **dict.fromkeys(("input", "inputs", "texts", "documents", "sentences", "text_1", "text_2"), "max_encode_inputs"),
}
_INPUTS: Final = frozenset({"prompt", "input", "inputs", "text_1", "text_2"})
_JSON_TEXTS: Final = frozenset({"arguments", "json_schema", "json", "schema", "value"})
_SCALARS: Final = (str, int, float, bool, NoneType)
_MOST_UNKNOWN: Final = 32  # unknown fields of an object; the reply lists an error for each


class _FieldPlace:
    """What a model reads at one place of a body: fields by name, or elements of a list."""

    def __init__(self) -> None:
        self.fields: dict[str, _FieldPlace] = {}
        self.items: _FieldPlace | None = None
        self.limit = ""  # name of the limit of its entries
        self.has_any_names = False
        self.holds_inputs = False  # whether a list here has inputs, or is the token ids of one input
        self.is_json = False  # whether a text here is parsed as JSON
        self.is_scalar = True  # whether no list or object is read here
        self.ignores_others = False  # whether other fields are accepted

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to check."""
        inner = self.items is not None and not self.items.is_plain
        return not (self.fields or self.limit or self.is_json or inner)

    def add(self, annotation: Any) -> None:
        """Add an alternative annotation of this place."""
        while get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        self.is_scalar &= annotation in _SCALARS or get_origin(annotation) in (Literal, Union, UnionType)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            own: Mapping[str, str] = getattr(annotation, "list_limits", {})
            self.ignores_others |= annotation.model_config.get("extra") != "forbid"
            for name, field in annotation.model_fields.items():
                known = field.alias or name
                place = self.fields.setdefault(known, _FieldPlace())
                place.limit = own.get(known, MOST.get(known, place.limit))
                place.holds_inputs = known in _INPUTS
                place.is_json = known in _JSON_TEXTS
                place.add(field.annotation)
        elif get_origin(annotation) is list:
            self.items = self.items or _FieldPlace()
            self.items.add(get_args(annotation)[0])
        elif annotation is Any or get_origin(annotation) is dict:
            self.has_any_names = True
        elif get_origin(annotation) is not Literal:
            for one in get_args(annotation):
                self.add(one)


@cache
def _place(model: type[BaseModel]) -> _FieldPlace:
    found = _FieldPlace()
    found.add(model)
    return found


def read_part(place: Sequence[int | str], model: type[BaseModel]) -> Sequence[int | str]:
    """Return the beginning of a path that the model knows, up to where any names are allowed."""
    found = _place(model)
    for at, part in enumerate(place):
        inner = found.items if isinstance(part, int) else found.fields.get(part)
        if inner is None:
            return place[: at + isinstance(part, str)]
        found = inner
    return place


def check_counts(value: object, model: type[BaseModel], limits: Limits, *, is_long: bool = False) -> None:
    """Raise an `ApiError` that names the first list or object of a parsed body with more entries than its limit.

    All texts that are parsed as JSON later, such as the arguments of calls, may have half of `max_json_values`. A body
    that `is_long` is refused for the first field that is not known, is missing, or has a list or an object that it
    cannot have: Pydantic copies what is wrong into each of its errors, in one call that lets no other thread run.
    """
    _Counter(limits, is_long).check(value, _place(model))
    if is_long and isinstance(value, dict):
        for name, field in model.model_fields.items():
            if field.is_required() and name_of(name, field) not in value:
                raise from_validation([{"type": "missing", "loc": (name_of(name, field),)}])


class _Counter:
    """Counts the entries of one body."""

    def __init__(self, limits: Limits, is_long: bool) -> None:
        self._limits = limits
        self._is_long = is_long
        self._path: list[int | str] = []
        self._values = 0  # JSON values inside texts

    def check(self, value: object, place: _FieldPlace) -> None:
        if isinstance(value, str):
            if place.is_json:
                self._check_text(value)
        elif isinstance(value, list):
            if not (place.holds_inputs and value and isinstance(value[0], int | float)):  # token ids are one input
                self._check_number("entries", len(value), place.limit)
            if place.items is not None and not place.items.is_plain:
                for at, one in enumerate(value):
                    self._check_inner(at, one, place.items)
        elif isinstance(value, dict):
            if place.has_any_names:
                self._check_number("entries", len(value), place.limit)
            elif len(value) > len(place.fields):
                self._check_number("unknown fields", len(value.keys() - place.fields.keys()), _MOST_UNKNOWN)
            if self._is_long and not place.has_any_names and place.fields:
                self._check_fields(value, place)
            for name, inner in place.fields.items():
                if name in value and not inner.is_plain:
                    self._check_inner(name, value[name], inner)

    def _check_fields(self, value: Mapping[str, object], place: _FieldPlace) -> None:
        for name, inner in value.items():
            known, where = place.fields.get(name), (*self._path, name)
            if known is None and not place.ignores_others:
                raise from_validation([{"type": "extra_forbidden", "loc": where}], lambda _: list(place.fields))
            if known is not None and known.is_scalar and isinstance(inner, list | dict):
                raise from_validation(
                    [{"type": "scalar_type", "loc": where, "msg": "Input should be no list or object"}]
                )

    def _check_inner(self, key: int | str, value: object, place: _FieldPlace) -> None:
        self._path.append(key)
        self.check(value, place)
        self._path.pop()

    def _check_number(self, what: str, found: int, limit: str | int) -> None:
        most = getattr(self._limits, limit) if isinstance(limit, str) and limit else limit
        if most and found > most:
            name = path_of(self._path)
            message = f"{name or 'the body'} has {found} {what}, more than {most}"
            if limit == "max_encode_inputs":
                raise too_large(message, name, "too_many_inputs")
            raise invalid(message, name or None)

    def _check_text(self, text: str) -> None:
        most = self._limits.max_json_values // 2  # they are parsed on the event loop
        size = json_size(text.encode(errors="replace"), most, most)
        self._values += size.values + size.marks
        if self._values > most:
            name = path_of(self._path)
            message = f"{name}: JSON in texts has more than {most} values, half of max_json_values"
            raise too_large(message, name, "too_many_values")
