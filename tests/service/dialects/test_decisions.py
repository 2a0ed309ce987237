"""Decisions and moderations by OpenAI's client, compared with the logits of `transformers`."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.checkpoints import bert, llama
from tests.engine.thread_transport import ThreadTransport
from tests.service.dialects.support import CALLS, TURNS
from tests.service.support import live, until
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.client.async_engine import AsyncEngine
from triptych.service.app import create_app
from triptych.service.core.models import Models
from triptych.service.dialects import decisions
from triptych.service.dialects.decision_bodies import DecisionBody
from triptych.service.routes import label_probes
from triptych.service.runtimes.model_reader import read_model
from triptych.service.settings.service_settings import ServiceSettings

LABELS = {
    "toxic": ["toxic", "self_harm", "non-toxic"],
    "nli": ["contradiction", "neutral", "entailment"],
    "rank": ["LABEL_0"],
    "unnamed": ["LABEL_0", "LABEL_1"],
}
TEXT = "import os and sys"
QUESTIONS: Any = [
    {"type": "predicate", "name": "p", "instructions": "It imports os."},
    {
        "type": "choice",
        "name": "c",
        "instructions": [{"type": "input_text", "text": "Which?"}, {"type": "input_json", "data": {"a": 1}}],
        "choices": [{"value": v} for v in ("true", True, False, "tru", "trunk")]
        + [{"value": "x", "description": "no"}],
    },
    {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "mid"}, {"label": "high"}]},
]


def write(name: str, folder: Path) -> Path:
    if name in LABELS:
        path = bert(folder / name, classes=len(LABELS[name]))
        config = json.loads((path / "config.json").read_text())
        config["id2label"] = dict(enumerate(LABELS[name]))
        config["label2id"] = {label: at for at, label in enumerate(LABELS[name])}
        (path / "config.json").write_text(json.dumps(config))
        return path
    path = llama(folder / name)
    if name != "plain":
        (path / "chat_template.jinja").write_text({"chat": TURNS, "tools": CALLS}[name])
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decisions")
    return {name: write(name, folder) for name in ("plain", "chat", "tools", *LABELS)}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[openai.OpenAI]:
    config = EngineConfig(kv_cache_memory=4 << 20, device="cpu", dtype="float32", max_num_seqs=8, block_size=16)
    specs = [ModelSpec(name, str(path), config) for name, path in folders.items()]
    served = [read_model(one) for one in specs]
    engine = AsyncEngine(specs, ThreadTransport, {one.name: one.tokenizer for one in served})
    app = create_app(engine, Models(served), ServiceSettings())
    with live(app) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def expected(folder: Path, prompt: str, values: list[Any], gap: str) -> tuple[list[float], float]:
    """Return the distribution of the labels by `transformers`, and the mass of the first tokens."""
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    model, raw = LlamaForCausalLM.from_pretrained(folder).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    before = raw.encode(prompt, add_special_tokens=bool(gap)).ids
    labels = [tuple(raw.encode(gap + json.dumps(one), add_special_tokens=False).ids) for one in values]

    def logprobs(path: tuple[int, ...]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([[*before, *path]])).logits[0, -1].log_softmax(-1)

    found, mass = [], None
    for ids in labels:
        log = 0.0
        for at, token in enumerate(ids):
            follow = sorted({one[at] for one in labels if one[:at] == ids[:at]})
            if len(follow) > 1:
                here = logprobs(ids[:at])
                mass = mass or float(here[follow].exp().sum())
                log += float(here[token] - here[follow].logsumexp(0))
        found.append(math.exp(log))
    assert mass is not None
    return found, mass


@pytest.mark.parametrize("name", ["plain", "chat"])
def test_a_decoder_answers_with_the_softmax_of_its_labels(
    client: openai.OpenAI, folders: dict[str, Path], name: str
) -> None:
    reply = client.decisions.create(model=name, input=TEXT, questions=QUESTIONS, prompt_cache_key="k")
    body = DecisionBody.model_validate({"input": TEXT, "questions": QUESTIONS})
    for question, answer in zip(body.questions, reply.answers, strict=True):
        asked = decisions.asked(question)
        prompt = f"{TEXT}\n\n{asked}"
        text = f"{prompt}\nAnswer:" if name == "plain" else f"<|turn|>user\n{prompt}<|end|>\n<|turn|>assistant\n"
        values = decisions.values_of(question)
        shares, mass = expected(folders[name], text, values, " " if name == "plain" else "")
        if answer.type == "predicate":
            assert answer.probability == pytest.approx(shares[0], abs=1e-4)
        else:
            assert answer.type in ("choice", "score")
            assert [one.probability for one in answer.probabilities] == pytest.approx(shares, abs=1e-4)  # type: ignore[union-attr]
            assert sum(shares) == pytest.approx(1)
            assert answer.confidence == pytest.approx(max(shares), abs=1e-4)  # type: ignore[union-attr]
        assert answer.mass == pytest.approx(mass, abs=1e-4)  # type: ignore[union-attr]
    choice, score = reply.answers[1:]
    assert choice.type == "choice" and [one.value for one in choice.probabilities][:3] == ["true", True, False]
    assert score.type == "score" and [one.value for one in score.probabilities] == [0, 1, 2]
    assert score.score == pytest.approx(sum(one.value * one.probability for one in score.probabilities))
    assert [one.name for one in reply.answers] == ["p", "c", None]
    assert reply.usage.output_tokens == 0 and reply.usage.total_tokens == reply.usage.input_tokens > 100


def test_four_hundred_questions_share_their_input(client: openai.OpenAI) -> None:
    asked: Any = [{"type": "predicate", "name": str(at), "instructions": f"{at} is it."} for at in range(400)]
    reply = client.decisions.create(model="chat", input=TEXT * 20, questions=asked)
    assert [one.name for one in reply.answers] == [str(at) for at in range(400)]
    assert reply.usage.input_tokens_details.cached_tokens > 0.5 * reply.usage.input_tokens
    alone = client.decisions.create(model="chat", input=TEXT * 20, questions=asked[7:8])
    assert alone.answers[0] == reply.answers[7]


@pytest.mark.parametrize("model", ["chat", "plain", "nli"])
def test_named_questions_have_the_answers_of_decisions(client: openai.OpenAI, model: str) -> None:
    """System One's API, which Ollama and TypeSafe have."""
    levels = ["low", "mid", "high"]
    asked: Any = [
        {"type": "predicate", "instructions": "It imports os.\ntrue: so"},
        {"type": "choice", "instructions": '{"q":"Wh\u00efch?"}', "choices": [{"value": "a", "description": "[1]"}]},
        {"type": "score", "instructions": "How?", "levels": [{"label": one} for one in levels]},
        {"type": "score", "instructions": "How?", "levels": [{"label": "0", "description": "x" * 65}, {"label": "1"}]},
    ]
    asked[1]["choices"].append({"value": "b"})
    asked[3]["levels"][1]["description"] = "y"
    named = {
        "p": {"type": "noul", "instructions": "It imports os.", "criteria": {"true": "so", "false": None}},
        "c": {"type": "choice", "instructions": {"q": "Wh\u00efch?"}, "criteria": {"a": [1], "b": None}},
        "s": {"type": "score", "instructions": "How?", "criteria": levels},
        "l": {"type": "score", "instructions": "How?", "criteria": ["x" * 65, "y"]},
    }
    theirs = client.decisions.create(model=model, input='{"imports":["os"]}', questions=asked).model_dump()["answers"]
    body = {"model": model, "state": {"imports": ["os"]}, "questions": named, "keep_alive": "5m"}
    reply: Any = client.post("/systemone", body=body, cast_to=object)
    assert reply.keys() == {"model", "answers", "usage"} and reply["model"] == model
    assert reply["usage"]["input_tokens"] > 0 and reply["usage"]["output_tokens"] == 0
    found = reply["answers"]
    assert list(found) == list(named) and found["p"]["noul"] == theirs[0]["probability"]
    for name, one in zip("csl", theirs[1:], strict=True):
        shares = [entry["probability"] for entry in one["probabilities"]]
        entropy = -sum(share * math.log(share) for share in shares)
        assert list(found[name]["probabilities"].values()) == shares
        assert found[name]["confidence"] == pytest.approx(1 - entropy / math.log(len(shares)))
        assert found[name].get("mass") == one.get("mass")
    assert found["c"]["choice"] == theirs[1]["choice"] and list(found["c"]["probabilities"]) == ["a", "b"]
    assert found["s"]["score"] == theirs[2]["score"] and found["s"]["legend"] == dict(zip("012", levels, strict=True))


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"state": ""}, "state", "at least 1"),
        ({"state": 7}, "state", ""),
        ({"questions": {}}, "questions", "at least 1"),
        ({"questions": [{"type": "noul"}]}, "questions", ""),
        ({"questions": {str(at): {"type": "noul", "instructions": "?"} for at in range(401)}}, "questions", "at most"),
        ({"questions": {"a": {"type": "noul"}}}, "questions.a", "instructions or criteria"),
        ({"questions": {"a": {"type": "box", "instructions": "?"}}}, "questions.a", "noul, choice or score"),
        ({"questions": {"a": {"type": "choice", "criteria": {"b": None}}}}, "questions.a.criteria", "at least 2"),
        ({"questions": {"a": {"type": "score", "criteria": ["x", 1]}}}, "questions.a.criteria[1]", ""),
        ({"questions": {"a": {"type": "noul", "instructions": "x" * 16_385}}}, "questions.a.instructions", "16384"),
        (
            {"model": "toxic", "questions": {"a": {"type": "choice", "criteria": {"b": "", "toxic": ""}}}},
            None,
            "no label 'b'",
        ),
        ({"state": "word " * 4000}, "state", "maximum context length"),
        ({"images": ["aGk="]}, "images", "not supported"),
        ({"stream": True}, "stream", "not supported"),
        ({"model": "none"}, "model", "none"),
    ],
)
def test_what_named_questions_refuse(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"model": "chat", "state": "a", "questions": {"a": {"type": "noul", "instructions": "?"}}} | fields
    with pytest.raises(openai.APIStatusError) as error:
        client.post("/systemone", body=body, cast_to=object)
    assert error.value.status_code in (400, 404), error.value.body
    assert message in error.value.message and (param is None or error.value.param == param), error.value.body


def test_labels_are_named_as_they_were_sent(client: openai.OpenAI) -> None:
    body = {"model": "toxic", "state": "a", "questions": {"a b": {"type": "choice", "criteria": {"b": None, "c": "d"}}}}
    with pytest.raises(openai.BadRequestError, match="model toxic has no label 'b'") as error:
        client.post("/systemone", body=body, cast_to=object)
    assert error.value.param == "questions.'a b'"


@pytest.mark.parametrize("ends", ["cancelled", "disconnected"])
def test_what_ends_in_the_middle_frees_everything(client: openai.OpenAI, ends: str) -> None:
    asked = [{"type": "predicate", "instructions": f"{ends} {at}"} for at in range(400)]
    body = {"model": "chat", "input": TEXT * 99, "questions": asked, "request_id": ends}
    url = str(client.base_url)

    with ThreadPoolExecutor(1) as pool:
        timeout = 0.3 if ends == "disconnected" else 60
        request = pool.submit(httpx.post, f"{url}decisions", json=body, timeout=timeout)
        if ends == "cancelled":
            address = url.replace("v1/", f"requests/{ends}")
            asyncio.run(until(lambda: httpx.delete(address).status_code == 200))
            reply = request.result()
            assert reply.status_code == 409 and reply.json()["error"]["code"] == "cancelled", reply.text
        else:
            assert isinstance(request.exception(), httpx.ReadTimeout)

    def freed() -> bool:
        metrics = httpx.get(url.replace("v1/", "metrics")).text
        left = re.findall(r'^triptych_(?:requests_running|requests_waiting)\{.*"chat".*\} (\S+)', metrics, re.M)
        used = re.findall(r'^triptych_kv_blocks\{.*"chat",state="used"\} (\S+)', metrics, re.M)
        return bool(left) and {*map(float, left + used)} == {0.0}

    asyncio.run(until(freed))


def test_a_fault_counts_as_an_error(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error budget is to know of it, as of other requests that end so."""

    def errors() -> float:
        metrics = httpx.get(str(client.base_url).replace("v1/", "metrics")).text
        [found] = re.findall(
            r'^triptych_requests_total\{model="chat",outcome="error",task="generate"\} (\S+)', metrics, re.M
        )
        return float(found)

    before = errors()
    monkeypatch.setattr(label_probes.Job, "observe", lambda *_: 1 / 0)
    body = {"model": "chat", "input": "a", "questions": [{"type": "predicate", "instructions": "b"}]}
    assert httpx.post(f"{client.base_url}decisions", json=body).status_code == 500
    assert errors() > before


def test_messages_calls_and_outputs(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "shell", "input": "ls"},
        {"type": "function_call_output", "call_id": "1", "output": "Sun"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "a"}]},
    ]
    for model in ("plain", "chat", "tools", "nli"):
        reply = client.decisions.create(model=model, input=items, questions=QUESTIONS[:1])
        assert reply.answers[0].type == "predicate" and 0 < reply.answers[0].probability < 1
    with pytest.raises(openai.BadRequestError, match=r"input\[0\].call_id: no call before it has the id"):
        client.decisions.create(model="chat", input=items[4:], questions=QUESTIONS)


def logits(folder: Path, first: str, second: str | None = None) -> Any:
    from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    sent = tokenizer(first, second, return_tensors="pt", return_token_type_ids=True)
    with torch.inference_mode():
        return BertForSequenceClassification.from_pretrained(folder).eval()(**sent).logits[0].numpy().astype(float)


def test_models_of_entailment_and_rerankers(client: openai.OpenAI, folders: dict[str, Path]) -> None:
    words: Any = [
        {"type": "predicate", "instructions": "sys"},
        {"type": "choice", "instructions": "of", "choices": [{"value": "os"}, {"value": True, "description": "sys"}]},
    ]
    for model in ("nli", "rank"):
        predicate, choice = client.decisions.create(model=model, input="import os", questions=words).answers
        pairs = [("import os", text) if model == "nli" else (text, "import os") for text in ("sys", "of os", "of sys")]
        found = np.array([logits(folders[model], *pair) for pair in pairs])
        odds = found[:, 2] if model == "nli" else found[:, 0]
        against = found[0, 0] if model == "nli" else 0.0
        assert predicate.type == "predicate" and choice.type == "choice"
        assert predicate.probability == pytest.approx(1 / (1 + np.exp(against - odds[0])), abs=1e-4)
        shares = np.exp(odds[1:]) / np.exp(odds[1:]).sum()
        assert [one.probability for one in choice.probabilities] == pytest.approx(shares.tolist(), abs=1e-4)


def test_a_classifier_answers_with_its_own_labels(client: openai.OpenAI, folders: dict[str, Path]) -> None:
    scores = np.exp(logits(folders["toxic"], "import os"))
    scores /= scores.sum()
    two: Any = [{"value": "non-toxic"}, {"value": "toxic"}]
    asked: Any = [
        {"type": "predicate", "instructions": "toxic"},
        {"type": "choice", "instructions": "?", "choices": two},
    ]
    predicate, choice = client.decisions.create(model="toxic", input="import os", questions=asked).answers
    assert predicate.type == "predicate" and predicate.probability == pytest.approx(scores[0], abs=1e-4)
    assert choice.type == "choice"
    assert choice.probabilities[0].probability == pytest.approx(scores[2] / (scores[0] + scores[2]), abs=1e-4)
    with pytest.raises(openai.BadRequestError, match=r"questions\[0\]: model toxic has no label 'It imports os"):
        client.decisions.create(model="toxic", input="import os", questions=QUESTIONS)


def choices(*values: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": "?", "choices": [{"value": value} for value in values]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"questions": []}, "questions", "at least 1"),
        ({"questions": QUESTIONS * 134}, "questions", "at most 400"),
        ({"questions": [choices("a")]}, "questions[0].choices", "at least 2"),
        ({"questions": [choices("a", True, "a")]}, "questions[0].choices[2]", "twice"),
        ({"questions": [choices("a", 1)]}, "questions[0].choices[1].value", ""),
        ({"questions": [{"type": "guess", "instructions": "?"}]}, "questions[0]", ""),
        ({"questions": [*QUESTIONS[:1], {"type": "choice", "instructions": "?"}]}, "questions[1].choices", "required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            None,
            "input_image",
        ),
        ({"input": "word " * 4000}, "input", ""),
        ({"input": "a" * 2000}, "questions[0]", "input and questions[0] have"),
        ({"questions": [*QUESTIONS, {"type": "predicate", "instructions": "a" * 3000}]}, "questions[3]", "3"),
        ({"temperature": 1}, "temperature", "unknown"),
        ({"prompt_cache_options": {"mode": "explicit"}, "input": ""}, "input", "at least 1"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str | None, message: str) -> None:
    asked = {"model": "chat", "input": TEXT, "questions": QUESTIONS} | fields
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/decisions", body=asked, cast_to=object)
    assert message in error.value.message and (param is None or error.value.param == param), error.value.body


def test_many_labels_are_refused_before_any_work(client: openai.OpenAI) -> None:
    asked: Any = [choices(*map(str, range(255)))] * 9
    with pytest.raises(openai.APIStatusError, match="questions have 2295 labels in all") as error:
        client.decisions.create(model="chat", input=TEXT, questions=asked)
    assert error.value.status_code == 413


_LONG = "os " * 400_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/rerank", {"model": "rank", "query": _LONG, "documents": ["a"] * 2000}),
        ("rerank", {"model": "rank", "query": _LONG, "texts": ["a"] * 2000, "truncate": True}),
        ("v1/score", {"model": "rank", "text_1": _LONG, "text_2": ["a"] * 2000}),
        ("encode", {"model": "nli", "input": _LONG, "labels": ["a"] * 2000, "output": "zero_shot", "truncate": "left"}),
        ("v1/decisions", {"model": "nli", "input": _LONG, "questions": [choices(*map(str, range(250)))] * 8}),
        ("v1/decisions", {"model": "plain", "input": _LONG, "questions": QUESTIONS * 100}),
    ],
)
def test_a_long_text_is_not_read_again_and_again(client: openai.OpenAI, path: str, body: dict[str, Any]) -> None:
    """A body of a megabyte would be read as gigabytes."""
    began, url = time.process_time(), str(client.base_url).removesuffix("v1/")
    reply = httpx.post(url + path, json=body, timeout=60)
    assert reply.status_code in (400, 413) and "characters" in reply.json()["error"]["message"], reply.text[:300]
    assert time.process_time() - began < 2


def test_moderations(client: openai.OpenAI, folders: dict[str, Path]) -> None:
    texts = ["import os", "for sys in range", "def os", "class sys"]
    results = client.moderations.create(model="toxic", input=texts).results
    for text, one in zip(texts, results, strict=True):
        scores = np.exp(logits(folders["toxic"], text))
        scores = (scores / scores.sum()).tolist()
        found: Any = one.category_scores.to_dict()
        assert [found[name] for name in ("toxic", "self-harm", "non-toxic")] == pytest.approx(scores, abs=1e-4)
        best = LABELS["toxic"][scores.index(max(scores))]
        assert one.flagged is (best != "non-toxic") and one.categories.self_harm is (best == "self_harm")
        assert one.categories.to_dict()["non-toxic"] is False
        assert one.category_applied_input_types.self_harm == ["text"]
    parts: Any = [{"type": "text", "text": "import"}, {"type": "text", "text": "os"}]
    [whole] = client.moderations.create(input=parts, model="toxic").results
    assert whole == client.moderations.create(input="import\nos").results[0]
    for model in ("unnamed", "rank", "nli", "chat"):
        with pytest.raises(openai.BadRequestError, match=f"model {model} is not one that classifies texts"):
            client.moderations.create(model=model, input="a")
    image: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.moderations.create(model="toxic", input=image)


@pytest.mark.parametrize("label", ["safe", "OK", "non-toxic", "not_hate", "neutral", "nothate", "normal"])
def test_labels_without_harm(label: str) -> None:
    assert decisions.is_harmless(label)


@pytest.mark.parametrize("label", ["toxic", "hate", "nordic", "obscene", "no-hate-but", "insult", "notorious"])
def test_labels_of_harm(label: str) -> None:
    assert decisions.is_harmless(label) is label.startswith("no-")


def test_labels_that_begin_alike_are_told_apart() -> None:
    body = DecisionBody.model_validate({"input": "a", "questions": [choices("a", "b", "c")]})
    tree = decisions.label_tree([(1, 2, 3), (1, 2, 4), (1, 5)], body.questions[0], "questions[0]")
    assert tree.branches == {(1,): (2, 5), (1, 2): (3, 4)}
    shares, mass = tree.shares({(1,): np.log([0.2, 0.3]).tolist(), (1, 2): np.log([0.1, 0.3]).tolist()})
    assert shares == pytest.approx([0.4 * 0.25, 0.4 * 0.75, 0.6]) and mass == pytest.approx(0.5)
    for labels in itertools.permutations([(1, 2), (1,), (3,)]):
        with pytest.raises(Exception, match="does not tell"):
            decisions.label_tree(labels, body.questions[0], "questions[0]")
