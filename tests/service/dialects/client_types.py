"""The fields that clients can send, by path, from the clients' types: TypedDicts, dataclasses, Pydantic's models."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import is_typeddict

Types = Mapping[str, set[str]]  # allowed values of `type` or `role`, by their paths in this service


def paths(kind: type, served: Types, path: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    """Yield every path below a type, except alternatives whose `type` or `role` is not in `served`."""
    hints = _fields(kind)
    for name in ("type", "role"):
        place = f"{path}.{name}" if path else name
        words = _words(hints.get(name))
        if words and served.get(place) and not words & served[place]:
            return
    for name, hint in hints.items():
        place = f"{path}.{name}" if path else name
        yield place
        for mark, inner in within(hint):
            if inner not in above:
                yield from paths(inner, served, place + mark, (*above, inner))


def _fields(kind: type) -> dict[str, Any]:
    if issubclass(kind, BaseModel):
        return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
    hints = typing.get_type_hints(kind, include_extras=True)
    return {_alias(hint) or name: hint for name, hint in hints.items()}


def _alias(hint: Any) -> str | None:
    """Return the name to which a client renames a field before it is sent."""
    if get_origin(hint) in (typing.Required, typing.NotRequired):
        return _alias(get_args(hint)[0])
    if get_origin(hint) is not Annotated:
        return None
    return next((one.alias for one in get_args(hint)[1:] if getattr(one, "alias", None)), None)


def within(hint: Any) -> Iterator[tuple[str, type]]:
    """Yield the object types within a hint, each with `[]` for every list around it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        if isinstance(hint, type) and (is_typeddict(hint) or dataclasses.is_dataclass(hint) or _is_model(hint)):
            yield "", hint
    elif origin is Annotated or origin in (typing.Required, typing.NotRequired):
        yield from within(args[0])
    elif origin is not Literal and origin is not dict:
        is_list = isinstance(origin, type) and hasattr(origin, "__iter__")
        for arg in args:
            for mark, inner in within(arg):
                yield ("[]" if is_list else "") + mark, inner


def _is_model(hint: type) -> bool:
    return issubclass(hint, BaseModel)


def _words(hint: Any) -> set[str]:
    return {one for arg in get_args(hint) for one in ([arg] if isinstance(arg, str) else _words(arg))}
