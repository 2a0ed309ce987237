"""The replies, for /openapi.json. The frequent ones are built as dictionaries in `triptych.service.http.json_replies`.

Tests compare those with these models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from triptych.service.core.models_folder import NAME_PATTERN
from triptych.service.schemas.types import Body, Reply
from triptych.service.settings.option_table import REQUEST_OPTIONS

Finish = Literal["stop", "length", "deadline", "cancelled", "error"]


class ErrorDetail(Reply):
    message: str = Field(description="What is wrong and what is expected.", examples=["n must be at most 8"])
    type: str = Field(description="The type of error.", examples=["invalid_request_error"])
    param: str | None = Field(description="The field that caused the error.", examples=["n", "prompt[1][5]"])
    code: str | None = Field(description="A word that programs can compare.", examples=["invalid_value"])


class ErrorReply(Reply):
    """The errors of all routes."""

    error: ErrorDetail = Field(description="The error.")


class AnthropicErrorDetail(Reply):
    type: str = Field(description="The type of error.", examples=["invalid_request_error"])
    message: str = Field(description="What is wrong, with the field's name.", examples=["max_tokens is required"])
    details: dict[str, Any] | None = Field(None, description="For a `thread`: how the client recognizes the refusal.")


class AnthropicError(Reply):
    """The errors of Anthropic's routes."""

    type: Literal["error"] = Field(description="The type of this object.", examples=["error"])
    error: AnthropicErrorDetail = Field(description="The error.")
    request_id: str = Field(description="The request id.", examples=["5f0c1d"])


class OllamaError(Reply):
    """The errors of Ollama's routes."""

    error: str = Field(
        description="What is wrong and what is expected.", examples=["model 'x' not found; served: chat"]
    )


class Usage(Reply):
    prompt_tokens: int = Field(description="Tokens of all prompts; encoder-decoder: of the sources.", examples=[5])
    completion_tokens: int = Field(description="Generated tokens of all choices.", examples=[16])
    total_tokens: int = Field(description="The sum of both.", examples=[21])
    cached_tokens: int = Field(description="Prompt tokens found in the prefix cache.", examples=[0])
    accepted_prediction_tokens: int | None = Field(
        None, description="With speculative decoding: draft tokens that were accepted.", examples=[12]
    )
    rejected_prediction_tokens: int | None = Field(
        None, description="With speculative decoding: draft tokens that were rejected.", examples=[3]
    )


class TimingsReply(Reply):
    """Milliseconds from a request's arrival to its end, divided into queue, prefill and decode."""

    queue_ms: float = Field(description="From arrival until it was first scheduled.", examples=[0.4])
    prefill_ms: float = Field(description="From first being scheduled to the first token.", examples=[5.1])
    decode_ms: float = Field(description="From the first token to the end.", examples=[80.2])
    ttft_ms: float = Field(description="From arrival to the first token.", examples=[5.5])
    total_ms: float = Field(description="From arrival to the end.", examples=[85.7])


class TopLogprob(Reply):
    id: int = Field(description="Token id.", examples=[42])
    text: str = Field(description="The token alone as text.", examples=[" the"])
    logprob: float = Field(description="Natural logarithm of the model's own probability.", examples=[-0.5])
    bytes: list[int] | None = Field(
        None, description="Its bytes, if it is a part of a character and has no text of its own.", examples=[None]
    )


class TokenLogprobReply(TopLogprob):
    top: list[TopLogprob] = Field(description="The most likely alternatives.", examples=[[]])


class Choice(Reply):
    index: int = Field(description="Unique in the reply: prompt_index x n + its place among the n.", examples=[0])
    prompt_index: int = Field(description="Index of the prompt that it continues.", examples=[0])
    text: str = Field(description="The text; in a stream, its new part.", examples=[" return n"])
    token_ids: list[int] | None = Field(None, description="Its token ids, if requested.", examples=[[42]])
    finish_reason: Finish | None = Field(description="Why it ended; null while it continues.", examples=["stop"])
    stop_reason: int | str | None = Field(None, description="The stop id or text that ended it.", examples=["\n"])
    score: float | None = Field(
        None, description="With beam search: log-probability divided by length ** length_penalty.", examples=[-0.4]
    )
    logprobs: list[TokenLogprobReply] | None = Field(None, description="One for each output token.")
    prompt_logprobs: list[TokenLogprobReply | None] | None = Field(None, description="One for each prompt token.")


class ReplyFrame(Reply):
    id: str = Field(description="The request id.", examples=["5f0c1d"])
    model: str = Field(description="The model that replies.", examples=["code"])
    created: int = Field(description="Unix time.", examples=[1_790_000_000])


class GenerateReply(ReplyFrame):
    choices: list[Choice] = Field(description="The n choices of each prompt, in order.")
    usage: Usage = Field(description="Token counts.")
    timings: TimingsReply = Field(description="The request's times.")


class GenerateEvent(ReplyFrame):
    """One event of a stream. The last one also has usage and timings, or is an `ErrorReply`; `[DONE]` follows it."""

    choices: list[Choice] = Field(description="New parts of choices.")
    usage: Usage | None = Field(None, description="Token counts, in the last event.")
    timings: TimingsReply | None = Field(None, description="The request's times, in the last event.")


class Candidate(Reply):
    token: int = Field(description="Token id.", examples=[2051])
    text: str = Field(description="The token alone as text.", examples=["time"])
    score: float = Field(description="Its probability.", examples=[0.4])
    sequence: str = Field(description="The input with the token in place of the mask.", examples=["a long time ago"])


class Mask(Reply):
    position: int = Field(description="Index of the mask among the tokens.", examples=[3])
    candidates: list[Candidate] = Field(description="The candidates, best first.")


class Entity(Reply):
    label: str = Field(description="Its class, without B- or I- if tokens are joined.", examples=["PER"])
    score: float = Field(description="Its probability; the mean for several tokens.", examples=[0.98])
    start: int = Field(description="First character.", examples=[0])
    end: int = Field(description="Character after the last one.", examples=[5])
    text: str = Field(description="The text, as the tokenizer writes it.", examples=["Ada Lovelace"])
    position: int | None = Field(None, description="Without aggregation: index of the token.", examples=[1])


class Answer(Reply):
    score: float = Field(description="Probability of its start x probability of its end.", examples=[0.7])
    start: int = Field(description="First character in the context.", examples=[10])
    end: int = Field(description="Character after the last one.", examples=[14])
    text: str = Field(description="The answer; empty: the context has none.", examples=["1843"])


class EncodeItem(Reply):
    index: int = Field(description="Index of the input.", examples=[0])
    embedding: list[float] | list[int] | str | None = Field(None, description="The vector.", examples=[[0.1, -0.2]])
    embeddings: list[list[float]] | list[list[int]] | list[str] | None = Field(
        None, description="With `chunks` or `split`: a vector for each chunk or window.", examples=[[[0.1], [0.2]]]
    )
    places: list[list[int]] | None = Field(
        None,
        description="First character of each window, and the character after its last.",
        examples=[[[0, 310], [250, 480]]],
    )
    tokens: list[list[float]] | str | None = Field(None, description="A vector for each token.")
    scores: list[float] | list[list[float]] | str | None = Field(
        None, description="Logits over the reply's labels; from a token classifier, a row for each token."
    )
    shape: list[int] | None = Field(None, description="Rows and columns of a matrix in base64.", examples=[[3, 384]])
    truncated: bool | None = Field(None, description="True if the input was truncated.", examples=[True])
    indices: list[int] | None = Field(None, description="sparse: ids of vocabulary entries.", examples=[[17, 2051]])
    weights: list[float] | None = Field(None, description="sparse: their weights.", examples=[[0.4, 1.2]])
    vectors: list[list[float]] | str | None = Field(None, description="multi_vector: a vector for each scored token.")
    masks: list[Mask] | None = Field(None, description="fill_mask: an entry for each mask token, in order.")
    entities: list[Entity] | None = Field(None, description="token_classification: in the order of the text.")
    answers: list[Answer] | None = Field(None, description="question_answering: best first.")
    labels: list[str] | None = Field(None, description="zero_shot: the labels of `scores`.", examples=[["sports"]])
    windows: int | None = Field(None, description="Number of windows in which a long text was read.", examples=[3])


class EncodeReply(Reply):
    id: str = Field(description="The request id.", examples=["5f0c1d"])
    model: str = Field(description="The model that replied.", examples=["embed"])
    created: int = Field(description="Unix time.", examples=[1_790_000_000])
    data: list[EncodeItem] = Field(description="An item for each input, in order.")
    labels: list[str] | None = Field(None, description="The classes of `scores`.", examples=[["NEGATIVE", "POSITIVE"]])
    usage: Usage = Field(description="Token counts.")
    timings: TimingsReply = Field(description="The request's times.")


class TokenizeReply(Reply):
    model: str = Field(description="The model of the tokenizer.", examples=["code"])
    token_ids: list[int] = Field(description="The ids.", examples=[[1, 42]])
    count: int = Field(description="Their number.", examples=[2])
    max_model_len: int = Field(description="The model's context length.", examples=[1024])
    texts: list[str] | None = Field(None, description="Each token as text.", examples=[["<s>", "def"]])


class DetokenizeReply(Reply):
    model: str = Field(description="The model of the tokenizer.", examples=["code"])
    text: str = Field(description="The text.", examples=["def"])


class HealthReply(Reply):
    status: Literal["ok"] = Field(description="Otherwise the reply is a 503 error with the reason.", examples=["ok"])


class CancelReply(Reply):
    id: str = Field(description="The request id.", examples=["my-request-1"])
    cancelled: int = Field(description="Number of running requests with this id that were cancelled.", examples=[1])


class EmbedCacheInfo(Reply):
    """The cache of results of one process."""

    max_bytes: int = Field(description="Its size, for all models together.", examples=[268435456])
    bytes: int = Field(description="The used part of it.", examples=[1048576])
    entries: int = Field(description="The number of results.", examples=[512])


class InfoReply(Reply):
    name: str = Field(description="The service.", examples=["triptych"])
    version: str = Field(description="Its version.", examples=["0.2.0"])
    versions: dict[str, str] = Field(description="Versions of Python and libraries.", examples=[{"python": "3.11.7"}])
    models: list[dict[str, Any]] = Field(
        description="Form, size, limits, abilities, device and attention backend of each model."
    )
    elsewhere: dict[str, str] = Field(
        description="Models of other groups, with the path prefix of each.", examples=[{"chat": "/chat"}]
    )
    embed_cache: EmbedCacheInfo | None = Field(description="The cache of results of /encode; null: off.")
    resident_bytes: int = Field(
        description="Bytes that the engine process has in the host's memory now, with the weights that it maps.",
        examples=[780_000_000],
    )
    asks_for_key: bool = Field(description="Whether requests need a key.", examples=[False])
    confinement: dict[str, Any] = Field(
        description="What confines the processes for templates, grammars and files: the version "
        "of Landlock (0: none), and whether there are seccomp filters.",
        examples=[{"landlock": 7, "seccomp": True}],
    )
    limits: dict[str, float] = Field(description="The limits on one request.", examples=[{"max_n": 8}])
    max_state_bytes: int | None = Field(
        description="Maximum bytes of all files and batches; null: without `--state-dir`, there are none.",
        examples=[10_000_000_000],
    )

    model_id: str = Field(description="For clients of Hugging Face's servers: the first model.", examples=["code"])
    model_sha: str | None = Field(None, description="Not known.", examples=[None])
    model_dtype: str = Field(description="Number format of the first model.", examples=["float32"])
    model_pipeline_tag: str | None = Field(description="Task of the first model.", examples=["text-generation"])
    model_type: dict[str, Any] | None = Field(description="Type of the first model, if it encodes.", examples=[None])
    max_concurrent_requests: int = Field(description="Maximum number of running and waiting requests.", examples=[320])
    max_best_of: int = Field(description="Maximum of `best_of`.", examples=[1])
    max_stop_sequences: int = Field(description="Maximum number of stop texts.", examples=[4])
    max_input_length: int = Field(description="Maximum tokens of an input.", examples=[1024])
    max_input_tokens: int = Field(description="Maximum tokens of a prompt.", examples=[1023])
    max_total_tokens: int = Field(description="Maximum tokens of input and output.", examples=[1024])
    max_batch_tokens: int = Field(description="Maximum tokens of a step.", examples=[2048])
    max_client_batch_size: int = Field(description="Maximum inputs of a request.", examples=[256])
    auto_truncate: bool = Field(description="False: inputs are truncated only if requested.", examples=[False])
    tokenization_workers: int = Field(description="Number of tokenizer threads.", examples=[2])
    validation_workers: int = Field(description="The same.", examples=[2])
    router: str = Field(description="The service.", examples=["triptych"])
    sha: str | None = Field(None, description="Not known.", examples=[None])
    docker_label: str | None = Field(None, description="Not known.", examples=[None])


class ModelCard(Reply):
    id: str = Field(description="The name to use in requests.", examples=["code"])
    object: Literal["model"] = Field("model", description="As in OpenAI's API.", examples=["model"])
    created: int = Field(description="Unix time at which the service started.", examples=[1_790_000_000])
    owned_by: str = Field(description="As in OpenAI's API.", examples=["triptych"])
    root: str = Field(
        description="Of a LoRA adapter the model that it is for; else the same as `id`.", examples=["code"]
    )
    parent: str | None = Field(description="Of a LoRA adapter the model that it is for; else null.", examples=[None])
    max_model_len: int | None = Field(
        description="Tokens of the context, of prompt and output together; null if it is not known.", examples=[2048]
    )


class ModelsReply(Reply):
    object: Literal["list"] = Field("list", description="As in OpenAI's API.", examples=["list"])
    data: list[ModelCard] = Field(description="The loaded models.")


class UsageSums(Reply):
    """What was used; a group has its labels, such as `tenant`, as well."""

    model_config = ConfigDict(extra="allow")

    requests: int = Field(description="Accepted requests that ended.", examples=[12])
    prompt_tokens: int = Field(description="Tokens of prompts and inputs.", examples=[3400])
    cached_tokens: int = Field(description="Those of them that the prefix cache had.", examples=[1200])
    completion_tokens: int = Field(description="Generated tokens.", examples=[870])
    audio_seconds: float = Field(description="Seconds of audio files.", examples=[0.0])
    images: int = Field(description="Image files.", examples=[0])
    engine_seconds: float = Field(description="Seconds from first being scheduled to the end.", examples=[9.5])


class UsageReply(Reply):
    object: Literal["list"] = Field("list", description="As in OpenAI's API.", examples=["list"])
    from_: str = Field(alias="from", description="The first hour.", examples=["2027-01-31T00:00:00Z"])
    to: str = Field(description="The end, which is not included.", examples=["2027-02-01T00:00:00Z"])
    is_stored: bool = Field(
        description="Whether usage survives a restart (`--state-dir`); if not, it begins with the service.",
        examples=[True],
    )
    by: list[str] = Field(description="The labels of the groups.", examples=[["tenant"]])
    data: list[UsageSums] = Field(description="The groups.")
    total: UsageSums = Field(description="The sum of all groups.")


# -- Bodies and replies of the routes that load and unload models.

Name = Annotated[str, Field(min_length=1, max_length=256)]
Setting = str | int | float | bool
ModelStateName = Literal["loaded", "loading", "unloading", "available", "unloaded", "failed"]

_SETTINGS: JsonDict = {option.name: {"description": option.help} for option in REQUEST_OPTIONS}


class LoadBody(Body):
    """Load a model, and serve it under `name`."""

    name: Name = Field(description=f"Its name. A new name must match `{NAME_PATTERN}`.", examples=["translate"])
    path: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="A folder in `--models-dir`, or a model of the Hub (`hf:ORGANISATION/NAME@REVISION`), as "
        "`--load-from` allows. Not needed for a model that `GET /models` lists.",
        examples=["opus-mt-en-de"],
    )
    settings: dict[str, Setting] = Field(
        default_factory=dict,
        description="Its engine settings, as in a configuration file.",
        examples=[{"dtype": "bfloat16", "max_model_len": 2048}],
        json_schema_extra={"properties": _SETTINGS, "additionalProperties": False},
    )
    adapter_of: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="The known model that `path` has a LoRA adapter for; the adapter is a model under `name`.",
        examples=[None],
    )
    pinned: bool = Field(
        False, description="Keep it loaded, even if it is idle or its memory is needed.", examples=[False]
    )
    wait: bool = Field(
        True, description="Reply when it is loaded; false: reply at once with status 202.", examples=[True]
    )


class LoraBody(Body):
    """Load a LoRA adapter; the fields are vLLM's."""

    lora_name: Name = Field(description="The model name of its requests.", examples=["sql"])
    lora_path: str = Field(
        min_length=1, max_length=4096, description="Its folder, as `path` of /models/load.", examples=["sql-adapter"]
    )
    load_inplace: bool = Field(False, description="Replace an adapter that has this name.", examples=[False])
    base_model_name: Name | None = Field(None, description="The model that it is for.", examples=[None])


class UnloadLoraBody(Body):
    """Unload a LoRA adapter; the fields are vLLM's."""

    lora_name: Name = Field(description="The adapter.", examples=["sql"])
    lora_int_id: int | None = Field(None, description="Has no effect.", examples=[None])


class UnloadBody(Body):
    """Unload a model, or cancel its load."""

    name: Name = Field(description="The model.", examples=["translate"])
    drain_s: float | None = Field(
        None,
        ge=0,
        le=3600,
        description="Seconds after which its running requests are cancelled. Default: `--drain-timeout`.",
        examples=[30],
    )
    wait: bool = Field(
        True, description="Reply when its memory is free; false: reply at once with status 202.", examples=[True]
    )


class ModelState(Reply):
    """A model on all replicas together."""

    name: str = Field(description="The name to use in requests.", examples=["translate"])
    state: ModelStateName = Field(
        description="A request that names an `available` model loads it; only /models/load loads an `unloaded` one.",
        examples=["loaded"],
    )
    reason: str = Field(description="Why it failed or is unloaded; else empty.", examples=[""])
    origin: Literal["start", "models-dir", "request"] = Field(
        description="How it became known: at the start, in `--models-dir`, or by /models/load.", examples=["request"]
    )
    path: str = Field(description="Its folder, or its name on the Hub.", examples=["hf:Helsinki-NLP/opus-mt-en-de"])
    pinned: bool = Field(description="Whether it stays loaded.", examples=[False])
    form: str = Field(description="Its form; empty if it is not known.", examples=["encoder-decoder"])
    memory_bytes: int = Field(
        description="Bytes of its weights and KV cache in one replica; 0: not loaded.", examples=[310_000]
    )
    load_seconds: float = Field(description="Seconds that loading took.", examples=[1.4])
    requests: int = Field(description="Number of requests that use it now.", examples=[0])
    idle_s: float = Field(description="Seconds since its last use, or since it was loaded or found.", examples=[12.5])
    adapter_of: str = Field(description="Of a LoRA adapter the model that it is for; else empty.", examples=[""])
    replicas: dict[str, int] = Field(description="The number of replicas by state.", examples=[{"loaded": 2}])


class ModelStates(Reply):
    models: list[ModelState] = Field(description="All known models.")
    memory_bytes: int = Field(description="Bytes of all loaded models in one replica.", examples=[310_000])
    memory_limit: int | None = Field(description="`--model-memory`; null: no limit.", examples=[8_000_000_000])
