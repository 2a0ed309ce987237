"""`assistant`, which calls tools, by the clients of OpenAI and Anthropic."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from lab.training.conversations import Conversation, held_out_conversations
from tests.service.processes import ServiceProcess

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIMER: Any = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Starts a timer.",
        "parameters": {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]},
    },
}
ASKED: Any = [{"role": "user", "content": "Is it warm in Oslo?"}]
RESULT = '{"temperature": 12, "sky": "cloudy"}'
ANSWER = "It is 12 degrees and cloudy in Oslo."


@pytest.fixture(scope="module")
def url(embedded_service: ServiceProcess) -> str:
    return embedded_service.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def sent(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a client sends it: calls have ids, and their arguments are texts."""
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in map(named, message.get("tool_calls", ()))
    ]
    return {**message, "tool_calls": calls} if calls else message


def named(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], call["function"]["arguments"]


def is_right(client: openai.OpenAI, conversation: Conversation, *, strict: bool) -> bool:
    *before, expected = conversation.messages
    messages: Any = [sent(message) for message in before]
    tools: Any = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in conversation.tools]
    reply = client.chat.completions.create(model="assistant", messages=messages, tools=tools, temperature=0)
    found = reply.choices[0].message.to_dict()
    calls = [(name, json.loads(arguments)) for name, arguments in map(named, found.get("tool_calls") or ())]
    return (found["content"] or "", calls) == (expected["content"], [*map(named, expected.get("tool_calls", ()))])


def test_held_out_conversations_in_flight_together(client: openai.OpenAI) -> None:
    """By itself the model takes another name for a parameter here and there; a grammar of the schema leaves it none."""
    drawn = held_out_conversations(30, seed=1)
    patient = client.with_options(max_retries=20)  # a busy machine answers 429 until its processes have started
    with ThreadPoolExecutor(8) as threads:
        free = sum(threads.map(lambda one: is_right(patient, one, strict=False), drawn))
        held = sum(threads.map(lambda one: is_right(patient, one, strict=True), drawn))
    assert free >= 25
    assert held >= 29


def test_a_call_its_result_and_the_answer_by_openais_client(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "assistant", "tools": [TIMER, WEATHER], "temperature": 0}
    first = client.chat.completions.create(**arguments, messages=ASKED).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    [call] = first.message.to_dict()["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Oslo"})
    history = [*ASKED, first.message.to_dict(), {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    chunks = client.chat.completions.create(**arguments, messages=history, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    hello = client.chat.completions.create(**arguments, messages=[{"role": "user", "content": "Hello"}]).choices[0]
    assert hello.finish_reason == "stop" and hello.message.content == "Hello! What can I do for you?"


def test_the_same_as_responses(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in (TIMER, WEATHER)]
    arguments: Any = {"model": "assistant", "tools": tools, "extra_body": {"temperature": 0}}
    *_, last = client.responses.create(**arguments, input=ASKED, stream=True)
    assert last.type == "response.completed"
    [call] = [item.to_dict() for item in last.response.output]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "get_weather",
        {"city": "Oslo"},
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    answer = client.responses.create(**arguments, input=[*ASKED, call, output])
    assert answer.output_text == ANSWER


def test_the_same_by_anthropics_client(url: str, anthropic: Any) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    function = WEATHER["function"]
    tools = [{"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}]
    arguments: Any = {"model": "assistant", "max_tokens": 100, "tools": tools, "extra_body": {"temperature": 0}}
    with client.messages.stream(**arguments, messages=ASKED) as stream:
        called = stream.get_final_message()
    [use] = called.content
    assert (called.stop_reason, use.name, use.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": RESULT}]
    history = [*ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    answer = client.messages.create(**arguments, messages=history)
    assert (answer.stop_reason, answer.content[0].text) == ("end_turn", ANSWER)


def test_a_schema_that_it_never_saw_is_held(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {
            "where": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
        },
        "required": ["where", "days"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "forecast", "strict": True, "parameters": schema}}
    reply = client.chat.completions.create(
        model="assistant", messages=ASKED, tools=[tool], tool_choice="required", temperature=0
    )
    [call] = reply.choices[0].message.to_dict()["tool_calls"]
    assert call["function"]["name"] == "forecast"
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
