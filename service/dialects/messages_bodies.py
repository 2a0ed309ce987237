"""The bodies of Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from triptych.service.chat.tools import NAME_PATTERN
from triptych.service.core.errors import NOT_SUPPORTED
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
from triptych.service.dialects.openai_bodies import SCHEMA_EXAMPLE, Effort
from triptych.service.dialects.other_fields import Cached, Transferred
from triptych.service.schemas.parameters import MESSAGES, Parameters
from triptych.service.schemas.types import PIXEL


class TextBlock(DialectBody):
    type: Literal["text"] = Field(description="The type of the block.", examples=["text"])
    text: str = Field(description="The text.", examples=["Hello"])
    cache_control: Cached = None
    citations: Annotated[Any, Ignored("templates read no citations")] = None


class ThinkingBlock(DialectBody):
    """Reasoning of an earlier message, for the chat template."""

    type: Literal["thinking"] = Field(description="The type of the block.", examples=["thinking"])
    thinking: str = Field(description="The reasoning.", examples=["A city."])
    signature: Annotated[Any, Ignored("reasoning is not signed")] = None


class RedactedThinkingBlock(DialectBody):
    """Encrypted reasoning, which is omitted: only the model that wrote it can read it."""

    type: Literal["redacted_thinking"] = Field(description="The type of the block.", examples=["redacted_thinking"])
    data: Annotated[Any, Ignored("only the model that wrote it can read it")] = None


class ToolUseBlock(DialectBody):
    list_limits: ClassVar[Mapping[str, str]] = {"input": ""}  # instead of `field_paths.MOST`

    type: Literal["tool_use"] = Field(description="The type of the block.", examples=["tool_use"])
    id: str = Field(description="Id of the call, which its result repeats.", examples=["toolu_1"])
    name: str = Field(description="The tool.", examples=["weather"])
    input: dict[str, Any] = Field(description="Its arguments.", examples=[{"city": "Oslo"}])
    caller: Annotated[Any, Refused({"type": "direct"})] = None
    toolset_name: NotSupported = None
    cache_control: Cached = None


class ImageSource(DialectBody):
    type: Literal["base64", "url", "file"] = Field(description="Only base64 is read.", examples=["base64"])
    media_type: str | None = Field(None, description="Not needed: the file says what it is.", examples=["image/jpeg"])
    data: str | None = Field(None, description="The file in base64.", examples=[PIXEL])
    url: Annotated[Any, Refused(instead="data, the file in base64: no address is followed")] = None
    file_id: NotSupported = None


class ImageBlock(DialectBody):
    """An image in a message of the user, or in the result of a tool, for models that read pictures."""

    type: Literal["image"] = Field(description="The type of the block.", examples=["image"])
    source: ImageSource = Field(description="The image.")
    transformations: Annotated[Any, Refused({}, {"oversized_image": "downsize"})] = None
    cache_control: Cached = None


class UnservedResult(Unserved):
    """A block that no result of a tool has."""

    source: NotSupported = None
    type: Annotated[Any, ServedTypes("text", "image")]


class UnservedText(Unserved):
    """A block that is not text, where only text is read."""

    source: NotSupported = None
    type: Annotated[Any, ServedTypes("text")]


class UnservedBlock(Unserved):
    """A block that chat models here cannot read, or of a tool that this service does not have."""

    source: NotSupported = None
    type: Annotated[Any, ServedTypes("text", "image", "thinking", "tool_use", "tool_result")]


TextBlocks = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[SkipJsonSchema[UnservedText], Tag(OTHER)],
    Discriminator(
        by_type({"text": "<text>"}),
        custom_error_type="union_type",
        custom_error_message="Input should be a block of text",
    ),
]
Texts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextBlocks], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


ResultBlocks = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[SkipJsonSchema[UnservedResult], Tag(OTHER)],
    Discriminator(
        by_type({"text": "<text>", "image": "<image>"}),
        custom_error_type="union_type",
        custom_error_message="Input should be a block of text or an image",
    ),
]
Results = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ResultBlocks], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


class ToolResultBlock(DialectBody):
    type: Literal["tool_result"] = Field(description="The type of the block.", examples=["tool_result"])
    tool_use_id: str = Field(description="Id of the call.", examples=["toolu_1"])
    content: Results | None = Field(None, description="What the tool returned.", examples=["Sun"])
    is_error: bool | None = Field(
        None, description="The tool failed: the text is marked as an error.", examples=[False]
    )
    toolset_name: NotSupported = None
    cache_control: Cached = None


_BLOCKS = {
    "text": "<text>",
    "image": "<image>",
    "thinking": "<thinking>",
    "redacted_thinking": "<redacted>",
    "tool_use": "<use>",
    "tool_result": "<result>",
}


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted>")]
    | Annotated[ToolUseBlock, Tag("<use>")]
    | Annotated[ToolResultBlock, Tag("<result>")]
    | Annotated[SkipJsonSchema[UnservedBlock], Tag(OTHER)],
    Discriminator(
        by_type(_BLOCKS),
        custom_error_type="union_type",
        custom_error_message="Input should be a block of text, image, thinking, tool_use or tool_result",
    ),
]
Blocks = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentBlock], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(by_content),
]


class ConversationMessage(DialectBody):
    role: Literal["user", "assistant", "system"] = Field(description="The author.", examples=["user"])
    content: Blocks = Field(description="Text, or blocks.", examples=["Hello"])
    clear_at: NotSupported = None
    output_config: NotFilled = None


class MessagesTool(DialectBody):
    """A tool that the client runs."""

    type: Literal["custom"] | None = Field(None, description="Only the client's own tools are supported.")
    name: str = Field(pattern=NAME_PATTERN, description="Its name.", examples=["weather"])
    description: str | None = Field(None, description="What it does, for the model.", examples=["The weather now."])
    input_schema: dict[str, Any] = Field(
        description="A JSON schema of its input, an object.", examples=[SCHEMA_EXAMPLE]
    )
    strict: bool | None = Field(None, description="Constrain its input to the schema.", examples=[True])
    cache_control: Cached = None
    eager_input_streaming: Annotated[Any, Ignored("calls are streamed as they are written")] = None
    input_examples: NotFilled = None
    defer_loading: NotTrue = None
    allowed_callers: Annotated[Any, Refused(["direct"])] = None


class MessagesToolChoice(DialectBody):
    type: Literal["auto", "any", "tool", "none"] = Field(
        description="`any`: at least one call; `tool`: a call of the tool `name`.", examples=["auto"]
    )
    name: str | None = Field(None, description="The tool to call, with the type `tool`.", examples=["weather"])
    disable_parallel_tool_use: bool | None = Field(None, description="Allow one call at most.", examples=[False])


class Thinking(DialectBody):
    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="Whether to reason, if the chat template supports it. Without `thinking`: disabled.",
        examples=["enabled"],
    )
    budget_tokens: int | None = Field(
        None,
        ge=1,
        description="Must be below `max_tokens`. Only `max_tokens` limits the reasoning: models here have no budget.",
        examples=[1024],
    )
    display: Literal["summarized", "full", "omitted"] | None = Field(
        None, description="`omitted`: the reply has no text of the reasoning.", examples=["summarized"]
    )
    block_binding: NotSupported = None


class OutputFormat(DialectBody):
    type: Literal["json_schema"] = Field(description="The type of the format.", examples=["json_schema"])
    schema_: dict[str, Any] = Field(
        alias="schema", description="A JSON schema of the answer.", examples=[SCHEMA_EXAMPLE]
    )


class OutputSettings(DialectBody):
    effort: Effort | None = Field(
        None, description="How much to reason, for chat templates that have levels; others do not read it."
    )
    format: OutputFormat | None = Field(None, description="A schema that constrains the answer.")
    task_budget: NotSupported = None


def _keeps_all(value: Any) -> Any:
    """Accept edits that keep everything, which agents send; other edits would change the conversation."""
    edits = value.get("edits", []) if isinstance(value, dict) else [value]
    if value is None or all(isinstance(edit, dict) and edit.get("keep") == "all" for edit in edits):
        return value
    raise PydanticCustomError(NOT_SUPPORTED, "")


class CountBody(Extended):
    """Count the tokens of a conversation, as Anthropic's API does."""

    messages: list[ConversationMessage] = Field(
        min_length=1,
        description="The conversation. If it ends with the assistant's text, that text is continued.",
        examples=[[{"role": "user", "content": "Hello"}]],
    )
    system: Texts | None = Field(None, description="A system message before all others.", examples=["Be brief."])
    tools: list[MessagesTool] | None = Field(None, description="The tools that the model may call.")
    tool_choice: MessagesToolChoice | None = Field(None, description="Whether the model may or must call a tool.")
    thinking: Thinking | None = Field(None, description="Whether to reason.")
    output_config: OutputSettings | None = Field(None, description="The format of the answer, and the effort.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template. Not Anthropic's.", examples=[{"enable_thinking": False}]
    )
    cache_control: Cached = None
    context_management: Annotated[Any, BeforeValidator(_keeps_all)] = Field(
        None, description="Accepted only with edits that keep everything."
    )
    mcp_servers: NotFilled = None
    user_profile_id: Annotated[Any, Ignored("no output depends on the end user")] = None
    workspace_id: Annotated[Any, Ignored("no output depends on the end user")] = None
    speed: Annotated[Any, Ignored("there is one speed")] = None
    billing_policy: Annotated[Any, Ignored("nothing is billed")] = None
    fallbacks: NotFilled = None
    fallback_credit_token: Annotated[Any, Ignored("nothing is billed")] = None
    compaction: NotSupported = None
    output_format: OutputFormat | None = Field(None, description="`output_config.format`, by its older name.")
    thread: NotSupported = None  # the client continues without a thread

    @property
    def format(self) -> OutputFormat | None:
        """The schema that constrains the answer."""
        return self.output_format or (None if self.output_config is None else self.output_config.format)


@MESSAGES.body
class MessagesBody(CountBody, Transferred, Parameters):
    """Continue a conversation, as Anthropic's messages do; the model's chat template makes the prompt."""

    max_tokens: int = Field(
        description="Maximum number of tokens to generate; reduced to what fits the context.",
        examples=[64],
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])
    stop_sequences: list[str] | None = Field(None, description="`stop` of /generate.", examples=[["\n\n"]])
    temperature: float | None = Field(
        None, description="0 is greedy. Default: the checkpoint's, else 1.", examples=[0.8]
    )
    metadata: Annotated[Any, Ignored("no output depends on the end user")] = None
    inference_geo: Annotated[Any, Ignored("requests run where this service runs")] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    container: NotSupported = None
    diagnostics: NotFilled = None
