"""Streams of every dialect: rendering an event does not change later events, the reply or its usage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.service.dialects.support import CALLS, HARMONY, says, talker
from tests.service.dialects.test_tools import OTHER, PARAMETERS, SAID, TOOL
from tests.service.support import App, check_accounts, events, make_app, opened
from triptych.model.api.request import TokenOutput
from triptych.service.http.sse import EventTemplate, GenerationEvents
from triptych.service.routes import generate

Json = dict[str, Any]
CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"),
)
HARMONY_SAID = (
    "<|channel|>analysis<|message|>A city.<|end|><|start|>assistant<|channel|>final<|message|>Sunny there.<|return|>"
)
HELLO = [{"role": "user", "content": "Weather?"}]
USAGE = {"stream_options": {"include_usage": True}}
TOOLS = {"tools": [TOOL, OTHER]}
RESPONSE_TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}]
MESSAGE_TOOLS = [{"name": "weather", "input_schema": PARAMETERS}]

CHATS: list[Json] = [
    {},
    USAGE,
    {**USAGE, "n": 2},
    {**USAGE, "logprobs": True, "top_logprobs": 2},
    {**USAGE, "include_reasoning": False},
    {**USAGE, "prediction": {"type": "content", "content": "Let me see."}},
    {**USAGE, "stop": "see"},
    {**USAGE, **TOOLS},
    {**USAGE, **TOOLS, "n": 2, "logprobs": True},
    {**USAGE, **TOOLS, "tool_choice": "none"},
]
TEXTS: list[Json] = [{}, USAGE, {**USAGE, "n": 2}, {**USAGE, "logprobs": 2}, {**USAGE, "echo": True}]
TEXTS += [{**USAGE, "echo": True, "logprobs": 0}, {**USAGE, "prompt": ["one", "two"], "n": 2}]
NATIVE: list[Json] = [{}, {"n": 2}, {"return_token_ids": True}, {"logprobs": 2}, {"echo": True, "prompt_logprobs": 1}]
CASES: list[tuple[str, Json]] = [
    *((CHAT, {"model": model, "messages": HELLO, **more}) for model in ("chat", "harmony") for more in CHATS),
    (CHAT, {"model": "chat", "messages": HELLO, **USAGE, "chat_template_kwargs": {"enable_thinking": False}}),
    *((COMPLETIONS, {"model": "gen", "prompt": "one", "max_tokens": 50, **more}) for more in TEXTS),
    *((RESPONSES, {"model": model, "input": "Hi"}) for model in ("chat", "harmony")),
    (RESPONSES, {"model": "chat", "input": "Hi", "tools": RESPONSE_TOOLS}),
    *((MESSAGES, {"model": model, "messages": HELLO, "max_tokens": 500}) for model in ("chat", "harmony")),
    (MESSAGES, {"model": "chat", "messages": HELLO, "max_tokens": 500, "tools": MESSAGE_TOOLS}),
    *((GENERATE, {"model": "gen", "prompt": "one", "max_tokens": 50, **more}) for more in NATIVE),
    (GENERATE, {"model": "gen", "inputs": "one", "parameters": {"max_new_tokens": 50, "details": True}}),
    (GENERATE, {"model": "gen", "inputs": "one", "parameters": {"top_n_tokens": 2, "decoder_input_details": True}}),
]
CHANGING = ("id", "item_id", "call_id", "created", "created_at", "completed_at", "timings", "resp_id")


class AlwaysAnew(GenerationEvents):
    """Makes the template again for every event, and once more before events that have none."""

    def _template(self, output: TokenOutput) -> EventTemplate | None:
        for _ in range(2):
            self._templates.clear()
            found = super()._template(output)
        return found

    def _shown(self, outputs: Any) -> Any:
        for output in outputs:
            self._template(output)
        return super()._shown(outputs)


class Never(GenerationEvents):
    """Renders every event for itself."""

    def _template(self, output: TokenOutput) -> EventTemplate | None:
        return None


@pytest.fixture(scope="module")
def app() -> App:
    return make_app(talker(CALLS), talker(HARMONY, "harmony"), max_model_len=8_192)


def streamed(app: App, asked: list[tuple[str, Json]]) -> list[list[Json]]:
    async def work() -> list[list[Json]]:
        async with opened(app) as client:
            found = []
            for path, body in asked:
                says(app, HARMONY_SAID if body["model"] == "harmony" else SAID)
                reply = await client.post(path, json=body | {"stream": True})
                assert reply.status_code == 200, reply.text
                found.append([settled(one) for one in _parsed(reply)])
            return found

    return asyncio.run(work())


def _parsed(reply: httpx.Response) -> list[Json]:
    if "data:{" in reply.text:
        return [json.loads(line[5:]) for line in reply.text.splitlines() if line.startswith("data:")]
    return [one for one in events(reply.text) if one != "[DONE]"]


def settled(value: Any) -> Any:
    """Return a value without the parts that differ between two runs."""
    if isinstance(value, dict):
        return {name: settled(one) for name, one in value.items() if name not in CHANGING}
    return [settled(one) for one in value] if isinstance(value, list) else value


def test_events_from_templates_are_those_that_are_rendered(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = streamed(app, CASES)
    monkeypatch.setattr(generate, "GenerationEvents", Never)
    rendered = streamed(app, CASES)
    monkeypatch.setattr(generate, "GenerationEvents", AlwaysAnew)
    anew = streamed(app, CASES)
    for (path, body), *found in zip(CASES, usual, rendered, anew, strict=True):
        assert "error" not in found[0][-1], (path, body, found[0][-1])
        assert found[0] == found[1] == found[2], (path, body)
    check_accounts(app)


@pytest.mark.parametrize("model", ["chat", "harmony"])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": True}, TOOLS])
def test_the_usage_of_a_stream_is_that_of_the_reply(app: App, model: str, more: Json) -> None:
    body = {"model": model, "messages": HELLO, **more}

    async def work() -> tuple[Json, list[Json]]:
        async with opened(app) as client:
            says(app, HARMONY_SAID if model == "harmony" else SAID)
            reply = await client.post(CHAT, json=body)
            stream = await client.post(CHAT, json={**body, **USAGE, "stream": True})
            return reply.json(), _parsed(stream)

    reply, found = asyncio.run(work())
    assert found[-1]["usage"] == reply["usage"]
    assert found[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    for choice in reply["choices"]:
        deltas = [one for event in found for one in event["choices"] if one["index"] == choice["index"]]
        assert deltas[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("content", "reasoning_content"):
            assert "".join(one["delta"].get(name, "") for one in deltas) == choice["message"][name]
