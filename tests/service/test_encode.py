"""POST /encode, /tokenize, /detokenize over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.service.support import (
    App,
    ask,
    check_accounts,
    counted,
    hold,
    make_app,
    run,
    samples,
    until,
    word_tokenizer,
)
from tests.service.test_bad_requests import check_error
from triptych.model.api.request import EncodeTask, Pooling
from triptych.service.http import bodies
from triptych.service.planning.tokenization import truncate_text
from triptych.service.schemas.replies import DetokenizeReply, EncodeReply, TokenizeReply


def encode(app: App, **fields: Any) -> dict[str, Any]:
    """Return the reply to a good request."""
    reply = ask(app, "POST", "/encode", json={"input": "w1 w2", **fields})
    assert reply.status_code == 200, reply.text
    EncodeReply.model_validate_json(reply.content)
    body: dict[str, Any] = reply.json()
    return body


def test_the_only_encoder_answers_when_no_model_is_named(app: App) -> None:
    reply = encode(app)
    assert reply["model"] == "enc"
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4, "cached_tokens": 0}
    assert len(reply["data"][0]["embedding"]) == 8


@pytest.mark.parametrize("model", ["gen", "seq"])
def test_every_model_answers(app: App, model: str) -> None:
    assert encode(app, model=model)["model"] == model


def test_inputs_of_every_kind_keep_their_order(app: App) -> None:
    pair = {"text": "w1", "text_pair": "w2"}
    for given in ("w3", ["w3", "w4 w5"], [4, 5], [[4], [5, 6]], [pair, {"text": "w1"}]):
        reply = encode(app, input=given)
        assert [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
    paired = next(request for request in app.client.encoded if 1 in request.source.token_type_ids)
    assert paired.source.token_ids == (1, 4, 2, 5, 2)
    assert paired.source.token_type_ids == (0, 0, 0, 1, 1)


def test_settings_reach_the_engine(app: App) -> None:
    encode(app, pooling="cls", normalize=False, dimensions=4)
    encode(app)
    first, second = app.client.encoded
    assert (first.pooling, first.normalize, first.dimensions) == (Pooling.CLS, False, 4)
    assert (second.pooling, second.normalize, second.dimensions) == (None, None, None)
    assert second.task is EncodeTask.EMBEDDING


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/encode", "prompt_name"),
        ("/v1/embeddings", "prompt_name"),
        ("/embed", "prompt_name"),
        ("/encode", "task"),
        ("/v1/embeddings", "task"),
    ],
)
def test_a_prompt_stands_in_front_of_texts_and_is_not_pooled(app: App, path: str, named: str) -> None:
    field = "inputs" if path == "/embed" else "input"
    reply = ask(app, "POST", path, json={"model": "enc", field: ["w3", "w4 w5"], named: "query"})
    assert reply.status_code == 200, reply.text
    tokenizer = word_tokenizer()
    expected = [tokenizer.encode(f"w1 w2 {text}").ids for text in ("w3", "w4 w5")]
    assert [one.source.token_ids for one in app.client.encoded] == expected
    assert [one.prompt_tokens for one in app.client.encoded] == [3, 3]  # [CLS] w1 w2
    encode(app, input="w3")
    assert app.client.encoded[-1].prompt_tokens == 0


def test_chunks_are_of_the_text_behind_its_prompt(app: App) -> None:
    [item] = encode(app, input="w3 w4 w5", prompt_name="query", chunks=[[0, 2], [3, 8]])["data"]
    assert [len(vector) for vector in item["embeddings"]] == [8, 8]
    [request] = app.client.encoded
    assert request.source.token_ids == word_tokenizer().encode("w1 w2 w3 w4 w5").ids
    assert (request.spans, request.prompt_tokens) == (((3, 4), (4, 6)), 0)
    reply = ask(app, "POST", "/encode", json={"input": "w3", "prompt_name": "query", "split": "pooled"})
    check_error(reply, 400, "split", "invalid_value")


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"chunks": [[0, 2]] * 2049}, 413, "chunks", "too_many_inputs"),
        ({"task": "query", "input": [4, 5]}, 400, "task", "invalid_value"),
        ({"task": "query", "input": [{"text": "w1", "text_pair": "w2"}]}, 400, "task", "invalid_value"),
        ({"task": "query", "prompt_name": "title"}, 400, "task", "invalid_value"),
    ],
)
def test_what_would_be_ignored_or_has_no_bound_is_refused(
    app: App, fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    """`task` names a prompt here, and no adapter."""
    check_error(ask(app, "POST", "/encode", json={"input": "w1 w2", **fields}), status, param, code)
    assert not app.client.encoded


def test_vectors_of_tokens(app: App) -> None:
    [item] = encode(app, output="tokens")["data"]
    assert [len(row) for row in item["tokens"]] == [8, 8, 8, 8]


def test_base64_holds_the_same_numbers(app: App) -> None:
    numbers = encode(app)["data"][0]["embedding"]
    coded = encode(app, encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack("<8f", base64.b64decode(coded))) == numbers
    tokens = encode(app, encoding_format="base64", output="tokens")["data"][0]
    assert tokens["shape"] == [4, 8]
    assert len(base64.b64decode(tokens["tokens"])) == 4 * 8 * 4


def test_numbers_of_a_reply_are_the_same_float32() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 4_000, np.uint32).view(np.float32)
    values[:6] = (0.0, -0.0, 1e-45, -3.4e38, 0.1, 16_777_217.0)
    values = values[np.isfinite(values)].reshape(-1, 2)
    written = bodies.json_response({"a": values, "b": values[0]}).body
    read = json.loads(written)
    assert np.array(read["a"], np.float32).tobytes() == values.tobytes()
    assert np.array(read["b"], np.float32).tobytes() == values[0].tobytes()
    unknown = bodies.json_response([np.float32([np.nan, np.inf])]).body
    assert json.loads(unknown) == [[None, None]]
    with pytest.raises(TypeError, match="JSON"):
        bodies.json_response({"a": values.dtype})


def test_cutting_keeps_special_tokens(app: App) -> None:
    text = " ".join(f"w{i}" for i in range(20))
    for side, kept in (("right", range(3, 11)), ("left", range(15, 23))):
        reply = encode(app, input=[text, "w1"], truncate=side)
        assert [item.get("truncated", False) for item in reply["data"]] == [True, False]
        assert app.client.encoded[-2].source.token_ids == (1, *kept, 2)
    encode(app, input=[[*range(20)]], truncate="right")
    assert app.client.encoded[-1].source.token_ids == tuple(range(10))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("limit", [3, 4, 5, 6, 7, 8, 9])
def test_cutting_a_pair_takes_from_the_longer_text(side: Any, limit: int) -> None:
    tokenizer = word_tokenizer()
    text, pair = "w1 w2 w3 w4 w5", "w6 w7"
    cut = truncate_text(tokenizer, text, pair, tokenizer.encode(text, pair), limit, side)
    assert len(cut.ids) == len(cut.type_ids) == limit
    assert (cut.ids[0], cut.ids[-1], cut.ids.count(2)) == (1, 2, 2)
    sizes = sorted((cut.type_ids.count(0) - 2, cut.type_ids.count(1) - 1))
    assert sizes[1] - sizes[0] <= 1 or sizes == [2, limit - 5]


def test_a_pair_is_cut_as_by_the_library() -> None:
    tokenizer, library = word_tokenizer(), RawTokenizer(WordLevel({"w": 0}, unk_token="w"))
    library.pre_tokenizer = Whitespace()
    for first, second in product(range(1, 8), range(1, 8)):
        texts = " ".join(["w1"] * first), " ".join(["w2"] * second)
        for left in range(2, first + second):
            library.enable_truncation(left, strategy="longest_first")
            sides = library.encode(*texts).sequence_ids
            cut = truncate_text(tokenizer, *texts, tokenizer.encode(*texts), left + 3, "right")
            found = cut.type_ids.count(0) - 2, cut.type_ids.count(1) - 1
            assert found == (sides.count(0), sides.count(1)), (first, second, left)


def test_a_cut_below_the_special_tokens_still_fits() -> None:
    tokenizer = word_tokenizer()
    assert len(truncate_text(tokenizer, "w1 w2", None, tokenizer.encode("w1 w2"), 1, "right").ids) == 1


def test_too_many_tokens_in_all() -> None:
    app = make_app()
    reply = ask(app, "POST", "/encode", json={"model": "gen", "input": ["a" * 40] * 250})
    assert reply.status_code == 200
    many = ask(app, "POST", "/encode", json={"model": "gen", "input": [[1] * 48] * 256})
    assert many.status_code == 200
    app = make_app()
    object.__setattr__(app.service.limits, "max_encode_tokens", 100)
    reply = ask(app, "POST", "/encode", json={"model": "gen", "input": [[1] * 40] * 3})
    check_error(reply, 413, "input", "too_many_tokens")
    assert not app.client.encoded


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ({"queue_full": "queue_tokens"}, 429, "queue_full"),
        ({"die_after": 0}, 500, "engine_failed"),
        ({"error_after": 0}, 500, "engine_failed"),
        ({"dead": True}, 503, "not_ready"),
    ],
)
def test_failures(script: dict[str, Any], status: int, code: str) -> None:
    app = make_app(**script)
    check_error(ask(app, "POST", "/encode", json={"input": "w1"}), status, None, code)
    check_accounts(app)


def test_deadline_and_cancel() -> None:
    app = make_app(delay_s=0.05)
    check_error(ask(app, "POST", "/encode", json={"input": "w1", "timeout_s": 0.01}), 504, "timeout_s", "deadline")

    free = hold(app)

    async def work(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(client.post("/encode", json={"input": "w1"}, headers={"x-request-id": "mine"}))
        await until(lambda: app.client.running)
        assert (await client.delete("/requests/mine")).status_code == 200
        free.set()
        reply = await running
        check_error(reply, 409, None, "cancelled")
        assert reply.headers["x-should-retry"] == "false"

    run(app, work)
    check_accounts(app)
    for name in ("request_queue_time", "prefill"):  # there was no output, so no time until it
        assert not any(samples(app, f"triptych_{name}_seconds_count").values())
    assert counted(app, "triptych_e2e_request_latency_seconds_count") == {("enc", "encode"): 2}


def test_tokenize_and_back(app: App) -> None:
    reply = ask(app, "POST", "/tokenize", json={"model": "gen", "text": "a \u00e9", "return_texts": True})
    body = TokenizeReply.model_validate_json(reply.content)
    assert body.count == len(body.token_ids) == 5
    assert body.texts is not None and body.texts[0] == "<s>"
    back = ask(app, "POST", "/detokenize", json={"model": "gen", "token_ids": body.token_ids[1:]})
    assert DetokenizeReply.model_validate_json(back.content).text == "a \u00e9"
    plain = ask(app, "POST", "/tokenize", json={"model": "gen", "text": "a", "add_special_tokens": False})
    assert plain.json()["count"] == 1
    assert ask(app, "POST", "/tokenize", json={"model": "enc", "text": "w1", "text_pair": "w2"}).json()["count"] == 5
