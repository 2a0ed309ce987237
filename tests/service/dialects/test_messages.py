"""Anthropic's messages by the official client; test_conversations.py has what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.dialects.support import TURNS, calling_app, chat_app, prompt_of, says
from tests.service.dialects.test_conversations import COUNT, GOOD, HELLO, MESSAGES, OWN_TOOLS, SENT
from tests.service.dialects.test_tools import PARAMETERS, SAID
from tests.service.support import App, ask, check_accounts, live
from triptych.service.dialects.messages import JsonBeginning
from triptych.service.settings.service_settings import ServiceSettings


@pytest.fixture(scope="module")
def served(anthropic: Any) -> Iterator[tuple[App, Any]]:
    """Yield a model that reasons and calls tools, and the client."""
    app = calling_app()
    with live(app) as url:
        yield app, anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    check_accounts(app)


def test_a_message_and_its_events(served: tuple[App, Any]) -> None:
    app, client = served
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


def test_reasoning_can_be_left_out_and_is_counted(served: tuple[App, Any]) -> None:
    app, client = served
    says(app, SAID)
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = client.messages.create(**SENT, **omitted)
    with client.messages.stream(**SENT, **omitted) as stream:
        deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
        final = stream.get_final_message()
    for message in (whole, final):
        assert (message.content[0].type, message.content[0].thinking) == ("thinking", "")
        assert message.usage.output_tokens_details.thinking_tokens == len("<think>\nA city.\n</think>")
    assert deltas[0] == "signature_delta" and "thinking_delta" not in deltas
    hidden = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"}
    history = [*HELLO, {"role": "assistant", "content": [hidden, {"type": "text", "text": "Yes."}]}, *HELLO]
    client.messages.create(**SENT | {"messages": history})
    assert "<|turn|>assistant\nYes.<|end|>\n<|turn|>user\nWeather?<|end|>" in prompt_of(app)


def test_an_effort_reaches_templates_that_have_levels(served: tuple[App, Any]) -> None:
    """Claude Code sends one to every model."""
    app, client = served
    says(app, "Yes.")
    wish = {"effort": "high"}
    assert client.messages.create(**SENT, output_config=wish).content[0].text == "Yes."
    levels = chat_app(TURNS + "{{ reasoning_effort }}", max_model_len=512)
    body = {"model": "chat", "messages": HELLO, "max_tokens": 1, "output_config": wish}
    assert ask(levels, "POST", MESSAGES, json=body).status_code == 200
    assert prompt_of(levels).endswith("high")


def test_turns_of_one_author_are_joined(served: tuple[App, Any]) -> None:
    """Many templates refuse two of them in a row; results of tools stay separate messages."""
    app, client = served
    call = {"type": "tool_use", "id": "c", "name": "time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "9"}
    history = [*HELLO, {"role": "user", "content": "Now?"}, {"role": "assistant", "content": "So"}]
    history += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}, *HELLO]
    client.messages.create(**SENT | {"messages": history, "max_tokens": 1})
    turns = prompt_of(app).split("<|turn|>")[2:]
    assert [turn.partition("\n")[0] for turn in turns] == ["user", *["assistant"] * 2, "tool", "user", "assistant"]
    assert turns[0] == "user\nWeather?\nNow?<|end|>\n"


def test_the_context_ends_a_reply_that_may_be_longer(served: tuple[App, Any]) -> None:
    """Clients ask for thousands of tokens whatever the model is."""
    app, client = served
    app.script.token_ids, app.script.end_id = (65,), None
    try:
        cut = client.messages.create(**SENT | {"max_tokens": 20_000})
        with client.messages.stream(**SENT | {"max_tokens": 20_000}) as stream:
            assert stream.get_final_message().stop_reason == cut.stop_reason == "model_context_window_exceeded"
        room = 8_192 - cut.usage.input_tokens - cut.usage.cache_read_input_tokens
        assert cut.usage.output_tokens == room
        assert client.messages.create(**SENT | {"max_tokens": room}).stop_reason == "max_tokens"
    finally:
        says(app, "Hi")


def test_the_clients_loop_over_tools_goes_on_without_threads(served: tuple[App, Any], anthropic: Any) -> None:
    app, client = served
    says(app, "Sunny.")

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells it."""
        return "Sun"

    runner = client.beta.messages.tool_runner(model="chat", max_tokens=500, messages=HELLO, tools=[weather])
    assert [message.content[0].text for message in runner] == ["Sunny."]
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported"):
        client.beta.messages.create(**GOOD[MESSAGES], thread={"type": "create"})


def test_arguments_that_are_no_json_do_not_break_the_client(served: tuple[App, Any]) -> None:
    app, client = served
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


def test_choices_and_ends_of_messages(served: tuple[App, Any], anthropic: Any) -> None:
    app, client = served
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
    grammar = app.client.submitted[-1].params.grammar
    client.messages.create(**SENT | {"tools": []}, extra_body={"output_format": held["format"]})  # anthropic 0.77's
    assert app.client.submitted[-1].params.grammar == grammar
    says(app, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}')
    cut = client.messages.create(**SENT | {"max_tokens": 57})
    assert (cut.stop_reason, cut.content[0].input) == ("max_tokens", {"city": "Osl"})
    app.script.die_after = 2
    with pytest.raises(anthropic.APIStatusError, match="engine failed"):
        list(client.messages.create(**SENT, stream=True))
    app.script.die_after = None


def test_errors_of_messages_are_those_of_anthropics_client(anthropic: Any) -> None:
    """Every error has the API's shape and the client's class; the key may be in either header."""
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


def test_models_are_listed_in_the_form_of_this_api(anthropic: Any) -> None:
    app = chat_app()
    with live(app) as url:
        models = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0).models
        page = models.list(limit=3)
        assert [one.id for one in page.data] == ["gen", "seq", "enc"] and page.has_more
        assert [one.id for one in page] == ["gen", "seq", "enc", "chat"]
        assert [one.id for one in models.list(limit=1, before_id="enc")] == ["seq", "gen"]
        found = models.retrieve("gen")
        assert (found.type, found.display_name, found.lifecycle) == ("model", "gen", "active") and found == page.data[0]
        context = httpx.get(f"{url}/v1/models/gen").json()["max_model_len"]
        assert found.max_input_tokens == context > 0 and found.created_at.year > 2000
        with pytest.raises(anthropic.BadRequestError, match="after_id: no model 'nope'"):
            models.list(after_id="nope")
        with pytest.raises(anthropic.BadRequestError, match="limit must be from 1 to 1000"):
            models.list(extra_query={"limit": "0000000011001"})
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            models.list(limit=0)
        with pytest.raises(anthropic.NotFoundError, match="nope"):
            models.retrieve("nope")
    check_accounts(app)
