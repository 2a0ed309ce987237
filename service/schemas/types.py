"""Parts of bodies: the strict base class, bounded numbers, and unions that the first element decides.

Members of a union have tags of the form `<name>`; `triptych.service.core.errors` removes them from `param`, so that an
error names `prompt[1][5]`. The validation of a list stops at its first bad element.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema

MAX_INT = 2**31 - 1
# Whole files as base64, for examples: a WAV file of 4 ms, and a PNG file of one pixel.
TONE = "UklGRjQAAABXQVZFZm10IBAAAAABAAEAoA8AAKAPAAABAAgAZGF0YRAAAACAyIA4gMiAOIDIgDiAyIA4"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mOIWnAHAAMuAdd2FgGxAAAAAElFTkSuQmCC"

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


def _stop_early(schema: object) -> None:
    """Set `fail_fast` for every list in a core schema of Pydantic."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for inner in schema.values():
            _stop_early(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            _stop_early(inner)


class Body(BaseModel):
    """The base of request bodies: exact types, finite numbers, no unknown fields.

    Validation stops at the first bad element of each list, because a body of 2 MB may have 600,000 bad ones.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_early(schema)
        return schema


@runtime_checkable
class NamesAdapter(Protocol):
    """A body that names a LoRA adapter in another field than `model`."""

    def adapter_named(self) -> tuple[str, str | int] | None:
        """Return the field's name and the adapter's name, or its place among those of the model; None: it has none."""


class Reply(BaseModel):
    """The base of replies. Frequent replies are built as dictionaries of the same shape."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


Detail = Literal["auto", "low", "high", "original"]  # of a picture of a prompt


class TextPair(Body):
    """Two texts that a model reads as one input, such as a question and a passage."""

    text: str = Field(min_length=1, description="The first text.", examples=["What is Ray?"])
    text_pair: str | None = Field(None, min_length=1, description="The second text.", examples=["Ray is a framework."])


class ImageFile(Body):
    """An image file for a vision model."""

    image: str = Field(
        min_length=1, description="A JPEG, PNG, WebP or GIF file in base64, or as a data URL.", examples=[PIXEL]
    )


OneInput = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[ImageFile, Tag("<image>")] | Annotated[TextPair, Tag("<pair>")],
    Discriminator(
        lambda value: _item_shape(value),
        custom_error_type="union_type",
        custom_error_message="Input should be a string, or a {text, text_pair} or {image} object",
    ),
]
Inputs = Annotated[list[OneInput], Field(min_length=1, fail_fast=True)]
TextPairs = Annotated[list[TextPair], Field(min_length=1, fail_fast=True)]


def _item_shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, ImageFile) or (isinstance(value, dict) and "image" in value):
        return "<image>"
    return "<pair>" if isinstance(value, dict | Body) else None


def _shape(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "<inputs>" if any(isinstance(one, dict | Body) for one in value) else "<texts>"
    if isinstance(first, dict | Body):
        return "<pairs>" if all(_item_shape(one) == "<pair>" for one in value) else "<inputs>"
    return "<id_lists>" if isinstance(first, list) else "<ids>"


def _text_shape(value: Any) -> str | None:
    return "<texts>" if isinstance(value, list) else _shape(value)


def _union(expected: str) -> Discriminator:
    return Discriminator(_shape, custom_error_type="union_type", custom_error_message=f"Input should be {expected}")


ONE_OR_LIST = Discriminator(lambda value: "<list>" if isinstance(value, list) else "<one>")
Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[TokenIdLists, Tag("<id_lists>")],
    _union("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
PromptOrNone = Annotated[  # one that may be the empty text, if a suffix follows the output
    Annotated[str, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[TokenIdLists, Tag("<id_lists>")],
    _union("a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
EncodeInput = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[Texts, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[TokenIdLists, Tag("<id_lists>")]
    | Annotated[TextPairs, Tag("<pairs>")]
    | Annotated[Inputs, Tag("<inputs>")],
    _union(
        "a string, or a list of strings, token ids, lists of token ids, {text, text_pair} or {image} objects, "
        "or of strings and objects"
    ),
]
TextOrIds = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[TokenIds, Tag("<ids>")],
    _union("a string or a list of token ids"),
]
TextOrTexts = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[Text], Tag("<texts>")],
    Discriminator(
        _text_shape,
        custom_error_type="union_type",
        custom_error_message="Input should be a string or a list of strings",
    ),
]
