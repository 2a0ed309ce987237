"""Names that clients send without knowing a model are ignored, unless a model is served by that name."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import InferenceClient

from tests.service.dialects.support import chat_app, talker, template
from tests.service.support import App, ask, byte_tokenizer, live, make_app, served
from tests.service.test_bad_requests import check_error
from triptych.service.http.bodies import PLACEHOLDERS

MESSAGES: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "ab"},
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/embeddings": {"input": "ab"},
    "/encode": {"input": "ab"},
    "/embed": {"inputs": "ab"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/embed": {"texts": ["ab"]},
    "/generate_stream": {"inputs": "ab"},
    "/tokenize": {"text": "ab"},
    "/detokenize": {"token_ids": [1]},
}
OF_EMBEDDERS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/embed")


def lone_chat() -> App:
    """Return an application that serves one model, which can chat."""
    return make_app(talker(), alone=True)


@pytest.mark.usefixtures("hub_client")
def test_a_chat_by_url() -> None:
    with live(chat_app()) as url:
        asked = dict(messages=MESSAGES, max_tokens=3)
        assert InferenceClient(model=url, token="any").chat_completion(**asked).model == "chat"
        assert InferenceClient(model=f"{url}/?model=chat", token="any").chat_completion(**asked).model == "chat"
        assert InferenceClient(base_url=f"{url}/v1", api_key="any").chat_completion(**asked).model == "chat"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", sorted(PLACEHOLDERS))
def test_a_placeholder_names_no_model(path: str, name: str) -> None:
    app = make_app(served("enc", "encoder-only", byte_tokenizer()), alone=True) if path in OF_EMBEDDERS else lone_chat()
    assert ask(app, "POST", path, json=BODIES[path] | {"model": name}).status_code == 200, path


@pytest.mark.parametrize("path", [*OF_EMBEDDERS, "/v2/embed", "/similarity"])
def test_a_model_that_writes_text_makes_no_vectors_to_compare(path: str) -> None:
    bodies = BODIES | {"/v2/embed": BODIES["/v1/embed"]}
    bodies["/similarity"] = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
    error = check_error(ask(lone_chat(), "POST", path, json=bodies[path]), 400, "model", "wrong_task")
    assert "model chat writes text and was not trained to make vectors" in error["message"]
    assert "POST /encode" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_a_placeholder_leaves_the_choice_to_the_url(path: str) -> None:
    reply = ask(chat_app(), "POST", f"{path}?model=nothing", json=BODIES[path] | {"model": "dummy"})
    assert reply.status_code == 404 and "nothing" in reply.text


@pytest.mark.parametrize("name", ["gpt-4", "Dummy", "tgi-2", "http://localhost"])
def test_other_names_are_unknown(name: str) -> None:
    reply = ask(lone_chat(), "POST", "/v1/chat/completions", json={"messages": MESSAGES, "model": name})
    check_error(reply, 404, "model", "model_not_found")


def test_a_model_may_have_such_a_name() -> None:
    plain = served("default", "decoder-only", byte_tokenizer())
    app = make_app(type(plain)("default", plain.checkpoint, plain.tokenizer, chat=template("x")), talker())
    body = {"messages": MESSAGES, "model": "default", "max_tokens": 1}
    assert ask(app, "POST", "/v1/chat/completions", json=body).json()["model"] == "default"
    check_error(ask(app, "POST", "/v1/chat/completions", json=body | {"model": "tgi"}), 400, "model", "missing_field")
