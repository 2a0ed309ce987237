"""JSON as text, from models and clients: every dialect reads it alike, and writes what every library reads."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import orjson
import pytest

from tests.service.dialects.support import calling_app, prompt_of, says
from tests.service.dialects.test_tools import HELLO, PARAMETERS
from tests.service.support import App, ask, check_accounts, opened

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
    RESPONSES: [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}],
    MESSAGES: [{"name": "weather", "input_schema": PARAMETERS}],
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "chat", "messages": HELLO, "tools": TOOLS[CHAT]},
    RESPONSES: {"model": "chat", "input": HELLO, "tools": TOOLS[RESPONSES]},
    MESSAGES: {"model": "chat", "messages": HELLO, "tools": TOOLS[MESSAGES], "max_tokens": 4_000},
}
# Arguments that a model writes, and their value.
WRITTEN: list[tuple[str, Any]] = [
    ('{"city": "\\ud800"}', {"city": "\ufffd"}),
    ('{"\\udc00": "\\udc00\\ud800x"}', {"\ufffd": "\ufffd\ufffdx"}),
    ('{"city": "\\ud83d\\ude00"}', {"city": "\U0001f600"}),
    ('{"city": "\\\\ud800"}', {"city": "\\ud800"}),
    ('{"city": "a\nb\x01"}', {"city": "a\nb\x01"}),
    ('{"city": [NaN, -Infinity, 1]}', {"city": [None, None, 1]}),
    ('{"city": "NaN", "n": 18446744073709551616}', {"city": "NaN", "n": 18446744073709551616}),
    ('{"city": 1, "city": 2}', {"city": 2}),
    ('{"city": "\\u0000"}', {"city": "\0"}),
    ('{"city": ' + "[" * 150 + "]" * 150 + "}", None),
]


async def _turns(app: App, path: str, text: str) -> tuple[str, str, httpx.Response]:
    """Return the arguments of the reply and of its stream, and the reply to a conversation that contains them."""
    async with opened(app) as client:
        says(app, f'<tool_call>\n{{"name": "weather", "arguments": {text}}}\n</tool_call>')
        body = BODIES[path]
        whole = await client.post(path, json=body)
        assert whole.status_code == 200, whole.text
        stream = await client.post(path, json=body | {"stream": True})
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        found = whole.json()
        if path == CHAT:
            message = found["choices"][0]["message"]
            said = message["tool_calls"][0]["function"]["arguments"]
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            pieces = [one["function"]["arguments"] for delta in deltas for one in delta.get("tool_calls", ())]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sun"}
            sent = {"messages": [*HELLO, message, result]}
        elif path == RESPONSES:
            item = found["output"][-1]
            said = item["arguments"]
            pieces = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
            result = {"type": "function_call_output", "call_id": item["call_id"], "output": "Sun"}
            sent = {"previous_response_id": found["id"], "input": [result]}
        else:
            block = found["content"][-1]
            said = orjson.dumps(block["input"]).decode() if -(2**63) < _number(block["input"]) < 2**64 else None
            said = said or json.dumps(block["input"])
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            pieces = [delta["partial_json"] for delta in deltas]
            content = [{"type": "tool_result", "tool_use_id": block["id"], "content": "Sun"}]
            sent = {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": found["content"]},
                    {"role": "user", "content": content},
                ]
            }
        return said, "".join(pieces), await client.post(path, json=body | sent)


def _number(value: Any) -> int:
    return value.get("n", 0) if isinstance(value, dict) else 0


@pytest.mark.parametrize("path", BODIES)
def test_arguments_that_libraries_read_differently(path: str) -> None:
    app = calling_app(max_model_len=20_000)
    for text, expected in WRITTEN:
        said, streamed, again = asyncio.run(_turns(app, path, text))
        value = json.loads(text) if expected is None else expected
        assert json.loads(said) == json.loads(streamed) == value, (text, said, streamed)
        if _number(value) < 2**64:
            assert orjson.loads(streamed) == value
        assert again.status_code == 200, (text, again.text)
        assert "Sun" in prompt_of(app)
    check_accounts(app)


@pytest.mark.parametrize("text", [written for written, _ in WRITTEN] + ["no JSON", "[1", "9" * 5_000, "[" * 9_000])
def test_arguments_that_clients_send(text: str) -> None:
    """Arguments come as text: text that is no JSON is given to the template unchanged."""
    app = calling_app(max_model_len=20_000)
    says(app, "Fine.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": text}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Sun"}
    reply = ask(app, "POST", CHAT, json=BODIES[CHAT] | {"messages": [*HELLO, said, result]})
    assert reply.status_code == 200, reply.text
    items = [
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": text},
        {"type": "function_call_output", "call_id": "call_1", "output": "Sun"},
    ]
    reply = ask(app, "POST", RESPONSES, json=BODIES[RESPONSES] | {"input": [*HELLO, *items]})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("value", "status"),
    [
        *(("9007199254740991", 200), ('"a"', 200), ('"\\ud83d\\ude00"', 200), ('{"a": 1, "a": 2}', 200)),
        *(("18446744073709551616", 400), ('"\\ud800"', 400), ("NaN", 400), ("-Infinity", 400), ("1e999", 400)),
        *(("9" * 5_000, 400), ("[" * 300 + "]" * 300, 400), ("[" * 9_000, 400)),
    ],
)
def test_a_schema_as_text_is_read_as_one_in_the_body(value: str, status: int) -> None:
    schema = f'{{"const": {value}}}'
    for shown in (schema, json.dumps(schema)):
        body = json.dumps({**BODIES[CHAT], "tools": None, "structured_outputs": {"json": "HERE"}})
        content = body.replace('"HERE"', shown).encode()
        reply = ask(calling_app(), "POST", CHAT, content=content, headers={"content-type": "application/json"})
        assert reply.status_code == status, (shown, reply.text)
