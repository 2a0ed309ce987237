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


def test_no_prefix(app: App) -> None:
    assert post(app, "/v1/completions", prompt="").status_code == 200
    assert sent(app) == "<fim_prefix><fim_suffix>yz<fim_middle>"


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


# -- llama.cpp's /infill, and the bodies that editors' plugins send.

EXTRA = [{"text": "xx", "time": [1, 2], "filename": "a.py"}]
VIM: dict[str, Any] = {  # llama.vim's s:fim_try_hint, as published
    "input_prefix": "a\n",
    "input_suffix": "z\n",
    "input_extra": EXTRA,
    "prompt": "b",
    "n_predict": 6,
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content",
        *(f"timings/{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_second")),
        "timings/prompt_per_token_ms",
        "timings/predicted_per_token_ms",
        "truncated",
        "tokens_cached",
    ],
}
VSCODE_UPDATE: dict[str, Any] = {  # llama.vscode's updateExtraContext
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": EXTRA,
    "prompt": "",
    "n_predict": 0,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1,
}
SNIPPET = "\n\n--- snippet ---\n\n"


def infill(app: App, **body: Any) -> Any:
    app.client.submitted.clear()
    return ask(app, "POST", "/infill", json={"input_prefix": "ab", "input_suffix": "yz", "n_predict": 8, **body})


def test_the_body_of_llama_vim(app: App) -> None:
    reply = infill(app, **VIM)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert list(found) == VIM["response_fields"]
    assert (found["content"], found["timings/predicted_n"], found["truncated"]) == ("hello ", 6, False)
    assert sent(app) == f"{SNIPPET}xx<fim_prefix>a\nb<fim_suffix>z\n<fim_middle>"
    params = app.client.submitted[0].params
    assert (params.top_k, params.top_p, params.min_p, params.temperature) == (40, 0.99, 0.05, 0.8)


@pytest.mark.parametrize("n", [-1, 1.5])
def test_infill_takes_top_n_sigma(app: App, n: float) -> None:
    assert infill(app, top_n_sigma=n).json()["generation_settings"]["top_n_sigma"] == n
    assert app.client.submitted[0].params.top_n_sigma == n


def test_the_body_of_llama_vscode_that_only_reads(app: App) -> None:
    found = infill(app, **VSCODE_UPDATE).json()
    assert (found["content"], found["tokens_predicted"], found["tokens_cached"]) == ("", 0, found["tokens_evaluated"])
    assert app.client.submitted[0].params.max_tokens == 1


def test_the_body_of_minuet(app: App) -> None:
    """Its `openai_fim_compatible` provider reads `choices[1].text` of each event."""
    body = {"stream": True, "max_tokens": 8, "top_p": 0.9, "stop": ["\n\n"]}
    found = events(post(app, "/v1/completions", **body).text)
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == "hello he"
    assert sent(app) == PROMPT


def test_what_infill_returns(app: App) -> None:
    found = infill(app, n_probs=2, return_tokens=True, stop=["lo"], seed=-1, logit_bias=[[7, False], [8, 1.5]]).json()
    assert (found["content"], found["stop"], found["stop_type"], found["stopping_word"]) == ("hel", True, "word", "lo")
    assert (found["prompt"], found["model"], found["index"], found["truncated"]) == (PROMPT, "fill", 0, False)
    assert (found["tokens_evaluated"], found["tokens_predicted"], found["tokens_cached"]) == (7, 5, 12)
    assert (len(found["tokens"]), len(found["completion_probabilities"])) == (5, 5)
    assert set(found["completion_probabilities"][0]) == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert found["generation_settings"]["n_predict"] == 8
    assert found["timings"]["prompt_n"] == 7
    assert app.client.submitted[0].params.logit_bias == {7: -100.0, 8: 1.5}


def test_streamed_infill(app: App) -> None:
    text = infill(app, stream=True, n_predict=4).text
    found = events(text)
    assert "[DONE]" not in text
    assert "".join(event["content"] for event in found) == "hell"
    assert [event["stop"] for event in found] == [False] * (len(found) - 1) + [True]
    assert (found[-1]["stop_type"], found[-1]["tokens_predicted"], found[-1]["content"]) == ("limit", 4, "")


def test_a_prompt_that_is_too_long_is_cut(app: App) -> None:
    found = infill(app, input_prefix="a" * 90_000 + "b", input_suffix="y" * 500, input_extra=EXTRA).json()
    assert found["truncated"] is True
    assert found["prompt"] == f"<fim_prefix>{'a' * 39}b<fim_suffix>{'y' * 13}<fim_middle>"
    assert found["tokens_evaluated"] == 64 - 8


def test_an_open_end_fills_the_context(app: App) -> None:
    assert infill(app, n_predict=-1).json()["tokens_cached"] == 64


def test_an_indent_ends_the_output() -> None:
    app = filling()
    says(app, "a\n  b\nc")
    found = infill(app, n_predict=20, n_indent=2).json()
    assert (found["content"], found["stop_type"], found["has_new_line"]) == ("a\n  b\n", "limit", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_extra": [{}]}, "input_extra[0].text"),
        ({"input_extra": [{"filename": 123, "text": "abc"}]}, "input_extra[0].filename"),
        ({"input_extra": {}}, "input_extra"),
        ({"prompt": ["a"]}, "prompt"),
        ({"input_prefix": None}, "input_prefix"),
        ({"mirostat": 2}, "mirostat"),
        ({"top_n_sigma": 101}, "top_n_sigma"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora[0].scale"),
        ({"lora": [{"id": 0, "scale": 0}, {"id": 1, "scale": 1}]}, "lora[1].id"),
        ({"lora": [{"id": 0, "scale": 1}, {"id": 1, "scale": 1}]}, "lora"),
        ({"n_cmpl": 2}, "n_cmpl"),
        ({"n_predict": 64}, "n_predict"),
        ({"n_predict": None, "max_tokens": 64}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": [["a", 1.0]]}, "logit_bias[0][0]"),
        ({"logit_bias": [[1, True]]}, "logit_bias[0][1]"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"model": "gen"}, "input_suffix"),
        ({"input_extra": [{"text": "x"}] * 2000}, "input_extra"),
        ({"inptu_extra": []}, "inptu_extra"),
    ],
)
def test_what_infill_refuses(app: App, body: dict[str, Any], param: str) -> None:
    reply = infill(app, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert not app.client.submitted
