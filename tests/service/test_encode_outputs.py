"""Outputs of /encode that say something of a text, through HTTP, against the pipelines of `transformers`."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.checkpoints import HEADS, copied, saved
from tests.service.encode_models import (
    TEXT,
    Client,
    client_of,
    encode_app,
    hf_tokenizer,
    late_folder,
    pipeline,
    reference_logits,
)
from tests.service.test_bad_requests import check_error
from triptych.service.planning.outputs.registry import OUTPUTS

MASKED = tuple(kind for kind in HEADS if "masked" in kind)
ANSWERING = tuple(kind for kind in HEADS if "answers" in kind)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    late = late_folder(tmp_path_factory.mktemp("late") / "late")
    with client_of(encode_app(*HEADS, "bert", "bert-token", late=late)) as made:
        yield made


class TestFillMask:
    @pytest.mark.parametrize("kind", MASKED)
    def test_candidates(self, client: Client, kind: str) -> None:
        text = "the [MASK] sat on a mat"
        expected = pipeline("fill-mask", kind)(text, top_k=7)
        [item] = client.encode(model=kind, output="fill_mask", input=text, top_k=7)["data"]
        [mask] = item["masks"]
        assert mask["position"] == 2
        assert [one["token"] for one in mask["candidates"]] == [one["token"] for one in expected]
        assert [one["text"] for one in mask["candidates"]] == [one["token_str"] for one in expected]
        assert [one["sequence"] for one in mask["candidates"]] == [one["sequence"] for one in expected]
        assert [one["score"] for one in mask["candidates"]] == pytest.approx(
            [one["score"] for one in expected], abs=1e-5
        )

    def test_several_masks_and_targets_in_a_batch(self, client: Client) -> None:
        texts = ["[MASK] cat [MASK] on", "the cat [MASK]"]
        fill = pipeline("fill-mask", "bert-masked")
        reply = client.encode(model="bert-masked", output="fill_mask", input=texts, targets=["cat", "mat", "##lace"])
        for item, text in zip(reply["data"], texts, strict=True):
            expected = fill(text, targets=["cat", "mat", "##lace"])
            expected = expected if isinstance(expected[0], list) else [expected]
            for mask, wanted in zip(item["masks"], expected, strict=True):
                assert [one["token"] for one in mask["candidates"]] == [one["token"] for one in wanted]
                assert [one["sequence"] for one in mask["candidates"]] == [one["sequence"] for one in wanted]
        alone = client.encode(model="bert-masked", output="fill_mask", input=texts[1], targets=["cat", "mat", "##lace"])
        assert alone["data"][0]["masks"] == reply["data"][1]["masks"]

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            (dict(input="no mask"), "input", "has no mask token [MASK]"),
            (dict(input=["a [MASK]", "none"]), "input[1]", "has no mask token"),
            (dict(input="[MASK]", top_k=101), "top_k", "at most 100"),
            (dict(input="[MASK] " * 30, top_k=50), "input", "30 masks x 50 top_k"),
            (dict(input="[MASK]", targets=["cat", "cat mat"]), "targets[1]", "is 2 tokens"),
            (dict(input="[MASK]", normalize=True), "normalize", "no meaning with output 'fill_mask'"),
        ],
    )
    def test_refusals(self, client: Client, fields: dict[str, Any], param: str, words: str) -> None:
        reply = client.post(model="bert-masked", output="fill_mask", **fields)
        assert words in check_error(reply, 400, param, reply.json()["error"]["code"])["message"]


class TestSparse:
    @pytest.mark.parametrize("kind", MASKED[:3])
    def test_weights(self, client: Client, kind: str) -> None:
        texts = [TEXT, "the cat", "a mat on a mat"]
        reply = client.encode(model=kind, output="sparse", input=texts)
        for item, text in zip(reply["data"], texts, strict=True):
            weights = torch.log1p(torch.relu(reference_logits(kind, text))).amax(dim=0)
            assert item["indices"] == weights.nonzero().flatten().tolist()
            assert item["weights"] == pytest.approx(weights[weights > 0].tolist(), abs=1e-4)

    def test_top_k_keeps_the_heaviest(self, client: Client) -> None:
        body = dict(model="bert-masked", output="sparse", input=TEXT)
        [whole], [few] = client.encode(**body)["data"], client.encode(**body, top_k=5)["data"]
        weights = dict(zip(whole["indices"], whole["weights"], strict=True))
        assert few["indices"] == sorted(sorted(weights, key=lambda token: -weights[token])[:5])
        assert few["weights"] == [weights[token] for token in few["indices"]]


@pytest.mark.parametrize("default", ["query", None])
def test_a_cross_encoders_default_prompt_is_before_the_first_text(tmp_path: Path, default: str | None) -> None:
    """As `CrossEncoder` of sentence-transformers has it."""
    folder = copied("bert-nli", tmp_path)
    settings = {"prompts": {"query": "the mat "}, "default_prompt_name": default}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    pair = {"text": "the cat", "text_pair": "a mat"}
    with client_of(encode_app(ranker=folder)) as client:
        for body in ({}, {"output": "scores"}):
            body = {"model": "ranker", "output": "logits", **body}
            found = client.encode(**body, input=[pair])["data"][0]["scores"]
            text = "the mat the cat" if default else "the cat"
            with_prompt = reference_logits("bert-nli", text, "a mat")
            expected = with_prompt if body["output"] == "logits" else with_prompt.softmax(-1)
            assert found == pytest.approx(expected.tolist(), abs=1e-4)


class TestTokenClassification:
    @pytest.mark.parametrize("way", ["none", "simple", "first", "average", "max"])
    def test_as_the_pipeline(self, client: Client, way: str) -> None:
        texts = [TEXT, "Ada Lovelace", "zzz sat xx Londonx", "Lovelacex , Ada"]
        find = pipeline("token-classification", "bert-entities")
        reply = client.encode(model="bert-entities", output="token_classification", input=texts, aggregation=way)
        assert any(item["entities"] for item in reply["data"])
        for item, text in zip(reply["data"], texts, strict=True):
            expected = find(text, aggregation_strategy=way)
            found = [
                (one["label"], one["start"], one["end"], one["text"], one.get("position")) for one in item["entities"]
            ]
            name = "entity" if way == "none" else "entity_group"
            assert found == [(one[name], one["start"], one["end"], one["word"], one.get("index")) for one in expected]
            scores = [one["score"] for one in item["entities"]]
            assert scores == pytest.approx([float(one["score"]) for one in expected], abs=1e-5)

    def test_labels_to_ignore(self, client: Client) -> None:
        body = dict(model="bert-entities", output="token_classification", input=TEXT)
        [item] = client.encode(**body, ignore_labels=[])["data"]
        assert len(item["entities"]) == len(hf_tokenizer("bert")(TEXT)["input_ids"]) - 2

    def test_long_texts_in_windows(self, client: Client) -> None:
        text = " ".join([TEXT] * 9)
        tokenizer = hf_tokenizer("bert-entities")
        tokenizer.model_max_length = 64
        import transformers

        model = saved("bert-entities").reference
        find = transformers.pipeline(
            "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple", stride=20
        )
        expected = find(text)
        body = dict(model="bert-entities", output="token_classification", aggregation="simple", stride=20)
        [item] = client.encode(**body, input=text)["data"]
        assert item["windows"] > 2
        assert [(one["label"], one["start"], one["end"]) for one in item["entities"]] == [
            (one["entity_group"], one["start"], one["end"]) for one in expected
        ]


def spans(
    kind: str, question: str, context: str, longest: int, *, room: int = 64, stride: int = 10
) -> tuple[float, dict[tuple[int, int], float]]:
    """The score of "no answer", and of every span of tokens by its characters, over windows of `room` tokens."""
    windows = dict(truncation="only_second", max_length=room, stride=stride, return_overflowing_tokens=True)
    encoded = hf_tokenizer(kind)(question, context, return_offsets_mapping=True, **windows)
    nothing, found = 1.0, dict[tuple[int, int], float]()
    for window, offsets in enumerate(encoded["offset_mapping"]):
        tokens = {name: torch.tensor([encoded[name][window]]) for name in hf_tokenizer(kind).model_input_names}
        with torch.inference_mode():
            out = saved(kind).reference(**tokens)
        of = encoded.sequence_ids(window)
        readable = torch.tensor([one == 1 or at == 0 for at, one in enumerate(of)])
        logits = (torch.where(readable, one[0], -1e4) for one in (out.start_logits, out.end_logits))
        starts, ends = (torch.softmax(one, -1).numpy() for one in logits)
        nothing = min(nothing, float(starts[0] * ends[0]))
        for first, last in product(range(len(of)), range(len(of))):
            if of[first] == of[last] == 1 and 0 <= last - first < longest:
                place = offsets[first][0], offsets[last][1]
                found[place] = max(found.get(place, 0), float(starts[first] * ends[last]))
    return nothing, found


class TestQuestionAnswering:
    @pytest.mark.parametrize("kind", ANSWERING)
    def test_best_spans(self, client: Client, kind: str) -> None:
        pair = {"text": "the cat sat on", "text_pair": TEXT}
        _, expected = spans(kind, pair["text"], TEXT, 4)
        body = dict(model=kind, output="question_answering", max_answer_length=4, top_k=6, align_to_words=False)
        [item] = client.encode(**body, input=[pair])["data"]
        best = sorted(expected, key=lambda span: -expected[span])[:6]
        assert [(one["start"], one["end"]) for one in item["answers"]] == best
        assert [one["text"] for one in item["answers"]] == [TEXT[start:end] for start, end in best]
        assert [one["score"] for one in item["answers"]] == pytest.approx([expected[span] for span in best], abs=1e-5)

    def test_no_answer_and_words(self, client: Client) -> None:
        pair = {"text": "the cat", "text_pair": TEXT}
        nothing, _ = spans("bert-answers", "the cat", TEXT, 15)
        body = dict(model="bert-answers", output="question_answering", top_k=100, no_answer=True)
        [item] = client.encode(**body, input=[pair])["data"]
        [empty] = [one for one in item["answers"] if not one["text"]]
        assert empty["score"] == pytest.approx(nothing, abs=1e-6)
        words = {" Lovelace ", " Londonx "}
        assert all(
            word.strip() in one["text"] or word.strip()[:4] not in one["text"]
            for one in item["answers"]
            for word in words
        )

    def test_windows_are_not_larger_than_those_of_the_pipeline(self, client: Client) -> None:
        context = " ".join([TEXT] * 30)
        body = dict(model="bert-long-answers", output="question_answering", top_k=20, align_to_words=False)
        [item] = client.encode(**body, input=[{"text": "the cat", "text_pair": context}])["data"]
        _, expected = spans("bert-long-answers", "the cat", context, 15, room=384, stride=128)
        assert item["windows"] > 1
        best = sorted(expected.values(), reverse=True)[:20]
        assert [one["score"] for one in item["answers"]] == pytest.approx(best, abs=1e-5)

    def test_long_contexts_in_windows(self, client: Client) -> None:
        context = " ".join([TEXT] * 9)
        body = dict(model="bert-answers", output="question_answering", top_k=20, stride=10, align_to_words=False)
        [item] = client.encode(**body, input=[{"text": "the cat", "text_pair": context}])["data"]
        _, expected = spans("bert-answers", "the cat", context, 15)
        assert item["windows"] > 2
        best = sorted(expected.values(), reverse=True)[:20]
        assert [one["score"] for one in item["answers"]] == pytest.approx(best, abs=1e-5)
        assert all(context[one["start"] : one["end"]] == one["text"] for one in item["answers"])
        for one in item["answers"]:
            assert one["score"] == pytest.approx(expected[one["start"], one["end"]], abs=1e-5)

    @pytest.mark.parametrize(
        ("given", "param", "words"),
        [
            ("the cat", "input", "must be {text: question, text_pair: context}"),
            ([{"text": "the cat " * 40, "text_pair": "a"}], "input[0]", "leaves no room for"),
            ([[5, 6]], "input[0]", "must be {text"),
        ],
    )
    def test_refusals(self, client: Client, given: Any, param: str, words: str) -> None:
        reply = client.post(model="bert-answers", output="question_answering", input=given)
        assert words in check_error(reply, 400, param, reply.json()["error"]["code"])["message"]


class TestZeroShot:
    @pytest.mark.parametrize("kind", ["bert-nli", "bart-nli"])
    @pytest.mark.parametrize("multi_label", [False, True])
    def test_as_the_pipeline(self, client: Client, kind: str, multi_label: bool) -> None:
        texts, labels = [TEXT, "the cat sat"], ["cat", "mat", "Ada Lovelace"]
        judge = pipeline("zero-shot-classification", kind)
        body = dict(labels=labels, hypothesis_template="a {} sat", multi_label=multi_label)
        reply = client.encode(model=kind, output="zero_shot", input=texts, **body)
        for item, text in zip(reply["data"], texts, strict=True):
            expected = judge(text, labels, hypothesis_template="a {} sat", multi_label=multi_label)
            assert item["labels"] == expected["labels"]
            assert item["scores"] == pytest.approx(expected["scores"], abs=1e-5)

    def test_an_encoder_decoder_classifies_by_its_end_of_sequence(self, client: Client) -> None:
        pairs = [{"text": TEXT, "text_pair": "the cat"}, {"text": "a mat", "text_pair": TEXT}]
        reply = client.encode(model="bart-nli", output="logits", input=pairs)
        for item, pair in zip(reply["data"], pairs, strict=True):
            expected = reference_logits("bart-nli", pair["text"], pair["text_pair"])
            assert torch.allclose(torch.tensor(item["scores"]), expected, atol=1e-4)
        error = check_error(
            client.post(model="bart-nli", output="logits", input=[[5, 6]]), 400, "input[0]", "invalid_value"
        )
        assert "no end-of-sequence token 2" in error["message"]

    @pytest.mark.parametrize(
        ("fields", "status", "param", "words"),
        [
            (dict(), 400, "labels", "is required"),
            (dict(labels=["a"], hypothesis_template="x"), 400, "hypothesis_template", "must have {}"),
            (dict(labels=["a"] * 2100), 413, "input", "makes more than 2048 inputs"),
            (dict(labels=["a"], top_k=3), 400, "top_k", "no meaning with output 'zero_shot'"),
        ],
    )
    def test_refusals(self, client: Client, fields: dict[str, Any], status: int, param: str, words: str) -> None:
        reply = client.post(model="bert-nli", output="zero_shot", input="the cat", **fields)
        assert words in check_error(reply, status, param, reply.json()["error"]["code"])["message"]


@pytest.mark.parametrize(
    ("model", "output", "words"),
    [
        ("bert", "fill_mask", "has no masked-language-model head"),
        ("bert", "sparse", "has no masked-language-model head"),
        ("bert", "zero_shot", "has no classifier with a label of entailment"),
        ("bert-nli", "token_classification", "has no classifier of tokens"),
        ("bert-answers", "token_classification", "has no classifier of tokens"),
        ("bert-token", "question_answering", "has no head for answers"),
    ],
)
def test_a_model_that_lacks_something_says_what(client: Client, model: str, output: str, words: str) -> None:
    reply = client.post(model=model, output=output, input="the cat", **({"labels": ["a"]} if "zero" in output else {}))
    assert words in check_error(reply, 400, "output", "invalid_value")["message"]


def test_info_lists_the_outputs_of_each_model(client: Client) -> None:
    shown = {one["name"]: one["outputs"] for one in client.get("/info").json()["models"]}
    vectors: Sequence[str] = ("embedding", "tokens")
    assert shown["bert"] == [*vectors]
    assert shown["bert-masked"] == [*vectors, "sparse", "fill_mask"]
    assert shown["bert-entities"] == [*vectors, "logits", "scores", "token_classification"]
    assert shown["bert-answers"] == [*vectors, "logits", "question_answering"]
    assert shown["bart-nli"] == [*vectors, "logits", "scores", "zero_shot"]


@pytest.mark.parametrize(
    "body",
    [
        dict(
            model="bart-nli", output="zero_shot", hypothesis_template="{}" * 500, labels=["a"] * 1000, input=["b"] * 40
        ),
        dict(model="bert", split="separate", stride=61, input="the cat " * 3000),
    ],
)
def test_inputs_that_are_too_many_are_not_made_first(client: Client, body: dict[str, Any]) -> None:
    tracemalloc.start()
    try:
        check_error(client.post(**body), 413, "input", "too_many_inputs")
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_every_request_of_the_docs_is_answered(client: Client) -> None:
    """To models of random weights under the names that the page has."""
    names = {"embed": "bert", "masked": "bert-masked", "entities": "bert-entities", "answers": "bert-answers"}
    names |= {"nli": "bart-nli", "late": "late"}
    page = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text()
    lines = re.findall(r"curl -s http://127\.0\.0\.1:8000(/\S+) .*\n\s+-d '(.*)'", page)
    assert len(lines) == page.count("curl -s") > 9
    outputs = set()
    for path, text in lines:
        body = json.loads(text)
        normalized = {"normalize": True} if "embedding_type" in body else {}  # as the folder of `embed` says
        reply = client.post(path, **{**body, **normalized, "model": names[body["model"]]})
        assert reply.status_code == 200, (text, reply.text)
        outputs.add(body.get("output", "embedding"))
    assert outputs == set(OUTPUTS) - {"tokens", "logits", "scores"}
