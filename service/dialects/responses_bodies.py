"""The body of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

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
    ServedTypes,
    Unserved,
    by_content,
    by_type,
)
from triptych.service.dialects.openai_bodies import SCHEMA_EXAMPLE, Effort, RefusalPart, choice_shape
from triptych.service.dialects.other_fields import Cached, Routed
from triptych.service.schemas.parameters import RESPONSES, Parameters
from triptych.service.schemas.types import PIXEL, Detail, TextOrTexts

_Marked = Annotated[Any, Ignored("clients copy it from replies")]
_Direct = Annotated[Any, Refused({"type": "direct"})]


class InputText(DialectBody):
    type: Literal["input_text", "output_text", "text"] = Field(
        description="The type of the part.", examples=["input_text"]
    )
    text: str = Field(description="The text.", examples=["Hello"])
    annotations: Annotated[Any, Ignored("templates read no citations")] = None
    logprobs: _Marked = None
    parsed: Annotated[Any, Ignored("clients that parse replies add it; the text contains it")] = None
    prompt_cache_breakpoint: Cached = None


class InputImage(DialectBody):
    """An image of a user or of a function, for models that read pictures."""

    type: Literal["input_image"] = Field(description="The type of the part.", examples=["input_image"])
    image_url: str = Field(
        description="A data URL; an address is refused.", examples=[f"data:image/png;base64,{PIXEL}"]
    )
    detail: Detail | None = Field(
        None, description="`low`: the image takes fewer tokens, of models that read any size.", examples=["auto"]
    )
    file_id: NotSupported = None
    prompt_cache_breakpoint: Cached = None


class UnservedInput(Unserved):
    """A part that chat models here cannot read."""

    file_url: NotSupported = None
    file_data: NotSupported = None
    file_id: NotSupported = None
    input_audio: NotSupported = None
    type: Annotated[Any, ServedTypes("input_text", "input_image", "output_text", "refusal")]


_PARTS = dict.fromkeys(("input_text", "output_text", "text"), "<text>")
_PARTS |= {"refusal": "<refusal>", "input_image": "<image>"}
InputPart = Annotated[
    Annotated[InputText, Tag("<text>")]
    | Annotated[InputImage, Tag("<image>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[SkipJsonSchema[UnservedInput], Tag(OTHER)],
    Discriminator(
        by_type(_PARTS),
        custom_error_type="union_type",
        custom_error_message="Input should be a part of the type input_text, input_image, output_text or refusal",
    ),
]
InputContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[InputPart], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


class InputItem(DialectBody):
    """The base of items; clients often send back those of an earlier response."""

    id: _Marked = None
    status: _Marked = None
    created_by: _Marked = None


class InputMessage(InputItem):
    type: Literal["message"] = Field("message", description="The type of the item.", examples=["message"])
    role: Literal["user", "assistant", "system", "developer"] = Field(description="The author.", examples=["user"])
    content: InputContent = Field(description="Text, or parts of it.", examples=["Hello"])
    phase: Annotated[Any, Ignored("templates do not distinguish answers from comments")] = None


class InputCall(InputItem):
    type: Literal["function_call"] = Field(description="The type of the item.", examples=["function_call"])
    call_id: str = Field(description="Id of the call, which its output repeats.", examples=["call_1"])
    name: str = Field(description="The function.", examples=["weather"])
    namespace: str | None = Field(None, description="The function's namespace.", examples=[None])
    arguments: str = Field(description="Its arguments as JSON.", examples=['{"city": "Oslo"}'])
    caller: _Direct = None
    async_: Annotated[Any, Refused(False)] = Field(None, alias="async")
    parsed_arguments: Annotated[Any, Ignored("clients that parse replies add it; `arguments` has them")] = None


class InputCallOutput(InputItem):
    type: Literal["function_call_output"] = Field(description="The type of the item.")
    call_id: str = Field(description="Id of the call.", examples=["call_1"])
    output: InputContent = Field(description="What the function returned.", examples=["Sun"])
    caller: _Direct = None
    name: Annotated[Any, Ignored("the call names the function")] = None
    namespace: Annotated[Any, Ignored("the call names the function")] = None


class ReasoningText(DialectBody):
    type: Literal["reasoning_text", "summary_text"] = Field(
        description="The type of the part.", examples=["reasoning_text"]
    )
    text: str = Field(description="The reasoning.", examples=["A city."])


class InputReasoning(InputItem):
    """Reasoning of an earlier response, for the chat template."""

    type: Literal["reasoning"] = Field(description="The type of the item.", examples=["reasoning"])
    summary: list[ReasoningText] | None = Field(None, description="Not read; `content` has the whole reasoning.")
    content: list[ReasoningText] | None = Field(None, description="The reasoning.")
    encrypted_content: NotSupported = None


class InputReference(DialectBody):
    """An item of a response that is stored, in place of the item itself."""

    type: Literal["item_reference"] = Field(description="The type of the item.", examples=["item_reference"])
    id: str = Field(max_length=300, description="Id of an item of its output.", examples=["msg_5f0c1d_0"])


class UnservedItem(Unserved):
    """An item of a tool or a store that this service does not have."""

    type: Annotated[Any, ServedTypes("message", "function_call", "function_call_output", "reasoning", "item_reference")]


_ITEMS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "reasoning": "<reasoning>",
    "item_reference": "<reference>",
}


AnyItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<call>")]
    | Annotated[InputCallOutput, Tag("<output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[InputReference, Tag("<reference>")]
    | Annotated[SkipJsonSchema[UnservedItem], Tag(OTHER)],
    Discriminator(
        by_type(_ITEMS, "message"),
        custom_error_type="union_type",
        custom_error_message="Input should be a message, function_call, function_call_output, reasoning or "
        "item_reference",
    ),
]
Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("<text>")]
    | Annotated[list[AnyItem], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


class ResponsesTool(DialectBody):
    """A function that the client can call."""

    type: Literal["function"] = Field(
        description="Only functions and namespaces of them are supported.", examples=["function"]
    )
    name: str = Field(pattern=NAME_PATTERN, description="Its name.", examples=["weather"])
    description: str | None = Field(None, description="What it does, for the model.", examples=["The weather now."])
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON schema of its arguments, an object.", examples=[SCHEMA_EXAMPLE]
    )
    strict: bool | None = Field(
        None, description="Constrain all arguments to the schema; default false, unlike OpenAI's.", examples=[True]
    )
    output_schema: Annotated[Any, Ignored("the model does not see it")] = None
    defer_loading: NotTrue = None
    allowed_callers: Annotated[Any, Refused(["direct"])] = None
    async_: Annotated[Any, Refused(False)] = Field(None, alias="async")


class ResponsesNamespace(DialectBody):
    """Functions of one source, such as an MCP server. The model sees `NAMESPACE__NAME`; calls have both separately."""

    type: Literal["namespace"] = Field(description="The type of the tool.", examples=["namespace"])
    name: str = Field(pattern=NAME_PATTERN, description="Its name.", examples=["mcp__crm"])
    description: str | None = Field(
        None, description="Description of the whole namespace, put before that of each function."
    )
    tools: list[ResponsesTool] = Field(description="Its functions.")


def _tool_shape(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<namespace>" if kind == "namespace" else "<function>"


ResponsesTools = Annotated[
    Annotated[ResponsesTool, Tag("<function>")] | Annotated[ResponsesNamespace, Tag("<namespace>")],
    Discriminator(_tool_shape),
]


class ResponsesNamedTool(DialectBody):
    """A choice that requires calls of one tool."""

    type: Literal["function"] = Field(description="Only functions are supported.", examples=["function"])
    name: str = Field(description="The name of one of `tools`.", examples=["weather"])


class ResponsesAllowedTools(DialectBody):
    """A choice that allows some tools; the template still gets all of them, so that the prefix stays cached."""

    type: Literal["allowed_tools"] = Field(description="The type of the choice.", examples=["allowed_tools"])
    mode: Literal["auto", "required"] = Field(description="Whether one of them must be called.", examples=["auto"])
    tools: list[ResponsesNamedTool] = Field(min_length=1, description="Which of `tools` may be called.")


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[ResponsesNamedTool, Tag("<tool>")]
    | Annotated[ResponsesAllowedTools, Tag("<allowed>")],
    Discriminator(choice_shape),
]


class TextFormat(DialectBody):
    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON that matches `schema`.", examples=["json_object"]
    )
    name: str | None = Field(None, description="A label of the client's.", examples=["person"])
    description: str | None = Field(None, description="A description of the client's.", examples=["A person."])
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="As in /generate.", examples=[SCHEMA_EXAMPLE]
    )
    strict: bool | None = Field(None, description="The schema is always enforced.", examples=[True])


class TextSettings(DialectBody):
    format: TextFormat | None = Field(None, description="The format of the answer.")
    verbosity: Annotated[Any, Refused("medium")] = None


class ReasoningSettings(DialectBody):
    effort: Effort | None = Field(
        None, description="How much to reason, if the chat template supports it; `none`: not at all.", examples=["low"]
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Reasoning is always returned in full, never summarized.", examples=["auto"]
    )
    generate_summary: NotSupported = None
    context: Annotated[Any, Refused("auto")] = None
    mode: Annotated[Any, Refused("standard")] = None


class ResponsesStreamOptions(DialectBody):
    include_obfuscation: Annotated[Any, Ignored("events are never padded")] = None


Include = Literal[
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
    "message.output_text.logprobs",
]


class InputTokensBody(Extended, Routed):
    """Count the tokens of a conversation, as OpenAI's responses do."""

    list_limits: ClassVar[Mapping[str, str]] = {"input": "max_chat_messages"}  # instead of `field_paths.MOST`

    input: Input = Field(
        description="A text, or items: messages, function calls, their outputs, reasoning.",
        examples=["Hello", [{"role": "user", "content": "Hello"}]],
    )
    instructions: str | None = Field(None, description="A system message before all others.", examples=["Be brief."])
    previous_response_id: str | None = Field(
        None, max_length=256, description="Continue from a response that was stored.", examples=["resp_5f0c1d"]
    )
    tools: list[ResponsesTools] | None = Field(None, description="The functions that the model may call.")
    tool_choice: ResponsesToolChoice | None = Field(
        None, description="As in chat completions.", examples=["auto", {"type": "function", "name": "weather"}]
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls; default true.", examples=[True])
    text: TextSettings | None = Field(None, description="The format of the answer.")
    reasoning: ReasoningSettings | None = Field(None, description="How much to reason.")
    enable_thinking: bool | None = Field(
        None, description="Whether to reason, if the chat template supports it. Not OpenAI's.", examples=[False]
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template. Not OpenAI's.", examples=[{"enable_thinking": False}]
    )
    truncation: Annotated[Any, Refused("disabled")] = None
    conversation: NotSupported = None
    personality: NotSupported = None


@RESPONSES.body
class ResponsesBody(InputTokensBody, Parameters):
    """Continue a conversation, as OpenAI's responses do; the model's chat template makes the prompt."""

    store: bool | None = Field(
        None, description="Store the conversation for `previous_response_id`; default: true if the store is on."
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])
    stream_options: ResponsesStreamOptions | None = Field(None, description="Options of a stream.")
    max_output_tokens: int | None = Field(
        None,
        description="Maximum number of tokens to generate. Default: until the model ends or the context is full.",
        examples=[64],
    )
    temperature: float | None = Field(
        None, description="0 is greedy. Default: the checkpoint's, else 1.", examples=[0.8]
    )
    top_k: int | None = Field(None, description="As in /generate; -1: off. Not OpenAI's.", examples=[40])
    stop: TextOrTexts | None = Field(
        None, description="Texts that end the output before them. Not OpenAI's.", examples=["\n\n"]
    )
    metadata: dict[str, str] | None = Field(
        None, max_length=16, description="Repeated in the reply.", examples=[{"a": "b"}]
    )
    user: str | None = Field(None, description="Repeated in the reply; no output depends on it.", examples=["u-1"])
    safety_identifier: str | None = Field(None, description="As `user`.", examples=["u-1"])
    client_metadata: Annotated[Any, Ignored("it identifies the agent")] = None
    prompt_cache_key: str | None = Field(
        None, description="Repeated in the reply; prefixes are cached without it.", examples=["chat-1"]
    )
    prompt_cache_options: Cached = None
    prompt_cache_retention: Cached = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    include: list[Include] | None = Field(
        None,
        description="Parts of a reply: log-probabilities of the answer's tokens. Reasoning is returned as text, never "
        "encrypted; the other parts belong to tools that this service does not have.",
        examples=[["reasoning.encrypted_content"]],
    )
    session_id: Annotated[Any, Ignored("prefixes are found without it; SGLang's")] = None
    extra_key: NotFilled = None
    background: NotTrue = None
    background_options: NotFilled = None
    context_management: NotFilled = None
    max_tool_calls: NotSupported = None
    moderation: NotSupported = None
    prompt: NotSupported = None
    access_programs: NotFilled = None
    image: NotFilled = None
    top_logprobs: int | None = Field(
        None, ge=0, description="Number of alternatives for each token of the answer.", examples=[2]
    )

    @property
    def has_logprobs(self) -> bool:
        """Whether the reply has the log-probabilities of the answer's tokens."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())
