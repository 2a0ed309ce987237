"""Parses a JSON body into its Pydantic model, after its values and the entries of its lists were counted.

Parsing is a call that blocks all other threads, so its cost is limited first (`max_json_values`,
`max_json_numbers`). A long body is parsed in a thread: the event loop goes on between the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from triptych.service.core.errors import ApiError, from_validation, invalid, path_of, too_large
from triptych.service.core.json_bounds import BODY_LEVELS, deep_place, json_size, too_deep
from triptych.service.core.request_context import current
from triptych.service.lifecycle.state import service_of
from triptych.service.schemas.field_paths import check_counts, read_part, siblings
from triptych.service.settings.service_settings import Limits

B = TypeVar("B", bound=BaseModel)
Choose = Callable[[Sequence[str]], type[B]]  # returns the model of a body with these keys

_INLINE_BYTES = 65_536  # of a body that is parsed on the event loop
_MOST_BLANKS = 4_000_000  # bytes of white space between values, which parsers skip while no other thread runs


async def parsed(request: Request, raw: bytes, model: type[B] | Choose[B]) -> B:
    """Parse a body as `model`, or as the one that `model` chooses for its keys; raises a 400 that names the field.

    A `request_id` in it becomes the request's.
    """
    service = service_of(request)

    def work() -> B:
        return _parsed(raw, model, service.limits)

    body = work() if len(raw) <= _INLINE_BYTES else await service.body_threads.run_in_thread(work)
    request_id, context = getattr(body, "request_id", None), current()
    if request_id is not None and context is not None:
        context.request_id = request_id
    return body


def one_of(default: type[B], by_key: Mapping[str, type[B]]) -> Choose[B]:
    """Return a function that chooses the model of a body: by the key of `by_key` that it has, else `default`.

    The function raises a 400 for a body with keys of two models.
    """

    def choose(keys: Sequence[str]) -> type[B]:
        known = [key for key in keys if key in by_key]
        for key in known[1:]:
            if by_key[key] is not by_key[known[0]]:
                message = f"{known[0]} and {key} are fields of different APIs; send one of them"
                raise invalid(message, key, "ambiguous_body")
        return by_key[known[0]] if known else default

    return choose


def _parsed(raw: bytes, model: type[B] | Choose[B], limits: Limits) -> B:
    check_size(raw, limits)
    try:
        found = pydantic_core.from_json(raw)  # accepts NaN, which the models then refuse, naming the field
    except ValueError as error:
        if "recursion limit" in str(error):
            raise _too_deep(raw, model) from None
        found = None  # making the model says what is wrong
    kind = _kind(model, list(found) if isinstance(found, dict) else [])
    check_counts(found, kind, limits, is_long=len(raw) > _INLINE_BYTES)
    del found
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False), partial(siblings, kind)) from None


def _too_deep(raw: bytes, model: type[B] | Choose[B]) -> ApiError:
    """Return the 400 that names the field that is nested too deep."""
    place = deep_place(raw, BODY_LEVELS) or []
    known = [name for name in place[:1] if isinstance(name, str)]
    return too_deep(path_of(read_part(place, _kind(model, known))), BODY_LEVELS, "invalid_json")


def _kind(model: type[B] | Choose[B], keys: Sequence[str]) -> type[B]:
    return cast("type[B]", model) if isinstance(model, type) else model(keys)


def check_size(raw: bytes, limits: Limits) -> None:
    """Raise a 413 for a body with too many values."""
    if len(raw) <= min(limits.max_json_values, limits.max_json_numbers, _MOST_BLANKS):
        return
    size = json_size(raw, limits.max_json_values, limits.max_json_numbers)
    if size.blanks > _MOST_BLANKS:
        raise too_large(f"the body has more than {_MOST_BLANKS} bytes of white space between its values")
    for name, found, what in (
        ("max_json_values", size.values, "names, texts, lists and objects"),
        ("max_json_numbers", size.marks, "numbers and escapes in texts"),
    ):
        most: int = getattr(limits, name)
        if found > most:
            raise too_large(f"the body has more than {most} {what} ({name})", code="too_many_values")
