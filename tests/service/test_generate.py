"""POST /generate over a scripted engine: the effect of each field, replies and streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.support import (
    App,
    ask,
    byte_tokenizer,
    check_accounts,
    events,
    make_app,
    served,
)
from tests.service.test_bad_requests import check_error
from triptych.model.api.request import Request
from triptych.model.api.sampling_bounds import check_value
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint.generation_config import GenerationTask
from triptych.model.errors import ConfigError
from triptych.model.text.source_languages import SourceLanguages
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.replies import GenerateEvent, GenerateReply
from triptych.service.settings.service_settings import Limits, ServiceSettings


def generate(app: App, **fields: Any) -> dict[str, Any]:
    """Return the reply to a good request."""
    reply = ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab", "max_tokens": 8, **fields})
    assert reply.status_code == 200, reply.text
    GenerateReply.model_validate_json(reply.content)
    body: dict[str, Any] = reply.json()
    return body


def streamed(app: App, **fields: Any) -> list[Any]:
    """Return the events of a good streamed request."""
    body = {"model": "gen", "prompt": "ab", "max_tokens": 8, "stream": True, **fields}
    reply = ask(app, "POST", "/generate", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)


def the_request(app: App) -> Request:
    [request] = app.client.submitted
    return request


def test_a_reply(app: App) -> None:
    reply = generate(app, return_token_ids=True, request_id="mine")
    [choice] = reply["choices"]
    assert (reply["id"], reply["model"]) == ("mine", "gen")
    assert choice["text"] == "hello he"
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 8
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11, "cached_tokens": 0}
    timings = reply["timings"]
    assert timings["ttft_ms"] == pytest.approx(timings["queue_ms"] + timings["prefill_ms"], abs=0.01)
    assert timings["total_ms"] == pytest.approx(timings["ttft_ms"] + timings["decode_ms"], abs=0.01)


def test_defaults_are_greedy_and_seeds_are_fresh(app: App) -> None:
    for _ in range(2):
        generate(app)
    first, second = (request.params for request in app.client.submitted)
    assert (first.temperature, first.top_p, first.n, first.stop) == (0.0, 1.0, 1, ())
    assert first.seed != second.seed
    assert app.client.submitted[0].request_id != app.client.submitted[1].request_id


def test_checkpoint_defaults_apply_where_the_client_says_nothing() -> None:
    app = make_app()
    defaults = {"temperature": 0.7, "top_k": 5, "max_tokens": 3}
    app.served["gen"].checkpoint.sampling_defaults.update(defaults)
    reply = ask(app, "POST", "/generate", json={"model": "gen", "prompt": "ab", "top_k": 9})
    params = the_request(app).params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.7, 9, 3)
    assert reply.json()["usage"]["completion_tokens"] == 3


def test_a_checkpoints_beams_are_as_many_as_fit_and_a_clients_are_refused() -> None:
    app, body = make_app(), {"model": "gen", "prompt": "ab", "max_tokens": 2}
    app.served["gen"].checkpoint.sampling_defaults.update({"num_beams": 500, "length_penalty": 2.0})
    assert ask(app, "POST", "/generate", json=body).status_code == 200
    params, info = the_request(app).params, app.client.models["gen"]
    assert (params.num_beams, params.length_penalty) == (info.max_num_seqs, 2.0)
    app.client._from_start["gen"] = replace(info, num_blocks=1, block_size=16, cache_pools=())
    app.client.submitted.clear()
    assert ask(app, "POST", "/generate", json=body).status_code == 200
    assert the_request(app).params.num_beams == 1
    assert ask(app, "POST", "/generate", json={**body, "num_beams": 2}).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 1.0, "early_stopping": False},
        {"num_beams": 2, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "stop": [], "temperature": 0.0},
    ],
    ids=["greedy", "beams"],
)
def test_a_value_that_has_no_effect_is_taken_with_any_search(fields: dict[str, Any]) -> None:
    body = {"model": "gen", "prompt": "ab", "max_tokens": 2}
    assert ask(make_app(), "POST", "/generate", json=body | fields).status_code == 200


class TestTask:
    """A task of the checkpoint sets a prefix and the defaults of the request that names it."""

    @pytest.fixture
    def tasked(self) -> App:
        app = make_app()
        beams = {"num_beams": 2, "length_penalty": 2.0, "max_length": 9, "min_tokens": 3}
        app.served["seq"].checkpoint.tasks["shorten"] = GenerationTask("tl: ", beams)
        app.served["gen"].checkpoint.tasks["write"] = GenerationTask("", {"temperature": 0.7})
        app.served["seq"].checkpoint.sampling_defaults.update(num_beams=4, repetition_penalty=1.5)
        return app

    def test_its_prefix_and_defaults_apply_beneath_the_clients_fields(self, tasked: App) -> None:
        body = {"model": "seq", "prompt": ["ab", "c"], "task": "shorten", "length_penalty": 0.5}
        assert ask(tasked, "POST", "/generate", json=body).status_code == 200
        expected = [byte_tokenizer().encode(text).ids for text in ("tl: ab", "tl: c")]
        assert [request.source.token_ids for request in tasked.client.submitted if request.source] == expected
        params = tasked.client.submitted[0].params
        assert (params.num_beams, params.length_penalty, params.max_tokens, params.min_tokens) == (2, 0.5, 9 - 1, 3)
        assert params.repetition_penalty == 1.0  # not the checkpoint's

    def test_a_request_without_a_task_has_the_checkpoints_defaults(self, tasked: App) -> None:
        generate(tasked, model="seq", prompt="ab")
        params = the_request(tasked).params
        assert (params.num_beams, params.repetition_penalty) == (4, 1.5)

    def test_a_task_without_a_prefix_takes_token_ids(self, tasked: App) -> None:
        generate(tasked, prompt=[5, 6], task="write")
        assert (the_request(tasked).prompt_token_ids, the_request(tasked).params.temperature) == ((5, 6), 0.7)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"model": "seq", "prompt": "ab", "task": "answer"}, "model seq has no task 'answer'; it has shorten"),
            ({"model": "seq", "prompt": [5], "task": "shorten"}, "shorten puts 'tl: ' in front of texts"),
        ],
    )
    def test_what_does_not_apply_is_refused(self, tasked: App, body: dict[str, Any], message: str) -> None:
        error = check_error(ask(tasked, "POST", "/generate", json=body), 400, "task", "invalid_value")
        assert message in error["message"]

    def test_info_lists_them(self, tasked: App) -> None:
        shown = {model["name"]: model["tasks"] for model in ask(tasked, "GET", "/info").json()["models"]}
        assert shown["seq"]["shorten"]["prefix"] == "tl: " and shown["enc"] == {}


def test_max_tokens_defaults_to_what_the_context_leaves(app: App) -> None:
    generate(app, max_tokens=None)
    assert the_request(app).params.max_tokens == 64 - 3


def test_text_gets_special_tokens_and_ids_do_not(app: App) -> None:
    generate(app, prompt=["ab", "c"])
    generate(app, prompt=[[5, 6], [7]])
    ids = [request.prompt_token_ids for request in app.client.submitted]
    assert [one[0] for one in ids[:2]] == [256, 256]
    assert ids[2:] == [(5, 6), (7,)]


def test_an_encoder_decoder_starts_from_its_start_token(app: App) -> None:
    reply = generate(app, model="seq", decoder_prompt="xy", echo=True, return_token_ids=True, max_tokens=2)
    request = the_request(app)
    plain = byte_tokenizer().encode("xy", add_special_tokens=False).ids
    assert request.source is not None
    assert request.source.token_ids[0] == 256
    assert request.prompt_token_ids == (0, *plain)
    [choice] = reply["choices"]
    assert choice["text"] == "xyhe"
    assert choice["token_ids"][:2] == list(plain)
    assert generate(app, model="seq", max_tokens=2)["choices"][0]["text"] == "he"
    assert app.client.submitted[-1].prompt_token_ids == (0,)


def test_choices_of_several_prompts(app: App) -> None:
    reply = generate(app, prompt=["ab", "cde"], n=2, echo=True, max_tokens=3)
    shown = [(choice["index"], choice["prompt_index"], choice["text"]) for choice in reply["choices"]]
    assert shown == [(0, 0, "abhel"), (1, 0, "abhel"), (2, 1, "cdehel"), (3, 1, "cdehel")]
    assert reply["usage"]["prompt_tokens"] == 3 + 4
    assert reply["usage"]["completion_tokens"] == 12


def test_logprobs(app: App) -> None:
    [choice] = generate(app, logprobs=2, prompt_logprobs=1, max_tokens=3)["choices"]
    assert [entry["text"] for entry in choice["logprobs"]] == ["h", "e", "l"]
    assert [len(entry["top"]) for entry in choice["logprobs"]] == [2, 2, 2]
    assert choice["prompt_logprobs"][0] is None
    assert [entry["text"] for entry in choice["prompt_logprobs"][1:]] == ["a", "b"]


def test_the_log_probabilities_of_a_reply_are_bounded_in_sum() -> None:
    app = make_app(settings=ServiceSettings(limits=Limits(max_reply_logprobs=96)))
    asked = {"model": "gen", "prompt": ["ab", "cd"], "max_tokens": 8, "n": 2, "logprobs": 2}  # 2 x 2 x 8 x 3
    assert ask(app, "POST", "/generate", json=asked).status_code == 200
    taken = len(app.client.submitted)
    error = check_error(ask(app, "POST", "/generate", json={**asked, "logprobs": 3}), 400, "logprobs", "invalid_value")
    assert error["message"] == (
        "logprobs asks for 2 n x 16 max_tokens x 4 = 128 log-probabilities, more than max_reply_logprobs (96); "
        "a stream may have them"
    )
    foreign = {"model": "gen", "inputs": "ab", "parameters": {"max_new_tokens": 50, "top_n_tokens": 2, "details": True}}
    error = check_error(ask(app, "POST", "/generate", json=foreign), 400, "parameters.top_n_tokens", "invalid_value")
    assert "50 parameters.max_new_tokens x 3" in error["message"]
    chat = {**asked, "prompt": "ab", "n": 1, "max_tokens": 50, "logprobs": 2}
    check_error(ask(app, "POST", "/v1/completions", json=chat), 400, "logprobs", "invalid_value")
    of_prompts = {**asked, "logprobs": None, "prompt_logprobs": 8}  # 2 x 6 x 9
    for stream in (False, True):
        body = {**of_prompts, "stream": stream}
        error = check_error(ask(app, "POST", "/generate", json=body), 400, "prompt_logprobs", "invalid_value")
        assert error["message"] == (
            "prompt_logprobs asks for 2 n x 6 prompt tokens x 9 = 108 log-probabilities, more than "
            "max_reply_logprobs (96)"
        )
    assert len(app.client.submitted) == taken
    assert ask(app, "POST", "/generate", json={**asked, "logprobs": 3, "stream": True}).status_code == 200
    assert ask(app, "GET", "/info").json()["limits"]["max_reply_logprobs"] == 96
    check_accounts(app)


def test_priorities_are_limited_by_the_operator(app: App) -> None:
    """(A13)"""
    generate(app, priority=100)
    body = {"model": "gen", "prompt": "ab", "priority": -1}
    error = check_error(ask(app, "POST", "/generate", json=body), 400, "priority", "invalid_value")
    assert "min_priority (0)" in error["message"]
    check_error(ask(app, "POST", "/v1/completions", json=body), 400, "priority", "invalid_value")
    assert [request.priority for request in app.client.submitted] == [100]
    trusting = make_app(settings=ServiceSettings(limits=Limits(min_priority=-5)))
    for route in ("/generate", "/v1/completions"):
        assert ask(trusting, "POST", route, json={**body, "priority": -5}).status_code == 200
        check_error(ask(trusting, "POST", route, json={**body, "priority": -6}), 400, "priority", "invalid_value")
    assert [request.priority for request in trusting.client.submitted] == [-5, -5]
    assert ask(trusting, "GET", "/info").json()["limits"]["min_priority"] == -5


def test_stop_texts(app: App) -> None:
    [choice] = generate(app, stop=["lo", "zz"], max_tokens=20)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hel", "stop", "lo")
    [choice] = generate(app, stop="lo", include_stop=True, max_tokens=20)["choices"]
    assert choice["text"] == "hello"


def test_without_a_tokenizer_ids_are_returned() -> None:
    app = make_app("bare")
    reply = generate(app, model="bare", prompt=[1, 2], echo=True, max_tokens=2)
    [choice] = reply["choices"]
    assert choice["text"] == ""
    assert choice["token_ids"][:2] == [1, 2] and len(choice["token_ids"]) == 4


@settings(max_examples=25, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    n=st.integers(1, 2),
    echo=st.booleans(),
    max_tokens=st.integers(1, 40),
)
def test_streamed_equals_unstreamed(text: str, stop: list[str], n: int, echo: bool, max_tokens: int) -> None:
    app = make_app(token_ids=byte_tokenizer().encode(text, add_special_tokens=False).ids)
    fields = {"stop": stop, "n": n, "echo": echo, "max_tokens": max_tokens, "logprobs": 0, "return_token_ids": True}
    whole = generate(app, **fields)
    *deltas, done = streamed(app, **fields)
    assert done == "[DONE]"
    for delta in deltas:
        GenerateEvent.model_validate(delta)
    assert ["usage" in delta for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [one for delta in deltas for one in delta["choices"] if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [entry for part in parts for entry in part["logprobs"]] == choice["logprobs"]
        ends = [part["finish_reason"] for part in parts]
        assert ends == [None] * (len(ends) - 1) + [choice["finish_reason"]]
    check_accounts(app)


class TestTargetLanguage:
    """The decoder starts with the language's token, by the tokenizer's own code or as M2M-100 writes it."""

    @pytest.mark.parametrize(("code", "token"), [("fr_XX", 257), ("__de__", 258), ("de", 258)])
    def test_the_output_begins_behind_the_languages_token(self, app: App, code: str, token: int) -> None:
        generate(app, model="seq", prompt="ab", target_language=code)
        sent = app.client.submitted[-1]
        assert (sent.prompt_token_ids, sent.num_forced) == ((0, token), 1)

    def test_a_decoder_prompt_comes_after_it(self, app: App) -> None:
        generate(app, model="seq", prompt="ab", target_language="fr_XX", decoder_prompt=[5, 9])
        sent = app.client.submitted[-1]
        assert (sent.prompt_token_ids, sent.num_forced) == ((0, 257, 5, 9), 0)

    @pytest.mark.parametrize("code", ["fr", "<s", "a", "__fr_XX__", "DE"])
    def test_invalid_language_tokens(self, app: App, code: str) -> None:
        reply = ask(app, "POST", "/generate", json={"model": "seq", "prompt": "ab", "target_language": code})
        error = check_error(reply, 400, "target_language", "invalid_value")
        assert "seq has no such language token" in error["message"]


class TestSourceLanguage:
    """The source is marked with the language's token, by the tokenizer's own code or as M2M-100 writes it."""

    @pytest.fixture
    def many(self) -> App:
        tokenizer = byte_tokenizer()
        tokenizer.source_languages = SourceLanguages({"fr_XX": 257, "__de__": 258}, in_front=True)
        return make_app(served("many", "encoder-decoder", tokenizer))

    @pytest.mark.parametrize(("code", "token"), [("fr_XX", 257), ("__de__", 258), ("de", 258)])
    def test_every_source_has_the_languages_token(self, many: App, code: str, token: int) -> None:
        generate(many, model="many", prompt=["ab", "c"], source_language=code, target_language="fr_XX")
        found = [request.source.token_ids for request in many.client.submitted[-2:] if request.source]
        assert [ids[0] for ids in found] == [token, token]
        assert [ids[1:] for ids in found] == [byte_tokenizer().encode(text).ids[1:] for text in ("ab", "c")]
        assert many.client.submitted[-1].prompt_token_ids == (0, 257)

    def test_a_decoder_prompt_is_not_marked(self, many: App) -> None:
        generate(many, model="many", prompt="ab", source_language="de", decoder_prompt="c")
        plain = byte_tokenizer().encode("c", add_special_tokens=False).ids
        assert many.client.submitted[-1].prompt_token_ids == (0, *plain)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"source_language": "es"}, "model many has no language 'es'; it has fr_XX, de"),
            ({"source_language": "__fr_XX__"}, "has no language '__fr_XX__'"),
            ({"source_language": "de", "prompt": [5, 6]}, "token ids are taken as they are"),
            ({"source_language": "de", "model": "seq"}, "model seq does not mark the language of a source"),
            ({"source_language": "de", "model": "gen"}, "model gen does not mark the language of a source"),
        ],
    )
    def test_what_does_not_apply_is_refused(self, many: App, fields: dict[str, Any], message: str) -> None:
        body = {"model": "many", "prompt": "ab", **fields}
        error = check_error(ask(many, "POST", "/generate", json=body), 400, "source_language", "invalid_value")
        assert message in error["message"]

    def test_few_of_many_languages_are_named(self, many: App) -> None:
        many.served["many"].require_tokenizer("").source_languages = SourceLanguages(
            {f"l{number}": number for number in range(9)}, in_front=True
        )
        for field in ("source_language", "target_language"):
            body = {"model": "many", "prompt": "ab", field: "es"}
            error = check_error(ask(many, "POST", "/generate", json=body), 400, field, "invalid_value")
            assert error["message"].endswith("it has l0, l1, l2, l3, l4, l5 and 3 more")


def test_no_repeat_ngram_size_is_the_clients_or_the_checkpoints(app: App) -> None:
    def sent(**fields: Any) -> int:
        generate(app, prompt="ab", **fields)
        return app.client.submitted[-1].params.no_repeat_ngram_size

    assert (sent(), sent(no_repeat_ngram_size=3)) == (0, 3)
    app.served["gen"].checkpoint.sampling_defaults["no_repeat_ngram_size"] = 2
    assert (sent(), sent(no_repeat_ngram_size=3), sent(no_repeat_ngram_size=0)) == (2, 3, 0)


@pytest.mark.parametrize(("model", "left"), [("gen", 9 - 3), ("seq", 9 - 1)])
def test_max_length_counts_the_prompt_or_the_decoders_start(app: App, model: str, left: int) -> None:
    app.served[model].checkpoint.sampling_defaults["max_length"] = 9
    body = {"model": model, "prompt": "ab"}  # <s> a b
    assert ask(app, "POST", "/generate", json=body).status_code == 200
    assert app.client.submitted[-1].params.max_tokens == left
    assert ask(app, "POST", "/generate", json={**body, "max_tokens": 20}).status_code == 200
    assert app.client.submitted[-1].params.max_tokens == 20


def test_only_one_key_and_salt_share_prefixes() -> None:
    app = make_app(settings=ServiceSettings(api_keys=("key-one", "key-two")))
    for key, salt in (("key-one", {}), ("key-one", {}), ("key-two", {}), ("key-one", {"cache_salt": "x"})):
        body = {"model": "gen", "prompt": "a", "max_tokens": 1, **salt}
        reply = ask(app, "POST", "/generate", json=body, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
    salts = [request.cache_salt for request in app.client.submitted]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert "key-" not in "".join(salts)


def test_offline_bounds_are_those_of_the_body() -> None:
    found = set()
    for name, shown in GenerateBody.model_json_schema()["properties"].items():
        numbers = next((one for one in shown.get("anyOf", [shown]) if "maximum" in one), None)
        if numbers is None or not hasattr(SamplingParams(), name):
            continue
        found.add(name)
        least, most = numbers.get("minimum", numbers.get("exclusiveMinimum")), numbers["maximum"]
        check_value(name, most)
        check_value(name, numbers.get("minimum", most))
        for beyond in (least - 1e-3 if "minimum" in numbers else least, most + 1, float("nan")):
            with pytest.raises(ConfigError, match=name):
                check_value(name, beyond)
    assert len(found) == 20, found
