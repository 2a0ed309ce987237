"""Tools and reasoning in chat completions: the template's input, the parsed reply, and its grammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.service.dialects.support import (
    CALLS,
    HARMONY,
    MISTRAL,
    TURNS,
    calling_app,
    chat_app,
    prompt_of,
    says,
    talker,
)
from tests.service.support import App, ask, byte_tokenizer, check_accounts, events, live, make_app, run
from tests.service.test_bad_requests import check_error
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import token_bytes
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.core.errors import ApiError
from triptych.service.core.models import ServedModel
from triptych.service.planning.response_format import GrammarChecker, OutputConstraint
from triptych.service.settings.service_settings import Limits, ServiceSettings

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "time"}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
HELLO: list[Any] = [{"role": "user", "content": "Weather?"}]
BODY: dict[str, Any] = {"model": "chat", "messages": HELLO, "tools": [TOOL, OTHER]}
SAID = (
    '<think>\nA city.\n</think>\n\nLet me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
CALLED = [("weather", '{"city": "Zürich"}'), ("time", "{}")]


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    made = calling_app()
    yield made
    check_accounts(made)


def post(app: App, **fields: Any) -> httpx.Response:
    return ask(app, "POST", PATH, json={**BODY, **fields})


def test_a_chat_with_tools_by_the_official_client(app: App) -> None:
    """The joined stream equals the unstreamed reply; sent back, it gives the template the text that the model wrote."""
    says(app, SAID)
    asked: dict[str, Any] = {"model": "chat", "messages": HELLO, "tools": [TOOL, OTHER], "n": 2}
    with live(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        reply = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion()
    for usage in (reply.usage, streamed.usage):
        assert usage is not None and usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 2 * len("<think>\nA city.\n</think>")
    for choice in (*reply.choices, *streamed.choices):
        message = choice.message
        assert choice.finish_reason == "tool_calls" and message.content == "Let me see."
        assert message.reasoning_content == "A city."  # type: ignore[attr-defined]
        calls = message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLED  # type: ignore[union-attr]
        assert len({call.id for call in calls}) == 2
    assert (
        kinds.count("tool_calls.function.arguments.done") == 4
        and kinds.count("tool_calls.function.arguments.delta") > 20
    )
    assert '<|turn|>tools\n{"type": "function", "function": {"name": "weather"' in prompt_of(app)

    said = json.loads(reply.choices[0].message.model_dump_json(exclude_none=True))
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "Sun"}
    assert post(app, messages=[*HELLO, said, result]).status_code == 200
    assert f"<|turn|>assistant\n{SAID}<|end|>\n<|turn|>tool\nSun<|end|>" in prompt_of(app)


def test_a_reply_without_its_reasoning(app: App) -> None:
    says(app, "<think>\nA city.\n</think>\n\nOslo.")
    reply = post(app, include_reasoning=False).json()
    assert reply["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": "Oslo."}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>\nA city.\n</think>")
    found = events(post(app, stream=True, include_reasoning=False).text)[:-1]
    deltas = [event["choices"][0]["delta"] for event in found]
    assert "".join(delta.get("content", "") for delta in deltas) == "Oslo."
    assert not any("reasoning_content" in delta for delta in deltas)


def test_events_of_a_call(app: App) -> None:
    says(app, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    found = events(post(app, stream=True, logprobs=True).text)
    assert found[-1] == "[DONE]"
    choices = [event["choices"][0] for event in found[:-1]]
    deltas = [choice["delta"] for choice in choices if choice["delta"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    [begin] = deltas[1]["tool_calls"]
    assert begin.pop("id").startswith("call_")
    assert begin == {"index": 0, "type": "function", "function": {"name": "time", "arguments": ""}}
    assert "".join(delta["tool_calls"][0]["function"]["arguments"] for delta in deltas[1:]) == "{}"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    tokens = "".join(
        entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": ()})["content"]
    )
    assert tokens.startswith("<tool_call>")  # each token once, whatever its text became


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": "none"}, {"content": SAID.partition("</think>\n\n")[2]}),
        ({"tools": None}, {"content": SAID.partition("</think>\n\n")[2]}),
        ({"parallel_tool_calls": False}, {"content": "Let me see.", "calls": CALLED[:1]}),
        (
            {"max_tokens": len(SAID.partition('y": "Z')[0])},
            {"content": "Let me see.", "calls": [("weather", '{"cit')], "finish": "length"},
        ),
        ({"stop": "rich"}, {"content": "Let me see.", "calls": [("weather", '{"city": "Zü')], "finish": "stop"}),
        ({"stop": "\n</tool_call>"}, {"content": "Let me see.", "calls": CALLED[:1]}),
    ],
)
def test_what_is_no_call(app: App, fields: dict[str, Any], message: dict[str, Any]) -> None:
    says(app, SAID)
    [choice] = post(app, **fields).json()["choices"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", ())
    ]
    assert (choice["message"]["content"], calls) == (message["content"], message.get("calls", []))
    assert choice["finish_reason"] == message.get("finish", "tool_calls" if calls else "stop")
    assert ("<|turn|>tools" in prompt_of(app)) == ("calls" in message)


def test_grammars_of_calls(app: App) -> None:
    """The grammar of a reply allows only the call that its choice asks for; without a choice there is no grammar."""
    says(app, "Hi")
    vocabulary = Vocabulary(token_bytes(byte_tokenizer(), 259))
    call, other = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLED
    )
    wrong = call.replace('"Zürich"', "3")

    texts = ("Hi", call, other, wrong, f"Hi {call}", f"<think>a</think>\n\n{call}", f"{call}\n{other}", '{"x": 1}')
    thought, both = texts[5:7]

    def matches(grammar: str, text: str) -> bool:
        matcher = compile_grammar(grammar, vocabulary)
        ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
        return all(matcher.tokens[token] and matcher.accept(token) is None for token in ids) and matcher.is_complete

    named = {"type": "function", "function": {"name": "weather"}}

    def allowed(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}

    shaped = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["anything"]),
        ({"tool_choice": "none", "tools": [STRICT]}, ["anything"]),
        ({"tool_choice": "required"}, [call, other, thought, both]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [call, other, thought]),
        ({"tool_choice": "required", "enable_thinking": False}, [call, other, both]),
        ({"tool_choice": named}, [call, thought]),
        ({"tool_choice": allowed("required")}, [call, thought]),
        ({"tool_choice": allowed("auto")}, ["Hi", call, f"Hi {call}", thought, '{"x": 1}']),
        ({"tools": [STRICT]}, ["Hi", call, f"Hi {call}", thought, '{"x": 1}']),
        ({"response_format": shaped}, [call, other, thought, both, '{"x": 1}']),
        ({"response_format": shaped, "tools": None}, ['{"x": 1}']),
    ]

    async def work(client: httpx.AsyncClient) -> None:
        for fields, matching in expected:
            reply = await client.post(PATH, json={**BODY, **fields})
            assert reply.status_code == 200, reply.text
            grammar = app.client.submitted[-1].params.grammar
            found = [text for text in texts if matches(grammar, text)] if grammar else ["anything"]
            assert found == matching, fields

    run(app, work)


def test_reasoning_and_variables_of_the_template(app: App) -> None:
    """Variables reach the template; if it opens the reasoning itself, the reply begins with reasoning."""
    says(app, "so it is\n</think>\n\nYes")
    for fields in (
        {"chat_template_kwargs": {"effort": "high"}},
        {"chat_template_kwargs": {"effort": "high"}, "tools": None},
    ):
        [choice] = post(app, **fields).json()["choices"]
        assert prompt_of(app).endswith("<|turn|>assistant\n<think>\nhigh: ")
        assert choice["message"]["content"] == "so it is\n</think>\n\nYes"  # the prompt does not end with the mark
    says(app, "m\n</think>\n\nYes")
    begun = [*HELLO, {"role": "assistant", "content": "<think>\nh"}]
    message = post(app, messages=begun, continue_final_message=True, add_generation_prompt=False).json()["choices"][0]
    assert (message["message"]["reasoning_content"], message["message"]["content"]) == ("m", "Yes")
    says(app, "Yes")
    for fields in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        message = post(app, **fields).json()["choices"][0]["message"]
        assert prompt_of(app).endswith("<think>\n\n</think>\n\n")
        assert message == {"role": "assistant", "refusal": None, "content": "Yes"}
    check_error(post(app, reasoning_effort="low"), 400, "reasoning_effort", "not_supported")
    opening = chat_app(
        TURNS.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}") + "{# </think> #}", max_model_len=512
    )
    says(opening, "so it is\n</think>\n\nYes")
    body = {"model": "chat", "messages": [{"role": "user", "content": "a"}]}
    streamed = events(ask(opening, "POST", PATH, json={**body, "stream": True}).text)[:-1]
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so it is"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes"
    effort = chat_app(TURNS + "{{ reasoning_effort }}", max_model_len=512)
    assert ask(effort, "POST", PATH, json={**body, "reasoning_effort": "low", "max_tokens": 1}).status_code == 200
    assert prompt_of(effort).endswith("low")


@pytest.mark.parametrize("path", ["chat", "responses", "messages", "ollama"])
def test_a_template_may_call_the_switch_of_reasoning_thinking(path: str) -> None:
    """DeepSeek V3.1's, Kimi K2.5's and Granite 3's do."""
    app = chat_app(CALLS.replace("enable_thinking", "thinking"), max_model_len=512)
    says(app, "Yes")
    off: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "chat": (PATH, [{"enable_thinking": False}, {"reasoning_effort": "none"}]),
        "responses": ("/v1/responses", [{"enable_thinking": False}, {"reasoning": {"effort": "none"}}]),
        "messages": ("/v1/messages", [{"max_tokens": 9}]),
        "ollama": ("/api/chat", [{"think": False}]),
    }
    route, bodies = off[path]
    name = "input" if path == "responses" else "messages"
    for fields in bodies:
        reply = ask(app, "POST", route, json={"model": "chat", name: HELLO, "stream": False, **fields})
        assert reply.status_code == 200, reply.text
        assert prompt_of(app).endswith("<think>\n\n</think>\n\n")


def test_a_template_without_tools_is_told_in_words() -> None:
    app = make_app(talker(TURNS), max_model_len=8_192)
    says(app, '[{"name": "weather", "arguments": {"city": "Oslo"}}]')
    called = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    [choice] = post(app, messages=history).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert prompt_of(app).startswith("<|turn|>user\nYou can call functions.")
    assert prompt_of(app).endswith(
        'Weather?<|end|>\n<|turn|>assistant\n[{"name": "time", "arguments": {}}]<|end|>\n'
        "<|turn|>user\nResult of time:\n9<|end|>\n<|turn|>assistant\n"
    )
    check_accounts(app)


def test_reasoning_and_arguments_go_back_as_templates_read_them() -> None:
    """Templates of gpt-oss read `thinking`, and refuse content in a message with calls."""
    source = (
        "{{ tools }}{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{% if message.thinking and message.content and message.tool_calls %}{{ raise_exception('both') }}{% endif %}"
        "{% if message.thinking %}({{ message.thinking }}){% endif %}"
        "{% for call in message.tool_calls or [] %} to=functions.{{ call.function.name }}<|channel|>commentary json"
        "<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %};{% endfor %}"
    )
    app = make_app(talker(source), max_model_len=8_192)
    call = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    for said, shown in (
        ({"content": "A", "reasoning_content": "hm"}, "A(hm)"),
        ({"content": "A", "reasoning": "hm"}, "A(hm)"),
        ({"content": "", "reasoning_content": "hm", "tool_calls": [call]}, "(hm){}"),
        ({"content": "A", "reasoning_content": "hm", "tool_calls": [call]}, "hm\n\nA{}"),
        ({"content": "", "tool_calls": [call | {"function": {"name": "time", "arguments": " "}}]}, "{}"),
    ):
        post(app, messages=[*HELLO, {"role": "assistant", **said}], tools=None, max_tokens=1)
        shown = shown.replace("{}", " to=functions.time<|channel|>commentary json<|message|>{}<|call|>")
        assert prompt_of(app) == f"Noneuser:Weather?;assistant:{shown};", said


def marked(source: str, marks: list[str], text: str) -> tuple[App, Tokenizer]:
    """Return a model `chat` whose tokenizer has special tokens, and which writes `text` with them."""
    model = talker(source)
    assert model.tokenizer is not None
    model.tokenizer._tokenizer.add_special_tokens(marks)
    tokenizer = Tokenizer(model.tokenizer._tokenizer)
    app = make_app(ServedModel(model.name, model.checkpoint, tokenizer, chat=model.chat), max_model_len=8_192)
    app.script.token_ids = (*tokenizer.encode(text, add_special_tokens=False).ids, 256)
    app.script.end_id = 256
    return app, tokenizer


def test_channels_are_parted_without_tools_too() -> None:
    """gpt-oss' marks are special tokens; they must be visible to the parser, with or without calls."""
    source = HARMONY
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    app, _ = marked(source, ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|skipped|>"], f"{said}<|skipped|>")
    for fields in ({}, {"tools": None}, {"tool_choice": "none"}):
        message = post(app, **fields).json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == ("Hm.", "Hello."), fields
    check_accounts(app)


def test_special_tokens_as_marks() -> None:
    """They are shown although other special tokens are skipped, and are ids in a grammar."""
    source = MISTRAL
    text = '<skipped>Hi[TOOL_CALLS][{"name": "time", "arguments": {}}]'
    app, tokenizer = marked(source, ["[TOOL_CALLS]", "<skipped>"], text)
    mark, skipped = (tokenizer.special_token_id(text) for text in ("[TOOL_CALLS]", "<skipped>"))
    assert app.script.token_ids[0] == skipped and mark in app.script.token_ids
    message = post(app, tools=[STRICT, OTHER]).json()["choices"][0]["message"]
    assert message["content"] == "Hi" and message["tool_calls"][0]["function"]["name"] == "time"
    assert len(message["tool_calls"][0]["id"]) == 9  # as Mistral's templates want it
    vocabulary = Vocabulary(token_bytes(tokenizer, 261))
    plain = byte_tokenizer()  # in which the mark is no special token
    for text, more, is_allowed in (("Hi", [mark], True), ("Hi[TOOL_CALLS]", [], False), ("Hi[TOOL CALLS]", [], True)):
        ids = [*plain.encode(text, add_special_tokens=False).ids, *more]
        matcher = compile_grammar(app.client.submitted[0].params.grammar, vocabulary)
        taken = [bool(matcher.tokens[token]) and matcher.accept(token) is None for token in ids]
        assert all(taken) == is_allowed, text
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    assert post(app, messages=[*HELLO, tool]).status_code == 200
    assert "call_1" not in prompt_of(app)
    check_accounts(app)


def test_refused_tools(app: App) -> None:
    def strict(**schema: Any) -> list[Any]:
        return [TOOL, {"type": "function", "function": {"name": "g", "strict": True, "parameters": schema}}]

    large = {"enum": ["x" * 70_000]}
    for fields, param, code in (
        (
            {"tools": strict(properties={"a": {"not": {"required": ["b"]}}})},
            "tools[1].function.parameters",
            "invalid_grammar",
        ),
        ({"tools": strict(properties={"a": large})}, "tools[1].function.parameters", "invalid_value"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos", "invalid_value"),
        ({"tools": strict(type="string")}, "tools[1].function.parameters.type", "invalid_value"),
    ):
        check_error(post(app, **fields), 400, param, code)
    few = calling_app(settings=ServiceSettings(limits=Limits(max_tools=1)))
    check_error(post(few), 400, "tools", "invalid_value")
    forced = calling_app(settings=ServiceSettings(tool_format="llama3", reasoning_format="none"))
    says(forced, '{"name": "time", "parameters": {}}')
    assert post(forced).json()["choices"][0]["finish_reason"] == "tool_calls"
    says(forced, SAID)
    assert post(forced).json()["choices"][0]["message"]["content"] == SAID


def test_the_search_for_the_part_at_fault_takes_no_longer_than_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(Limits(grammar_s=0.05))
    compiled: list[str] = []

    async def compile_slowly(grammar: str, param: str) -> str:
        compiled.append(param)
        await asyncio.sleep(0.02)
        return "too large" if param == "tools" else ""

    monkeypatch.setattr(checker, "_compile", compile_slowly)
    parts = tuple(OutputConstraint(f"grammar {at}", f"tools[{at}]") for at in range(200))
    with pytest.raises(ApiError, match="tools cannot be followed: too large"):
        asyncio.run(checker.check(OutputConstraint("all", "tools", parts), talker()))
    assert 1 < len(compiled) < 10
    checker.close()
