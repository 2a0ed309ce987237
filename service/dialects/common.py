"""Shared parts of the dialects: the base of bodies, refused fields, and errors that name the client's own fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from triptych.model.api.parameters import MAX_INT
from triptych.service.core.errors import NOT_SUPPORTED, ApiError, from_validation, invalid, shorten
from triptych.service.core.json_bounds import check_levels, too_deep
from triptych.service.core.models import ServedModel
from triptych.service.core.request_context import REQUEST_ID_PATTERN
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.field_paths import NotRead, walk
from triptych.service.schemas.parameters import Dialect
from triptych.service.schemas.types import Body

B = TypeVar("B", bound=Body)

_SEED_LIMIT = 2**63  # native seeds are below it
_LAST = 64  # tokens at which penalties of llama.cpp and Ollama look

NATIVE_NAMES: Mapping[str, str] = MappingProxyType({})


class DialectBody(Body):
    """The base of a dialect's bodies: strict types, null allowed for optional fields, no unknown fields.

    A field is read, or marked as `Refused` or `Ignored`; docs/fields.md is made from these marks.
    """


RepeatLastN = Annotated[
    int | None,
    Field(
        ge=-1,
        description="How many tokens the penalties look at, the last ones of prompt and output; -1: all; 0 switches "
        "penalties off. Default: 64 for penalties of the request, all for the checkpoint's.",
        examples=[64],
    ),
]


class Extended(DialectBody):
    """The native fields that every dialect has in addition to its own."""

    model: str | None = Field(
        None,
        description="The model; may be omitted if only one can serve the task.",
        examples=["code"],
    )
    timeout_s: float | None = Field(None, description="As in /generate.", examples=[30.0])
    request_id: str | None = Field(
        None, pattern=REQUEST_ID_PATTERN, description="As in /generate.", examples=["my-request-1"]
    )


_OF_ALL = tuple(Extended.model_fields)


class Refused(NotRead):
    """Marks a field that is not supported: null and `harmless` values are accepted, others get a 400 that names it.

    `instead` names the field to use for the same purpose.
    """

    def __init__(self, *harmless: object, instead: str = "") -> None:
        self._harmless = (None, *harmless)
        self.instead = instead

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": f"Not supported: accepted only as {self.harmless}.", "examples": [None]}

    @property
    def harmless(self) -> str:
        """The values that are accepted, as JSON."""
        return ", ".join(msgspec.json.encode(one).decode() for one in self._harmless)

    def _check(self, value: object) -> object:
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self._harmless):
            return value
        if not self.instead:
            raise PydanticCustomError(NOT_SUPPORTED, "")
        raise PydanticCustomError(NOT_SUPPORTED, "; use {instead}", {"instead": self.instead})


class Ignored(NotRead):
    """Marks a field that changes no output: any value is accepted and ignored."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(lambda value: None, core_schema.any_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"description": f"Ignored: {self.reason}.", "examples": [None]}


class Native:
    """Marks a field that has the meaning of the native field `name`; default: of the same name."""

    def __init__(self, name: str = "") -> None:
        self.name = name


def native_field(name: str = "", *examples: Any, more: str = "", **field: Any) -> Any:
    """Return a field with the meaning of the field `name` (default: the same name) of /encode; optional by default."""
    text = (f"`{name}` of /encode." if name else "As in /encode.") + more
    found = Field(field.pop("default", None), description=text, examples=[*examples], **field)
    found.metadata.append(Native(name))
    return found


class ServedTypes:
    """Marks the `type` of a part that this service cannot read; the error names the types that it can read."""

    def __init__(self, *types: str) -> None:
        self._types = types

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._refuse, core_schema.any_schema())

    def _refuse(self, value: object) -> object:
        known = ", ".join(self._types)
        if not isinstance(value, str):
            raise PydanticCustomError("string_type", "Input should be one of {known}", {"known": known})
        found = {"found": shorten(value), "known": known}
        raise PydanticCustomError(NOT_SUPPORTED, ": {found}; served: {known}", found)


class Unserved(DialectBody):
    """The base of parts whose type is not served. None is ever made: `ServedTypes` refuses its `type`."""

    model_config = ConfigDict(extra="ignore")

    text: ClassVar[str] = ""


NotSupported = Annotated[Any, Refused()]  # only null is accepted
NotTrue = Annotated[Any, Refused(False)]
NotFilled = Annotated[Any, Refused([], {}, "")]


def by_content(value: Any) -> str:
    """Return the tag of content, which is a text or a list of parts."""
    return "<parts>" if isinstance(value, list) else "<text>"


OTHER = "<other>"  # the tag of an object whose type is not served


def by_type(tags: Mapping[str, str], default: str | None = None) -> Callable[[Any], str | None]:
    """Return a function that finds the tag of an object or model by its `type`, which is `default` if missing."""

    def shape(value: Any) -> str | None:
        if isinstance(value, dict):
            kind = value.get("type", default)
            return tags.get(kind, OTHER) if isinstance(kind, str) else OTHER
        return tags.get(getattr(value, "type", ""))

    return shape


PromptValue = str | list[str] | list[int] | list[list[int]]


def native(model: type[B], fields: Mapping[str, Any]) -> B:
    """Make a native body from the fields that are not None; raises `ApiError` with native field names.

    It is validated from JSON, so that errors are those of a native request. `naming_errors` renames the fields.
    """
    try:
        given = {name: value for name, value in fields.items() if value is not None}
        return model.model_validate_json(pydantic_core.to_json(given, inf_nan_mode="constants"))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None


def native_generate(fields: Mapping[str, Any], prompt: PromptValue) -> GenerateBody:
    """Make a body of /generate as `native` does, with a prompt that is already valid.

    The prompt is not validated again: for 500,000 token ids that would block the event loop for 50 ms.
    """
    return native(GenerateBody, {**fields, "prompt": [0]}).model_copy(update={"prompt": prompt})


def native_encode(fields: Mapping[str, Any], inputs: Any) -> EncodeBody:
    """Make a body of /encode as `native` does, with inputs that are already valid and not validated again."""
    return native(EncodeBody, {**fields, "input": "-"}).model_copy(update={"input": inputs})


@contextmanager
def naming_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors raised inside the block, from native names to the client's (`names`)."""
    try:
        yield
    except ApiError as error:
        raise rename_fields(error, names) from None


def rename_fields(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return `error` with the client's field names. The text of a message after `field: ` is left unchanged."""
    if not names or (error.param is None and not any(name in error.message for name in names)):
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


Schema = Annotated[str | dict[str, Any], Field(union_mode="left_to_right")]  # a JSON schema as an object or as text


def json_format(schema: str | Mapping[str, Any], param: str) -> dict[str, Any]:
    """Return the native `response_format` of a JSON schema; raises `ApiError` that names `param` if it is invalid."""
    try:
        found = pydantic_core.from_json(schema, allow_inf_nan=False) if isinstance(schema, str) else schema
    except ValueError as error:
        if "recursion limit" in str(error):
            raise too_deep(param) from None
        found = None
    if not isinstance(found, Mapping):
        raise invalid(f"{param} must be a JSON object, or one as text", param)
    check_levels(found, param)
    return {"type": "json_schema", "json_schema": {"schema": found}}


def sampled(temperature: float | None, served: ServedModel) -> float | None:
    """Return the temperature for a dialect that samples by default: the client's, the checkpoint's, or 1."""
    if temperature is None and "temperature" not in served.checkpoint.sampling_defaults:
        return 1.0
    return temperature


def fields_of(body: Extended) -> dict[str, Any]:
    """Return the native fields that need no translation: those of `Extended`, and those marked `Native`."""
    found = {name: getattr(body, name) for name in _OF_ALL}
    for native_name, path in _native_paths(type(body)).items():
        value: Any = body
        for part in path.split("."):
            value = None if value is None else getattr(value, part)
        found[native_name] = value
    return found


def names_of(body: BaseModel) -> dict[str, str]:
    """Return the paths of the fields marked `Native` whose path differs from the native name, by that name."""
    return {name: path for name, path in _native_paths(type(body)).items() if name != path}


@cache
def _native_paths(model: type[BaseModel]) -> dict[str, str]:
    marked = ((path, mark) for path, field in walk(model) for mark in field.metadata if isinstance(mark, Native))
    return {mark.name or path.rpartition(".")[2]: path for path, mark in marked}


def sampling_fields(body: Any, dialect: Dialect, served: ServedModel) -> dict[str, Any]:
    """Return the native fields of a dialect that samples by default, except those that only the dialect can translate.

    `top_p: 0` allows the most likely token only, so it becomes greedy. There is no beam search.
    """
    fields = fields_of(body) | dialect.fields(body)
    fields |= {"stream": body.stream, "num_beams": 1, "seed": native_seed(body.seed)}
    if body.top_p == 0:
        return fields | {"temperature": 0.0, "top_p": None}
    return fields | {"temperature": sampled(body.temperature, served)}


def native_seed(seed: int | None) -> int | None:
    """Map a seed of another API, which may be negative, to a native one."""
    return None if seed is None else seed % _SEED_LIMIT


def native_penalties(last: int | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Map `repeat_last_n` of llama.cpp and Ollama: 0 switches penalties off, -1 is all tokens.

    Without it the client's penalties look at 64 tokens, the folder's at all.
    """
    if last == 0:
        return {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    given = any(fields[name] is not None for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"))
    return {"penalty_window": (_LAST if given else 0) if last is None else last if last > 0 else MAX_INT}


def native_top_k(top_k: int | None) -> int | None:
    """Map the -1 of other APIs, for off, to 0."""
    return 0 if top_k == -1 else top_k
