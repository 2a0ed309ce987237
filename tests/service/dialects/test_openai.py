"""OpenAI's official client against the application under a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.service.dialects.support import chat_app
from tests.service.processes import eventually
from tests.service.support import App, byte_tokenizer, check_accounts, let_time_pass, live
from triptych.model.text.grammar import choice_grammar, json_grammar, regex_grammar
from triptych.service.settings.service_settings import ServiceSettings

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
AB = list(byte_tokenizer().encode("ab").ids)  # <s> a b
AFRB = list(byte_tokenizer().encode("afr_XXb", add_special_tokens=False).ids)  # a special token between two letters
ABC: dict[str, Any] = {"model": "gen", "prompt": "ab", "max_tokens": 8}


@contextmanager
def client_of(app: App, **options: Any) -> Iterator[openai.OpenAI]:
    with live(app) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", **{"api_key": "any", "max_retries": 0, **options})
    check_accounts(app)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[openai.OpenAI, App]]:
    """Yield a client and its application, which always writes "hello "."""
    app = chat_app()
    with client_of(app) as client:
        yield client, app


@pytest.fixture
def client(served: tuple[openai.OpenAI, App]) -> openai.OpenAI:
    return served[0]


@pytest.fixture
def app(served: tuple[openai.OpenAI, App]) -> App:
    served[1].client.submitted.clear()
    return served[1]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["gen", "seq", "enc", "chat"]
    assert client.models.retrieve("gen").owned_by == "triptych"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


def test_a_completion(client: openai.OpenAI, app: App) -> None:
    reply = client.completions.create(**ABC, user="me", extra_headers={"x-request-id": "mine"})
    assert (reply.id, reply.object, reply.model) == ("cmpl-mine", "text_completion", "gen")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("hello he", "length")
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 8, 11)
    assert app.client.submitted[0].params.temperature == 1.0


def test_allowed_tokens(client: openai.OpenAI, app: App) -> None:
    client.completions.create(**ABC, extra_body={"allowed_token_ids": [5, 7]})
    client.chat.completions.create(model="chat", messages=HELLO, max_tokens=2, extra_body={"allowed_token_ids": []})
    assert [request.params.allowed_token_ids for request in app.client.submitted] == [(5, 7), ()]


def test_completion_defaults(client: openai.OpenAI, app: App) -> None:
    assert client.completions.create(model="gen", prompt="ab", stop=["lo"]).choices[0].finish_reason == "stop"
    params = app.client.submitted[0].params
    assert (params.max_tokens, params.temperature) == (16, 1.0)
    app.served["gen"].checkpoint.sampling_defaults["temperature"] = 0.5
    client.completions.create(
        model="gen", prompt="ab", seed=-1, extra_body={"top_k": -1, "min_p": 0.1, "top_n_sigma": 1.5}
    )
    app.served["gen"].checkpoint.sampling_defaults.clear()
    params = app.client.submitted[1].params
    assert (params.temperature, params.top_k, params.min_p, params.seed) == (0.5, 0, 0.1, 2**63 - 1)
    assert params.top_n_sigma == 1.5


def test_token_id_prompts_and_n(client: openai.OpenAI, app: App) -> None:
    reply = client.completions.create(model="gen", prompt=[[1, 2], [3]], n=2, max_tokens=2)
    assert [(choice.index, choice.text) for choice in reply.choices] == [(at, "he") for at in range(4)]
    client.completions.create(model="gen", prompt=[1, 2, 3], max_tokens=1)
    assert [one.prompt_token_ids for one in app.client.submitted] == [(1, 2), (3,), (1, 2, 3)]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    found = client.completions.create(model="gen", prompt="ab", max_tokens=2, logprobs=2).choices[0].logprobs
    assert found is not None and found.top_logprobs is not None
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["h", "e"], [-0.5, -0.5], [0, 1])
    assert found.top_logprobs[0] == {"h": -0.5, "i": -1.5}


@pytest.mark.parametrize(("max_tokens", "text", "generated"), [(2, "abhe", 2), (0, "ab", 0)])
def test_the_prompt_scored(client: openai.OpenAI, max_tokens: int, text: str, generated: int) -> None:
    reply = client.completions.create(model="gen", prompt="ab", max_tokens=max_tokens, echo=True, logprobs=1)
    [choice] = reply.choices
    assert choice.text == text and choice.logprobs is not None
    assert choice.logprobs.tokens == ["<s>", *text]
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * len(text)]
    assert choice.logprobs.text_offset == [0, *range(len(text))]  # <s> is not in the text
    assert choice.logprobs.top_logprobs is not None and choice.logprobs.top_logprobs[0] is None
    assert reply.usage is not None and reply.usage.completion_tokens == generated


@pytest.mark.parametrize(
    ("prompt", "skip", "text", "offsets"),
    [
        ("ab", True, "ab", [0, 0, 1]),  # <s> is put before it
        ("ab", False, "ab", [0, 0, 1]),
        ("afr_XXb", True, "afr_XXb", [0, 0, 1, 6]),  # a special token that the client wrote
        ("afr_XXb", False, "afr_XXb", [0, 0, 1, 6]),
        (AB, True, "ab", [0, 0, 1]),
        (AB, False, "<s>ab", [0, 3, 4]),
        (AFRB, True, "ab", [0, 1, 1]),
        (AFRB, False, "afr_XXb", [0, 1, 6]),
    ],
)
def test_a_prompts_offset_is_a_place_in_the_text(
    client: openai.OpenAI, prompt: str | list[int], skip: bool, text: str, offsets: list[int]
) -> None:
    asked: dict[str, Any] = {"extra_body": {"skip_special_tokens": skip}, "echo": True, "logprobs": 0}
    [choice] = client.completions.create(model="gen", prompt=prompt, max_tokens=1, **asked).choices
    assert choice.logprobs is not None
    assert (choice.text, choice.logprobs.text_offset) == (text + "h", [*offsets, len(text)])


def test_an_encoder_decoder_echoes_no_source(client: openai.OpenAI) -> None:
    for max_tokens, text in ((2, "he"), (0, "")):
        reply = client.completions.create(model="seq", prompt="ab", max_tokens=max_tokens, echo=True, logprobs=1)
        [choice] = reply.choices
        assert choice.logprobs is not None
        assert (choice.text, choice.logprobs.tokens) == (text, [*text])
        assert choice.logprobs.text_offset == [*range(len(text))]


def test_a_prompt_that_fills_the_context_is_scored(client: openai.OpenAI, app: App) -> None:
    asked: dict[str, Any] = {"model": "gen", "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = client.completions.create(prompt="a" * 63, **asked).choices  # with <s> all of max_model_len
    assert (choice.text, choice.finish_reason) == ("a" * 63, "length")
    assert app.client.submitted[0].params.max_tokens == 1
    with pytest.raises(openai.BadRequestError, match=r"65 prompt tokens \+ 0 max_tokens"):
        client.completions.create(prompt="a" * 64, **asked)


def test_an_offset_is_a_place_in_the_text() -> None:
    """The output has tokens that share a character, and a special token in the middle, shown or hidden."""
    app = chat_app()
    tokenizer = app.served["gen"].tokenizer
    assert tokenizer is not None
    app.client.script.token_ids = tokenizer.encode("éfr_XXa", add_special_tokens=False).ids
    asked: dict[str, Any] = {"model": "gen", "prompt": "b", "max_tokens": 4, "logprobs": 0}
    with client_of(app) as client:
        for fields, text, offsets in (
            ({}, "éa", [0, 0, 1, 1]),
            ({"echo": True}, "béa", [0, 0, 1, 1, 2, 2]),
            ({"extra_body": {"skip_special_tokens": False}}, "éfr_XXa", [0, 0, 1, 6]),
        ):
            [choice] = client.completions.create(**asked | fields).choices
            assert choice.logprobs is not None
            assert (choice.text, choice.logprobs.text_offset) == (text, offsets)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"echo": True, "logprobs": 1}, {"max_tokens": 0, "echo": True}])
def test_a_streamed_completion_is_the_unstreamed_one(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    asked = ABC | {"prompt": ["ab", "c"]} | fields
    whole = client.completions.create(**asked)
    events = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert events[-1].choices == [] and events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])
    for choice in whole.choices:
        parts = [one for event in events for one in event.choices if one.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts][-1] == choice.finish_reason
        if choice.logprobs is not None:
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                joined = [value for part in parts for value in getattr(part.logprobs, name)]
                assert joined == getattr(choice.logprobs, name)


def test_a_chat(client: openai.OpenAI, app: App) -> None:
    reply = client.chat.completions.create(model="chat", messages=HELLO, max_completion_tokens=5)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "length")
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    ids = app.client.submitted[0].prompt_token_ids
    tokenizer = app.served["gen"].tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(ids) == "<|turn|>user\nHi<|end|>\n<|turn|>assistant\n"


@pytest.mark.parametrize("content", ["world", [{"type": "text", "text": "world"}]])
def test_a_predicted_answer_is_drafted_from(content: Any, client: openai.OpenAI, app: App) -> None:
    prediction: Any = {"type": "content", "content": content}
    client.chat.completions.create(model="chat", messages=HELLO, max_completion_tokens=5, prediction=prediction)
    tokenizer = app.served["gen"].tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(app.client.submitted[0].prediction) == "world"
    assert app.client.submitted[0].params.num_speculative_tokens is None


def test_content_in_parts(client: openai.OpenAI, app: App) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    client.chat.completions.create(model="chat", messages=parts, max_tokens=1)
    client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": "a\nb"}], max_tokens=1, temperature=0
    )
    assert app.client.submitted[0].prompt_token_ids == app.client.submitted[1].prompt_token_ids
    copied = {"type": "text", "text": "ab", "role": "assistant", "refusal": None}  # by OpenAI's agents for JavaScript
    for said in ([copied], "ab"):
        talk: Any = [{"role": "assistant", "content": said}]
        client.chat.completions.create(model="chat", messages=talk, max_tokens=1)
    assert app.client.submitted[2].prompt_token_ids == app.client.submitted[3].prompt_token_ids


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chat", messages=HELLO, max_tokens=5, n=2, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert events[-1].choices == [] and events[-1].usage is not None and events[-1].usage.completion_tokens == 10
    for index in (0, 1):
        parts = [one for event in events for one in event.choices if one.index == index]
        assert (parts[0].delta.role, parts[0].delta.content) == ("assistant", "")
        assert "".join(part.delta.content or "" for part in parts) == "hello"
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="chat", messages=HELLO, max_tokens=2, logprobs=True)
    [choice] = client.chat.completions.create(**asked, top_logprobs=2).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [(one.token, one.bytes, len(one.top_logprobs)) for one in choice.logprobs.content] == [
        ("h", [104], 2),
        ("e", [101], 2),
    ]
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [one.top_logprobs for one in choice.logprobs.content] == [[], []]


def test_the_bytes_of_tokens_that_share_a_character_are_its_bytes() -> None:
    app = chat_app()
    tokenizer = app.served["chat"].tokenizer
    assert tokenizer is not None
    app.client.script.token_ids = tokenizer.encode("aé😀", add_special_tokens=False).ids
    asked: dict[str, Any] = dict(model="chat", messages=HELLO, max_tokens=7, logprobs=True, top_logprobs=1)
    with client_of(app) as client:
        [choice] = client.chat.completions.create(**asked).choices
    assert choice.message.content == "aé😀"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert bytes(byte for one in choice.logprobs.content for byte in one.bytes or []).decode() == "aé😀"


def test_continuing_the_final_message(client: openai.OpenAI, app: App) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "yes and"}]
    client.chat.completions.create(
        model="chat", messages=messages, max_tokens=1, extra_body={"continue_final_message": True}
    )
    tokenizer = app.served["gen"].tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(app.client.submitted[0].prompt_token_ids).endswith("<|turn|>assistant\nyes and")


def test_embeddings(client: openai.OpenAI, app: App) -> None:
    app.client.encoded.clear()
    plain = client.embeddings.create(model="enc", input=["w1", "w2"], encoding_format="float")
    packed = client.embeddings.create(model="enc", input=["w1", "w2"])  # base64 under way
    exact, written = ([one.embedding for one in reply.data] for reply in (packed, plain))
    assert np.array_equal(np.float32(exact), np.float32(written))
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (6, 6)
    assert len(client.embeddings.create(model="enc", input=[1, 5, 2], dimensions=3).data[0].embedding) == 3
    client.embeddings.create(model="enc", input="w1", extra_body={"normalize": False, "add_special_tokens": True})
    assert [one.normalize for one in app.client.encoded] == [None] * 5 + [False]


def test_asynchronous() -> None:
    app = chat_app()

    async def work(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            whole = client.chat.completions.create(model="chat", messages=HELLO, max_tokens=5)
            stream = await client.chat.completions.create(model="chat", messages=HELLO, max_tokens=5, stream=True)
            streamed = "".join([event.choices[0].delta.content or "" async for event in stream])
            content = (await whole).choices[0].message.content
            assert content is not None
            return [streamed, content]

    with live(app) as url:
        assert asyncio.run(work(url)) == ["hello", "hello"]
    check_accounts(app)


def test_error_classes() -> None:
    app = chat_app(settings=ServiceSettings(api_keys=("right",)))
    with client_of(app, api_key="right") as client:
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError, match="nope"):
            client.completions.create(model="nope", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="chat", messages=HELLO, max_completion_tokens=1000)
        assert caught.value.param == "max_completion_tokens" and "64" in caught.value.message
        assert caught.value.code == "context_length_exceeded"
        app.script.queue_full = "queue_requests"
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(**ABC)
        assert full.value.response.headers["retry-after"] == "3"
        app.script.queue_full = None
        app.script.die_after = 0
        with pytest.raises(openai.InternalServerError):
            client.completions.create(**ABC)
        with pytest.raises(openai.APIError, match="engine failed"):
            list(client.completions.create(**ABC, stream=True))


def test_timeouts_and_aborted_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    app = chat_app(delay_s=0.05)
    with client_of(app) as client:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.1).completions.create(**ABC)
        with pytest.raises(openai.InternalServerError, match="deadline"):
            client.completions.create(**ABC, extra_body={"timeout_s": 0.01})
        eventually(lambda: not app.client.running, 60)
        let_time_pass(app, monkeypatch, 10.0, outputs=5)
        reply = client.completions.create(**ABC | {"max_tokens": 50}, extra_body={"timeout_s": 10.0})
        assert str(reply.choices[0].finish_reason) == "abort"
        assert reply.choices[0].text


def test_a_cancelled_request_is_not_sent_again() -> None:
    """The package does that after a 409, unless the reply says no."""
    app = chat_app(delay_s=1.0)
    with client_of(app, max_retries=2) as client, ThreadPoolExecutor() as threads:
        named = {"x-request-id": "mine"}
        running = threads.submit(client.embeddings.create, model="enc", input="w1", extra_headers=named)
        eventually(lambda: bool(app.client.running))
        assert httpx.delete(str(client.base_url).removesuffix("v1/") + "requests/mine").status_code == 200
        with pytest.raises(openai.ConflictError) as caught:
            running.result()
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_leaving_a_stream_ends_its_work() -> None:
    app = chat_app(delay_s=0.1)
    with client_of(app) as client, client.completions.create(**ABC | {"max_tokens": 50}, stream=True) as stream:
        next(iter(stream))
    assert len(app.client.aborted) == 1


def test_structured_output(client: openai.OpenAI, app: App) -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    wrapped: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    chat: Any = client.chat.completions
    chat.create(model="chat", messages=HELLO, max_tokens=2, response_format=wrapped)
    chat.create(model="chat", messages=HELLO, max_tokens=2, response_format={"type": "json_object"})
    chat.create(model="chat", messages=HELLO, max_tokens=2, response_format={"type": "text"})
    for extra in (
        {"json": schema},
        {"json": json.dumps(schema)},
        {"regex": "a+"},
        {"choice": ["a"]},
        {"json_object": True},
    ):
        client.completions.create(**ABC, extra_body={"structured_outputs": extra})
    for name in ("value", "schema"):  # as Hugging Face's client and as llama.cpp's clients send it
        bare = {"type": "json_object", name: schema}
        chat.create(model="chat", messages=HELLO, max_tokens=2, response_format=bare)
    as_schema, as_object = json_grammar(schema), json_grammar({"type": "object"})
    assert [request.params.grammar for request in app.client.submitted] == [
        *(as_schema, as_object, ""),
        *(as_schema, as_schema, regex_grammar("a+"), choice_grammar(["a"]), as_object),
        *(as_schema, as_schema),
    ]
