"""SGLang's API: `text` or `input_ids` with `sampling_params` on /generate, and on /encode.

Events of a stream have the whole text so far. The reply is an object for a single prompt with one choice, and a list
otherwise. A sequence that ended at its deadline or was cancelled has the finish_reason `abort`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import Field

from service.core.errors import invalid
from service.core.model_registry import ServedModel
from service.core.request_context import REQUEST_ID_PATTERN
from service.dialects.common import (
    DialectBody,
    Extended,
    NotFilled,
    NotSupported,
    NotTrue,
    Refused,
    Schema,
    json_format,
    native,
    native_seed,
    native_top_k,
    sampled,
)
from service.http.json_replies import DataEvents, Generation, Json
from service.planning.encode import EncodePlan
from service.schemas.bodies import GenerateBody
from service.schemas.encode_bodies import EncodeBody
from service.schemas.types import MAX_INT, Prompt, TextOrTexts, TokenId

_ABORTED = {"deadline": "the deadline passed", "cancelled": "the request was cancelled"}
_SAMPLING = {  # native: SGLang's
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop": "no_stop_trim",
    "grammar": "ebnf",
    **{
        name: name
        for name in ("n", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty")
    },
    **{
        name: name
        for name in (
            "presence_penalty",
            "repetition_penalty",
            "ignore_eos",
            "skip_special_tokens",
            "logit_bias",
            "regex",
        )
    },
}
_NAMES = {name: f"sampling_params.{theirs}" for name, theirs in _SAMPLING.items()} | {
    "response_format.json_schema.schema": "sampling_params.json_schema",
    "response_format": "sampling_params.json_schema",
}


class SamplingParameters(DialectBody):
    """Parameters of the generation."""

    max_new_tokens: int | None = Field(None, description="`max_tokens` of /generate, with its default.", examples=[32])
    min_new_tokens: int | None = Field(None, description="`min_tokens` of /generate.", examples=[0])
    temperature: float | None = Field(None, description="Default: the checkpoint's, else 1.", examples=[0.8])
    top_p: float | None = Field(None, description="As in /generate.", examples=[0.95])
    top_k: int | None = Field(None, description="As in /generate; -1: off.", examples=[-1])
    min_p: float | None = Field(None, description="As in /generate.", examples=[0.05])
    frequency_penalty: float | None = Field(None, description="As in /generate.", examples=[0.0])
    presence_penalty: float | None = Field(None, description="As in /generate.", examples=[0.0])
    repetition_penalty: float | None = Field(None, description="As in /generate.", examples=[1.0])
    n: int | None = Field(None, description="As in /generate.", examples=[1])
    stop: TextOrTexts | None = Field(None, description="As in /generate.", examples=["\n"])
    stop_token_ids: list[TokenId] | None = Field(None, description="As in /generate.", examples=[[2]])
    no_stop_trim: bool | None = Field(None, description="`include_stop` of /generate.", examples=[False])
    ignore_eos: bool | None = Field(None, description="As in /generate.", examples=[False])
    skip_special_tokens: bool | None = Field(None, description="As in /generate.", examples=[True])
    logit_bias: dict[TokenId, float] | None = Field(None, description="As in /generate.", examples=[{"42": -5}])
    sampling_seed: int | None = Field(None, description="`seed` of /generate.", examples=[7])
    spaces_between_special_tokens: Annotated[Any, Refused(True)] = None
    stop_regex: NotFilled = None
    beam_width: NotSupported = None
    json_schema: Schema | None = Field(
        None,
        description="A JSON schema, as text or an object, that constrains the output.",
        examples=['{"type": "object"}'],
    )
    regex: str | None = Field(None, description="As in /generate.", examples=["[0-9]{4}"])
    ebnf: str | None = Field(None, description="`grammar` of /generate.", examples=[None])
    structural_tag: NotSupported = None
    custom_params: NotFilled = None


class _SglangBody(Extended):
    text: TextOrTexts | None = Field(None, description="Text, or several.", examples=["def add(a, b):"])
    input_ids: Prompt | None = Field(None, description="Token ids, or several lists of them.", examples=[[1, 42]])
    request_id: str | None = Field(
        None, alias="rid", pattern=REQUEST_ID_PATTERN, description="The request id.", examples=["my-request-1"]
    )
    priority: int | None = Field(
        None,
        description="Higher is served first; at most `min_priority` of `/info`, negated.",
        examples=[0],
    )
    lora_path: NotSupported = None
    image_data: NotSupported = None
    input_embeds: NotSupported = None

    def source(self) -> tuple[str, Any]:
        """Return the name and the value of the field that holds the input."""
        given = {name: value for name in ("text", "input_ids") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise invalid("give one of text and input_ids", "input_ids", "ambiguous_body")
        return next(iter(given.items()))


class SglangGenerateBody(_SglangBody):
    """Generate text, as SGLang does."""

    sampling_params: SamplingParameters | None = Field(
        None, description="Parameters of the generation, for all prompts."
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.", examples=[False])
    return_logprob: bool | None = Field(None, description="Return log-probabilities of the tokens.", examples=[True])
    logprob_start_len: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT,
        description="The first prompt token to return them for; -1: only the output.",
        examples=[-1],
    )
    top_logprobs_num: int | None = Field(None, ge=0, description="Number of alternatives for each token.", examples=[2])
    return_text_in_logprobs: bool | None = Field(None, description="Return each token's text too.", examples=[True])
    token_ids_logprob: NotFilled = None
    return_hidden_states: NotTrue = None
    return_prompt_token_ids: NotTrue = None
    session_params: NotSupported = None
    custom_logit_processor: NotSupported = None
    cache_salt: str | None = Field(None, description="As in /generate.", examples=["tenant-7"])
    extra_key: NotSupported = None
    video_data: NotSupported = None
    audio_data: NotSupported = None


class SglangEncodeBody(_SglangBody):
    """Turn inputs into vectors, as SGLang does."""

    dimensions: int | None = Field(None, description="Number of leading dimensions to keep.", examples=[128])
    is_cross_encoder_request: NotTrue = None
    return_pooled_hidden_states: NotTrue = None


def generate_names(body: SglangGenerateBody) -> dict[str, str]:
    """Return the body's own field names, by native name."""
    alternatives = {"prompt_logprobs": "top_logprobs_num", "logprobs": "top_logprobs_num"}
    return {**_NAMES, **alternatives, "prompt": body.source()[0]}


def encode_names(body: SglangEncodeBody) -> dict[str, str]:
    return {"input": body.source()[0]}


def generate(body: SglangGenerateBody, served: ServedModel) -> GenerateBody:
    """Translate a generation body; raises `ApiError` with native field names."""
    params = body.sampling_params or SamplingParameters.model_validate({})
    fields: dict[str, Any] = {name: getattr(params, theirs) for name, theirs in _SAMPLING.items()}
    top = body.top_logprobs_num or 0
    fields |= {
        **_common(body),
        "prompt": body.source()[1],
        "stream": body.stream,
        "cache_salt": body.cache_salt,
        "priority": None if body.priority is None else -body.priority,
        "temperature": sampled(params.temperature, served),
        "num_beams": 1,
        "top_k": native_top_k(params.top_k),
        "seed": native_seed(params.sampling_seed),
        "return_token_ids": True,
        "logprobs": top if body.return_logprob else None,
        "response_format": None
        if params.json_schema is None
        else json_format(params.json_schema, "sampling_params.json_schema"),
        "prompt_logprobs": top if body.return_logprob and _start(body) is not None else None,
    }
    return native(GenerateBody, fields)


def encode(body: SglangEncodeBody) -> EncodeBody:
    """Translate an embedding body."""
    return native(EncodeBody, _common(body) | {"input": body.source()[1], "dimensions": body.dimensions})


def encode_reply(body: SglangEncodeBody) -> Callable[[EncodePlan, Json], object]:
    """Return an object for a single input, and a list for several."""
    _, value = body.source()
    several = isinstance(value, list) and not isinstance(value[0], int)

    def show(plan: EncodePlan, reply: Json) -> object:
        found = []
        for item, request in zip(reply["data"], plan.requests, strict=True):
            tokens = request.source.num_positions
            meta = {"id": reply["id"], "finish_reason": {"type": "stop"}, "prompt_tokens": tokens}
            found.append({"embedding": item["embedding"], "meta_info": meta | _latency(reply)})
        return found if several else found[0]

    return show


class SglangGeneration(DataEvents):
    """Renders replies and events of generation."""

    def __init__(self, generation: Generation, body: SglangGenerateBody) -> None:
        self._generation = generation
        self._body = body
        self._so_far: dict[int, Json] = {}
        value = body.source()[1]
        several = isinstance(value, list) and not isinstance(value[0], int)
        self._in_list = several or generation.plan.n > 1

    def events(self, event: Json) -> Iterable[Json]:
        for delta in event["choices"]:
            choice = self._add(delta)
            shown = self._choice(choice, event)
            yield {**shown, "index": delta["index"]} if self._in_list else shown

    def reply(self, reply: Json) -> object:
        found = [self._choice(choice, reply) for choice in reply["choices"]]
        return found if self._in_list else found[0]

    def _add(self, delta: Json) -> Json:
        before = self._so_far.get(delta["index"], {})
        choice = {**before, **delta, "text": before.get("text", "") + delta["text"]}
        for name in ("token_ids", "logprobs"):
            if name in delta:
                choice[name] = [*before.get(name, ()), *delta[name]]
        self._so_far[delta["index"]] = choice
        return choice

    def _choice(self, choice: Json, native_reply: Json) -> Json:
        at = choice["prompt_index"]
        meta: Json = {
            "id": native_reply["id"],
            "finish_reason": _finish(choice),
            "prompt_tokens": self._generation.plan.requests[at].num_sent_tokens,
            "completion_tokens": len(choice["token_ids"]),
            "cached_tokens": self._generation.cached_tokens(at),
        }
        if self._body.return_logprob:
            meta |= self._logprobs(choice)
        return {
            "text": choice["text"],
            "output_ids": choice["token_ids"],
            "meta_info": meta | _latency(native_reply),
        }

    def _logprobs(self, choice: Json) -> Json:
        entries = choice.get("logprobs") or []
        found = {"output_token_logprobs": [self._triple(entry) for entry in entries]}
        if self._body.top_logprobs_num:
            found["output_top_logprobs"] = [[self._triple(one) for one in entry["top"]] for entry in entries]
        start = _start(self._body)
        if start is not None and choice.get("prompt_logprobs"):
            found |= self._prompt_logprobs(choice, start)
        return found

    def _prompt_logprobs(self, choice: Json, start: int) -> Json:
        ids = self._generation.plan.requests[choice["prompt_index"]].prompt_token_ids
        first: Json = {"id": ids[0], "text": None, "logprob": None, "top": []}
        entries = [first, *choice["prompt_logprobs"][1:]][start:]
        found: Json = {"input_token_logprobs": [self._triple(entry) for entry in entries]}
        if self._body.top_logprobs_num:
            found["input_top_logprobs"] = [[self._triple(one) for one in entry["top"]] for entry in entries]
        return found

    def _triple(self, entry: Json) -> list[Any]:
        return [entry["logprob"], entry["id"], entry["text"] if self._body.return_text_in_logprobs else None]


def _common(body: _SglangBody) -> dict[str, Any]:
    return {name: getattr(body, name) for name in ("model", "timeout_s", "request_id")}


def _start(body: SglangGenerateBody) -> int | None:
    """Return the first prompt token whose log-probability is requested; None: none."""
    start = body.logprob_start_len
    return None if start is None or start < 0 else start


def _latency(reply: Json) -> Json:
    return {"e2e_latency": round(reply["timings"]["total_ms"] / 1000, 6)} if "timings" in reply else {}


def _finish(choice: Json) -> Json | None:
    reason = choice["finish_reason"]
    if reason is None:
        return None
    if reason == "stop":
        return {"type": "stop", "matched": choice.get("stop_reason")}
    if reason == "length":
        return {"type": "length", "length": len(choice["token_ids"])}
    return {"type": "abort", "message": _ABORTED.get(reason, "the engine failed")}
