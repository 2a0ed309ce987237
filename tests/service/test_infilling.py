"""`suffix`: a model fills in the middle of a text, over each route that takes it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.test_infilling import byte_level
from tests.service.dialects.support import says
from tests.service.support import App, ask, events, make_app, served
from triptych.model.text.tokenizer import Tokenizer

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
PROMPT = "<fim_prefix>ab<fim_suffix>yz<fim_middle>"


def filling(form: str = "decoder-only", tokenizer: Tokenizer | None = None, **options: Any) -> App:
    """Return an application with the usual models and `fill`, which fills in."""
    return make_app(served("fill", form, tokenizer or byte_level(*MARKS)), **options)


@pytest.fixture(scope="module")
def app() -> App:
    return filling()


def post(app: App, path: str = "/generate", **body: Any) -> Any:
    app.client.submitted.clear()
    return ask(app, "POST", path, json={"model": "fill", "prompt": "ab", "suffix": "yz", "max_tokens": 8, **body})


def sent(app: App, tokenizer: Tokenizer | None = None) -> str:
    ids = app.client.submitted[0].prompt_token_ids
    return (tokenizer or byte_level(*MARKS)).decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_the_model_reads_the_suffix(app: App, path: str) -> None:
    asked: dict[str, Any] = {"n": 2, "stop": "l", "logprobs": 1} | ({"echo": True} if path == "/generate" else {})
    shown = "abhe" if path == "/generate" else "he"
    reply = post(app, path, **asked)
    assert reply.status_code == 200, reply.text
    assert [choice["text"] for choice in reply.json()["choices"]] == [shown, shown]
    request = app.client.submitted[0]
    assert sent(app) == PROMPT
    assert set(request.params.stop_token_ids) == {256, 257, 258}
    assert request.continued == (1, 3)
    assert reply.json()["usage"]["prompt_tokens"] == 7
    streamed = post(app, path, stream=True, **asked)
    texts = {0: "", 1: ""}
    for event in events(streamed.text)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: shown, 1: shown}


def test_a_mark_ends_the_output() -> None:
    app = filling()
    says(app, "xx")
    app.script.token_ids = (*app.script.token_ids[:2], 257, 120)
    app.script.end_id = 257
    [choice] = post(app).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xx", "stop")


def test_several_prompts(app: App) -> None:
    assert post(app, prompt=["ab", "c"]).status_code == 200
    assert [len(request.prompt_token_ids) for request in app.client.submitted] == [7, 6]


def test_no_suffix(app: App) -> None:
    for path, suffix in (("/generate", None), ("/v1/completions", ""), ("/v1/completions", None)):
        assert post(app, path, suffix=suffix).status_code == 200
        assert (sent(app), app.client.submitted[0].continued) == ("ab", None)
    assert post(app, "/generate", suffix="").status_code == 200
    assert sent(app) == "<fim_prefix>ab<fim_suffix><fim_middle>"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"model": "gen"}, "suffix", "no marks (such as <|fim_prefix|>)"),
        ({"model": "seq"}, "suffix", "no sentinels (<extra_id_0>)"),
        ({"prompt": [1, 2]}, "suffix", "texts"),
        ({"prompt": [[1, 2], [3]]}, "suffix", "texts"),
        ({"suffix": 3}, "suffix", "string"),
        ({"suffix": "y" * 60}, "prompt", "maximum context length is 64 tokens"),
        ({"suffix": "y" * 60_000}, "suffix", "maximum context length is 64 tokens"),
    ],
)
def test_what_is_refused(app: App, path: str, body: dict[str, Any], param: str, words: str) -> None:
    reply = post(app, path, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error
    assert not app.client.submitted


def test_fields_without_meaning(app: App) -> None:
    assert post(app, prompt_logprobs=1).json()["error"]["param"] == "prompt_logprobs"
    error = post(app, "/v1/completions", echo=True, logprobs=1, max_tokens=0).json()["error"]
    assert (error["param"], "suffix" in error["message"]) == ("echo", True)
    assert post(app, "/v1/completions", echo=True).json()["choices"][0]["text"] == "abhello he"


def test_marks_beyond_the_vocabulary() -> None:
    tokenizer = byte_level(*(f"<{number}>" for number in range(50)), *MARKS)
    error = post(filling(tokenizer=tokenizer)).json()["error"]
    assert (error["param"], "vocabulary ends before the marks" in error["message"]) == ("suffix", True)


def test_an_encoder_decoder_fills_a_span() -> None:
    tokenizer = byte_level("<extra_id_0>", "<extra_id_1>")
    app = filling("encoder-decoder", tokenizer)
    assert post(app).status_code == 200
    [request] = app.client.submitted
    assert request.source is not None
    assert tokenizer.decode(request.source.token_ids, skip_special_tokens=False) == "ab<extra_id_0>yz"
    assert request.prompt_token_ids == (0, 256)
    assert (request.params.stop_token_ids, request.continued) == ((256, 257), (0, 2))
    assert post(app, decoder_prompt="x").json()["error"]["param"] == "decoder_prompt"
