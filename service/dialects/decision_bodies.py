"""The bodies of OpenAI's decisions and moderations."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pydantic_core
from pydantic import Discriminator, Field, StrictBool, StrictStr, Tag
from pydantic.json_schema import SkipJsonSchema

from triptych.service.dialects.common import (
    OTHER,
    DialectBody,
    Extended,
    Ignored,
    NotSupported,
    ServedTypes,
    Unserved,
    by_content,
    by_type,
)
from triptych.service.dialects.openai_bodies import RefusalPart
from triptych.service.dialects.other_fields import Cached
from triptych.service.dialects.responses_bodies import InputCall, InputItem, InputText
from triptych.service.schemas.types import Text

MAX_QUESTIONS, MAX_CHOICES = 400, 255
MAX_INSTRUCTIONS, MAX_VALUE = 16_384, 256  # characters
_NO_USER = Ignored("no output depends on the end user")


def json_text(value: Any) -> str:
    """Return a value as JSON; `json.dumps` takes ten times as long for numbers."""
    return pydantic_core.to_json(value).decode()


# -- What is asked about: a text, or messages, calls and their outputs.


class JsonPart(DialectBody):
    type: Literal["input_json"] = Field(description="The type of the part.", examples=["input_json"])
    data: Annotated[
        Annotated[dict[str, Any], Tag("<object>")] | Annotated[list[dict[str, Any]], Tag("<objects>")],
        Discriminator(lambda value: "<objects>" if isinstance(value, list) else "<object>"),
    ] = Field(description="An object or several, which the model reads as text.", examples=[{"total": 12}])

    @property
    def text(self) -> str:
        return json_text(self.data)


class UnservedPart(Unserved):
    """A part that is not read here."""

    image_url: NotSupported = None
    detail: NotSupported = None
    type: Annotated[Any, ServedTypes("input_text", "input_json", "output_text", "refusal")]


_PARTS = dict.fromkeys(("input_text", "output_text", "text"), "<text>") | {
    "refusal": "<refusal>",
    "input_json": "<json>",
}
Part = Annotated[
    Annotated[InputText, Tag("<text>")]
    | Annotated[JsonPart, Tag("<json>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[UnservedPart], Tag(OTHER)],
    Discriminator(
        by_type(_PARTS),
        custom_error_type="union_type",
        custom_error_message="Input should be a part of the type input_text, input_json, output_text or refusal",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


class DecisionMessage(InputItem):
    type: Literal["message"] = Field("message", description="The type of the item.", examples=["message"])
    role: Literal["user", "assistant", "system", "developer"] = Field(description="The author.", examples=["user"])
    content: Content = Field(description="Text, or parts of it.", examples=["The parcel came late."])
    phase: Annotated[Any, Ignored("templates do not distinguish answers from comments")] = None


class _Output(InputItem):
    call_id: str = Field(description="Id of the call.", examples=["call_1"])
    output: Content = Field(description="What the tool returned.", examples=["Sun"])


class DecisionOutput(_Output):
    type: Literal["function_call_output"] = Field(description="The type of the item.")


class CustomCall(InputItem):
    type: Literal["custom_tool_call"] = Field(description="The type of the item.", examples=["custom_tool_call"])
    call_id: str = Field(description="Id of the call, which its output repeats.", examples=["call_1"])
    name: str = Field(description="The tool.", examples=["shell"])
    namespace: str | None = Field(None, description="The tool's namespace.", examples=[None])
    input: str = Field(description="The text that the tool was given.", examples=["ls"])


class CustomOutput(_Output):
    type: Literal["custom_tool_call_output"] = Field(description="The type of the item.")


class UnservedDecisionItem(Unserved):
    """An item of another type."""

    type: Annotated[
        Any,
        ServedTypes(
            *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
        ),
    ]


_ITEMS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "custom_tool_call": "<custom>",
    "custom_tool_call_output": "<custom output>",
}
Item = Annotated[
    Annotated[DecisionMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<call>")]
    | Annotated[DecisionOutput, Tag("<output>")]
    | Annotated[CustomCall, Tag("<custom>")]
    | Annotated[CustomOutput, Tag("<custom output>")]
    | Annotated[SkipJsonSchema[UnservedDecisionItem], Tag(OTHER)],
    Discriminator(
        by_type(_ITEMS, "message"),
        custom_error_type="union_type",
        custom_error_message="Input should be a message, a call of a tool or its output",
    ),
]
DecisionInput = Annotated[
    Annotated[str, Field(min_length=1), Tag("<text>")]
    | Annotated[list[Item], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]

# -- The questions.

Instructions = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_INSTRUCTIONS), Tag("<text>")]
    | Annotated[list[Part], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]
Description = Annotated[str | None, Field(max_length=MAX_INSTRUCTIONS)]


class _Question(DialectBody):
    name: str | None = Field(None, max_length=256, description="Returned with the answer.", examples=["late"])


class Predicate(_Question):
    """How likely a statement is true."""

    type: Literal["predicate"] = Field(description="The kind of question.", examples=["predicate"])
    instructions: Instructions = Field(description="The statement.", examples=["The parcel came late."])


class DecisionChoice(DialectBody):
    value: Annotated[
        Annotated[StrictStr, Field(min_length=1, max_length=MAX_VALUE), Tag("<text>")]
        | Annotated[StrictBool, Tag("<boolean>")],
        Discriminator(lambda value: "<boolean>" if isinstance(value, bool) else "<text>"),
    ] = Field(description="A text or a boolean, which are distinct.", examples=["billing"])
    description: Description = Field(None, description="What it means, for the model.", examples=["Invoices."])


class Choice(_Question):
    """Which of some values fits."""

    type: Literal["choice"] = Field(description="The kind of question.", examples=["choice"])
    instructions: Instructions = Field(description="What to choose.", examples=["Who should answer?"])
    choices: list[DecisionChoice] = Field(
        min_length=2,
        max_length=MAX_CHOICES,
        description="The values.",
        examples=[[{"value": "billing"}, {"value": "delivery"}]],
    )


class Level(DialectBody):
    label: Annotated[str, Field(min_length=1, max_length=MAX_VALUE)] = Field(description="Its name.", examples=["calm"])
    description: Description = Field(None, description="What it means, for the model.", examples=["No complaint."])


class Score(_Question):
    """Which of some ordered levels fits."""

    type: Literal["score"] = Field(description="The kind of question.", examples=["score"])
    instructions: Instructions = Field(description="What to rate.", examples=["How angry is the writer?"])
    levels: list[Level] = Field(
        min_length=2,
        max_length=MAX_CHOICES,
        description="The levels, the lowest first; the first has the value 0.",
        examples=[[{"label": "calm"}, {"label": "angry"}]],
    )


Question = Predicate | Choice | Score
AnyQuestion = Annotated[
    Annotated[Predicate, Tag("<predicate>")] | Annotated[Choice, Tag("<choice>")] | Annotated[Score, Tag("<score>")],
    Discriminator(
        by_type({name: f"<{name}>" for name in ("predicate", "choice", "score")}),
        custom_error_type="union_type",
        custom_error_message="Input should be a question of the type predicate, choice or score",
    ),
]


class DecisionBody(Extended):
    """Answer questions about a text with probabilities, as OpenAI's decisions do."""

    list_limits: ClassVar[dict[str, str]] = {"input": "max_chat_messages", "instructions": "max_content_parts"}

    input: DecisionInput = Field(
        description="A text, or messages, calls and their outputs.", examples=["The parcel came two weeks late."]
    )
    questions: list[AnyQuestion] = Field(
        min_length=1,
        max_length=MAX_QUESTIONS,
        description="What to answer about the input.",
        examples=[[{"type": "predicate", "instructions": "The writer complains."}]],
    )
    prompt_cache_key: Cached = None
    prompt_cache_options: Cached = None
    safety_identifier: Annotated[Any, _NO_USER] = None


# -- Moderations.


class ModeratedText(DialectBody):
    type: Literal["text"] = Field(description="Only text is supported.", examples=["text"])
    text: Text = Field(description="The text.", examples=["I will find you."])


class UnservedModeration(Unserved):
    """A part that is not read here."""

    image_url: NotSupported = None
    type: Annotated[Any, ServedTypes("text")]


def _moderated(value: Any) -> str:
    if isinstance(value, str):
        return "<text>"
    first = value[0] if isinstance(value, list) and value else None
    return "<texts>" if first is None or isinstance(first, str) else "<parts>"


ModeratedPart = Annotated[
    Annotated[ModeratedText, Tag("<part>")] | Annotated[SkipJsonSchema[UnservedModeration], Tag(OTHER)],
    Discriminator(by_type({"text": "<part>"})),
]


class ModerationBody(Extended):
    """Classify texts by what may be harmful in them, as OpenAI's moderations do."""

    input: Annotated[
        Annotated[Text, Tag("<text>")]
        | Annotated[list[Text], Field(min_length=1, fail_fast=True), Tag("<texts>")]
        | Annotated[list[ModeratedPart], Field(min_length=1, fail_fast=True), Tag("<parts>")],
        Discriminator(_moderated),
    ] = Field(
        description="A text, several, or parts of one text.", examples=["I will find you.", ["a fine film", "go away"]]
    )
