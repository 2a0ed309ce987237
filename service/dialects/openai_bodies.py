"""OpenAI's request bodies, with the fields that clients of other servers add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from triptych.service.chat.tools import NAME_PATTERN
from triptych.service.dialects.common import (
    OTHER,
    DialectBody,
    Extended,
    Ignored,
    NotFilled,
    NotSupported,
    NotTrue,
    Refused,
    Schema,
    ServedTypes,
    Unserved,
    by_content,
    by_type,
)
from triptych.service.dialects.other_fields import Cached, ChatNotServed, Harmless, NotServed, OtherNames
from triptych.service.schemas.parameters import OPENAI, Parameters
from triptych.service.schemas.types import PIXEL, Detail, PromptOrNone, Text, TextOrTexts, TokenId

SCHEMA_EXAMPLE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class StreamOptions(DialectBody):
    include_usage: bool | None = Field(
        None, description="End a stream with an event that has the token counts and no choices.", examples=[True]
    )
    include_obfuscation: Annotated[Any, Ignored("events are never padded")] = None
    continuous_usage_stats: Annotated[Any, Ignored("the last event has the usage; vLLM's")] = None


class FormatSchema(DialectBody):
    name: str | None = Field(None, description="A label of the client's.", examples=["person"])
    description: Annotated[Any, Ignored("the model does not see the schema")] = None
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="As in /generate.", examples=[{"type": "object"}]
    )
    strict: bool | None = Field(None, description="The schema is always enforced.", examples=[True])


class Format(DialectBody):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that matches `json_schema`.", examples=["json_object"]
    )
    json_schema: FormatSchema | None = Field(None, description="With the type `json_schema`.")
    value: Schema | None = Field(
        None,
        description="A JSON schema with the type `json_object`, as Hugging Face's client sends it.",
        examples=[None],
    )
    schema_: Schema | None = Field(
        None, alias="schema", description="The same as `value`; llama.cpp's.", examples=[None]
    )
    grammar: NotSupported = None

    @property
    def bare_schema(self) -> tuple[str, Schema] | None:
        """A schema outside `json_schema`, with the path of its field; None if there is none."""
        if self.value is not None:
            return "response_format.value", self.value
        return None if self.schema_ is None else ("response_format.schema", self.schema_)


class StructuredOutputs(DialectBody):
    """A constraint of the output; one field is given."""

    json_: Schema | None = Field(
        None, alias="json", description="A JSON schema, as an object or as text.", examples=[{"type": "object"}]
    )
    regex: str | None = Field(None, description="As in /generate.", examples=["[0-9]{4}"])
    choice: list[str] | None = Field(None, description="As in /generate.", examples=[["yes", "no"]])
    json_object: bool | None = Field(None, description="Any JSON object.", examples=[True])
    grammar: str | None = Field(None, description="As in /generate.", examples=['root ::= "yes" | "no"'])
    structural_tag: NotSupported = None
    whitespace_pattern: NotSupported = None
    disable_any_whitespace: NotTrue = None
    disable_additional_properties: NotTrue = None


@OPENAI.body
class Sampling(Extended, Harmless, NotServed, OtherNames, Parameters):
    """The fields that completions and chat completions share."""

    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])
    stream_options: StreamOptions | None = Field(None, description="Options of a stream.")
    max_tokens: int | None = Field(
        None,
        description="Maximum number of tokens to generate. Default: 16 for completions; for chats, until the model "
        "ends or the context is full.",
        examples=[32],
    )
    temperature: float | None = Field(
        None, description="0 is greedy. Default: the checkpoint's, else 1.", examples=[0.8]
    )
    n: int | None = Field(None, description="Number of choices for each prompt; default: 1.", examples=[1])
    stop: TextOrTexts | None = Field(None, description="Texts that end the output before them.", examples=["\n\n"])
    seed: int | None = Field(None, description="As in /generate.", examples=[7])
    top_k: int | None = Field(None, description="As in /generate; -1: off. Not OpenAI's.", examples=[40])
    include_stop_str_in_output: bool | None = Field(
        None, description="`include_stop` of /generate. Not OpenAI's.", examples=[False]
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, description="As in /generate; empty: any. Not OpenAI's.", examples=[[5, 7]]
    )
    response_format: Format | None = Field(None, description="As in /generate.", examples=[{"type": "json_object"}])
    structured_outputs: StructuredOutputs | None = Field(None, description="The same; vLLM's.")
    guided_json: Annotated[Any, Refused(instead="structured_outputs.json")] = None
    guided_regex: Annotated[Any, Refused(instead="structured_outputs.regex")] = None
    guided_choice: Annotated[Any, Refused(instead="structured_outputs.choice")] = None
    guided_grammar: str | None = Field(None, description="`grammar`, by its older name in vLLM.", examples=[None])
    guided_json_object: Annotated[Any, Refused(False, instead="structured_outputs.json_object")] = None
    guided_whitespace_pattern: NotSupported = None
    regex: Annotated[Any, Refused(instead="structured_outputs.regex")] = None
    json_schema: Annotated[Any, Refused(instead="response_format")] = None
    grammar: str | None = Field(None, description="As in /generate; llama.cpp's.", examples=[None])
    ebnf: str | None = Field(None, description="`grammar`, by its name in SGLang.", examples=[None])


class CompletionBody(Sampling):
    """Continue a prompt, as OpenAI's completions do."""

    prompt: PromptOrNone = Field(
        description="Text, token ids, or several of either.", examples=["def add(a, b):", ["a", "b"], [1, 42]]
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.", examples=[False])
    logprobs: int | None = Field(
        None,
        ge=0,
        description="Return log-probabilities with this many alternatives; with `echo`, also of the prompt.",
        examples=[2],
    )
    best_of: int | None = Field(None, description="Accepted only if equal to `n`.", examples=[None])
    add_special_tokens: Annotated[Any, Refused(True)] = None
    suffix: str | None = Field(
        None,
        description="A text that follows the output, for models that fill in the middle; empty: none.",
        examples=["\n\nprint(add(1, 2))\n"],
    )
    prompt_embeds: NotSupported = None


OfTheMessage = Annotated[Any, Ignored("the message has it; OpenAI's agents for JavaScript copy it to each part")]


class TextPart(DialectBody):
    type: Literal["text"] = Field(description="The type of the part.", examples=["text"])
    text: str = Field(description="The text.", examples=["Hello"])
    prompt_cache_breakpoint: Cached = None
    cache_control: Cached = None
    role: OfTheMessage = None
    annotations: OfTheMessage = None
    reasoning_content: OfTheMessage = None
    refusal: NotSupported = None


class RefusalPart(DialectBody):
    """A refusal by the assistant; its text is part of the message."""

    type: Literal["refusal"] = Field(description="The type of the part.", examples=["refusal"])
    refusal: str = Field(description="The text.", examples=["I cannot help with that."])

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(DialectBody):
    url: str = Field(description="A data URL; an address is refused.", examples=[f"data:image/png;base64,{PIXEL}"])
    detail: Detail | None = Field(
        None, description="`low`: the image takes fewer tokens, of models that read any size.", examples=["auto"]
    )


class ImagePart(DialectBody):
    """An image in a message of a user or a tool, for models that read pictures."""

    type: Literal["image_url"] = Field(description="The type of the part.", examples=["image_url"])
    image_url: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[ImageUrl, Tag("<url>")],
        Discriminator(lambda value: "<text>" if isinstance(value, str) else "<url>"),
    ] = Field(description="The image, or only its `url`.", examples=[{"url": f"data:image/png;base64,{PIXEL}"}])
    uuid: Annotated[Any, Ignored("equal images are found by their pixels; vLLM's")] = None
    prompt_cache_breakpoint: Cached = None
    cache_control: Cached = None


class UnservedPart(Unserved):
    """A part that chat models here cannot read."""

    image_embeds: NotSupported = None
    input_audio: NotSupported = None
    audio_url: NotSupported = None
    video_url: NotSupported = None
    file: NotSupported = None
    type: Annotated[Any, ServedTypes("text", "image_url", "refusal")]


class UnservedPrediction(UnservedPart):
    """A part that no prediction has."""

    image_url: NotSupported = None
    type: Annotated[Any, ServedTypes("text", "refusal")]


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[UnservedPart], Tag(OTHER)],
    Discriminator(
        by_type({"text": "<text>", "image_url": "<image>", "refusal": "<refusal>"}),
        custom_error_type="union_type",
        custom_error_message="Input should be a part of the type text, image_url or refusal",
    ),
]
PredictedPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[UnservedPrediction], Tag(OTHER)],
    Discriminator(
        by_type({"text": "<text>", "refusal": "<refusal>"}),
        custom_error_type="union_type",
        custom_error_message="Input should be a part of the type text or refusal",
    ),
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


Predicted = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[PredictedPart], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


class Prediction(DialectBody):
    """A text that much of the answer is expected to repeat."""

    type: Literal["content"] = Field(description="Only content is predicted.", examples=["content"])
    content: Predicted = Field(description="The text.", examples=["def add(a, b):\n    return a + b\n"])


class FunctionCall(DialectBody):
    name: str = Field(description="The function.", examples=["weather"])
    arguments: str | dict[str, Any] = Field(
        description="Its arguments as JSON; the template sees the object.", examples=['{"city": "Oslo"}']
    )
    parsed_arguments: Annotated[Any, Ignored("clients that parse replies add it; `arguments` has them")] = None
    parameters: Annotated[Any, Ignored("`tools` describe the function; Hugging Face's")] = None
    description: Annotated[Any, Ignored("`tools` describe the function; Hugging Face's")] = None


_OfAnother = Annotated[Any, Ignored("clients of other services copy it from replies")]


class ToolCall(DialectBody):
    id: str | None = Field(None, description="Id of the call, which the tool's reply repeats.", examples=["call_1"])
    type: str = Field("function", description="Type of the called tool.", examples=["function"])
    function: FunctionCall = Field(description="The call.")
    custom: NotSupported = None
    index: Annotated[Any, Ignored("clients copy it from streams; the order of the calls gives it")] = None
    extra_content: _OfAnother = None
    provider_specific_fields: _OfAnother = None


class Message(DialectBody):
    """A message of a conversation. The model's chat template decides which roles and orders are allowed."""

    role: Text = Field(description="The role of the author.", examples=["user"])
    content: Content | None = Field(
        None, description="Text, or parts of type `text`, joined by line breaks, and `image_url`.", examples=["Hello"]
    )
    name: str | None = Field(None, description="Passed to the template.", examples=["Ada"])
    tool_calls: list[ToolCall] | None = Field(None, description="Tool calls of an assistant, passed to the template.")
    tool_call_id: str | None = Field(None, description="Id of the call that a tool replies to.", examples=["call_1"])
    reasoning_content: str | None = Field(None, description="Passed to the template.", examples=[None])
    reasoning: str | None = Field(None, description="`reasoning_content`, by its name elsewhere.", examples=[None])
    refusal: str | None = Field(
        None, description="The assistant's text, if it has no other.", examples=["I cannot help with that."]
    )
    audio: NotSupported = None
    function_call: NotSupported = None
    tools: NotFilled = None
    prefix: Annotated[Any, Refused(False, instead="continue_final_message")] = None
    partial: Annotated[Any, Refused(False, instead="continue_final_message")] = None
    annotations: Annotated[Any, Ignored("templates read no citations")] = None
    parsed: Annotated[Any, Ignored("clients that parse replies add it; the content contains it")] = None
    phase: Annotated[Any, Ignored("templates do not distinguish answers from comments")] = None
    type: Annotated[Any, Ignored("messages have no type; lm-eval sends it")] = None
    id: Annotated[Any, Ignored("nothing refers to a message")] = None
    cache_control: Cached = None
    images: NotFilled = None
    reasoning_details: _OfAnother = None
    reasoning_items: _OfAnother = None
    thinking_blocks: _OfAnother = None
    provider_specific_fields: _OfAnother = None


class FunctionTool(DialectBody):
    """A function that the client can call."""

    name: str = Field(pattern=NAME_PATTERN, description="Its name.", examples=["weather"])
    description: str | None = Field(None, description="What it does, for the model.", examples=["The weather now."])
    parameters: dict[str, Any] | None = Field(
        None,
        description="A JSON schema of its arguments, an object. Default: no parameters.",
        examples=[SCHEMA_EXAMPLE],
    )
    strict: bool | None = Field(None, description="Constrain all arguments to the schema.", examples=[True])
    defer_loading: NotTrue = None
    key_order: NotFilled = None


class ToolBody(DialectBody):
    type: Literal["function"] = Field("function", description="Only functions are supported.", examples=["function"])
    function: FunctionTool = Field(description="The function.")
    custom: NotSupported = None
    defer_loading: NotTrue = None
    cache_control: Cached = None


class NamedFunction(DialectBody):
    name: str = Field(description="The name of one of `tools`.", examples=["weather"])


class NamedTool(DialectBody):
    """A choice that requires calls of one tool."""

    type: Literal["function"] = Field("function", description="Only functions are supported.", examples=["function"])
    function: NamedFunction = Field(description="The function.")
    custom: NotSupported = None


class AllowedTools(DialectBody):
    mode: Literal["auto", "required"] = Field(description="Whether one of them must be called.", examples=["auto"])
    tools: list[NamedTool] = Field(min_length=1, description="Which of `tools` may be called.")


class AllowedToolChoice(DialectBody):
    """A choice that allows some tools; the template still gets all of them, so that the prefix stays cached."""

    type: Literal["allowed_tools"] = Field(description="The type of the choice.", examples=["allowed_tools"])
    allowed_tools: AllowedTools = Field(description="The tools.")


def choice_shape(value: Any) -> str:
    """Return the tag of a choice of tools, which is a word, one tool, or a list of allowed ones."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<tool>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedTool, Tag("<tool>")]
    | Annotated[AllowedToolChoice, Tag("<allowed>")],
    Discriminator(choice_shape),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(Sampling, ChatNotServed):
    """Continue a conversation, as OpenAI's chat completions do; the model's chat template makes the prompt."""

    messages: list[Message] = Field(
        min_length=1, description="The conversation.", examples=[[{"role": "user", "content": "Hello"}]]
    )
    max_completion_tokens: int | None = Field(None, description="Maximum number of tokens to generate.", examples=[32])
    logprobs: bool | None = Field(None, description="Return log-probabilities of the output's tokens.", examples=[True])
    top_logprobs: int | None = Field(None, ge=0, description="Number of alternatives for each token.", examples=[2])
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt at the start of the assistant's message; default true. Not OpenAI's.",
        examples=[True],
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead. Not OpenAI's.", examples=[False]
    )
    prediction: Prediction | None = Field(
        None, description="A text from which drafts are proposed: the answer is the same, and faster."
    )
    tools: list[ToolBody] | None = Field(None, description="The functions that the model may call.")
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto` (default), `none`, `required` (at least one call), the tool to call, or `allowed_tools`. "
        "If a call is required, arguments are constrained to their schemas.",
        examples=["auto", {"type": "function", "function": {"name": "weather"}}],
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls; default true.", examples=[True])
    reasoning_effort: Effort | None = Field(
        None, description="How much to reason, if the chat template supports it; `none`: not at all.", examples=["low"]
    )
    enable_thinking: bool | None = Field(
        None, description="Whether to reason, if the chat template supports it. Not OpenAI's.", examples=[False]
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables of the chat template; those that it does not read are refused. Not OpenAI's.",
        examples=[{"enable_thinking": False}],
    )
    include_reasoning: bool | None = Field(
        None, description="Whether the reply contains the reasoning; default true. Not OpenAI's.", examples=[True]
    )
    thinking: NotSupported = None
    thinking_token_budget: NotSupported = None
    reasoning: NotFilled = None
    functions: Annotated[Any, Refused([])] = None
    function_call: Annotated[Any, Refused("none", "auto")] = None
    modalities: Annotated[Any, Refused(["text"])] = None
    audio: NotSupported = None
    verbosity: Annotated[Any, Refused("medium")] = None
    web_search_options: NotSupported = None
    moderation: NotSupported = None
    echo: NotTrue = None
    chat_template: NotSupported = None
    documents: NotFilled = None
    add_special_tokens: NotTrue = None
