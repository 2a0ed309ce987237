"""OpenAI's responses and Anthropic's messages, by their official clients as they are, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from service.core.response_store import ResponseStore
from service.dialects.messages import JsonBeginning
from service.settings.service_settings import ServiceSettings
from tests.service.dialects.support import calling_app, chat_app, prompt_of, says
from tests.service.dialects.test_tools import CALLED, PARAMETERS, SAID
from tests.service.processes import eventually
from tests.service.support import App, ask, check_accounts, let_time_pass, live, run
from tests.service.test_bad_requests import check_error

anthropic: Any = pytest.importorskip("anthropic", reason="anthropic's client is not installed")

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "time", "parameters": None, "strict": False},
]
OWN_TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS},
    {"name": "time", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}},
]
HELLO: list[Any] = [{"role": "user", "content": "Weather?"}]
ASKED: dict[str, Any] = {"model": "chat", "input": "Weather?", "tools": TOOLS}
SENT: dict[str, Any] = {"model": "chat", "max_tokens": 500, "messages": HELLO, "tools": OWN_TOOLS}
GOOD = {
    RESPONSES: {"model": "chat", "input": "Hi", "max_output_tokens": 2},
    MESSAGES: {"model": "chat", "messages": HELLO, "max_tokens": 2},
    COUNT: {"model": "chat", "messages": HELLO},
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[App, openai.OpenAI, Any]]:
    """A model that reasons and calls tools, and the two clients."""
    app = calling_app()
    with live(app) as url:
        yield (
            app,
            openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0),
            anthropic.Anthropic(base_url=url, api_key="any", max_retries=0),
        )
    check_accounts(app)


def test_a_response_and_its_events(served: tuple[App, openai.OpenAI, Any]) -> None:
    app, client, _ = served
    says(app, SAID)
    asked = {**ASKED, "metadata": {"a": "b"}, "instructions": "Be brief."}
    whole = client.responses.create(**asked)
    assert {item.status for item in whole.output} == {"completed"} and whole.completed_at  # type: ignore[union-attr]
    assert whole.status == "completed" and whole.id.startswith("resp_") and whole.metadata == {"a": "b"}
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "A city." and whole.output_text == "Let me see."  # type: ignore[union-attr, index]
    assert [(item.name, item.arguments) for item in whole.output[2:]] == CALLED  # type: ignore[union-attr]
    assert whole.usage is not None and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens == len("<think>\nA city.\n</think>")
    assert prompt_of(app).startswith("<|turn|>tools\n") and "<|turn|>system\nBe brief.<|end|>" in prompt_of(app)

    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    block = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    kinds = (
        [name.format("reasoning_text") for name in block] + [name.format("output_text") for name in block] + call * 2
    )
    once = [name for at, name in enumerate(types) if types[at - 1 : at] != [name]]
    assert once == [f"response.{name}" for name in ("created", "in_progress", *kinds, "completed")]
    random = {"id", "call_id"}
    *_, last = client.responses.create(**asked, stream=True)
    shown = [
        [{name: value for name, value in item.to_dict().items() if name not in random} for item in response.output]
        for response in (whole, last.response)  # type: ignore[union-attr]
    ]
    assert shown[0] == shown[1]
    assert final.usage == whole.usage
    done: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            done[event.item_id] = done.get(event.item_id, "") + event.delta  # type: ignore[union-attr, operator]
    assert [*done.values()] == ["A city.", "Let me see.", *(arguments for _, arguments in CALLED)]


def test_going_on_from_a_response(served: tuple[App, openai.OpenAI, Any]) -> None:
    """By its id, or with its items sent back, the model sees the same conversation."""
    app, client, _ = served
    says(app, SAID)
    first = client.responses.create(**ASKED)
    says(app, "Sunny.")
    results = [
        {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "Sun"},  # type: ignore[union-attr]
        {"role": "developer", "content": [{"type": "input_text", "text": "Now."}]},
    ]
    stored: Any = {"model": "chat", "tools": TOOLS, "input": results, "previous_response_id": first.id}
    second = client.responses.create(**stored)
    assert second.output_text == "Sunny." and second.previous_response_id == first.id
    by_id = prompt_of(app)
    items = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), *results]
    client.responses.create(model="chat", tools=TOOLS, input=items, store=False)  # type: ignore[arg-type]
    assert prompt_of(app) == by_id
    assert f"{SAID}<|end|>\n<|turn|>tool\nSun<|end|>\n<|turn|>system\nNow.<|end|>" in by_id
    client.responses.create(model="chat", input="And?", previous_response_id=second.id)
    assert prompt_of(app).endswith("Sunny.<|end|>\n<|turn|>user\nAnd?<|end|>\n<|turn|>assistant\n")


def test_formats_and_ends_of_responses(served: tuple[App, openai.OpenAI, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    app, client, _ = served
    says(app, '{"x": 1}')
    format: Any = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
    assert client.responses.create(model="chat", input="x", text=format).output_text == '{"x": 1}'
    assert "%json" in app.client.submitted[-1].params.grammar
    client.responses.create(model="chat", input="x", reasoning={"effort": "none"}, temperature=0)
    assert prompt_of(app).endswith("</think>\n\n") and app.client.submitted[-1].params.temperature == 0
    cut = client.responses.create(model="chat", input="x", max_output_tokens=3)
    assert (cut.status, cut.output_text, cut.completed_at) == ("incomplete", '{"x', None)
    assert cut.output[-1].status == "incomplete"  # so that nobody runs half a call
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
    streamed = list(client.responses.create(model="chat", input="x", max_output_tokens=3, stream=True))
    assert streamed[-1].type == "response.incomplete"
    assert streamed[-2].item.status == streamed[-1].response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    app.script.die_after = 2
    with pytest.raises(openai.InternalServerError, match="engine failed"):
        client.responses.create(model="chat", input="x")
    failed = list(client.responses.create(model="chat", input="x", stream=True))
    assert [event.type for event in failed[-2:]] == ["response.output_item.done", "response.failed"]
    assert "engine failed" in failed[-1].response.error.message  # type: ignore[union-attr]
    assert failed[-2].item.status == "incomplete"  # type: ignore[union-attr]
    app.script.die_after = None


def test_a_message_and_its_events(served: tuple[App, openai.OpenAI, Any]) -> None:
    app, _, client = served
    says(app, SAID)
    whole = client.messages.create(**SENT, thinking={"type": "enabled", "budget_tokens": 100})
    assert (whole.stop_reason, whole.role, whole.id[:4]) == ("tool_use", "assistant", "msg_")
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("A city.", "Let me see.")
    assert [(block.name, block.input) for block in whole.content[2:]] == [("weather", {"city": "Zürich"}), ("time", {})]
    assert not prompt_of(app).endswith("</think>\n\n")
    assert client.messages.count_tokens(model="chat", messages=HELLO, tools=OWN_TOOLS).input_tokens > 300

    with client.messages.stream(**SENT) as stream:  # of events under their names
        types = [event.type for event in stream]
        final = stream.get_final_message()
    assert prompt_of(app).endswith("</think>\n\n")  # reasoning is off unless it is asked for
    assert [block.to_dict() | {"id": ""} for block in final.content] == [
        b.to_dict() | {"id": ""} for b in whole.content
    ]
    assert types.count("content_block_start") == types.count("content_block_stop") == 4
    assert (types[0], types[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert final.usage.output_tokens == whole.usage.output_tokens == len(SAID.encode()) + 1
    raw = httpx.post(str(client.base_url).rstrip("/") + MESSAGES, json=SENT | {"stream": True}).text
    frames = [frame.split("\n") for frame in raw.strip().split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in frames)
    assert [name for name, _ in frames[:3]] == ["event: message_start", "event: ping", "event: content_block_start"]

    says(app, "Sunny.\n\nBye")
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": [{"type": "text", "text": "Sun"}]}
    failed = {"type": "tool_result", "tool_use_id": whole.content[3].id, "content": "late", "is_error": True}
    history = [*HELLO, {"role": "assistant", "content": whole.content}]
    history.append({"role": "user", "content": [result, failed, {"type": "text", "text": "Well?"}]})
    reply = client.messages.create(**SENT | {"messages": history}, system="Be brief.", stop_sequences=["\n\n"])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "\n\n", "Sunny.")
    turns = (
        "<|turn|>tool\nSun<|end|>\n<|turn|>tool\nError: late<|end|>\n<|turn|>user\nWell?<|end|>\n<|turn|>assistant\n"
    )
    assert f"<|turn|>assistant\n{SAID}<|end|>\n{turns}" in prompt_of(app)
    assert "<|turn|>system\nBe brief.<|end|>\n<|turn|>user\nWeather?" in prompt_of(app)


def test_arguments_that_are_no_json_do_not_break_the_client(served: tuple[App, openai.OpenAI, Any]) -> None:
    app, _, client = served
    body = {**SENT, "tools": [{**tool, "strict": False} for tool in OWN_TOOLS]}
    for arguments, expected in (('{"city": Oslo}', {}), ('{"city": "Oslo", day: 1}', {"city": "Oslo"})):
        says(app, f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
        whole = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            [call] = message.content
            assert (call.name, call.input) == ("weather", expected)


def test_all_that_is_json_is_passed_on() -> None:
    value = {"städte": [1.5e-3, -2, None, {"\n": 'a "\\" b'}], "so": True, "long": "x" * 3_000, "last": "\U0001f600"}
    text = json.dumps(value)
    for size in (1, 7, 400, len(text)):
        beginning = JsonBeginning()
        passed = [beginning.push(text[at : at + size]) for at in range(0, len(text), size)]
        assert all(passed[:250]) and "".join(passed) + beginning.rest() == text


def test_choices_and_ends_of_messages(served: tuple[App, openai.OpenAI, Any]) -> None:
    app, _, client = served
    says(app, "Oslo.")
    for choice, words in (
        ({"type": "any"}, ["weather", "time"]),
        ({"type": "tool", "name": "time", "disable_parallel_tool_use": True}, ["time"]),
        ({"type": "auto"}, []),
        ({"type": "none"}, []),
    ):
        client.messages.create(**SENT, tool_choice=choice)
        grammar = app.client.submitted[-1].params.grammar
        assert [name for name in ("weather", "time") if f'{name}\\", \\"arguments' in grammar] == words
    assert "tools" not in prompt_of(app)
    client.messages.create(**SENT | {"messages": [*HELLO, {"role": "assistant", "content": "In"}]})
    assert prompt_of(app).endswith("<|turn|>assistant\nIn")
    held = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    assert client.messages.create(**SENT | {"tools": []}, output_config=held).stop_reason == "end_turn"
    assert "%json" in app.client.submitted[-1].params.grammar
    says(app, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}')
    cut = client.messages.create(**SENT | {"max_tokens": 57})
    assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {"city": "Osl"})
    app.script.die_after = 2
    with pytest.raises(anthropic.APIStatusError, match="engine failed"):
        list(client.messages.create(**SENT, stream=True))
    app.script.die_after = None


def test_errors_of_messages_are_those_of_anthropics_client() -> None:
    """In its shape on every way to an error, with its classes; the key may be in either header."""
    app = chat_app(settings=ServiceSettings(api_keys=("right",)))
    with live(app) as url:
        client = anthropic.Anthropic(base_url=url, api_key="right", max_retries=0)
        good = GOOD[MESSAGES]
        assert client.messages.create(**good).content[0].text == "he"
        bearer = anthropic.Anthropic(base_url=url, auth_token="right", api_key=None, max_retries=0)
        assert bearer.messages.create(**good).stop_reason == "max_tokens"
        with pytest.raises(anthropic.AuthenticationError, match=r"authentication_error.*API key"):
            client.with_options(api_key="wrong").messages.create(**good)
        with pytest.raises(anthropic.NotFoundError, match="nope"):
            client.messages.create(**good | {"model": "nope"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: input should be") as caught:
            client.messages.create(**good, extra_body={"max_tokens": "2"})
        assert caught.value.body["request_id"] == caught.value.response.headers["x-request-id"]
        assert caught.value.request_id == caught.value.body["request_id"]
        assert [model.id for model in client.models.list()] == ["gen", "seq", "enc", "chat"]
        app.script.queue_full = "queue_requests"
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**good)
        app.script.queue_full, app.script.ready = None, False
        with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
            client.messages.create(**good)
        app.script.ready = True
        body = httpx.post(
            f"{url}{COUNT}", content=b"{", headers={"content-type": "application/json", "x-api-key": "right"}
        )
        assert body.json()["error"]["type"] == "invalid_request_error"
    check_accounts(app)


NO, IV, IT = "not_supported", "invalid_value", "invalid_type"
IMAGE = {"type": "image", "source": {}}
BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    (RESPONSES, {"input": None}, "input", IT),
    (RESPONSES, {"input": []}, "input", IV),
    (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role", IV),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", IT),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", IV),
    (RESPONSES, {"input": "Hi " * 9999}, "input", "context_length_exceeded"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens", IV),
    (RESPONSES, {"max_output_tokens": 9999}, "max_output_tokens", "context_length_exceeded"),
    (RESPONSES, {"max_tokens": 2}, "max_tokens", "unknown_field"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type", IV),
    (RESPONSES, {"tools": [TOOLS[0], TOOLS[0]]}, "tools", IV),
    (RESPONSES, {"tools": [TOOLS[0] | {"defer_loading": True}]}, "tools[0].defer_loading", NO),
    (RESPONSES, {"tools": [TOOLS[0] | {"async": True}]}, "tools[0].async", NO),
    (RESPONSES, {"tools": [TOOLS[0] | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", IV),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", IV),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_field"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema", ""),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort", NO),
    (RESPONSES, {"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    (RESPONSES, {"background": True}, "background", NO),
    (RESPONSES, {"truncation": "auto"}, "truncation", NO),
    (RESPONSES, {"include": ["file_search_call.results"]}, "include[0]", IV),
    (RESPONSES, {"conversation": "x"}, "conversation", NO),
    (RESPONSES, {"temperature": -1}, "temperature", IV),
    (MESSAGES, {"max_tokens": 0}, "max_tokens", IV),
    (MESSAGES, {"messages": []}, "messages", IV),
    (MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", IT),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", IV),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "messages[0].content[0]",
        IV,
    ),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", IV),
    (MESSAGES, {"tools": [OWN_TOOLS[0] | {"input_examples": [{"city": "Oslo"}]}]}, "tools[0].input_examples", NO),
    (MESSAGES, {"tools": [OWN_TOOLS[0] | {"input_schema": {"type": ["object"]}}]}, "tools[0].input_schema.type", IV),
    (MESSAGES, {"tools": OWN_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_field"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice", IV),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2}}, "thinking.budget_tokens", IV),
    (MESSAGES, {"stop_sequences": ["a"] * 5}, "stop_sequences", IV),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort", NO),
    (MESSAGES, {"container": "x"}, "container", NO),
    (MESSAGES, {"mcp_servers": [{}]}, "mcp_servers", NO),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management", NO),
    (MESSAGES, {"n": 2}, "n", "unknown_field"),
    (COUNT, {"max_tokens": 2}, "max_tokens", "unknown_field"),
    (COUNT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", IT),
]


def test_table_of_bad_requests() -> None:
    app = calling_app()

    async def work(client: httpx.AsyncClient) -> None:
        for route, changes, param, code in BAD:
            reply = await client.post(route, json={**GOOD[route], **changes})
            if route == RESPONSES:
                found = check_error(reply, 400)
                assert (found["param"], code and found["code"]) == (param, code), (changes, found)
            else:
                assert reply.status_code == 400 and reply.json()["type"] == "error", reply.text
                assert str(param) in reply.json()["error"]["message"], (changes, reply.text)
            assert (await client.post(route, json=GOOD[route])).status_code == 200

    run(app, work)
    check_accounts(app)


BASH = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command to execute"},
        "timeout": {"type": "number", "description": "Optional timeout in milliseconds (max 600000)"},
        "run_in_background": {"type": "boolean"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "workdir": {"type": "string"},
        "timeout_ms": {"type": "number"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
STEP = {"type": "object", "properties": {"step": {"type": "string"}, "status": {"enum": ["pending", "completed"]}}}
PLAN = {"type": "object", "properties": {"plan": {"type": "array", "items": STEP}}, "required": ["plan"]}


def test_a_turn_of_an_agent_over_messages(served: tuple[App, openai.OpenAI, Any]) -> None:
    """The fields and schemas that a coding agent sends, and what it sends back after a call."""
    app, _, client = served
    cached = {"cache_control": {"type": "ephemeral"}}
    body: dict[str, Any] = {
        "model": "chat",
        "max_tokens": 4000,
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Env: linux", **cached}],
        "tools": [{"name": "Bash", "description": "Executes a bash command.", "input_schema": BASH}],
        "metadata": {"user_id": "user_1_session_2"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
            {"role": "user", "content": [{"type": "text", "text": "List the files.", **cached}]},
        ],
        "extra_body": {
            "temperature": 1,
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        },
        "extra_query": {"beta": "true"},
        "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"},
    }
    says(app, 'I look.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "ls", "timeout": 5}}\n</tool_call>')
    with client.messages.stream(**body) as stream:
        message = stream.get_final_message()
    text, call = message.content
    assert (text.text, call.name, call.input) == ("I look.", "Bash", {"command": "ls", "timeout": 5})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a.py", "is_error": False, **cached}
    body["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    says(app, "There is a.py.")
    with client.messages.stream(**body) as stream:
        assert stream.get_final_text() == "There is a.py."
    assert "<|turn|>system\nYou are an agent.\nEnv: linux<|end|>" in prompt_of(app)
    assert "</tool_call><|end|>\n<|turn|>tool\na.py<|end|>" in prompt_of(app)


def test_a_turn_of_an_agent_over_responses(served: tuple[App, openai.OpenAI, Any]) -> None:
    """The same over responses, with a conversation that the agent keeps."""
    app, client, _ = served
    tools = [("shell", "Runs a shell command.", SHELL), ("update_plan", "Updates the plan.", PLAN)]
    context = [{"type": "input_text", "text": "<environment_context>linux</environment_context>"}]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": context},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ]
    body: dict[str, Any] = {
        "model": "chat",
        "instructions": "You are an agent.",
        "tools": [
            {"type": "function", "name": name, "description": told, "strict": False, "parameters": schema}
            for name, told, schema in tools
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "7c1f",
        "text": {"verbosity": "medium"},
    }
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
    says(app, f"<think>\nlook\n</think>\n\n{call}")
    *_, last = client.responses.create(**body, input=items)
    assert last.type == "response.completed"
    reasoning, made = (item.to_dict() for item in last.response.output)
    assert (made["name"], made["arguments"]) == ("shell", '{"command": ["ls"]}')
    output = {"type": "function_call_output", "call_id": made["call_id"], "output": "a.py"}
    says(app, "There is a.py.")
    again = {
        "type": "reasoning",
        "id": "rs_2",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": " again"}],
    }
    sent = [*items, reasoning | {"encrypted_content": None}, again, made, output]
    *_, last = client.responses.create(**body, input=sent)
    assert last.response.output_text == "There is a.py."
    assert f"<think>\nlook again\n</think>\n\n\n{call}<|end|>\n<|turn|>tool\na.py<|end|>" in prompt_of(app)


def test_a_model_without_reasoning_or_a_template_says_so() -> None:
    app = chat_app()
    thinking = {"thinking": {"type": "adaptive"}}
    reply = ask(app, "POST", MESSAGES, json=GOOD[MESSAGES] | thinking)
    assert reply.status_code == 400 and "thinking" in reply.json()["error"]["message"]
    assert ask(app, "POST", MESSAGES, json=GOOD[MESSAGES] | {"thinking": {"type": "disabled"}}).status_code == 200
    check_error(ask(app, "POST", RESPONSES, json=GOOD[RESPONSES] | {"model": "gen"}), 400, "model", "no_chat_template")


def test_the_store_is_bounded_can_be_off_and_is_each_keys_own() -> None:
    store = ResponseStore(1_200)  # two messages, which are more than their text
    for id in "abc":
        store.put("t", id, [{"role": "user", "content": "x" * 10}])
    assert [store.get("t", id) is not None for id in "abc"] == [False, True, True]
    store.put("t", "d", [{"content": "x" * 1_000}])
    assert store.get("t", "d") is None and store.get("t", "c") is not None and store.get("u", "c") is None
    for settings in (ServiceSettings(response_store_bytes=0), ServiceSettings(front_processes=2)):
        app = chat_app(settings=settings)
        good = ask(app, "POST", RESPONSES, json=GOOD[RESPONSES])
        assert good.status_code == 200 and good.json()["store"] is False
        for fields, param in (({"store": True}, "store"), ({"previous_response_id": "x"}, "previous_response_id")):
            check_error(ask(app, "POST", RESPONSES, json=GOOD[RESPONSES] | fields), 400, param, NO)
    keys = calling_app(settings=ServiceSettings(api_keys=("one", "two")))

    async def work(client: httpx.AsyncClient) -> None:
        async def status(key: str, **fields: Any) -> httpx.Response:
            return await client.post(RESPONSES, json=GOOD[RESPONSES] | fields, headers={"x-api-key": key})

        id = (await status("one")).json()["id"]
        assert (await status("one", previous_response_id=id)).status_code == 200
        check_error(await status("two", previous_response_id=id), 400, "previous_response_id")

    run(keys, work)


def test_deadlines_and_clients_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    app = calling_app(delay_s=0.02)
    with live(app) as url:
        for path in (RESPONSES, MESSAGES):
            body = GOOD[path] | {"max_output_tokens" if path == RESPONSES else "max_tokens": 500}
            with httpx.stream("POST", url + path, json=body | {"stream": True}) as reply:
                next(line for line in reply.iter_lines() if "delta" in line)
            late = httpx.post(url + path, json=body | {"timeout_s": 0.001})
            assert late.status_code == 504 and ("type" in late.json()) == (path == MESSAGES)
        eventually(lambda: len(app.client.aborted) == 2, 60)
    check_accounts(app)
    ended = calling_app()
    let_time_pass(ended, monkeypatch, 700.0, outputs=5)
    whole = ask(ended, "POST", MESSAGES, json=GOOD[MESSAGES] | {"max_tokens": 500}).json()
    assert whole["stop_reason"] == "pause_turn" and whole["content"]
    check_accounts(ended)
