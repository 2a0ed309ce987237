"""What the dialects share: their bodies' base, refused fields, and errors that name the client's own fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from service.core.errors import NOT_SUPPORTED, ApiError, from_validation, invalid
from service.core.model_registry import ServedModel
from service.core.request_context import REQUEST_ID_PATTERN
from service.schemas.types import Body

B = TypeVar("B", bound=Body)

_KEPT_SEED = 2**63  # native seeds are below it
_MOST_LEVELS = 190  # of a schema: a body is read to 200, and a schema may stand deeper in the native one

NATIVE_NAMES: Mapping[str, str] = MappingProxyType({})


class DialectBody(Body):
    """A foreign body: as strict as ours, with null for every optional field, and unknown fields ignored."""

    model_config = ConfigDict(extra="ignore")


class Extended(DialectBody):
    """What this service adds to every dialect, by its own names."""

    model: str | None = Field(
        None,
        description="Which loaded model answers; may be left out when only one can serve the task.",
        examples=["code"],
    )
    timeout_s: float | None = Field(None, description="As in /generate.", examples=[30.0])
    request_id: str | None = Field(
        None, pattern=REQUEST_ID_PATTERN, description="As in /generate.", examples=["my-request-1"]
    )


class Refused:
    """Metadata of a field that is not served: null and `harmless` values pass, anything else is a 400 naming it."""

    def __init__(self, *harmless: object) -> None:
        self._harmless = (None, *harmless)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        shown = ", ".join("null" if one is None else repr(one) for one in self._harmless)
        return {"description": f"Not served: taken only as {shown}.", "examples": [None]}

    def _check(self, value: object) -> object:
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self._harmless):
            return value
        raise PydanticCustomError(NOT_SUPPORTED, "")


Never = Annotated[Any, Refused()]  # only null
NotTrue = Annotated[Any, Refused(False)]
NotFilled = Annotated[Any, Refused([], {}, "")]


def native(model: type[B], fields: Mapping[str, Any]) -> B:
    """A native body of those fields that are not None, held to all its bounds; `ApiError` names native fields (see
    `speaking`). It goes through JSON so that errors are those of a native request to the letter.
    """
    try:
        return model.model_validate_json(msgspec.json.encode({k: v for k, v in fields.items() if v is not None}))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False), {}) from None


@contextmanager
def speaking(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside that name native fields come out naming the client's (`names`: native to foreign)."""
    try:
        yield
    except ApiError as error:
        raise renamed(error, names) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """`error` naming the client's fields. What a message says behind `field: ` are words, which name none."""
    if not names:
        return error
    any_name = re.compile(rf"(?<![\w.'])({'|'.join(map(re.escape, names))})(?!\w| tokens)")

    def rename(text: str) -> str:
        return any_name.sub(lambda found: names[found[1]], text)

    parts = [part.partition(": ") for part in error.message.split("; ")]
    return ApiError(
        error.status,
        "; ".join(rename(head) + colon + words for head, colon, words in parts),
        type=error.type,
        code=error.code,
        param=None if error.param is None else rename(error.param),
        headers=error.headers,
        reason=error.reason,
    )


Schema = Annotated[str | dict[str, Any], Field(union_mode="left_to_right")]  # a JSON schema, or its text


def json_format(schema: str | Mapping[str, Any], param: str) -> dict[str, Any]:
    """The native `response_format` of a JSON schema; raises `ApiError` naming `param` for a text that is none and for
    what is nested too deeply.
    """
    try:
        found: Mapping[str, Any] = (
            msgspec.json.decode(schema, type=dict[str, Any]) if isinstance(schema, str) else schema
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise invalid(f"{param} must be a JSON object, or one as text", param) from None
    except RecursionError:
        raise _too_deep(param) from None
    if _levels(found) > _MOST_LEVELS:
        raise _too_deep(param)
    return {"type": "json_schema", "json_schema": {"schema": found}}


def _levels(value: object) -> int:
    """How deep objects and lists stand in each other."""
    levels, within = 0, [value]
    while within := [one for one in within if isinstance(one, dict | list)]:
        levels += 1
        within = [inner for one in within for inner in (one.values() if isinstance(one, dict) else one)]
    return levels


def _too_deep(param: str) -> ApiError:
    return invalid(f"{param} has more than {_MOST_LEVELS} levels of objects and lists", param)


def sampled(temperature: float | None, served: ServedModel) -> float | None:
    """The temperature of a dialect that samples by default: as asked, as the checkpoint says, else 1."""
    if temperature is None and "temperature" not in served.checkpoint.sampling_defaults:
        return 1.0
    return temperature


def native_seed(seed: int | None) -> int | None:
    """Other APIs take negative seeds; each gets one of ours."""
    return None if seed is None else seed % _KEPT_SEED


def native_top_k(top_k: int | None) -> int | None:
    """Others write -1 for off."""
    return 0 if top_k == -1 else top_k
