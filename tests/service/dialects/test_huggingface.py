"""`huggingface_hub.InferenceClient` against the application under a real server; and classifiers of Hugging Face."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError, GenerationError, HfHubHTTPError, OverloadedError

from tests.service.dialects.support import chat_app
from tests.service.support import App, ask, check_accounts, events, live, make_app, served, word_tokenizer
from triptych.model.config.model import ClassifierConfig, ClassifierInput
from triptych.service.dialects import huggingface
from triptych.service.dialects.huggingface import PredictBody, RerankBody
from triptych.service.dialects.huggingface_info import model_kind
from triptych.service.settings.service_settings import ServiceSettings

pytestmark = pytest.mark.usefixtures("hub_client")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = chat_app()
    with live(app) as address:
        yield address
    check_accounts(app)


@pytest.fixture(params=["/?model=gen", "/generate?model=gen"])
def client(url: str, request: pytest.FixtureRequest) -> InferenceClient:
    return InferenceClient(model=url + request.param, token="any")


def test_text_generation(client: InferenceClient) -> None:
    assert client.text_generation("ab", max_new_tokens=5) == "hello"
    assert client.text_generation("ab", max_new_tokens=5, return_full_text=True) == "abhello"
    assert client.text_generation("ab", stop=["lo"], seed=3, temperature=0.5) == "hello"


def test_details(client: InferenceClient) -> None:
    found = client.text_generation("ab", max_new_tokens=2, details=True, decoder_input_details=True, top_n_tokens=2)
    assert found.generated_text == "he" and found.details is not None
    assert (found.details.finish_reason, found.details.generated_tokens, found.details.seed) == ("length", 2, None)
    assert [(one.text, one.logprob, one.special) for one in found.details.tokens] == [
        ("h", -0.5, False),
        ("e", -0.5, False),
    ]
    assert [(one.text, one.logprob) for one in found.details.prefill] == [("<s>", None), ("a", -0.5), ("b", -0.5)]
    assert found.details.top_tokens is not None and [len(top) for top in found.details.top_tokens] == [2, 2]
    sampled = client.text_generation("ab", max_new_tokens=9, details=True, stop=["l"], do_sample=True, seed=3).details
    assert sampled is not None and (sampled.finish_reason, sampled.seed) == ("stop_sequence", 3)


def test_prefill_is_what_the_decoder_was_given() -> None:
    parameters = {"max_new_tokens": 1, "details": True, "decoder_input_details": True}
    reply = ask(make_app(), "POST", "/?model=seq", json={"inputs": "ab", "parameters": parameters})
    [found] = reply.json()
    assert [(one["id"], one["logprob"]) for one in found["details"]["prefill"]] == [(0, None)]


def test_streams(client: InferenceClient) -> None:
    assert "".join(client.text_generation("ab", max_new_tokens=5, stream=True)) == "hello"
    found = list(client.text_generation("ab", max_new_tokens=5, stream=True, details=True, return_full_text=True))
    assert [one.index for one in found] == [1, 2, 3, 4, 5]
    assert [one.generated_text for one in found] == [None] * 4 + ["abhello"]
    last = found[-1].details
    assert last is not None and (last.finish_reason, last.generated_tokens, last.input_length) == ("length", 5, 3)


def test_errors_reach_the_client(client: InferenceClient) -> None:
    with pytest.raises(BadRequestError, match=r"parameters\.max_new_tokens"):
        client.text_generation("ab", max_new_tokens=1000)
    with pytest.raises(BadRequestError, match=r"parameters\.watermark is not supported"):
        client.text_generation("ab", watermark=True)


def test_failures_have_the_classes_of_the_client() -> None:
    app = make_app(die_after=1)
    with live(app) as url:
        client = InferenceClient(model=f"{url}/?model=gen", token="any")
        for stream in (False, True):
            with pytest.raises(GenerationError, match="engine failed"):
                list(client.text_generation("ab", stream=stream))
        app.script.queue_full = "queue_requests"
        for path in ("/?model=gen", "/generate?model=gen"):
            for stream in (False, True):
                with pytest.raises(OverloadedError, match="queue is full"):
                    InferenceClient(model=url + path, token="any").text_generation("ab", stream=stream)
    check_accounts(app)


def test_a_chat(url: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    reply = InferenceClient(base_url=f"{url}/v1", token="any").chat_completion(messages, model="chat", max_tokens=5)
    assert reply.choices[0].message.content == "hello"


def test_a_chat_held_to_a_schema(url: str) -> None:
    """With a URL the client always sends {"type": "json_object", "value": SCHEMA}."""
    framed: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}, "strict": True}}
    hello = [{"role": "user", "content": "ab"}]
    client = InferenceClient(base_url=f"{url}/v1", token="any")
    assert client.chat_completion(hello, model="chat", max_tokens=5, response_format=framed).choices
    framed["json_schema"]["schema"] = {"type": "none"}
    with pytest.raises(BadRequestError, match=r"response_format\.value"):
        client.chat_completion(hello, model="chat", max_tokens=5, response_format=framed)


@pytest.mark.parametrize("path", ["/embed", "/encode", "/?model=enc"])
def test_feature_extraction(url: str, path: str) -> None:
    client = InferenceClient(model=url + path, token="any")
    assert client.feature_extraction("w1").shape == (1, 8)
    both = client.feature_extraction(["w1", "w2 w3"], normalize=False, truncate=True, truncation_direction="left")
    assert both.shape == (2, 8)
    assert both[0].tolist() == client.feature_extraction("w1", normalize=False)[0].tolist()
    assert client.feature_extraction("w1", dimensions=3).shape == (1, 3)
    assert client.feature_extraction("w1", prompt_name="query").shape == (1, 8)
    with pytest.raises(HfHubHTTPError, match="model enc has no prompt 'passage'; it has query"):
        client.feature_extraction("w1", prompt_name="passage")


async def _asynchronous(url: str) -> tuple[str, str]:
    client = AsyncInferenceClient(model=f"{url}/?model=gen", token="any")
    whole = await client.text_generation("ab", max_new_tokens=5)
    stream = await client.text_generation("ab", max_new_tokens=5, stream=True)
    return whole, "".join([piece async for piece in stream])


def test_asynchronous(url: str) -> None:
    assert asyncio.run(_asynchronous(url)) == ("hello", "hello")


def test_generate_stream_ends_without_a_mark(app: App) -> None:
    body = {"inputs": "ab", "parameters": {"max_new_tokens": 3, "top_n_tokens": 1}}
    text = ask(app, "POST", "/generate_stream?model=gen", json=body).text
    found = events(text)
    assert "[DONE]" not in text
    assert [one["token"]["text"] for one in found] == ["h", "e", "l"]
    assert found[0]["top_tokens"] == [{"id": 71, "text": "h", "logprob": -0.5, "special": False}]
    assert found[-1]["generated_text"] == "hel"


def test_sampling_as_they_decide_it(app: App) -> None:
    for parameters in ({}, {"do_sample": True}, {"top_k": 5}, {"temperature": 0.3}, {"repetition_penalty": 1.2}):
        body = {"model": "gen", "inputs": "ab", "parameters": {"max_new_tokens": 1, **parameters}}
        assert ask(app, "POST", "/generate", json=body).status_code == 200
    assert [one.params.temperature for one in app.client.submitted] == [0.0, 1.0, 1.0, 0.3, 0.0]


def test_a_special_token_is_called_one() -> None:
    app = make_app(token_ids=[256, 71])
    body = {"model": "gen", "inputs": "ab", "parameters": {"max_new_tokens": 2, "details": True}}
    reply = ask(app, "POST", "/generate", json=body).json()
    assert reply["generated_text"] == "h"
    assert [one["special"] for one in reply["details"]["tokens"]] == [True, False]
    streamed = events(ask(app, "POST", "/generate_stream", json=body).text)
    assert [one["token"]["text"] for one in streamed] == ["", "h"]


def test_info(app: App) -> None:
    info = httpx.Response(200, content=ask(app, "GET", "/info").content).json()
    assert (info["model_id"], info["max_total_tokens"], info["max_client_batch_size"]) == ("gen", 64, 2048)
    assert info["max_stop_sequences"] == 4 and info["router"] == "triptych"


def test_the_type_of_a_model_in_info() -> None:
    plain = served("enc", "encoder-only", word_tokenizer())
    for labels, expected in (
        (("NO", "YES"), {"classifier": {"id2label": {"0": "NO", "1": "YES"}, "label2id": {"NO": 0, "YES": 1}}}),
        (("FIT",), {"reranker": {"id2label": {"0": "FIT"}, "label2id": {"FIT": 0}}}),
    ):
        head = ClassifierConfig(labels, ClassifierInput.FIRST)
        checkpoint = replace(plain.checkpoint, config=replace(plain.config, classifier=head))
        assert model_kind(replace(plain, checkpoint=checkpoint)) == expected


REPLY: dict[str, Any] = {
    "data": [{"index": 0, "scores": [-1.0]}, {"index": 1, "scores": [2.0]}],
    "labels": ["LABEL_0"],
}


def test_reranking() -> None:
    judge = judging().served["judge"]
    fields = {"query": "q", "texts": ["a", "b"], "return_text": True}
    plan = huggingface.rerank(RerankBody.model_validate(fields), judge)
    assert [one.text_pair for one in plan.body.input] == ["a", "b"]  # type: ignore[union-attr]
    best, other = plan.show(None, REPLY)  # type: ignore[arg-type, misc, attr-defined]
    assert best == {"index": 1, "score": 2.0, "text": "b"} and other["index"] == 0
    raw = huggingface.rerank(RerankBody.model_validate(fields | {"raw_scores": True}), judge)
    assert (plan.body.output, raw.body.output) == ("scores", "logits")


def test_predicting() -> None:
    reply = {"data": [{"index": 0, "scores": [1.0, 3.0]}], "labels": ["NO", "YES"]}
    asked = PredictBody.model_validate({"inputs": [["a", "b"]], "raw_scores": True})
    [[first, _]] = huggingface.predict_reply(asked)(None, reply)  # type: ignore[arg-type, misc, attr-defined]
    assert first == {"label": "YES", "score": 3.0}
    found = huggingface.predict(asked)
    [pair] = found.input
    assert (pair.text, pair.text_pair, found.output) == ("a", "b", "logits")  # type: ignore[union-attr]


def judging(settings: ServiceSettings | None = None) -> App:
    """Return an application with a classifier, `judge`."""
    plain = served("judge", "encoder-only", word_tokenizer())
    labels = tuple(f"LABEL_{at}" for at in range(8))  # as many as the numbers of a scripted vector
    classifier = ClassifierConfig(labels, ClassifierInput.FIRST)
    checkpoint = replace(plain.checkpoint, config=replace(plain.config, classifier=classifier))
    return make_app(replace(plain, checkpoint=checkpoint), settings=settings)


def test_classifiers_over_http() -> None:
    app = judging()
    reply = ask(app, "POST", "/rerank", json={"query": "w1", "texts": ["w2", "w9"], "return_text": True})
    assert reply.status_code == 200, reply.text
    assert sorted(one["index"] for one in reply.json()) == [0, 1]
    assert [one.source.token_type_ids for one in app.client.encoded] == [(0, 0, 0, 1, 1)] * 2
    [best, *others] = ask(app, "POST", "/predict", json={"inputs": "w1"}).json()
    assert best["label"] == "LABEL_7" and len(others) == 7
    check_accounts(app)
