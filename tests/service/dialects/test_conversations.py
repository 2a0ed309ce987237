"""OpenAI's responses by the official client, and what they and Anthropic's messages refuse and limit."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.service.dialects.support import calling_app, chat_app, prompt_of, says
from tests.service.dialects.test_tools import CALLED, PARAMETERS, SAID
from tests.service.processes import eventually
from tests.service.support import App, ask, check_accounts, let_time_pass, live, run
from tests.service.test_bad_requests import check_error
from triptych.service.core.response_store import ResponseStore, StoredResponse
from triptych.service.dialects.content_tokens import ContentTokens, token_texts
from triptych.service.settings.service_settings import Limits, ServiceSettings

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
def served() -> Iterator[tuple[App, openai.OpenAI]]:
    """Yield a model that reasons and calls tools, and the client."""
    app = calling_app()
    with live(app) as url:
        yield app, openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    check_accounts(app)


def test_a_response_and_its_events(served: tuple[App, openai.OpenAI]) -> None:
    app, client = served
    says(app, SAID)
    named = {"prompt_cache_key": "k", "safety_identifier": "s"}
    asked = {**ASKED, "metadata": {"a": "b"}, "instructions": "Be brief.", **named}
    whole = client.responses.create(**asked)
    assert {item.status for item in whole.output} == {"completed"} and whole.completed_at  # type: ignore[union-attr]
    assert whole.status == "completed" and whole.id.startswith("resp_") and whole.metadata == {"a": "b"}
    echoed = {"prompt_cache_key": "k", "safety_identifier": "s", "background": False, "service_tier": "default"}
    echoed |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0, "max_tool_calls": None}
    assert {name: whole.to_dict()[name] for name in echoed} == echoed  # the schema of openresponses.org requires them
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
    assert {*echoed, "completed_at"} <= events[0].response.to_dict().keys()  # type: ignore[union-attr]
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


def test_going_on_from_a_response(served: tuple[App, openai.OpenAI]) -> None:
    """With its id or with its items sent back, the model sees the same conversation."""
    app, client = served
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
    client.responses.create(model="chat", input=[], previous_response_id=second.id)  # pydantic-ai's, without a prompt
    assert prompt_of(app).endswith("Sunny.<|end|>\n<|turn|>assistant\n")


def test_items_are_given_by_their_ids(served: tuple[App, openai.OpenAI]) -> None:
    """Vercel's AI SDK sends texts and reasoning of earlier responses by id, and calls whole; older ones calls too."""
    app, client = served
    says(app, SAID)
    first = client.responses.create(**ASKED)
    whole = [item.to_dict() for item in first.output]
    by_id = [{"type": "item_reference", "id": item.id} for item in first.output]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "Sun"} for item in whole[2:]]

    def prompt_with(items: list[Any]) -> str:
        sent: Any = [*HELLO, *items, *results]
        made = client.responses.create(model="chat", tools=TOOLS, input=sent)
        listed = [item.type for item in client.responses.input_items.list(made.id, order="asc")]
        assert listed == ["message", *(item.type for item in first.output), *["function_call_output"] * 2]
        counted = client.responses.input_tokens.count(model="chat", tools=TOOLS, input=sent)
        assert counted.input_tokens == len(app.client.submitted[-1].prompt_token_ids)
        return prompt_of(app)

    expected = prompt_with(whole)
    assert prompt_with(by_id) == prompt_with([*by_id[:2], *whole[2:]]) == expected


def test_items_given_by_their_ids_are_bounded() -> None:
    """A short body could otherwise ask for any number of long texts."""
    app = calling_app(settings=ServiceSettings(limits=Limits(max_body_bytes=2_000)))
    says(app, "Hello")
    item = ask(app, "POST", RESPONSES, json=GOOD[RESPONSES]).json()["output"][0]
    by_id = [{"type": "item_reference", "id": item["id"]}] * 20
    check_error(ask(app, "POST", RESPONSES, json=GOOD[RESPONSES] | {"input": by_id}), 413, "input", "body_too_large")


@pytest.mark.parametrize(
    "asked", [{"top_logprobs": 2, "include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}]
)
def test_log_probabilities_are_those_of_the_answer(served: tuple[App, openai.OpenAI], asked: Any) -> None:
    """Tokens of the reasoning, of calls, and of marks have none."""
    app, client = served
    says(app, SAID)
    [text] = client.responses.create(**ASKED, **asked).output[1].content  # type: ignore[union-attr]
    assert "".join(one.token for one in text.logprobs) == text.text == "Let me see."  # type: ignore[union-attr]
    assert {(one.logprob, len(one.top_logprobs)) for one in text.logprobs} == {(-0.5, 2)}  # type: ignore[union-attr]
    assert bytes(text.logprobs[0].bytes) == b"L"  # type: ignore[union-attr, index]
    events = list(client.responses.create(**ASKED, **asked, stream=True))
    pieces = [event for event in events if event.type == "response.output_text.delta"]
    assert ["".join(one.token for one in piece.logprobs) for piece in pieces] == [piece.delta for piece in pieces]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [one.token for one in done.logprobs] == [one.token for one in text.logprobs]  # type: ignore[union-attr]
    [last] = events[-1].response.output[1].content  # type: ignore[union-attr]
    assert last == text and events[-1].response.top_logprobs == 2  # type: ignore[union-attr]


def test_log_probabilities_without_alternatives(served: tuple[App, openai.OpenAI]) -> None:
    app, client = served
    says(app, "Hé")
    included: Any = {"input": "x", "include": ["message.output_text.logprobs"]}
    [text] = client.responses.create(model="chat", **included).output[0].content  # type: ignore[union-attr]
    assert (text.text, len(text.logprobs)) == ("Hé", 3)  # type: ignore[union-attr, arg-type]
    assert not any(one.top_logprobs for one in text.logprobs)  # type: ignore[union-attr]
    [bare] = client.responses.create(model="chat", input="x").output[0].content  # type: ignore[union-attr]
    assert bare.logprobs == []  # type: ignore[union-attr]


def test_tokens_of_a_piece() -> None:
    """They are found where a token shares a mark, begins a character, or comes with others."""
    told = [{"text": one} for one in ("<a>", "\n\nHi", " \ufffd", "\ufffd", "!<", "b>")]
    parted = [{"text": one} for one in ("Hi", "</s>", " ", "\ufffd", "\ufffd", "!", "</s>")]
    assert [text for text, _ in token_texts("Hi é!", parted)] == ["Hi", "", " ", "", "é", "!", ""]
    assert [text for text, _ in token_texts("Hi é", parted[:5])] == ["Hi", "", " ", "", "é"]
    assert token_texts("held Hi", parted[:1]) == [("held Hi", parted[0])] and token_texts("", parted[:1])[0][0] == ""
    bytes_ = [{"text": "\ufffd", "bytes": [byte]} for byte in "ü😀".encode()]
    assert [text for text, _ in token_texts("ü", bytes_)] == ["", "ü", "", "", "", ""]  # the other is a stop text
    assert [text for text, _ in token_texts("ü😀", bytes_)] == ["", "ü", "", "", "", "😀"]
    tokens = ContentTokens()
    for text, one in zip(("<a>", "\n\nHi", " ", "é", "!<", "b>"), told, strict=True):
        tokens.add(text, one)
    assert tokens.take("Hi é!", held=3) == told[1:5]
    assert tokens.take("<b>", held=0) == told[5:]
    assert tokens.take("never said", held=0) == []


def test_instructions_join_a_system_message(served: tuple[App, openai.OpenAI]) -> None:
    """Many templates take one such message, before all others."""
    app, client = served
    system: Any = [{"role": "developer", "content": "Answer."}, *HELLO]
    client.responses.create(model="chat", input=system, instructions="Be brief.", max_output_tokens=1)
    assert prompt_of(app).startswith("<|turn|>system\nBe brief.\n\nAnswer.<|end|>\n<|turn|>user\n")


def test_some_of_the_tools_may_be_called(served: tuple[App, openai.OpenAI]) -> None:
    """The template gets all tools, the grammar only the allowed ones."""
    app, client = served
    says(app, SAID)
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    found = client.responses.create(**ASKED, tool_choice=choice)
    assert found.to_dict()["tool_choice"] == choice and '"name": "weather"' in prompt_of(app)
    grammar = app.client.submitted[-1].params.grammar
    assert [f'{name}\\", \\"arguments' in grammar for name in ("weather", "time")] == [False, True]


def test_formats_and_ends_of_responses(served: tuple[App, openai.OpenAI], monkeypatch: pytest.MonkeyPatch) -> None:
    app, client = served
    says(app, '{"x": 1}')
    format: Any = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
    assert client.responses.create(model="chat", input="x", text=format).output_text == '{"x": 1}'
    assert "%json" in app.client.submitted[-1].params.grammar
    client.responses.create(model="chat", input="x", reasoning={"effort": "none"}, temperature=0)
    assert prompt_of(app).endswith("</think>\n\n") and app.client.submitted[-1].params.temperature == 0
    cut = client.responses.create(model="chat", input="x", max_output_tokens=3)
    assert (cut.status, cut.output_text, cut.completed_at) == ("incomplete", '{"x', None)
    assert cut.output[-1].status == "incomplete"  # so that no client runs half a call
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
    streamed = list(client.responses.create(model="chat", input="x", max_output_tokens=3, stream=True))
    assert streamed[-1].type == "response.incomplete"
    assert streamed[-2].item.status == streamed[-1].response.output[-1].status == "incomplete"  # type: ignore[union-attr]
    app.script.die_after = 2
    with pytest.raises(openai.InternalServerError, match="engine failed"):
        client.responses.create(model="chat", input="x")
    with pytest.raises(openai.APIError, match="engine failed"):  # as at OpenAI: LangChain.js and LlamaIndex rely on it
        list(client.responses.create(model="chat", input="x", stream=True))
    raw = httpx.post(f"{client.base_url}responses", json={"model": "chat", "input": "x", "stream": True}).text
    done, error, failed = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")][-3:]
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert "engine failed" in error["message"] and failed["response"]["error"] == {
        name: error["error"][name] for name in ("code", "message")
    }
    app.script.die_after = None


NO, IV, IT = "not_supported", "invalid_value", "invalid_type"
IMAGE = {"type": "image", "source": {}}
FORMAT = {"type": "json_schema", "schema": PARAMETERS}
BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    (RESPONSES, {"input": None}, "input", IT),
    (RESPONSES, {"input": []}, "input", IV),
    (RESPONSES, {"input": [{"role": "tool", "content": "x"}]}, "input[0].role", IV),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type", NO),
    (RESPONSES, {"input": [*HELLO, {"type": "item_reference", "id": "msg_x_0"}]}, "input[1].id", "item_not_found"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id", "item_not_found"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type", NO),
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
    (RESPONSES, {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools", IV),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing_field"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema", ""),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort", NO),
    (RESPONSES, {"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    (RESPONSES, {"background": True}, "background", NO),
    (RESPONSES, {"truncation": "auto"}, "truncation", NO),
    (RESPONSES, {"include": ["reasoning.text"]}, "include[0]", IV),
    (RESPONSES, {"top_logprobs": -1}, "top_logprobs", IV),
    (RESPONSES, {"top_logprobs": 10_000}, "top_logprobs", IV),
    (RESPONSES, {"conversation": "x"}, "conversation", NO),
    (RESPONSES, {"temperature": -1}, "temperature", IV),
    (MESSAGES, {"max_tokens": 0}, "max_tokens", IV),
    (MESSAGES, {"messages": []}, "messages", IV),
    (MESSAGES, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].source", NO),
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
    (MESSAGES, {"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format", IV),
    (MESSAGES, {"output_format": FORMAT | {"schema": {"type": "x"}}}, "output_format.schema", IV),
    (MESSAGES, {"stop_sequences": ["a"] * 5}, "stop_sequences", IV),
    (MESSAGES, {"output_config": {"effort": "some"}}, "output_config.effort", IV),
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


def test_a_model_without_reasoning_or_a_template_says_so() -> None:
    app = chat_app()
    thinking = {"thinking": {"type": "adaptive"}}
    reply = ask(app, "POST", MESSAGES, json=GOOD[MESSAGES] | thinking)
    assert reply.status_code == 400 and "thinking" in reply.json()["error"]["message"]
    assert ask(app, "POST", MESSAGES, json=GOOD[MESSAGES] | {"thinking": {"type": "disabled"}}).status_code == 200
    check_error(ask(app, "POST", RESPONSES, json=GOOD[RESPONSES] | {"model": "gen"}), 400, "model", "no_chat_template")


def test_the_store_is_bounded_can_be_off_and_is_each_keys_own() -> None:
    store = ResponseStore(2_300, 50)  # two messages, which take more than their text
    for id in "abc":
        store.put("t", id, [{"role": "user", "content": "x" * 10}], {"id": id})
    assert [store.get("t", id) is not None for id in "abc"] == [False, True, True]
    kept = store.get("t", "c")
    assert kept is not None and kept.reply == b'{"id":"c"}' and kept.messages()[0]["role"] == "user"
    store.put("t", "d", [{"content": "x" * 2_000}], {})
    assert store.get("t", "d") is None and store.get("t", "c") is not None and store.get("u", "c") is None
    store.put("t", "e", [{"content": [""] * 50}], {})  # few bytes, but too many values
    assert store.get("t", "e") is None and store.get("t", "c") is not None
    app = chat_app(settings=ServiceSettings(response_store_bytes=0))
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


class OtherReplica:
    """The other replica of two, whose store is asked as Ray's calls ask it; None: it does not answer."""

    store: ResponseStore | None = None

    async def stored(self, tenant: str, response_id: str) -> StoredResponse | None:
        if self.store is None:
            raise TimeoutError
        return self.store.get(tenant, response_id)

    async def forget(self, tenant: str, response_id: str) -> int:
        if self.store is None:
            raise TimeoutError
        return int(self.store.drop(tenant, response_id))


def test_a_conversation_goes_on_at_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, other = calling_app(), calling_app(), OtherReplica()
    monkeypatch.setattr(second.service, "_replicas", other)
    made = ask(first, "POST", RESPONSES, json=GOOD[RESPONSES]).json()
    body, path = GOOD[RESPONSES] | {"previous_response_id": made["id"]}, f"{RESPONSES}/{made['id']}"
    check_error(ask(second, "POST", RESPONSES, json=body), 503, None, "not_live")
    for method in ("GET", "DELETE"):
        check_error(ask(second, method, path), 503, None, "not_live")
    other.store = first.service.responses
    continued = ask(second, "POST", RESPONSES, json=body)
    assert continued.status_code == 200, continued.text
    kept = second.service.responses.get("", continued.json()["id"])
    assert kept is not None and len(kept.messages()) == 4
    assert ask(second, "GET", path).json() == made
    assert ask(second, "GET", f"{path}/input_items").status_code == 200
    check_error(ask(second, "GET", f"{path}/input_items?limit={1:09}{'9' * 5000}"), 400, "limit")
    assert ask(second, "DELETE", path).json()["deleted"] is True
    check_error(ask(second, "GET", path), 404, None, "response_not_found")
    check_error(ask(second, "POST", RESPONSES, json=body), 400, "previous_response_id")


def test_stored_responses_can_be_read_and_deleted() -> None:
    app = calling_app()
    says(app, "<think>\nHm.\n</think>\n\nHello")
    with live(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        first = client.responses.create(model="chat", input="Hi", store=True)
        streamed = client.responses.create(model="chat", input="And?", previous_response_id=first.id, stream=True)
        last = list(streamed)[-1].response  # type: ignore[union-attr]
        assert client.responses.retrieve(first.id) == first
        assert client.responses.retrieve(last.id).output == last.output
        listed = list(client.responses.input_items.list(last.id, limit=1, order="asc"))
        assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]
        assert [item.content[0].text.strip() for item in listed] == ["Hi", "Hm.", "Hello", "And?"]  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="stream"):
            client.responses.retrieve(first.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="no item 'item_9'"):
            client.responses.input_items.list(last.id, after="item_9")
        client.responses.delete(first.id)
        for again in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response"):
                again(first.id)
        unkept = client.responses.create(model="chat", input="Hi", store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(unkept.id)
    off = calling_app(settings=ServiceSettings(response_store_bytes=0))
    error = check_error(ask(off, "GET", f"{RESPONSES}/resp_1"), 404, None, "response_not_found")
    assert "--response-store" in error["message"]


def test_a_kept_conversation_takes_no_more_than_it_counts() -> None:
    store = ResponseStore(10**9, 10**6)
    arguments = json.dumps({"a": [{}] * 5_000})
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(20):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": json.loads(arguments)}}
        store.put("t", str(at), [{"role": "assistant", "content": "", "tool_calls": [call]}], {})
        del call
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < store._bytes


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
    monkeypatch.undo()
    failed = calling_app()
    let_time_pass(failed, monkeypatch, 700.0, outputs=5)
    stream = ask(failed, "POST", RESPONSES, json=GOOD[RESPONSES] | {"max_output_tokens": 500, "stream": True}).text
    assert [line for line in stream.splitlines() if line.startswith("event: ")][-2:] == [
        "event: error",
        "event: response.failed",
    ]
    check_accounts(failed)
