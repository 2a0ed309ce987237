"""Replies of the dialects, with the shapes of their own documentation.

`service.dialects` writes plain dictionaries; the OpenAPI document describes these, and a test compares all replies with
them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from service.schemas.types import Reply

_ID = Field(description="The request id.", examples=["cmpl-5f0c1d"])
_CREATED = Field(description="Unix time.", examples=[1_790_000_000])
_MODEL = Field(description="The model that replied.", examples=["code"])
INDEX = Field(description="Which choice.", examples=[0])
TOKEN_TEXT = Field(description="The token alone as text.", examples=[" the"])
LOGPROB = Field(description="Natural logarithm, of the model's own distribution.", examples=[-0.5])
_PROMPT_TOKENS = Field(description="Tokens of all prompts.", examples=[5])
_COMPLETION_TOKENS = Field(description="Tokens generated, over all choices.", examples=[16])
TOTAL_TOKENS = Field(description="The sum.", examples=[21])

OpenAIFinish = Literal["stop", "length", "tool_calls", "abort", "error"]


class OpenAIPromptDetails(Reply):
    cached_tokens: int = Field(description="Prompt tokens that came from the prefix cache.", examples=[0])


class OpenAICompletionDetails(Reply):
    reasoning_tokens: int | None = Field(
        None, description="Tokens of the reasoning, with its marks, of a model that can reason.", examples=[120]
    )
    accepted_prediction_tokens: int | None = Field(None, description="Drafted tokens that were right.", examples=[12])
    rejected_prediction_tokens: int | None = Field(None, description="Drafted tokens that were wrong.", examples=[3])


class OpenAIUsage(Reply):
    prompt_tokens: int = _PROMPT_TOKENS
    completion_tokens: int = _COMPLETION_TOKENS
    total_tokens: int = TOTAL_TOKENS
    prompt_tokens_details: OpenAIPromptDetails = Field(description="Details of the prompt tokens.")
    completion_tokens_details: OpenAICompletionDetails | None = Field(
        None, description="Of a chat with a model that can reason, and if any tokens were drafted."
    )


class OpenAICompletionLogprobs(Reply):
    text_offset: list[int] = Field(description="Offset of each token in the text, in characters.", examples=[[0]])
    token_logprobs: list[float | None] = Field(description="Log-probability of each token.", examples=[[-0.5]])
    tokens: list[str] = Field(description="Each token alone as text.", examples=[[" the"]])
    top_logprobs: list[dict[str, float] | None] | None = Field(
        description="The most likely alternatives.", examples=[[{" a": -1.0}]]
    )


class OpenAICompletionChoice(Reply):
    index: int = INDEX
    text: str = Field(description="The text; in a stream, its new part.", examples=[" return n"])
    logprobs: OpenAICompletionLogprobs | None = Field(description="If requested.")
    finish_reason: OpenAIFinish | None = Field(description="Why it ended.", examples=["stop"])


class OpenAIHead(Reply):
    """The first fields of every reply and event."""

    id: str = _ID
    created: int = _CREATED
    model: str = _MODEL


class OpenAICompletion(OpenAIHead):
    """A `text_completion`; each event of a stream is one too."""

    object: Literal["text_completion"] = Field(description="The type of this object.", examples=["text_completion"])
    choices: list[OpenAICompletionChoice] = Field(description="n for each prompt.")
    usage: OpenAIUsage | None = Field(None, description="In a stream only with `include_usage`.")


class OpenAIToken(Reply):
    token: str = TOKEN_TEXT
    logprob: float = LOGPROB
    bytes: list[int] | None = Field(description="UTF-8 of the token; null for a part of a character.")


class OpenAITopToken(OpenAIToken):
    top_logprobs: list[OpenAIToken] = Field(description="The most likely alternatives.")


class OpenAIChatLogprobs(Reply):
    content: list[OpenAITopToken] = Field(description="One for each output token.")
    refusal: None = Field(description="Always null.", examples=[None])


class OpenAIFunctionCall(Reply):
    name: str = Field(description="The function.", examples=["weather"])
    arguments: str = Field(description="Its arguments, as the text of a JSON object.", examples=['{"city": "Oslo"}'])


class OpenAIToolCall(Reply):
    id: str = Field(description="What the tool's message refers to.", examples=["call_5f0c1d"])
    type: Literal["function"] = Field(description="The type of the tool.", examples=["function"])
    function: OpenAIFunctionCall = Field(description="The call.")


class OpenAIMessage(Reply):
    role: Literal["assistant"] = Field(description="The role of the author.", examples=["assistant"])
    content: str | None = Field(description="The text; null beside tool calls, if there is none.", examples=["Paris."])
    reasoning_content: str | None = Field(None, description="What the model reasoned before.", examples=["A capital."])
    tool_calls: list[OpenAIToolCall] | None = Field(None, description="The functions that the model calls.")
    refusal: None = Field(description="Always null.", examples=[None])


class OpenAIChatChoice(Reply):
    index: int = INDEX
    message: OpenAIMessage = Field(description="The reply.")
    logprobs: OpenAIChatLogprobs | None = Field(description="If requested.")
    finish_reason: OpenAIFinish = Field(description="Why it ended.", examples=["stop"])


class OpenAIChatCompletion(OpenAIHead):
    object: Literal["chat.completion"] = Field(description="The type of this object.", examples=["chat.completion"])
    choices: list[OpenAIChatChoice] = Field(description="n choices.")
    usage: OpenAIUsage = Field(description="Token counts.")


class OpenAIFunctionDelta(Reply):
    name: str | None = Field(None, description="The function, on the first event of a call.", examples=["weather"])
    arguments: str = Field(description="The new part.", examples=['{"ci'])


class OpenAIToolDelta(Reply):
    index: int = Field(description="Which call of the choice.", examples=[0])
    id: str | None = Field(None, description="On the first event of a call.", examples=["call_5f0c1d"])
    type: Literal["function"] | None = Field(None, description="On the first event of a call.", examples=["function"])
    function: OpenAIFunctionDelta = Field(description="The new part of the call.")


class OpenAIDelta(Reply):
    role: Literal["assistant"] | None = Field(None, description="On the first event.", examples=["assistant"])
    content: str | None = Field(None, description="The new part.", examples=["Pa"])
    reasoning_content: str | None = Field(None, description="The new part of the reasoning.", examples=["A ca"])
    tool_calls: list[OpenAIToolDelta] | None = Field(None, description="The new part of a tool call.")


class OpenAIChunkChoice(Reply):
    index: int = INDEX
    delta: OpenAIDelta = Field(description="The new part.")
    logprobs: OpenAIChatLogprobs | None = Field(description="If requested.")
    finish_reason: OpenAIFinish | None = Field(description="On the last event.", examples=["stop"])


class OpenAIChatChunk(OpenAIHead):
    object: Literal["chat.completion.chunk"] = Field(
        description="The type of this object.", examples=["chat.completion.chunk"]
    )
    choices: list[OpenAIChunkChoice] = Field(description="The new part of one choice; empty on the event with usage.")
    usage: OpenAIUsage | None = Field(None, description="With `include_usage`, on an event of its own.")


class OpenAIEmbedding(Reply):
    object: Literal["embedding"] = Field(description="The type of this object.", examples=["embedding"])
    index: int = Field(description="Which input.", examples=[0])
    embedding: list[float] | str = Field(description="Its vector, or that as base64 of float32.", examples=[[0.1]])


class OpenAIEmbeddingUsage(Reply):
    prompt_tokens: int = _PROMPT_TOKENS
    total_tokens: int = TOTAL_TOKENS


class OpenAIEmbeddings(Reply):
    object: Literal["list"] = Field(description="The type of this object.", examples=["list"])
    data: list[OpenAIEmbedding] = Field(description="One for each input, in order.")
    model: str = _MODEL
    usage: OpenAIEmbeddingUsage = Field(description="Token counts.")


class HuggingFaceToken(Reply):
    id: int = Field(description="Token id.", examples=[42])
    text: str = TOKEN_TEXT
    logprob: float = LOGPROB
    special: bool = Field(description="Whether it is a special token, without text.", examples=[False])


class HuggingFacePrefillToken(Reply):
    id: int = Field(description="Token id.", examples=[42])
    text: str = TOKEN_TEXT
    logprob: float | None = Field(description="Null for the first.", examples=[-0.5])


class HuggingFaceEnding(Reply):
    finish_reason: Literal["eos_token", "stop_sequence", "length"] = Field(
        description="The reason.", examples=["length"]
    )
    generated_tokens: int = _COMPLETION_TOKENS
    seed: int | None = Field(description="Of sampling; null when greedy.", examples=[7])


class HuggingFaceDetails(HuggingFaceEnding):
    prefill: list[HuggingFacePrefillToken] = Field(description="Tokens of the prompt, if requested.")
    tokens: list[HuggingFaceToken] = Field(description="One for each output token.")
    top_tokens: list[list[HuggingFaceToken]] | None = Field(
        None, description="The most likely alternatives, if requested."
    )


class HuggingFaceText(Reply):
    generated_text: str = Field(description="The text.", examples=[" return n"])
    details: HuggingFaceDetails | None = Field(None, description="If requested.")


class HuggingFaceRewritten(Reply):
    generated_text: str = Field(description="The text.", examples=["der dritte März"])
    translation_text: str = Field(description="The same, for a client that translates.", examples=["der dritte März"])
    summary_text: str = Field(description="The same, for a client that summarizes.", examples=["der dritte März"])


class HuggingFaceTranslation(Reply):
    translation_text: str = Field(description="The translation.", examples=["der dritte März"])


class HuggingFaceSummary(Reply):
    summary_text: str = Field(description="The summary.", examples=["They paid."])


class HuggingFaceStreamEnding(HuggingFaceEnding):
    input_length: int = _PROMPT_TOKENS


class HuggingFaceEvent(Reply):
    index: int = Field(description="Which token, from 1.", examples=[1])
    token: HuggingFaceToken = Field(description="The token.")
    top_tokens: list[HuggingFaceToken] | None = Field(None, description="The most likely alternatives, if requested.")
    generated_text: str | None = Field(description="The whole text, on the last event.", examples=[None])
    details: HuggingFaceStreamEnding | None = Field(description="On the last event.")


class HuggingFaceRank(Reply):
    index: int = Field(description="Which text.", examples=[0])
    score: float = Field(description="Relevance to the query.", examples=[0.9])
    text: str | None = Field(None, description="The text, if requested.", examples=["a cat"])


class HuggingFaceClass(Reply):
    score: float = Field(description="Probability, or logit if requested.", examples=[0.9])
    label: str = Field(description="The class.", examples=["POSITIVE"])


class EncodeUsage(Reply):
    prompt_tokens: int = _PROMPT_TOKENS
    total_tokens: int = TOTAL_TOKENS


class RankedDocument(Reply):
    text: str = Field(description="The text.", examples=["a cat"])


class RankedResult(Reply):
    index: int = Field(description="Which document.", examples=[0])
    relevance_score: float = Field(description="Relevance to the query.", examples=[0.9])
    document: RankedDocument | None = Field(None, description="The document, if requested.")


class Ranked(Reply):
    id: str = _ID
    model: str = _MODEL
    object: Literal["list"] = Field(description="Always list.", examples=["list"])
    results: list[RankedResult] = Field(description="The best first.")
    usage: EncodeUsage = Field(description="Token counts.")


class _Listed(Reply):
    id: str = _ID
    object: Literal["list"] = Field(description="Always list.", examples=["list"])
    created: int = _CREATED
    model: str = _MODEL
    usage: EncodeUsage = Field(description="Token counts.")


class ScoredPair(Reply):
    index: int = Field(description="Which pair.", examples=[0])
    object: Literal["score"] = Field(description="Always score.", examples=["score"])
    score: float = Field(description="How well the two belong together.", examples=[0.9])


class Scored(_Listed):
    data: list[ScoredPair] = Field(description="One for each pair, in order.")


class ClassifiedText(Reply):
    index: int = Field(description="Which text.", examples=[0])
    label: str = Field(description="The most likely class.", examples=["POSITIVE"])
    probs: list[float] = Field(description="The probability of each class.", examples=[[0.1, 0.9]])
    num_classes: int = Field(description="Number of classes.", examples=[2])


class Classified(_Listed):
    data: list[ClassifiedText] = Field(description="One for each text, in order.")


class CohereVectors(Reply):
    id: str = _ID
    response_type: Literal["embeddings_floats", "embeddings_by_type"] = Field(
        description="Whether `embeddings` is a list of vectors or has lists by type.", examples=["embeddings_by_type"]
    )
    embeddings: list[list[float]] | dict[str, list[Any]] = Field(
        description="The vectors.", examples=[{"float": [[0.1, -0.2]]}]
    )
    texts: list[str] = Field(description="The texts.", examples=[["a cat"]])
    meta: dict[str, Any] = Field(
        description="The version, and the token count.",
        examples=[{"api_version": {"version": "2"}, "billed_units": {"input_tokens": 5}}],
    )


class HuggingFaceSparse(Reply):
    index: int = Field(description="Id of a vocabulary entry.", examples=[2051])
    value: float = Field(description="Its weight.", examples=[0.4])


class HuggingFaceFill(Reply):
    score: float = Field(description="Probability.", examples=[0.4])
    token: int = Field(description="Token id.", examples=[2051])
    token_str: str = Field(description="The token alone as text.", examples=["time"])
    sequence: str = Field(description="The text with the token in the mask's place.", examples=["a long time ago"])


class HuggingFaceAnswer(Reply):
    score: float = Field(description="Probability.", examples=[0.7])
    start: int = Field(description="First character in the context.", examples=[10])
    end: int = Field(description="Character behind the last one.", examples=[14])
    answer: str = Field(description="The answer; empty: there is none.", examples=["1843"])


class HuggingFaceEntity(Reply):
    entity: str | None = Field(None, description="The label, without aggregation.", examples=["B-PER"])
    entity_group: str | None = Field(None, description="The label, with aggregation.", examples=["PER"])
    score: float = Field(description="Probability.", examples=[0.98])
    index: int | None = Field(None, description="The token's place, without aggregation.", examples=[1])
    word: str = Field(description="As the tokenizer writes it.", examples=["Ada"])
    start: int = Field(description="First character.", examples=[0])
    end: int = Field(description="Character behind the last one.", examples=[3])


Vectors = list[list[float]]
