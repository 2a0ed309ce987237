"""The replies. Hot ones are written as plain dictionaries by `service.http.json_replies`; tests hold them to these
shapes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from service.schemas.types import Reply

Finish = Literal["stop", "length", "deadline", "cancelled", "error"]


class ErrorDetail(Reply):
    message: str = Field(description="What is wrong and what would be right.", examples=["n must be at most 8"])
    type: str = Field(description="The class of error.", examples=["invalid_request_error"])
    param: str | None = Field(description="The field at fault.", examples=["n", "prompt[1][5]"])
    code: str | None = Field(description="A word for programs.", examples=["invalid_value"])


class ErrorReply(Reply):
    """Every error of every route."""

    error: ErrorDetail = Field(description="The error.")


class Usage(Reply):
    prompt_tokens: int = Field(description="Of all prompts; encoder-decoder: of the sources.", examples=[5])
    completion_tokens: int = Field(description="Generated, over all choices.", examples=[16])
    total_tokens: int = Field(description="The sum.", examples=[21])
    cached_tokens: int = Field(description="Prompt tokens that needed no computing.", examples=[0])


class TimingsReply(Reply):
    """Milliseconds since the request arrived, split where its first token was scheduled and where it came out."""

    queue_ms: float = Field(description="Until it was first scheduled.", examples=[0.4])
    prefill_ms: float = Field(description="From then to the first token.", examples=[5.1])
    decode_ms: float = Field(description="From the first token to the end.", examples=[80.2])
    ttft_ms: float = Field(description="From arrival to the first token.", examples=[5.5])
    total_ms: float = Field(description="From arrival to the end.", examples=[85.7])


class TopLogprob(Reply):
    id: int = Field(description="Token id.", examples=[42])
    text: str = Field(description="The token alone as text.", examples=[" the"])
    logprob: float = Field(description="Natural logarithm, of the model's own distribution.", examples=[-0.5])


class TokenLogprobReply(TopLogprob):
    top: list[TopLogprob] = Field(description="The likeliest alternatives.", examples=[[]])


class Choice(Reply):
    index: int = Field(description="prompt_index x n + which of the n: unique in the reply.", examples=[0])
    prompt_index: int = Field(description="Which prompt it continues.", examples=[0])
    text: str = Field(description="The text; in a stream, what is new of it.", examples=[" return n"])
    token_ids: list[int] | None = Field(None, description="Its ids, where asked for.", examples=[[42]])
    finish_reason: Finish | None = Field(description="Why it ended; null while it goes on.", examples=["stop"])
    stop_reason: int | str | None = Field(None, description="The stop id or text that ended it.", examples=["\n"])
    score: float | None = Field(
        None, description="Of beam search: its log-probability over its length.", examples=[-0.4]
    )
    logprobs: list[TokenLogprobReply] | None = Field(None, description="One for each output token.")
    prompt_logprobs: list[TokenLogprobReply | None] | None = Field(None, description="One for each prompt token.")


class GenerateReply(Reply):
    id: str = Field(description="The request id.", examples=["5f0c1d"])
    model: str = Field(description="Who answered.", examples=["code"])
    created: int = Field(description="Unix time.", examples=[1_790_000_000])
    choices: list[Choice] = Field(description="n for each prompt, in order.")
    usage: Usage = Field(description="Token counts.")
    timings: TimingsReply = Field(description="Where the time went.")


class GenerateEvent(Reply):
    """One event of a stream; the last also has usage and timings, or is an `ErrorReply`. Then comes `[DONE]`."""

    id: str = Field(description="The request id.", examples=["5f0c1d"])
    model: str = Field(description="Who answers.", examples=["code"])
    created: int = Field(description="Unix time.", examples=[1_790_000_000])
    choices: list[Choice] = Field(description="What is new.")
    usage: Usage | None = Field(None, description="On the last event.")
    timings: TimingsReply | None = Field(None, description="On the last event.")


class EncodeItem(Reply):
    index: int = Field(description="Which input.", examples=[0])
    embedding: list[float] | str | None = Field(None, description="Its vector.", examples=[[0.1, -0.2]])
    tokens: list[list[float]] | str | None = Field(None, description="A vector for each token.")
    scores: list[float] | list[list[float]] | str | None = Field(
        None, description="Logits over the reply's labels; a row for each token from a token classifier."
    )
    shape: list[int] | None = Field(None, description="Rows and columns of base64 in rows.", examples=[[3, 384]])
    truncated: bool | None = Field(None, description="True when the input was cut.", examples=[True])


class EncodeReply(Reply):
    id: str = Field(description="The request id.", examples=["5f0c1d"])
    model: str = Field(description="Who answered.", examples=["embed"])
    created: int = Field(description="Unix time.", examples=[1_790_000_000])
    data: list[EncodeItem] = Field(description="One for each input, in order.")
    labels: list[str] | None = Field(None, description="What `scores` are of.", examples=[["NEGATIVE", "POSITIVE"]])
    usage: Usage = Field(description="Token counts.")
    timings: TimingsReply = Field(description="Where the time went.")


class TokenizeReply(Reply):
    model: str = Field(description="Whose tokenizer.", examples=["code"])
    token_ids: list[int] = Field(description="The ids.", examples=[[1, 42]])
    count: int = Field(description="How many.", examples=[2])
    max_model_len: int = Field(description="What the model can take.", examples=[1024])
    texts: list[str] | None = Field(None, description="Each token alone.", examples=[["<s>", "def"]])


class DetokenizeReply(Reply):
    model: str = Field(description="Whose tokenizer.", examples=["code"])
    text: str = Field(description="The text.", examples=["def"])


class HealthReply(Reply):
    status: Literal["ok"] = Field(description="Otherwise the reply is a 503 error with the reason.", examples=["ok"])


class CancelReply(Reply):
    id: str = Field(description="The request id.", examples=["my-request-1"])
    cancelled: int = Field(description="How many running requests of that id were ended.", examples=[1])


class InfoReply(Reply):
    name: str = Field(description="The service.", examples=["triptych"])
    version: str = Field(description="Its version.", examples=["0.1.0"])
    versions: dict[str, str] = Field(description="What it runs on.", examples=[{"python": "3.11.7"}])
    models: list[dict[str, Any]] = Field(description="Each model: form, size, limits, device, attention backend.")
    elsewhere: dict[str, str] = Field(
        description="Models of other groups, and the route below which each is served.", examples=[{"chat": "/chat"}]
    )
    asks_for_key: bool = Field(description="Whether requests must carry a key.", examples=[False])
    limits: dict[str, float] = Field(description="The bounds on one request.", examples=[{"max_n": 8}])

    model_id: str = Field(description="For clients of Hugging Face's servers: the first model.", examples=["code"])
    model_sha: str | None = Field(None, description="Not known.", examples=[None])
    model_dtype: str = Field(description="Of the first model.", examples=["float32"])
    model_pipeline_tag: str | None = Field(description="What it does.", examples=["text-generation"])
    model_type: dict[str, Any] | None = Field(description="What an encoder does.", examples=[None])
    max_concurrent_requests: int = Field(description="That run or wait.", examples=[320])
    max_best_of: int = Field(description="`best_of`.", examples=[1])
    max_stop_sequences: int = Field(description="`stop`.", examples=[4])
    max_input_length: int = Field(description="Tokens of an input.", examples=[1024])
    max_input_tokens: int = Field(description="Tokens of an input.", examples=[1023])
    max_total_tokens: int = Field(description="Tokens of input and output.", examples=[1024])
    max_batch_tokens: int = Field(description="Tokens of a step.", examples=[2048])
    max_client_batch_size: int = Field(description="Inputs of a request.", examples=[256])
    auto_truncate: bool = Field(description="Inputs are cut only where asked.", examples=[False])
    tokenization_workers: int = Field(description="Threads.", examples=[2])
    validation_workers: int = Field(description="Threads.", examples=[2])
    router: str = Field(description="The service.", examples=["triptych"])
    sha: str | None = Field(None, description="Not known.", examples=[None])
    docker_label: str | None = Field(None, description="Not known.", examples=[None])


class ModelCard(Reply):
    id: str = Field(description="The name to ask for.", examples=["code"])
    object: Literal["model"] = Field("model", description="As OpenAI's API has it.", examples=["model"])
    created: int = Field(description="Unix time at which the service started.", examples=[1_790_000_000])
    owned_by: str = Field(description="As OpenAI's API has it.", examples=["triptych"])


class ModelsReply(Reply):
    object: Literal["list"] = Field("list", description="As OpenAI's API has it.", examples=["list"])
    data: list[ModelCard] = Field(description="The loaded models.")
