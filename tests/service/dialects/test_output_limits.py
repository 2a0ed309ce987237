"""Requests without an output limit are treated as by the reference servers of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.service.dialects.support import CALLS, TURNS, talker
from tests.service.support import App, ask, byte_tokenizer, make_app, served
from triptych.service.core.models import ServedModel
from triptych.service.settings.service_settings import Limits, ServiceSettings

CONTEXT = 8_192
HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}]
CHAT = "/v1/chat/completions"
# Path, body, and the most tokens of an output; None: until the context is full.
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    *((CHAT, {"model": model, "messages": HELLO}, None) for model in ("chat", "calls")),
    (CHAT, {"model": "chat", "messages": HELLO, "n": 3, "stream": True}, None),
    (CHAT, {"model": "chat", "messages": HELLO, "response_format": {"type": "json_object"}}, None),
    (CHAT, {"model": "calls", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}, None),
    (CHAT, {"model": "chat", "messages": HELLO, "max_tokens": None, "max_completion_tokens": 7}, 7),
    *(("/v1/responses", {"model": model, "input": "Hi"}, None) for model in ("chat", "calls")),
    ("/v1/responses", {"model": "chat", "input": "Hi", "max_output_tokens": 7}, 7),
    ("/v1/messages", {"model": "chat", "messages": HELLO, "max_tokens": 10**6}, None),
    ("/v1/completions", {"model": "gen", "prompt": "Hi"}, 16),
    *((path, {"model": "gen", "inputs": "Hi"}, None) for path in ("/", "/generate", "/generate_stream")),
    ("/generate", {"model": "gen", "inputs": "Hi", "parameters": {"max_new_tokens": 7}}, 7),
    ("/generate", {"model": "gen", "prompt": "Hi"}, 256),
]


def app_with(*models: ServedModel, **settings: int) -> App:
    made = make_app(
        *models,
        settings=ServiceSettings(limits=Limits(**settings)),
        max_model_len=CONTEXT,
        end_id=256,
        token_ids=[*byte_tokenizer().encode("ok", add_special_tokens=False).ids, 256],
    )
    return made


def tokens_of(app: App, path: str, body: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of a prompt's tokens, and the most tokens of its output."""
    reply = ask(app, "POST", path, json=body)
    assert reply.status_code == 200, reply.text
    request = app.client.submitted[-1]
    return len(request.prompt_token_ids), request.params.max_tokens


@pytest.mark.parametrize(("path", "body", "expected"), CASES)
def test_the_limit_of_a_request_that_has_none(path: str, body: dict[str, Any], expected: int | None) -> None:
    prompt, most = tokens_of(app_with(talker(TURNS), talker(CALLS, "calls")), path, body)
    assert most == (CONTEXT - prompt if expected is None else expected)


def with_defaults(name: str, **defaults: int) -> ServedModel:
    plain = served(name, "decoder-only", byte_tokenizer(), sampling_defaults=defaults)
    return ServedModel(name, plain.checkpoint, plain.tokenizer, chat=talker(TURNS).chat)


@pytest.mark.parametrize(
    ("defaults", "chat", "generate"),
    [({"max_tokens": 700}, 700, 700), ({"max_length": 700}, None, 700), ({"max_tokens": 10**6}, None, None)],
)
def test_the_checkpoints_own_limits(defaults: dict[str, int], chat: int | None, generate: int | None) -> None:
    """`max_new_tokens` applies everywhere; `max_length` does not limit the chats of a decoder."""
    app = app_with(with_defaults("set", **defaults))
    prompt, most = tokens_of(app, CHAT, {"model": "set", "messages": HELLO})
    assert most == (chat or CONTEXT - prompt)
    prompt, most = tokens_of(app, "/generate", {"model": "set", "prompt": "Hi"})
    assert most == (CONTEXT if generate is None else generate) - (prompt if defaults != {"max_tokens": 700} else 0)


@pytest.mark.parametrize(("fields", "divisor"), [({}, 1), ({"n": 2}, 2), ({"n": 2, "top_logprobs": 4}, 10)])
def test_log_probabilities_bound_what_a_client_left_open(fields: dict[str, Any], divisor: int) -> None:
    """A reply has a limit of log probabilities; a request without a number of tokens is not refused for it."""
    app = app_with(talker(TURNS), max_reply_logprobs=5_000)
    body = {"model": "chat", "messages": HELLO, "logprobs": True, **fields}
    assert tokens_of(app, CHAT, body)[1] == 5_000 // divisor
    prompt, most = tokens_of(app, CHAT, body | {"stream": True})
    assert most == CONTEXT - prompt
    reply = ask(app, "POST", CHAT, json=body | {"max_tokens": 5_000 // divisor + 1})
    assert reply.status_code == 400 and "max_reply_logprobs" in reply.text
