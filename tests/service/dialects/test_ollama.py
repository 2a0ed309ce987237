"""Ollama's API: chats, prompts, embeddings, lists of models, and the requests of programs that speak it.

`make clients` runs the official package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.service.dialects.support import CALLS, calling_app, chat_app, prompt_of, says, talker
from tests.service.dialects.test_conversations import HELLO
from tests.service.dialects.test_tools import PARAMETERS, SAID
from tests.service.support import App, ask, byte_tokenizer, check_accounts, info, live, make_app, run, until
from tests.service.test_infilling import filling, sent
from triptych.model.api.parameters import MAX_INT
from triptych.service.core.models import State
from triptych.service.dialects.ollama_bodies import _seconds
from triptych.service.settings.service_settings import Limits, ServiceSettings

Json = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "description": "Tells it.", "parameters": {"type": "object"}}},
]
CHAT, GENERATE = "/api/chat", "/api/generate"
ROUTES = {CHAT: {"model": "chat", "messages": HELLO}, GENERATE: {"model": "chat", "prompt": "Weather?"}}
WRITTEN = {"model", "created_at", "done", "done_reason", "total_duration", "load_duration"}
COUNTS = {"prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    made = calling_app()
    yield made
    check_accounts(made)


def send(app: App, path: str, **changes: Any) -> httpx.Response:
    body = {**ROUTES.get(path, {}), **changes}
    return ask(app, "POST", path, json={name: value for name, value in body.items() if value is not ...})


def lines(reply: httpx.Response) -> list[Json]:
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson"), reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def without_ids(calls: list[Json]) -> list[Json]:
    return [{name: value for name, value in call.items() if name != "id"} for call in calls]


def test_a_chat_and_its_lines(app: App) -> None:
    says(app, SAID)
    whole = send(app, CHAT, tools=TOOLS, stream=False).json()
    assert whole.keys() == WRITTEN | COUNTS | {"message"}
    assert whole["done_reason"] == "stop" and all(whole[name] > 0 for name in (*COUNTS, "total_duration"))
    message = whole["message"]
    assert (message["role"], message["thinking"], message["content"]) == ("assistant", "A city.", "Let me see.")
    assert without_ids(message["tool_calls"]) == [
        {"function": {"index": 0, "name": "weather", "arguments": {"city": "Zürich"}}},
        {"function": {"index": 1, "name": "time", "arguments": {}}},
    ]
    streamed = lines(send(app, CHAT, tools=TOOLS))
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1].keys() == whole.keys() and streamed[-1]["eval_count"] == whole["eval_count"]
    for part in ("thinking", "content"):
        assert "".join(line["message"].get(part, "") for line in streamed) == message[part]
    calls = [call for line in streamed for call in line["message"].get("tool_calls", ())]
    assert without_ids(calls) == without_ids(message["tool_calls"])
    assert len({call["id"] for call in calls}) == 2


def test_calls_without_ids_get_their_results(app: App) -> None:
    """The official client drops the ids of calls; programs send results with or without the tool's name."""
    says(app, "Sunny.")
    calls = [
        {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"function": {"name": "time", "arguments": {}}},
    ]
    said = {"role": "assistant", "thinking": "A city.", "tool_calls": calls}
    for results in (
        [
            {"role": "tool", "content": "9 am", "tool_name": "time"},
            {"role": "tool", "content": "Sun", "tool_name": "weather"},
        ],
        [{"role": "tool", "content": "Sun"}, {"role": "tool", "content": "9 am"}],
    ):
        reply = send(app, CHAT, messages=[*HELLO, said, *results], tools=TOOLS, stream=False)
        assert reply.json()["message"]["content"] == "Sunny."
        assert "<think>\nA city.\n</think>" in prompt_of(app) and '{"city": "Oslo"}' in prompt_of(app)
    from triptych.service.dialects.ollama import _messages
    from triptych.service.dialects.ollama_bodies import OllamaMessage

    given = [OllamaMessage.model_validate(one) for one in (said, *results)]
    made = list(_messages(given))
    assert [one["id"] for one in made[0]["tool_calls"]] == [one["tool_call_id"] for one in made[1:]]
    assert [one["name"] for one in made[1:]] == ["weather", "time"]


def test_a_choice_of_tools(app: App) -> None:
    """Ollama has none; its provider for Vercel's AI SDK sends one in the form of OpenAI's responses."""
    says(app, "Yes.")
    for choice, held in (
        *(("auto", []), ("none", []), ("required", ["weather", "time"])),
        ({"type": "function", "name": "time"}, ["time"]),
    ):
        assert send(app, CHAT, tools=TOOLS, tool_choice=choice, stream=False).status_code == 200
        grammar = app.client.submitted[-1].params.grammar
        assert [name for name in ("weather", "time") if f'{name}\\", \\"arguments' in grammar] == held
    assert send(app, CHAT, tool_choice="required", stream=False).status_code == 400


def test_think(app: App) -> None:
    says(app, "Yes.")
    for think, closed in ((False, True), (True, False), (..., False), ("high", False)):
        for path in ROUTES:
            assert send(app, path, think=think, stream=False).status_code == 200
            assert prompt_of(app).endswith("</think>\n\n") == closed
    plain = chat_app(max_model_len=512)
    for path in ROUTES:
        reply = send(plain, path, think=True)
        assert (reply.status_code, reply.json()) == (400, {"error": "'chat' does not support thinking"})
        assert send(plain, path, think=False).status_code == 200
    check_accounts(plain)


def test_options_are_taken_by_their_names(app: App) -> None:
    says(app, "Yes.")
    options = {
        **{"temperature": 0.5, "top_k": -1, "top_p": 0.7, "min_p": 0.1, "typical_p": 0.9, "seed": 7, "stop": ["\n"]},
        **{"num_predict": 99_999, "repeat_penalty": 1.2, "repeat_last_n": -1, "presence_penalty": 0.5},
        **{
            "frequency_penalty": 0.25,
            "draft_num_predict": 4,
            "num_ctx": 4096,
            "num_gpu": 1,
            "num_keep": 5,
            "mirostat": 0,
        },
    }
    for path in ROUTES:
        assert send(app, path, options=options, stream=False).status_code == 200
        params = app.client.submitted[-1].params
        found = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.typical_p,
            params.seed,
            params.stop,
        )
        assert found == (0.5, 0, 0.7, 0.1, 0.9, 7, ("\n",))
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, 0.25)
        assert (params.num_speculative_tokens, params.max_tokens < 8_192) == (4, True)
        assert send(app, path, stream=False).status_code == 200
        params = app.client.submitted[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.8, 40, 0.9, 1)
        off = {"repeat_penalty": 1.2, "repeat_last_n": 0, "num_predict": -1, "seed": -1, "top_p": 0}
        assert send(app, path, options=off, stream=False).status_code == 200
        params = app.client.submitted[-1].params
        assert (params.repetition_penalty, params.temperature, params.max_tokens > 7_000) == (1, 0, True)
        for given, window in (
            ({"repeat_last_n": 32}, 32),
            ({"repeat_last_n": -1}, MAX_INT),
            ({}, 0),
            ({"presence_penalty": 0.5}, 64),
        ):
            assert send(app, path, options=given, stream=False).status_code == 200
            assert app.client.submitted[-1].params.penalty_window == window
        for schema, held in (("json", "%json"), (PARAMETERS, "%json"), ("", ""), (None, "")):
            assert send(app, path, format=schema, stream=False).status_code == 200
            assert held in app.client.submitted[-1].params.grammar


@pytest.mark.parametrize(
    ("path", "changes", "words"),
    [
        (CHAT, {"options": {"repeat_penalty": 1.1, "repeat_last_n": -2}}, "options.repeat_last_n"),
        (CHAT, {"options": {"num_predict": 0}}, "options.num_predict"),
        (CHAT, {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        (CHAT, {"options": {"temprature": 1}}, "unknown field 'temprature' in options; did you mean 'temperature'"),
        (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
        (CHAT, {"options": {"top_p": 1.5}}, "options.top_p"),
        (CHAT, {"options": {"draft_num_predict": 1000}}, "options.draft_num_predict"),
        (CHAT, {"format": "yaml"}, "format: "),
        (CHAT, {"format": 1}, "format: "),
        (CHAT, {"think": 0}, "think: "),
        (CHAT, {"keep_alive": True}, "keep_alive: "),
        ("/api/embed", {"model": "enc", "input": 5}, "input: "),
        (CHAT, {"format": {"type": "nothing"}}, "format"),
        (CHAT, {"keep_alive": "soon"}, "keep_alive"),
        (CHAT, {"think": "hard"}, "think"),
        (CHAT, {"shift": True}, "shift is not supported"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs needs logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", "images": ["iVBOR"]}]},
            "messages[0].images[0]: model chat reads text, not images",
        ),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "messages[0].content"),
        (GENERATE, {"images": ["iVBOR"]}, "images[0]: model chat reads text, not images"),
        (GENERATE, {"suffix": "x"}, "suffix: model chat cannot fill in the middle"),
        (GENERATE, {"suffix": "x", "system": "a"}, "suffix excludes system and context"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "template is not supported; use raw"),
        (GENERATE, {"raw": True, "system": "a"}, "raw mode does not support template, system, or context"),
        (GENERATE, {"raw": True, "context": [1]}, "raw mode does not support template, system, or context"),
        (GENERATE, {"context": [100_000]}, "context[0] must be a token id below"),
        (GENERATE, {"model": "gen", "system": "a"}, "system: model gen has no chat template"),
        (GENERATE, {"model": "seq", "context": [1]}, "context: model seq"),
        ("/api/show", {}, "model is required"),
        ("/api/show", {"model": "chat", "verbose": True}, "verbose is not supported"),
        ("/api/embed", {"model": "enc", "input": "w1", "dimensions": 0}, "dimensions"),
        ("/api/embed", {"model": "gen", "input": "w1"}, "was not trained to make vectors"),
    ],
)
def test_what_is_refused_is_named(app: App, path: str, changes: Json, words: str) -> None:
    reply = send(app, path, **changes)
    assert reply.status_code == 400 and reply.json().keys() == {"error"}
    assert words in reply.json()["error"] and len(reply.json()["error"]) <= 600


def test_a_prompt_is_answered_by_the_template_and_a_context_goes_on(app: App) -> None:
    says(app, "<think>\nA city.\n</think>\n\nYes.")
    first = send(app, GENERATE, system="Be brief.", stream=False).json()
    assert first.keys() == WRITTEN | COUNTS | {"response", "thinking", "context"}
    assert (first["thinking"], first["response"]) == ("A city.", "Yes.")
    prompt = "<|turn|>system\nBe brief.<|end|>\n<|turn|>user\nWeather?<|end|>\n<|turn|>assistant\n"
    assert prompt_of(app) == prompt
    assert byte_tokenizer().decode(first["context"], skip_special_tokens=True).startswith(prompt + "<think>\nA city.")
    streamed = lines(send(app, GENERATE, system="Be brief."))
    assert streamed[-1]["context"] == first["context"]
    assert "".join(line["response"] for line in streamed) == "Yes."
    send(app, GENERATE, context=first["context"], prompt="And now?", stream=False)
    assert prompt_of(app).endswith("Yes.<s><|turn|>user\nAnd now?<|end|>\n<|turn|>assistant\n")
    says(app, "x = 1")
    raw = send(app, GENERATE, raw=True, prompt="y = ", stream=False, logprobs=True, top_logprobs=1).json()
    assert (prompt_of(app), raw["response"], "context" in raw) == ("<s>y = ", "x = 1", False)
    assert [one["token"] for one in raw["logprobs"]][:3] == ["x", " ", "="] and len(
        raw["logprobs"][0]["top_logprobs"]
    ) == 1
    for model, start in (("gen", "<s>"), ("seq", None)):
        assert send(app, GENERATE, model=model, prompt="y = ", options={"num_predict": 99}).status_code == 200
        assert start is None or prompt_of(app) == "<s>y = "


def test_a_suffix() -> None:
    """Continue knows by the template that a model fills in, and may ask for more tokens than fit."""
    app = filling()
    says(app, "xx")
    shown = send(app, "/api/show", model="fill").json()
    assert shown["capabilities"] == ["completion", "insert"] and ".Suffix" in shown["template"]
    for prompt, start in (("ab", "<fim_prefix>ab"), ("ab" * 90, "<fim_prefix>ba")):
        body = {"model": "fill", "prompt": prompt, "suffix": "yz", "options": {"num_predict": 1000}}
        found = lines(send(app, GENERATE, **body))
        assert "".join(line["response"] for line in found) == "xx" and "context" not in found[-1]
        read = sent(app)
        app.client.submitted.clear()
        assert read.startswith(start[:14]) and read.endswith("<fim_suffix>yz<fim_middle>")
    check_accounts(app)


def test_logprobs_of_a_chat(app: App) -> None:
    says(app, "Yes.")
    whole = send(app, CHAT, logprobs=True, stream=False).json()
    streamed = lines(send(app, CHAT, logprobs=True))
    assert [one for line in streamed for one in line.get("logprobs", ())] == whole["logprobs"]
    assert [one["bytes"] for one in whole["logprobs"]][:2] == [[89], [101]]


def test_the_oldest_messages_are_left_out() -> None:
    app = chat_app(max_model_len=256)
    says(app, "Yes.")
    turns = [{"role": "system", "content": "Be brief."}]
    for at in range(40):
        turns += [{"role": "user", "content": f"question {at}"}, {"role": "assistant", "content": f"answer {at}"}]
    turns.append({"role": "user", "content": "last"})
    assert send(app, CHAT, messages=turns, stream=False).status_code == 200
    prompt = prompt_of(app)
    assert prompt.startswith("<|turn|>system\nBe brief.<|end|>\n<|turn|>user\nquestion 3")
    assert prompt.endswith("<|turn|>user\nlast<|end|>\n<|turn|>assistant\n") and 200 < len(prompt) < 256
    refused = send(app, CHAT, messages=turns, truncate=False)
    assert refused.status_code == 400 and "maximum context length is 256 tokens" in refused.json()["error"]
    long = send(app, CHAT, messages=[*turns, {"role": "user", "content": "a" * 300}])
    assert long.status_code == 400 and "maximum context length" in long.json()["error"]
    check_accounts(app)


def test_vectors() -> None:
    app, name = make_app(), "enc"
    one = send(app, "/api/embed", model=name, input="w1").json()
    several = send(app, "/api/embed", model=f"{name}:latest", input=["w1", "w2 " * 60], dimensions=4).json()
    assert one.keys() == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert (len(one["embeddings"]), several["model"]) == (1, f"{name}:latest")
    assert [len(vector) for vector in several["embeddings"]] == [4, 4]
    assert app.client.encoded[-1].normalize
    refused = send(app, "/api/embed", model=name, input="w2 " * 60, truncate=False)
    assert refused.status_code == 400 and "input" in refused.json()["error"]
    assert len(send(app, "/api/embeddings", model=name, prompt="w1").json()["embedding"]) == len(one["embeddings"][0])
    too_long = send(app, "/api/embeddings", model=name, prompt="w2 " * 60)
    assert too_long.status_code == 400 and "prompt" in too_long.json()["error"]
    assert send(app, "/api/embed", model=name, input=[]).json() == {"model": name, "embeddings": []}
    assert send(app, "/api/embeddings", model=name, prompt="").json() == {"embedding": []}
    check_accounts(app)


def test_lists_of_models(app: App) -> None:
    listed = {one["model"]: one for one in ask(app, "GET", "/api/tags").json()["models"]}
    assert set(listed) == {"gen:latest", "seq:latest", "enc:latest", "chat:latest"}
    assert listed["chat:latest"]["capabilities"] == ["completion", "tools", "thinking"]
    assert (listed["gen:latest"]["size"], listed["gen:latest"]["details"]["parameter_size"]) == (4000, "1.00K")
    assert len({one["digest"] for one in listed.values()}) == 4
    running = {one["name"]: one for one in ask(app, "GET", "/api/ps").json()["models"]}
    assert running.keys() == listed.keys()
    assert running["chat:latest"]["context_length"] == 8_192 and running["chat:latest"]["expires_at"] > "2299"
    for name in ("chat", "chat:latest"):
        for field in ("model", "name"):
            shown = send(app, "/api/show", **{field: name}).json()
            assert shown["model_info"]["tiny.context_length"] == 8_192 and shown["details"]["family"] == "tiny"
            assert shown["parameters"].split("\n")[0].split() == ["num_ctx", "8192"]
    assert send(app, "/api/show", model="enc").json()["capabilities"] == ["embedding"]
    assert ask(app, "GET", "/api/version").json()["version"].split(".")[1] > "20"
    for accept, text in (("*/*", "Ollama is running"), ("application/json", "Ollama is running"), ("text/html", "<!")):
        assert ask(app, "GET", "/", headers={"accept": accept}).text.startswith(text)
        assert ask(app, "HEAD", "/", headers={"accept": accept}).status_code == 200


def test_errors_have_the_shape_of_the_api() -> None:
    app = chat_app(settings=ServiceSettings(api_keys=("right",)), max_model_len=512)
    key = {"authorization": "Bearer right"}
    for method, path in (
        *(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy", "blobs/sha256:1")),
        ("DELETE", "/api/delete"),
    ):
        reply = ask(app, method, path, json={"model": "llama3"}, headers=key)
        assert (reply.status_code, "triptych serve" in reply.json()["error"]) == (403, True)
        assert ask(app, method, path, json={}).status_code == 401
    for path, body in ROUTES.items():
        reply = ask(app, "POST", path, json=body | {"model": "nope"}, headers=key)
        assert reply.status_code == 404 and reply.json()["error"].startswith("model 'nope' not found; served: ")
        wrong = ask(app, "POST", path, json=body, headers={"authorization": "Bearer wrong"})
        assert wrong.status_code == 401 and isinstance(wrong.json()["error"], str)
    assert ask(app, "GET", "/api/nope", headers=key).json()["error"].startswith("there is no such route")
    app.script.queue_full = "queue_requests"
    reply = ask(app, "POST", CHAT, json=ROUTES[CHAT], headers=key)
    assert (reply.status_code, reply.json().keys()) == (429, {"error"}) and reply.headers["retry-after"]
    app.script.queue_full, app.script.die_after = None, 2
    *some, last = lines(ask(app, "POST", CHAT, json=ROUTES[CHAT], headers=key))
    assert some and last == {"error": "the engine failed while it processed the request"}
    check_accounts(app)


def test_a_silence_is_filled_with_lines_that_clients_can_read() -> None:
    app = chat_app(max_model_len=512, settings=ServiceSettings(limits=Limits(stream_keepalive_s=0.05)))
    says(app, "Yes.")
    app.script.delay_s = 0.2
    with live(app) as url:
        found = lines(httpx.post(url + CHAT, json=ROUTES[CHAT]))
    assert "".join(line["message"]["content"] for line in found) == "Yes."
    assert len([line for line in found if not line["message"]["content"]]) > 4


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), (300, 300), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("300", 300), ("0", 0)],
)
def test_durations(given: Any, seconds: float) -> None:
    assert _seconds(given) == seconds
    assert _seconds(-1) == _seconds("-1m") == float("inf")


def test_models_come_and_go_by_keep_alive() -> None:
    app = make_app(talker(CALLS), max_model_len=8_192, loadable=[info("chat", "decoder-only")])
    says(app, "Yes.")

    async def work(client: httpx.AsyncClient) -> None:
        async def sent(path: str, **changes: Any) -> httpx.Response:
            return await client.post(path, json={"model": "chat", "stream": False, **changes})

        loader, model = app.service.loader, app.service.models["chat"]
        assert (await sent(CHAT, messages=[])).json()["done_reason"] == "load"
        pinned = await sent(GENERATE, keep_alive=0)
        assert (pinned.status_code, "pinned" in pinned.json()["error"]) == (403, True)
        assert (await sent(CHAT, messages=HELLO, keep_alive=0)).status_code == 200
        loader.unload_unneeded()
        assert model.state is State.LOADED  # given at the start
        model.pinned = False
        assert (await sent(CHAT, messages=HELLO, keep_alive="1h")).status_code == 200
        [entry] = [one for one in (await client.get("/api/ps")).json()["models"] if one["name"] == "chat:latest"]
        assert "2020" < entry["expires_at"] < "2299"
        loader.unload_unneeded()
        assert model.state is State.LOADED
        assert (await sent(CHAT, messages=HELLO, keep_alive=0)).status_code == 200
        loader.unload_unneeded()
        await until(lambda: model.state is State.AVAILABLE)
        assert "chat:latest" in {one["name"] for one in (await client.get("/api/tags")).json()["models"]}
        assert "chat:latest" not in {one["name"] for one in (await client.get("/api/ps")).json()["models"]}
        assert (await client.post("/api/show", json={"model": "chat"})).json()["capabilities"] == ["completion"]
        unloaded = (await sent(CHAT, keep_alive=0)).json()
        assert (unloaded["done_reason"], unloaded["message"]["content"]) == ("unload", "")
        app.script.load_delay_s = 0.1
        loading = asyncio.create_task(sent(CHAT))
        await until(lambda: model.state is State.LOADING)
        assert (await sent(CHAT, keep_alive=0)).status_code == 200  # once it is loaded
        assert (await loading).json()["done_reason"] == "load"
        loader.unload_unneeded()
        await until(lambda: model.state is State.AVAILABLE)

    run(app, work)
    check_accounts(app)


# -- Requests of programs that speak this API, as their sources make them.

ASSIST = "You are a voice assistant."
PROGRAMS: dict[str, list[tuple[str, Json]]] = {
    "home assistant": [
        (
            CHAT,
            {
                "messages": [
                    {"role": "system", "content": ASSIST},
                    {"role": "user", "content": "Weather?"},
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"function": {"name": "weather", "arguments": {}}}],
                    },
                    {"role": "tool", "content": '{"data":{"sky":"clear"},"error":null}'},
                ],
                "tools": TOOLS,
                "stream": True,
                "keep_alive": "-1s",
                "options": {"num_ctx": 8192.0},
                "think": False,
            },
        )
    ],
    "open webui": [
        (
            CHAT,
            {
                "model": "chat:latest",
                "messages": HELLO,
                "stream": True,
                "options": {
                    "temperature": 0.7,
                    "num_ctx": 2048,
                    "use_mmap": True,
                    "num_thread": 2,
                    "repeat_last_n": 64,
                },
                "keep_alive": "5m",
                "tools": [],
                "format": None,
            },
        ),
        (GENERATE, {"model": "chat:latest", "prompt": "A title?", "stream": False, "keep_alive": 0}),
    ],
    "continue": [
        (
            CHAT,
            {
                "messages": HELLO,
                "options": {"temperature": 0.5, "num_predict": 2048, "stop": ["<end>"], "num_ctx": 8192, "top_k": 40},
                "keep_alive": 1800,
                "stream": False,
                "tools": TOOLS,
            },
        ),
        (
            GENERATE,
            {"prompt": "def f():", "raw": True, "options": {"num_predict": 1000}, "keep_alive": 1800, "stream": True},
        ),
    ],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_programs_requests_are_answered(app: App, program: str) -> None:
    says(app, "Sunny.")
    for path, body in PROGRAMS[program]:
        reply = send(app, path, **body)
        assert reply.status_code == 200, reply.text
        found = [json.loads(line) for line in reply.text.splitlines()]
        assert "".join(line.get("response", line.get("message", {}).get("content")) for line in found) == "Sunny."


def test_commands_without_a_content_type_are_read_and_pages_of_other_sites_are_not(app: App) -> None:
    """Ollama's documentation sends JSON with `curl -d`, which declares it as a form."""
    says(app, "Sunny.")
    body, form = json.dumps(ROUTES[CHAT]), {"content-type": "application/x-www-form-urlencoded"}
    assert ask(app, "POST", CHAT, content=body, headers=form).status_code == 200
    assert ask(app, "POST", CHAT, content=body).status_code == 200
    for site in ({"sec-fetch-site": "cross-site"}, {"origin": "https://example.com"}):
        refused = ask(app, "POST", CHAT, content=body, headers=form | site)
        assert (refused.status_code, refused.json().keys()) == (403, {"error"})


def test_names_of_the_lists_serve_in_every_dialect(app: App) -> None:
    """VS Code reads /api/tags and /api/show, and chats by OpenAI's API."""
    says(app, "Sunny.")
    body = {"model": "chat:latest", "messages": HELLO, "stream": False}
    reply = ask(app, "POST", "/v1/chat/completions", json=body)
    assert reply.json()["choices"][0]["message"]["content"] == "Sunny."
