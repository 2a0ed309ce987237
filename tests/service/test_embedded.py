"""The embedded models through HTTP, started as a person starts them, held to the figures that their cards claim."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from huggingface_hub import InferenceClient

from lab.training import corpus, pairs
from lab.training.evaluate import pieces
from tests.service.processes import ServiceProcess
from triptych.model.api.engine_config import EngineConfig
from triptych.model.llm import LLM
from triptych.model.pretrained import CHECKPOINTS, embedded_models

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "sentence_vectors.json").read_text())
HELD_OUT = pairs.held_out_pairs(100, seed=1)
# Cosine of our vectors and sentence-transformers', which differ by 1e-12; two texts that have little to do with each
# other are below 0.7.
ALIKE = 0.999999


@pytest.fixture(scope="module")
def url(embedded_service: ServiceProcess) -> str:
    return embedded_service.url


def check_alike(found: Sequence[float], expected: Sequence[float]) -> None:
    """Both are of length 1."""
    assert math.hypot(*found) == pytest.approx(1, abs=1e-4)
    assert sum(a * b for a, b in zip(found, expected, strict=True)) > ALIKE


def post_all(url: str, path: str, bodies: list[dict[str, object]]) -> list[dict[str, object]]:
    """All at once, each on a connection of its own."""

    async def run() -> list[dict[str, object]]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            replies = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
        for reply in replies:
            assert reply.status_code == 200, reply.text
        return [reply.json() for reply in replies]

    return asyncio.run(run())


def texts(replies: list[dict[str, object]]) -> list[str]:
    return [reply["choices"][0]["text"] for reply in replies]  # type: ignore[index]


def card_figure(model: str, pattern: str) -> float:
    found = re.search(pattern, (CHECKPOINTS / model / "README.md").read_text())
    assert found is not None
    return float(found[1])


def test_normalize_is_right_for_100_held_out_pairs_in_flight_together(url: str) -> None:
    bodies: list[dict[str, object]] = [{"model": "normalize", "prompt": spoken} for spoken, _ in HELD_OUT]
    together = texts(post_all(url, "/generate", bodies))
    right = sum(answer == written for answer, (_, written) in zip(together, HELD_OUT, strict=True))
    assert right >= 0.99 * len(HELD_OUT)
    one_by_one = [text for body in bodies[::5] for text in texts(post_all(url, "/generate", [body]))]
    assert one_by_one == together[::5]


def test_code_predicts_the_held_out_text_as_well_as_its_card_says(url: str) -> None:
    sample = corpus.held_out_sample()
    bodies: list[dict[str, object]] = [
        {"model": "code", "prompt": piece, "max_tokens": 1, "prompt_logprobs": 0} for piece in pieces(sample)
    ]
    nats = 0.0
    for reply in post_all(url, "/generate", bodies):
        entries = reply["choices"][0]["prompt_logprobs"]  # type: ignore[index]
        assert entries[0] is None
        nats -= sum(entry["logprob"] for entry in entries[1:])
    measured = nats / math.log(2) / len(sample.encode())
    assert measured == pytest.approx(card_figure("code", r"\*\*([\d.]+)\*\* on `held_out_code"), rel=0.01)


def test_embed_equals_the_vectors_of_sentence_transformers(url: str) -> None:
    body = {"model": "embed", "input": VECTORS["texts"], "truncate": "right", "encoding_format": "base64"}
    [reply] = post_all(url, "/encode", [body])
    data: list[dict[str, str]] = reply["data"]  # type: ignore[assignment]
    for item, expected in zip(data, VECTORS["vectors"], strict=True):
        raw = base64.b64decode(item["embedding"])
        check_alike(struct.unpack(f"<{len(raw) // 4}f", raw), expected)
    assert [item.get("truncated", False) for item in data] == [False] * (len(data) - 1) + [True]


@pytest.mark.usefixtures("packed_here")
def test_embed_in_float32_equals_them_to_four_digits() -> None:
    llm = LLM(embedded_models()["embed"], EngineConfig(dtype="float32", device="cpu"))
    vectors = llm.encode(VECTORS["texts"][:-1])  # the last is longer than the model reads
    for ours, expected in zip(vectors, VECTORS["vectors"], strict=False):
        assert ours.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("model", ["code", "normalize"])
def test_a_greedy_request_is_the_same_alone_and_among_31_others(url: str, model: str) -> None:
    prompts = pieces(corpus.held_out_sample(), 300)[:32] if model == "code" else [spoken for spoken, _ in HELD_OUT[:32]]
    bodies: list[dict[str, object]] = [
        {"model": model, "prompt": prompt, "max_tokens": 24, "return_token_ids": True} for prompt in prompts
    ]
    crowd = [reply["choices"][0]["token_ids"] for reply in post_all(url, "/generate", bodies)]  # type: ignore[index]
    for at in (0, 13, 31):
        [alone] = post_all(url, "/generate", [bodies[at]])
        assert alone["choices"][0]["token_ids"] == crowd[at]  # type: ignore[index]


@pytest.mark.parametrize("prompt", ["# Grüße, 東京 🎉: ünïcödé\nname = '", "def f():\n    return '日本語 "])
def test_streamed_deltas_join_to_the_unstreamed_text(url: str, prompt: str) -> None:
    body = {"model": "code", "prompt": prompt, "max_tokens": 48, "temperature": 1.5, "seed": 7, "echo": True}
    whole = httpx.post(f"{url}/generate", json=body, timeout=60).json()["choices"][0]["text"]
    joined = ""
    with httpx.stream("POST", f"{url}/generate", json={**body, "stream": True}, timeout=60) as reply:
        events = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        joined += json.loads(event)["choices"][0]["text"]
    assert joined == whole
    assert whole.startswith(prompt)


def test_a_prompt_that_comes_again_is_found_within_its_salt(url: str) -> None:
    prompt = pieces(corpus.held_out_sample(), 600)[3]
    cached = []
    for salt in ("one", "one", "two"):
        [reply] = post_all(url, "/generate", [{"model": "code", "prompt": prompt, "max_tokens": 8, "cache_salt": salt}])
        cached.append((reply["usage"]["cached_tokens"] > 0, reply["choices"][0]["text"]))  # type: ignore[index]
    text = cached[0][1]
    assert cached == [(False, text), (True, text), (False, text)]


def test_what_outputs_of_one_request_have_of_each_other_was_not_cached(url: str) -> None:
    prompt = pieces(corpus.held_out_sample(), 600)[3]
    body: dict[str, object] = {"model": "code", "prompt": prompt, "max_tokens": 4, "n": 3, "cache_salt": "several"}
    first, second = (post_all(url, "/generate", [body])[0]["usage"] for _ in range(2))
    assert first["cached_tokens"] == 0 < second["cached_tokens"]  # type: ignore[index]


def test_drafts_change_nothing_but_the_number_of_steps(url: str) -> None:
    prompt = pieces(corpus.held_out_sample(), 600)[3]
    body: dict[str, object] = {
        "model": "code",
        "prompt": prompt,
        "max_tokens": 64,
        "logprobs": 1,
        "temperature": 0.5,
        "seed": 1,
    }
    [plain] = post_all(url, "/generate", [body])
    text: str = plain["choices"][0]["text"]  # type: ignore[index]
    [drafted] = post_all(url, "/generate", [{**body, "prediction": text}])
    assert drafted["choices"] == plain["choices"]
    assert drafted["usage"]["accepted_prediction_tokens"] > 40  # type: ignore[index]
    assert drafted["usage"]["rejected_prediction_tokens"] < 20  # type: ignore[index]
    assert "accepted_prediction_tokens" not in plain["usage"]  # type: ignore[operator]
    stopped = {**body, "stop": text[40:44], "return_token_ids": True}  # text after the stop does not count
    cut, drafted_cut = post_all(url, "/generate", [stopped, {**stopped, "prediction": text}])
    assert drafted_cut["choices"] == cut["choices"]
    usage = drafted_cut["usage"]
    assert isinstance(usage, dict) and usage["completion_tokens"] == cut["usage"]["completion_tokens"]  # type: ignore[index]
    assert 0 < usage["accepted_prediction_tokens"] <= usage["completion_tokens"]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    reply = client.completions.create(
        model="code", prompt="x = 1\n" * 20, max_tokens=40, temperature=0, extra_body={"num_speculative_tokens": 4}
    )
    details = reply.usage.completion_tokens_details if reply.usage is not None else None
    assert details is not None and (details.accepted_prediction_tokens or 0) > 10
    metrics = httpx.get(f"{url}/metrics").text
    assert 'triptych_spec_decode_num_accepted_tokens_total{model="code"}' in metrics


def test_beam_search_returns_its_best_hypotheses_at_its_end(url: str) -> None:
    spoken, written = HELD_OUT[0]
    body = {"model": "normalize", "prompt": spoken, "num_beams": 4, "n": 2}
    [reply] = post_all(url, "/generate", [body])
    first, second = reply["choices"]  # type: ignore[misc]
    assert first["text"] == written  # type: ignore[index]
    assert first["score"] >= second["score"]  # type: ignore[index]
    with httpx.stream("POST", f"{url}/generate", json={**body, "stream": True}, timeout=60) as streamed:
        events = [line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: ")]
    texts = {choice["index"]: choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"]}
    assert texts == {0: first["text"], 1: second["text"]}  # type: ignore[index]


def test_a_search_that_finds_fewer_hypotheses_gives_fewer_choices(url: str) -> None:
    """A pattern of one character is one output, however many are asked for."""
    body = {"model": "normalize", "prompt": HELD_OUT[0][0], "num_beams": 4, "n": 4, "regex": "7"}
    [reply] = post_all(url, "/generate", [body])
    assert [(one["index"], one["text"], one["finish_reason"]) for one in reply["choices"]] == [(0, "7", "stop")]  # type: ignore[index,misc]
    with httpx.stream("POST", f"{url}/generate", json={**body, "stream": True}, timeout=60) as streamed:
        events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
    assert [choice["text"] for event in events for choice in event["choices"]] == ["7"]
    assert events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]  # type: ignore[index]


@pytest.mark.usefixtures("hub_client")
def test_official_clients_of_other_servers_are_served(url: str) -> None:
    spoken, written = HELD_OUT[0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "normalize", "prompt": spoken, "temperature": 0, "max_tokens": 40}
    streamed = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    assert "".join(event.choices[0].text for event in streamed) == written
    vectors = client.embeddings.create(model="embed", input=VECTORS["texts"][0])
    check_alike(vectors.data[0].embedding, VECTORS["vectors"][0])
    generate = InferenceClient(model=f"{url}/?model=normalize", token="none").text_generation
    assert generate(spoken) == "".join(generate(spoken, stream=True)) == written


DATE = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "day": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}},
    "required": ["ok", "day"],
    "additionalProperties": False,
}


def test_openais_client_gets_json_that_the_schema_accepts(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    wrapped = {"type": "json_schema", "json_schema": {"name": "date", "schema": DATE, "strict": True}}
    for model, prompt in (("normalize", "the third of march twenty twenty four"), ("code", "x = ")):
        reply = client.completions.create(
            model=model,
            prompt=prompt,
            n=3,
            max_tokens=64,
            temperature=0.7,
            seed=5,
            extra_body={"response_format": wrapped},
        )
        assert [choice.finish_reason for choice in reply.choices] == ["stop"] * 3
        for choice in reply.choices:
            jsonschema.validate(json.loads(choice.text), DATE)


def test_a_pattern_and_words_for_both_models_in_every_dialect(url: str) -> None:
    spoken, pattern = "the third of march twenty twenty four", r"\d{2}/\d{2}/\d{4}"
    native = {"model": "normalize", "prompt": spoken, "regex": pattern}
    searched = {"model": "normalize", "prompt": spoken, "regex": pattern, "num_beams": 4}
    coded = {"model": "code", "prompt": "x = ", "regex": pattern, "temperature": 1.0, "seed": 5, "echo": True}
    chosen = {"model": "code", "prompt": "x = ", "choice": ["yes", "no"]}
    found = texts(post_all(url, "/generate", [native, searched, coded, chosen, native]))
    assert re.fullmatch(pattern, found[0]) and found[0] == found[4]
    assert re.fullmatch(pattern, found[1])
    assert re.fullmatch("x = " + pattern, found[2])
    assert found[3] in ("yes", "no")
    with httpx.stream("POST", f"{url}/generate", json={**native, "stream": True}, timeout=60) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == found[0]
    hugging = {"model": "normalize", "inputs": spoken, "parameters": {"grammar": {"type": "regex", "value": pattern}}}
    held = {"type": "json", "value": json.dumps(DATE)}
    schemed = {"model": "normalize", "inputs": spoken, "parameters": {"grammar": held, "max_new_tokens": 60}}
    replies: list[object] = [*post_all(url, "/generate", [hugging, schemed])]  # type: ignore[list-item]
    assert replies[0]["generated_text"] == found[0]  # type: ignore[index]
    jsonschema.validate(json.loads(replies[1]["generated_text"]), DATE)  # type: ignore[index]


def test_tokens_that_alone_are_allowed_and_tokens_that_are_suppressed(url: str) -> None:
    body = {"model": "code", "prompt": "def add(a, b):", "max_tokens": 12, "return_token_ids": True}
    [plain] = post_all(url, "/generate", [body])
    said = plain["choices"][0]["token_ids"]  # type: ignore[index]
    changes: list[dict[str, object]] = [
        {"suppress_tokens": said[:2]},
        {"allowed_token_ids": said[2:5], "temperature": 1.5, "seed": 1},
        {"allowed_token_ids": said[:6], "suppress_tokens": said[:2], "num_beams": 3},
    ]
    suppressed, allowed, both = (
        set(reply["choices"][0]["token_ids"])  # type: ignore[index]
        for reply in post_all(url, "/generate", [body | change for change in changes])
    )
    assert suppressed.isdisjoint(said[:2])
    assert allowed <= set(said[2:5]) and len(allowed) > 1
    assert both <= set(said[:6]) - set(said[:2])


def test_a_stop_id_that_a_constraint_needs_is_refused(url: str) -> None:
    body = {"model": "normalize", "text": "a"}
    [token] = httpx.post(f"{url}/tokenize", json=body | {"add_special_tokens": False}).json()["token_ids"]
    held = {"model": "normalize", "prompt": "x", "regex": "a", "stop_token_ids": [token]}  # a stop id is no text
    reply = httpx.post(f"{url}/generate", json=held)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "regex"), reply.text
