"""Limits of inputs and tokens in a request: every route takes as many as clients send by default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.support import App, ask, make_app
from tests.service.test_bad_requests import check_error
from triptych.service.settings.service_settings import Limits

COUNT = 2048
# By route: the field of several inputs, and the rest of the body.
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/encode": ("input", {}),
    "/v1/embeddings": ("input", {}),
    "/embed": ("inputs", {}),
    "/pipeline/feature-extraction": ("inputs", {}),
    "/v2/embed": ("texts", {}),
    "/v1/rerank": ("documents", {"query": "w1"}),
    "/v2/rerank": ("documents", {"query": "w1"}),
    "/v1/score": ("text_2", {"text_1": "w1"}),
}


@pytest.fixture(scope="module")
def app() -> App:
    return make_app(alone=False)


@pytest.mark.parametrize("path", ROUTES)
def test_as_many_inputs_as_openai_takes(app: App, path: str) -> None:
    field, rest = ROUTES[path]
    body = {"model": "enc", field: ["w2"] * COUNT, **rest}
    assert ask(app, "POST", path, json=body).status_code == 200
    error = check_error(
        ask(app, "POST", path, json=body | {field: ["w2"] * (COUNT + 1)}), 413, field, "too_many_inputs"
    )
    assert f"{field} has 2049 entries, more than 2048" in error["message"]


def test_a_source_sentence_is_no_sentence(app: App) -> None:
    body: dict[str, Any] = {"source_sentence": "w1", "sentences": ["w2"] * COUNT}
    for path in ("/similarity", "/pipeline/sentence-similarity"):
        assert len(ask(app, "POST", f"{path}?model=enc", json={"inputs": body}).json()) == COUNT
        more = {"inputs": body | {"sentences": ["w2"] * (COUNT + 1)}}
        check_error(ask(app, "POST", f"{path}?model=enc", json=more), 413, "inputs.sentences", "too_many_inputs")


def test_pairs_count_once(app: App) -> None:
    body = {"model": "enc", "text_1": ["w1"] * COUNT, "text_2": ["w2"] * COUNT}
    assert ask(app, "POST", "/v1/score", json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "w1 " * 20, "documents": ["w2"] * 3, "truncation": False}, "query"),
        ("/v1/score", {"text_1": "w1 " * 20, "text_2": ["w2"] * 3}, "text_1"),
        ("/v1/score", {"text_1": ["w1", "w1 " * 20], "text_2": ["w2", "w3"]}, "text_1[1]"),
        ("/similarity", {"inputs": {"source_sentence": "w1 " * 20, "sentences": ["w2"] * 3}}, "inputs.source_sentence"),
    ],
)
def test_what_others_are_compared_with_is_named(app: App, path: str, body: dict[str, Any], param: str) -> None:
    reply = ask(app, "POST", f"{path}?model=enc", json=body)
    assert check_error(reply, 400, param, "context_length_exceeded")["message"].endswith(f"but {param} has 22 tokens")


def test_outputs_for_each_token_have_lower_limits(app: App) -> None:
    """A vector of each token of 300,000 would be hundreds of megabytes."""
    limits = Limits()
    assert (limits.max_encode_inputs, limits.max_encode_tokens) == (COUNT, 300_000)
    assert (limits.max_detailed_inputs, limits.max_detailed_tokens) == (256, 16_384)
    body = {"model": "enc", "output": "tokens", "input": ["w1"] * 257}
    check_error(ask(app, "POST", "/encode", json=body), 413, "input", "too_many_inputs")
    assert ask(app, "POST", "/encode", json=body | {"input": ["w1"] * 256}).status_code == 200


def test_tokens_are_bounded(app: App) -> None:
    body = {"model": "enc", "input": [[1] * 9] * COUNT}
    object.__setattr__(app.service.limits, "max_encode_tokens", 9 * COUNT)
    try:
        assert ask(app, "POST", "/v1/embeddings", json=body).status_code == 200
        object.__setattr__(app.service.limits, "max_encode_tokens", 9 * COUNT - 1)
        error = check_error(ask(app, "POST", "/v1/embeddings", json=body), 413, "input", "too_many_tokens")
        assert "18432 tokens in all, more than 18431" in error["message"]
    finally:
        object.__setattr__(app.service.limits, "max_encode_tokens", Limits().max_encode_tokens)
