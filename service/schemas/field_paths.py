"""The fields of bodies at every depth: their paths, and what is known at a place where an unknown one stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Tag
from pydantic.fields import FieldInfo

Location = Sequence[int | str]  # as Pydantic has it: names, indices, and tags of union members such as `<text>`


class NotRead:
    """Is the base of marks of fields that are known and not read."""


def name_of(name: str, field: FieldInfo) -> str:
    """Return the name of a field in JSON."""
    return field.alias or name


def siblings(model: type[BaseModel], location: Location) -> list[str]:
    """Return the names that are read where the last part of `location` stands, for a suggestion of a similar one."""
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
    """Yield the models within an annotation, each with `[]` for every list around it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
        return
    is_list = get_origin(annotation) is list
    for one in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
        for mark, inner in _inner_models(one):
            yield ("[]" if is_list else "") + mark, inner


def _within(annotation: Any, part: int | str) -> list[Any]:
    """Return the annotations of what stands at `part` of a value."""
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
    """Return the alternatives of a union, of nested ones too; another annotation is its only one."""
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
