"""Replies and events of OpenAI's responses and Anthropic's messages, with the shapes of their own documentation.

`service.dialects` writes plain dictionaries; the OpenAPI document describes these, and a test compares them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from service.schemas.types import Reply

_ID = Field(description="The request id behind a prefix.", examples=["resp_5f0c1d"])
_MODEL = Field(description="The model that replied.", examples=["code"])


class OpenAIInputDetails(Reply):
    cached_tokens: int = Field(description="Prompt tokens that came from the prefix cache.", examples=[0])
    cache_write_tokens: int = Field(description="Always 0: the cache costs nothing.", examples=[0])


class OpenAIOutputDetails(Reply):
    reasoning_tokens: int = Field(description="Tokens of the reasoning, with its marks.", examples=[0])


class OpenAIResponseUsage(Reply):
    input_tokens: int = Field(description="Tokens of the prompt.", examples=[5])
    input_tokens_details: OpenAIInputDetails = Field(description="Details of these.")
    output_tokens: int = Field(description="Tokens generated.", examples=[16])
    output_tokens_details: OpenAIOutputDetails = Field(description="Details of these.")
    total_tokens: int = Field(description="The sum.", examples=[21])


class OpenAIOutputItem(Reply):
    """A `message`, `reasoning` or `function_call`; a call has `call_id`, `name` and `arguments`, others `content`."""

    type: Literal["message", "reasoning", "function_call"] = Field(description="Its type.", examples=["message"])
    id: str = Field(description="Its id.", examples=["msg_5f0c1d_0"])
    status: Literal["in_progress", "completed", "incomplete"] = Field(
        description="`incomplete`: the response was cut off in it.", examples=["completed"]
    )
    role: Literal["assistant"] | None = Field(None, description="Of a message.", examples=["assistant"])
    content: list[dict[str, Any]] | None = Field(None, description="Parts: `output_text` or `reasoning_text`.")
    summary: list[Any] | None = Field(None, description="Of reasoning: always empty.")
    call_id: str | None = Field(None, description="What the call's output refers to.", examples=["call_1"])
    name: str | None = Field(None, description="The function.", examples=["weather"])
    namespace: str | None = Field(None, description="The namespace that it is in.", examples=["mcp__crm"])
    arguments: str | None = Field(None, description="Its arguments as JSON.", examples=['{"city": "Oslo"}'])


class OpenAIResponse(Reply):
    id: str = _ID
    object: Literal["response"] = Field(description="The type of this object.", examples=["response"])
    created_at: int = Field(description="Unix time.", examples=[1_790_000_000])
    completed_at: int | None = Field(None, description="Unix time of its end, of one that is complete.")
    status: Literal["in_progress", "completed", "incomplete", "failed"] = Field(description="How it ended.")
    error: dict[str, str] | None = Field(description="Why it failed.")
    incomplete_details: dict[str, str] | None = Field(description="Why it is incomplete.")
    model: str = _MODEL
    output: list[OpenAIOutputItem] = Field(description="What the model wrote, in order.")
    usage: OpenAIResponseUsage | None = Field(description="Token counts, at the end.")
    store: bool = Field(description="Whether `previous_response_id` may name it.")
    instructions: str | None = Field(description="Of the request.")
    max_output_tokens: int | None = Field(description="Of the request.")
    metadata: dict[str, str] = Field(description="Of the request.")
    parallel_tool_calls: bool = Field(description="Of the request.")
    previous_response_id: str | None = Field(description="Of the request.")
    reasoning: dict[str, str | None] = Field(description="Of the request.")
    temperature: float = Field(description="That was used.")
    text: dict[str, Any] = Field(description="Of the request.")
    tool_choice: str | dict[str, Any] = Field(description="Of the request.")
    tools: list[dict[str, Any]] = Field(description="Of the request.")
    top_p: float = Field(description="That was used.")
    truncation: Literal["disabled"] = Field(description="Always disabled.")
    user: str | None = Field(description="Of the request.")


class DeletedResponse(Reply):
    id: str = _ID
    object: Literal["response"] = Field(description="The type of this object.", examples=["response"])
    deleted: Literal[True] = Field(description="It is forgotten.", examples=[True])


class ResponseItems(Reply):
    object: Literal["list"] = Field(description="The type of this object.", examples=["list"])
    data: list[dict[str, Any]] = Field(description="Messages, calls, their outputs and reasoning.")
    first_id: str | None = Field(description="Of the first of them.", examples=["item_3"])
    last_id: str | None = Field(description="Of the last: `after` of the next page.", examples=["item_0"])
    has_more: bool = Field(description="Whether there is a next page.", examples=[False])


class OpenAIResponseEvent(Reply):
    """An event of a stream; which fields it has depends on its type, which is also its name."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="The type of the event.", examples=["response.output_text.delta"])
    sequence_number: int = Field(description="Counts the events of the stream.", examples=[0])
    response: OpenAIResponse | None = Field(None, description="Of events of the whole response.")
    delta: str | None = Field(None, description="The new part.", examples=["Pa"])


class AnthropicUsage(Reply):
    input_tokens: int = Field(description="Prompt tokens, without those from the prefix cache.", examples=[5])
    output_tokens: int = Field(description="Tokens generated.", examples=[16])
    cache_read_input_tokens: int = Field(0, description="Prompt tokens that came from the prefix cache.")
    cache_creation_input_tokens: int = Field(0, description="Always 0: the cache costs nothing.")
    output_tokens_details: dict[str, int] | None = Field(
        None, description="`thinking_tokens`: of the reasoning, with its marks.", examples=[{"thinking_tokens": 0}]
    )


class AnthropicBlock(Reply):
    """A block of `text`, `thinking` or `tool_use`."""

    type: Literal["text", "thinking", "tool_use"] = Field(description="Its type.", examples=["text"])
    text: str | None = Field(None, description="Of a text.", examples=["Paris."])
    thinking: str | None = Field(None, description="The reasoning.", examples=["A capital."])
    signature: str | None = Field(None, description="Of thinking: always empty.")
    id: str | None = Field(None, description="Of a call: what its result refers to.", examples=["call_1"])
    name: str | None = Field(None, description="Of a call: the tool.", examples=["weather"])
    input: dict[str, Any] | None = Field(None, description="Of a call: its arguments.", examples=[{"city": "Oslo"}])


class AnthropicMessage(Reply):
    id: str = _ID
    type: Literal["message"] = Field(description="The type of this object.", examples=["message"])
    role: Literal["assistant"] = Field(description="The author.", examples=["assistant"])
    model: str = _MODEL
    content: list[AnthropicBlock] = Field(description="What the model wrote, in order.")
    stop_reason: (
        Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use", "pause_turn"]
        | None
    ) = Field(description="Why it ended; null while it streams.", examples=["end_turn"])
    stop_sequence: str | None = Field(description="The text that ended it.")
    usage: AnthropicUsage = Field(description="Token counts.")


class AnthropicEvent(Reply):
    """An event of a stream; which fields it has depends on its type, which is also its name."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="The type of the event.", examples=["content_block_delta"])
    index: int | None = Field(None, description="Which block.", examples=[0])


class AnthropicCount(Reply):
    input_tokens: int = Field(description="Tokens of the prompt.", examples=[12])


class AnthropicErrorDetail(Reply):
    type: str = Field(description="Its kind.", examples=["invalid_request_error"])
    message: str = Field(description="What is wrong, naming the field.", examples=["max_tokens is required"])
    details: dict[str, Any] | None = Field(None, description="For a `thread`: what the client knows the refusal by.")


class AnthropicError(Reply):
    """The errors of Anthropic's routes."""

    type: Literal["error"] = Field(description="The type of this object.", examples=["error"])
    error: AnthropicErrorDetail = Field(description="The error.")
    request_id: str = Field(description="The request id.", examples=["5f0c1d"])
