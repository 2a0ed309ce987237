"""OpenAI's API: completions, chat completions, embeddings.

A sequence that ended by its deadline or was cancelled has the finish_reason `abort`, which OpenAI's API does not know
but servers of it use: `stop` and `length` would not be true. Ids carry the request id after OpenAI's prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from service.dialects.common import native, native_seed, native_top_k, sampled
from service.dialects.openai_bodies import ChatBody, CompletionBody, EmbeddingBody, Message, Sampling
from service.encode_plan import EncodePlan
from service.errors import invalid
from service.registry import ServedModel
from service.replies import Json
from service.schemas.bodies import EncodeBody, GenerateBody

COMPLETION_NAMES = {"include_stop": "include_stop_str_in_output", "prompt_logprobs": "logprobs"}
CHAT_NAMES = {**COMPLETION_NAMES, "prompt": "messages", "logprobs": "top_logprobs"}
DEFAULT_MAX_TOKENS = 16  # of completions; a chat has the model's own default

_SAME = (
    *("model", "timeout_s", "request_id", "stream", "top_p", "n", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("skip_special_tokens", "priority", "cache_salt"),
)


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
    if prompt_only(asked):
        fields |= {"max_tokens": 1, "min_tokens": None}
    return native(GenerateBody, fields)


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
    if asked.max_completion_tokens is None:
        return CHAT_NAMES
    return {**CHAT_NAMES, "max_tokens": "max_completion_tokens"}


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
    names = ("model", "input", "encoding_format", "dimensions", "timeout_s", "request_id")
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
    }


def _arguments(given: str | Json) -> object:
    """Clients send arguments as JSON in a string."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
