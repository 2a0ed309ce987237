"""OpenAI's API: completions and chat completions.

A sequence that ended at its deadline or was cancelled has the finish_reason `abort`, as in other servers of this API:
OpenAI has no such reason, and `stop` and `length` would be wrong. Ids are OpenAI's prefix and the request id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych.service.chat.conversation import Conversation, template_variables
from triptych.service.chat.tools import Tool, ToolUse, called_arguments, tool_use
from triptych.service.core.errors import invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects.common import json_format, native_generate, native_top_k, sampling_fields
from triptych.service.dialects.openai_bodies import (
    AllowedToolChoice,
    ChatBody,
    CompletionBody,
    Format,
    ImagePart,
    Message,
    NamedTool,
    RefusalPart,
    Sampling,
    TextPart,
    ToolBody,
    UnservedPart,
)
from triptych.service.http.json_replies import Json
from triptych.service.images.pictures import Content, content_of, picture, text
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.parameters import OPENAI

COMPLETION_NAMES = OPENAI.names | {"prompt_logprobs": "logprobs"}
CHAT_NAMES = {**COMPLETION_NAMES, "prediction": "prediction.content", "prompt": "messages", "logprobs": "top_logprobs"}
DEFAULT_MAX_TOKENS = 16  # of completions, as at OpenAI; chats may fill the context

_GRAMMARS = ("guided_grammar", "grammar", "ebnf")  # fields of vLLM, llama.cpp and SGLang


def completion_names(body: CompletionBody) -> Mapping[str, str]:
    """Return the body's own field names, by native name."""
    return {**_structure_names(body), **COMPLETION_NAMES}


def check_completion(body: CompletionBody) -> None:
    """Raise `ApiError`, with the body's own field names, for fields that contradict each other."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of must be n: choosing among more is not supported", "best_of", "not_supported")
    if body.suffix and body.echo and body.logprobs is not None:
        message = "echo with logprobs has no meaning with suffix: the model reads marks between the texts"
        raise invalid(message, "echo", "not_supported")
    _check_structure(body)


def check_chat(body: ChatBody) -> None:
    """Raise as `check_completion`."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    _check_structure(body)


def completion(body: CompletionBody, served: ServedModel) -> GenerateBody:
    """Translate a completion body; raises `ApiError` with native field names."""
    fields = _sampling(body, served) | {
        "max_tokens": DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        "echo": body.echo,
        "logprobs": body.logprobs,
        "suffix": body.suffix or None,
    }
    if body.echo and body.logprobs is not None:
        fields["prompt_logprobs"] = body.logprobs
    if not prompt_only(body):
        return native_generate(fields, body.prompt)
    found = native_generate(fields | {"max_tokens": 1, "min_tokens": None}, body.prompt)
    return found.model_copy(update={"max_tokens": 0})  # not allowed in a native body


def prompt_only(body: CompletionBody) -> bool:
    """Whether only the prompt and its log-probabilities are requested; one token is generated and not shown."""
    return body.max_tokens == 0 and bool(body.echo)


def conversation(body: ChatBody, served: ServedModel) -> Conversation:
    """Return the messages, tools and template variables of a chat body; raises `ApiError`."""
    if body.continue_final_message and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other"
        raise invalid(problem, "continue_final_message")
    effort, others = body.reasoning_effort, body.chat_template_kwargs
    return Conversation(
        [message(one, f"messages[{at}]") for at, one in enumerate(body.messages)],
        _tool_use(body),
        template_variables(served.chat, effort, "reasoning_effort", body.enable_thinking, others),
        to_speak=body.add_generation_prompt is not False,
        continues=bool(body.continue_final_message),
    )


def _tool_use(body: ChatBody) -> ToolUse:
    tools = tuple(tool(one, f"tools[{at}].function") for at, one in enumerate(body.tools or ()))
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case NamedTool(function=named):
            return tool_use(tools, "required", (named.name,), parallel=parallel)
        case AllowedToolChoice(allowed_tools=allowed):
            return tool_use(tools, allowed.mode, (one.function.name for one in allowed.tools), parallel=parallel)
        case choice:
            return tool_use(tools, choice, None, parallel=parallel)


def tool(body: ToolBody, param: str) -> Tool:
    """Return a tool whose function is the field `param`."""
    function = body.function
    return Tool(function.name, function.description, function.parameters, bool(function.strict), f"{param}.parameters")


def chat(body: ChatBody, served: ServedModel, prompt: list[int], *, with_ids: bool) -> GenerateBody:
    """Translate a chat body whose messages have become the token ids `prompt`; `with_ids`: return ids of the reply."""
    fields = _sampling(body, served) | {
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "prediction": None if body.prediction is None else joined(body.prediction.content),
        "return_token_ids": with_ids,
    }
    return native_generate(fields, prompt)


def chat_names(body: ChatBody) -> Mapping[str, str]:
    """Return the body's own field names, by native name."""
    names = {**_structure_names(body), **CHAT_NAMES}
    if body.max_completion_tokens is None:
        return names
    return {**names, "max_tokens": "max_completion_tokens"}


def message(one: Message, param: str) -> Json:
    """Return a message as templates expect it: no nulls, text as one string, arguments as objects."""
    if one.content is None and one.refusal is None and not one.tool_calls:
        raise invalid(f"{param}.content is missing", f"{param}.content", "missing_field")
    found = one.model_dump(exclude_none=True)
    refusal = found.pop("refusal", None)
    if "reasoning" in found:
        found.setdefault("reasoning_content", found.pop("reasoning"))
    if one.content is not None:
        found["content"] = _content(one.content, param, one.role)
    elif refusal is not None:
        found["content"] = refusal
    for call in found.get("tool_calls", ()):
        if isinstance(given := call["function"]["arguments"], str):
            call["function"]["arguments"] = called_arguments(given)
    return found


def joined(content: str | Sequence[TextPart | RefusalPart | UnservedPart]) -> str:
    """Return content as one text, with line breaks between parts."""
    return (
        content
        if isinstance(content, str)
        else "\n".join(part.text for part in content if not isinstance(part, UnservedPart))
    )


def _content(
    content: str | Sequence[TextPart | ImagePart | RefusalPart | UnservedPart], param: str, role: str
) -> Content:
    """Return the content of a message, which is the field `param`, as one text or with images as a list of parts."""
    if isinstance(content, str):
        return content
    return content_of([_part(one, f"{param}.content[{at}].image_url") for at, one in enumerate(content)], role)


def _part(part: TextPart | ImagePart | RefusalPart | UnservedPart, param: str) -> Json:
    if not isinstance(part, ImagePart):
        return text(part.text)
    if isinstance(part.image_url, str):
        return picture(part.image_url, param)
    return picture(part.image_url.url, f"{param}.url", part.image_url.detail)


def _sampling(body: Sampling, served: ServedModel) -> dict[str, Any]:
    return sampling_fields(body, OPENAI, served) | {
        "n": body.n,
        "stop": body.stop,
        "top_k": native_top_k(body.top_k),
        "allowed_token_ids": body.allowed_token_ids or None,
        "include_stop": body.include_stop_str_in_output,
        **_structure(body),
    }


def is_held(body: Sampling) -> bool:
    """Whether a grammar constrains the answer."""
    format = body.response_format
    is_formatted = format is not None and format.type != "text"
    return is_formatted or body.structured_outputs is not None or bool(_grammars(body))


def _grammars(body: Sampling) -> list[str]:
    """Return the names of the given fields that contain a grammar."""
    return [name for name in _GRAMMARS if getattr(body, name) is not None]


def _check_structure(body: Sampling) -> None:
    vllm, grammars = body.structured_outputs, _grammars(body)
    if len(grammars) + (vllm is not None and vllm.grammar is not None) > 1:
        raise invalid(f"{grammars[-1]} excludes the other fields for a grammar", grammars[-1])
    if vllm is None:
        return
    if body.response_format is not None and body.response_format.type != "text":
        raise invalid("structured_outputs and response_format exclude each other", "structured_outputs")
    if vllm.json_ is not None and vllm.json_object:
        place = "structured_outputs.json_object"
        raise invalid(f"{place} and structured_outputs.json exclude each other", place)


def _structure(body: Sampling) -> Json:
    """Return the native fields of the output constraint."""
    found: Json = {}
    if body.response_format is not None:
        found["response_format"] = _format(body.response_format)
    vllm, grammars = body.structured_outputs, _grammars(body)
    if grammars:
        found["grammar"] = getattr(body, grammars[0])
    if vllm is None:
        return found
    if vllm.json_ is not None:
        found["response_format"] = json_format(vllm.json_, "structured_outputs.json")
    elif vllm.json_object:
        found["response_format"] = {"type": "json_object"}
    if vllm.grammar is not None:
        found["grammar"] = vllm.grammar
    return found | {"regex": vllm.regex, "choice": vllm.choice}


def _format(body: Format) -> Json:
    if body.bare_schema is not None:
        param, schema = body.bare_schema
        if body.type != "json_object":
            raise invalid(f"{param} needs the type json_object; with json_schema, send json_schema.schema", param)
        if body.json_schema is not None or (body.value is not None and body.schema_ is not None):
            raise invalid(f"{param} excludes the other fields for a schema", param)
        return json_format(schema, param)
    if body.json_schema is None:
        return {"type": body.type}
    framed = body.json_schema.schema_
    return {"type": body.type, "json_schema": {} if framed is None else {"schema": framed}}


def _structure_names(body: Sampling) -> dict[str, str]:
    grammars = _grammars(body)
    named = {"grammar": grammars[0]} if grammars else {}
    if body.structured_outputs is None:
        bare = body.response_format and body.response_format.bare_schema
        return named | ({"response_format.json_schema.schema": bare[0]} if bare else {})
    schema = (
        "structured_outputs.json" if body.structured_outputs.json_ is not None else "structured_outputs.json_object"
    )
    names = {name: f"structured_outputs.{name}" for name in ("regex", "choice", "grammar")}
    return {"response_format.json_schema.schema": schema, "response_format": schema, **names, **named}
