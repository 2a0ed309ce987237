"""OpenAI's API: completions, chat completions, embeddings.

A sequence that ended by its deadline or was cancelled has the finish_reason `abort`, which OpenAI's API does not know
but servers of it use: `stop` and `length` would not be true. Ids carry the request id after OpenAI's prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from service.core.errors import invalid
from service.core.model_registry import ServedModel
from service.dialects.common import json_format, native, native_seed, native_top_k, sampled
from service.dialects.openai_bodies import ChatBody, CompletionBody, EmbeddingBody, Format, Message, Sampling
from service.http.json_replies import Json
from service.planning.encode import EncodePlan
from service.schemas.bodies import EncodeBody, GenerateBody

COMPLETION_NAMES = {"include_stop": "include_stop_str_in_output", "prompt_logprobs": "logprobs"}
CHAT_NAMES = {**COMPLETION_NAMES, "prompt": "messages", "logprobs": "top_logprobs"}
DEFAULT_MAX_TOKENS = 16  # of completions; a chat has the model's own default

_SAME = (
    *("model", "timeout_s", "request_id", "stream", "top_p", "n", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "priority", "cache_salt"),
)


def completion_names(asked: CompletionBody) -> Mapping[str, str]:
    """Native names to those that this body uses."""
    return {**_structure_names(asked), **COMPLETION_NAMES}


def completion(asked: CompletionBody, served: ServedModel) -> GenerateBody:
    """What a completion asks for; raises `ApiError` in native names."""
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise invalid("best_of must be n: choosing among more is not served", "best_of", "not_supported")
    fields = _sampling(asked, served) | {
        "prompt": asked.prompt,
        "max_tokens": DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        "echo": asked.echo,
        "logprobs": asked.logprobs,
    }
    if asked.echo and asked.logprobs is not None:
        fields["prompt_logprobs"] = asked.logprobs
    if not prompt_only(asked):
        return native(GenerateBody, fields)
    found = native(GenerateBody, fields | {"max_tokens": 1, "min_tokens": None})
    return found.model_copy(update={"max_tokens": 0})  # which a native body cannot say


def prompt_only(asked: CompletionBody) -> bool:
    """No output is wanted, only the prompt and what the model thinks of it; one token is generated and not shown."""
    return asked.max_tokens == 0 and bool(asked.echo)


def chat(asked: ChatBody, served: ServedModel, prompt: list[int]) -> GenerateBody:
    """What a chat completion asks for, with the ids that its messages have become."""
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    fields = _sampling(asked, served) | {
        "prompt": prompt,
        "max_tokens": asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }
    return native(GenerateBody, fields)


def chat_names(asked: ChatBody) -> Mapping[str, str]:
    """Native names to those that this body uses."""
    names = {**_structure_names(asked), **CHAT_NAMES}
    if asked.max_completion_tokens is None:
        return names
    return {**names, "max_tokens": "max_completion_tokens"}


def message(one: Message, param: str) -> Json:
    """A message as templates expect it: no null, text as one string, arguments as objects."""
    if one.content is None and not one.tool_calls:
        raise invalid(f"{param}.content is missing", f"{param}.content", "missing_field")
    found = one.model_dump(exclude_none=True)
    if isinstance(one.content, list):
        found["content"] = "\n".join(part.text for part in one.content)
    for call in found.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return found


def embedding(asked: EmbeddingBody) -> EncodeBody:
    """What an embedding asks for."""
    names = ("model", "input", "encoding_format", "dimensions", "normalize", "timeout_s", "request_id")
    return native(EncodeBody, {name: getattr(asked, name) for name in names})


def embedding_reply(plan: EncodePlan, reply: Json) -> Json:
    """OpenAI's reply for one of /encode."""
    usage = reply["usage"]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": item["index"], "embedding": item["embedding"]} for item in reply["data"]
        ],
        "model": reply["model"],
        "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]},
    }


def _sampling(asked: Sampling, served: ServedModel) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in _SAME} | {
        "temperature": sampled(asked.temperature, served),
        "num_beams": 1,
        "seed": native_seed(asked.seed),
        "top_k": native_top_k(asked.top_k),
        "include_stop": asked.include_stop_str_in_output,
        **_structure(asked),
    }


def _structure(asked: Sampling) -> Json:
    """The native fields of what the output must match."""
    found: Json = {}
    if asked.response_format is not None:
        found["response_format"] = _format(asked.response_format)
    vllm = asked.structured_outputs
    if vllm is None:
        return found
    if asked.response_format is not None and asked.response_format.type != "text":
        raise invalid("structured_outputs and response_format exclude each other", "structured_outputs")
    if vllm.json_ is not None and vllm.json_object:
        raise invalid("json_object and json exclude each other", "structured_outputs.json_object")
    if vllm.json_ is not None:
        found["response_format"] = json_format(vllm.json_, "structured_outputs.json")
    elif vllm.json_object:
        found["response_format"] = {"type": "json_object"}
    return found | {"regex": vllm.regex, "choice": vllm.choice}


def _format(asked: Format) -> Json:
    if asked.json_schema is None:
        return {"type": asked.type}
    schema = asked.json_schema.schema_
    return {"type": asked.type, "json_schema": {} if schema is None else {"schema": schema}}


def _structure_names(asked: Sampling) -> dict[str, str]:
    if asked.structured_outputs is None:
        return {}
    schema = (
        "structured_outputs.json" if asked.structured_outputs.json_ is not None else "structured_outputs.json_object"
    )
    names = {name: f"structured_outputs.{name}" for name in ("regex", "choice")}
    return {"response_format.json_schema.schema": schema, "response_format": schema, **names}


def _arguments(given: str | Json) -> object:
    """Clients send arguments as JSON in a string."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
