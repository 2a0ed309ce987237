"""Requests of two coding agents, replayed over HTTP: their fields, headers and tools, turn by turn.

`tests/data/agents/` has them. An agent sends back each reply unchanged, with the results of its calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.dialects.support import CALLS, calling_app, prompt_of, says, talker
from tests.service.support import App, check_accounts, live
from tests.service.test_reply_parts import check, held, walk
from triptych.service.chat.reply_parser import ReplyParser
from triptych.service.chat.tools import Tool, ToolUse
from triptych.service.dialects import messages, responses
from triptych.service.dialects.messages_bodies import MessagesBody
from triptych.service.dialects.responses_bodies import ResponsesBody

AGENTS = Path(__file__).parents[2] / "data" / "agents"
NAMES = ("claude_code", "codex")
Json = dict[str, Any]


def recording(name: str) -> Json:
    found: Json = json.loads((AGENTS / f"{name}.json").read_text())
    return found


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[App, str]]:
    app = calling_app(max_model_len=32_768)
    with live(app) as url:
        yield app, url
    check_accounts(app)


@pytest.mark.parametrize("name", NAMES)
def test_the_turns_of_a_coding_agent(served: tuple[App, str], name: str) -> None:
    app, url = served
    agent = recording(name)
    sent: list[Json] = []
    calls: list[str] = []
    for turn in agent["turns"]:
        sent += results(name, calls, turn.get("results", [])) + turn["sent"]
        says(app, turn["says"])
        body = agent["body"] | {"messages" if name == "claude_code" else "input": sent}
        reply = httpx.post(url + agent["path"], json=body, headers=agent["headers"])
        assert reply.status_code == 200, reply.text
        got, ended = (blocks if name == "claude_code" else items)(reply.text)
        assert [without_ids(one) for one in got] == turn["got"]
        assert ended == turn["ended"]
        for part in turn["prompt"]:
            assert part in prompt_of(app)
        sent += [{"role": "assistant", "content": got}] if name == "claude_code" else got
        calls = [one.get("call_id", one["id"]) for one in got if one["type"] in ("tool_use", "function_call")]
        assert len(set(calls)) == len(calls)


def results(name: str, calls: list[str], found: list[Json]) -> list[Json]:
    """Return the messages in which an agent sends the results of its calls."""
    pairs = list(zip(calls, found, strict=True)) if found else []
    if name == "codex":
        return [{"type": "function_call_output", "call_id": call, **result} for call, result in pairs]
    content = [{"type": "tool_result", "tool_use_id": call, **result} for call, result in pairs]
    return [{"role": "user", "content": content}] if content else []


def without_ids(one: Json) -> Json:
    return {name: value for name, value in one.items() if name not in ("id", "call_id", "status")}


def events(text: str) -> list[Json]:
    """Return the events of a stream; each must have its own name."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def blocks(text: str) -> tuple[list[Json], str]:
    """Return the blocks of Anthropic's event stream, joined from their deltas, and the stop reason."""
    found: list[Json] = []
    reason = ""
    for event in events(text):
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(found)
                found.append(block | ({"input": ""} if block["type"] == "tool_use" else {}))
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **delta}}:
                assert index == len(found) - 1
                [(name, piece)] = delta.items()
                place = "input" if kind == "input_json_delta" else name
                found[-1][place] += piece
            case {"type": "message_delta", "delta": delta}:
                reason = delta["stop_reason"]
    assert event["type"] == "message_stop"
    for block in found:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return found, reason


def items(text: str) -> tuple[list[Json], str]:
    """Return the finished items of OpenAI's event stream, and how the response ended."""
    found: list[Json] = []
    for at, event in enumerate(events(text)):
        assert event["sequence_number"] == at
        if event["type"] == "response.output_item.done":
            found.append(event["item"])
    assert event["response"]["output"] == found
    return found, event["response"]["status"]


@pytest.mark.parametrize("name", NAMES)
def test_calls_of_an_agents_tools_are_held_to_their_schemas(name: str) -> None:
    """Random texts of each tool's grammar are one call of the tool, with arguments that its schema allows."""
    generator = random.Random(name)
    for tool in tools_of(name):
        use = ToolUse((tool,), "required", parallel=False)
        format, matcher = held(use, "hermes")
        reply = ReplyParser(format).whole(walk(matcher, generator, 40))
        assert [call.name for call in reply.calls] == [tool.name]
        check(reply, use)


def tools_of(name: str) -> tuple[Tool, ...]:
    """Return an agent's tools as the model gets them."""
    agent, model = recording(name), talker(CALLS)
    if name == "codex":
        body = ResponsesBody(**agent["body"], input="a")
        return responses.conversation(body, model, ()).use.tools
    asked = MessagesBody(**agent["body"], messages=[{"role": "user", "content": "a"}])
    return messages.conversation(asked, model).use.tools


def test_names_in_namespaces(served: tuple[App, str]) -> None:
    """Functions whose names would be equal for the model are refused, and so are values that are no function."""
    _, url = served
    body = recording("codex")["body"] | {"input": "a", "stream": False}
    twice = {"type": "function", "name": "mcp__crm__find", "parameters": None}
    reply = httpx.post(f"{url}/v1/responses", json=body | {"tools": [*body["tools"], twice]})
    assert reply.status_code == 400 and "two of the name 'mcp__crm__find'" in reply.text
    deep = body | {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}]}
    reply = httpx.post(f"{url}/v1/responses", json=deep)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools[0].tools[0].type"
    shown = httpx.post(f"{url}/v1/responses", json=body).json()["tools"]
    assert shown == body["tools"]
