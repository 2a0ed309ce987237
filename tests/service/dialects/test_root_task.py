"""`InferenceClient(model=URL)` with only the service's address: `/` runs each model's own task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.model.checkpoints import saved
from tests.service.encode_models import TEXT, encode_app, pipeline
from tests.service.support import ask, live, make_app
from tests.service.test_heads import FILES, pixel_values
from triptych.service.dialects.root_task import RootBody, RootTask

pytestmark = pytest.mark.usefixtures("hub_client")
KINDS = ("bert", "bert-masked", "bert-entities", "bert-answers", "bert-nli", "vit-image")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = encode_app(*KINDS)
    with live(app) as address:
        yield address


@pytest.fixture(scope="module")
def writer() -> Iterator[str]:
    """Yield the URL of an encoder-decoder alone."""
    app = make_app()
    with live(app) as address:
        yield f"{address}/?model=seq"


def client(url: str, model: str) -> InferenceClient:
    return InferenceClient(model=f"{url}/?model={model}", token="any")


def test_each_encoder_does_its_task(url: str) -> None:
    classes = client(url, "bert-nli").text_classification(TEXT)
    judged = pipeline("text-classification", "bert-nli")(TEXT, top_k=None)
    assert [one.label for one in classes] == [one["label"] for one in judged]
    entities = client(url, "bert-entities").token_classification(TEXT)
    assert [one.word for one in entities] == [
        one["word"] for one in pipeline("token-classification", "bert-entities")(TEXT, aggregation_strategy="simple")
    ]
    filled = client(url, "bert-masked").fill_mask("the [MASK] sat")
    assert [one.token for one in filled] == [
        one["token"] for one in pipeline("fill-mask", "bert-masked")("the [MASK] sat")
    ]
    answer = client(url, "bert-answers").question_answering(question="the cat", context=TEXT)
    assert TEXT[answer.start : answer.end] == answer.answer  # type: ignore[union-attr]
    zero = client(url, "bert-nli").zero_shot_classification(TEXT, ["cat", "mat"])
    assert {one.label for one in zero} == {"cat", "mat"}
    assert len(client(url, "bert").sentence_similarity("the cat", other_sentences=["a mat", TEXT])) == 2
    assert np.asarray(client(url, "bert").feature_extraction(TEXT)).shape == (1, 32)
    assert np.asarray(client(url, "bert-masked").feature_extraction(TEXT)).shape == (1, 32)


@pytest.mark.parametrize("path", ["/?model=vit-image", "/pipeline/image-classification"])
@pytest.mark.parametrize("function", [None, "sigmoid", "none"])
def test_images(url: str, path: str, function: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILES[0])
    asks = InferenceClient(model=url + path, token="any")
    with torch.inference_mode():
        logits = saved("vit-image").reference(pixel_values=pixel_values(FILES[0])).logits[0]
    ways = {None: torch.nn.Softmax(-1), "sigmoid": torch.nn.Sigmoid(), "none": torch.nn.Identity()}
    expected = sorted(ways[function](logits).tolist(), reverse=True)
    for image in (FILES[0], str(tmp_path / "a.png")):
        found = asks.image_classification(image, function_to_apply=function)
        assert [one.score for one in found] == pytest.approx(expected, abs=1e-4)
        assert found[0].label == f"LABEL_{int(logits.argmax())}"
    assert len(asks.image_classification(FILES[1], top_k=2)) == 2


def test_files_that_no_model_takes() -> None:
    for media_type, status in (("image/png", 400), ("audio/wav", 400), ("text/plain", 415), ("", 415)):
        reply = ask(make_app(), "POST", "/", content=b"x", headers={"content-type": media_type})
        assert reply.status_code == status, (media_type, reply.text)
    for body in (b"", b"{}"):
        headers = {"content-type": "application/json"} if body else {}
        assert (
            ask(make_app(), "POST", "/pipeline/image-classification", content=body, headers=headers).status_code == 400
        )
    cross = {"content-type": "image/png", "sec-fetch-site": "cross-site"}
    assert ask(make_app(), "POST", "/pipeline/image-classification", content=b"x", headers=cross).status_code == 403


def test_broken_images_are_named(url: str) -> None:
    with pytest.raises(HfHubHTTPError, match="inputs: not an image file of JPEG, PNG, WEBP or GIF"):
        InferenceClient(model=f"{url}/pipeline/image-classification", token="any").image_classification(b"hello")


def test_the_body_finds_the_only_model_of_its_task(url: str) -> None:
    anyone = InferenceClient(model=url, token="any")
    assert anyone.zero_shot_classification(TEXT, ["cat", "mat"])
    assert anyone.question_answering(question="the cat", context=TEXT)


def test_an_encoder_decoder_does_all_of_its_tasks(writer: str) -> None:
    asks = InferenceClient(model=writer, token="any")
    assert asks.text_generation("ab", max_new_tokens=5) == "hello"
    options: dict[str, Any] = {"generate_parameters": {"max_new_tokens": 5}}
    assert asks.summarization("ab", **options).summary_text == "hello"
    assert asks.translation("ab", **options).translation_text == "hello"
    assert asks.summarization("ab").summary_text.startswith("hello")
    assert "".join(asks.text_generation("ab", max_new_tokens=5, stream=True)) == "hello"


def test_languages_are_not_passed_over(writer: str) -> None:
    with pytest.raises(Exception, match=r"parameters\.tgt_lang: model seq does not tell languages apart"):
        InferenceClient(model=writer, token="any").translation("ab", src_lang="en", tgt_lang="de")


@pytest.mark.parametrize("body", [b"[", b"{}", b"3", b'{"inputs": 7}', b'{"inputs": {"a": 1}}', b'{"parameters": 3}'])
def test_bad_bodies_are_refused_as_elsewhere(body: bytes) -> None:
    for model in ("gen", "seq", "enc"):
        reply = ask(make_app(), "POST", f"/?model={model}", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, (model, reply.text)


def test_what_only_one_task_has_decides() -> None:
    for body, task in (
        (b'{"inputs": {"question": "a", "context": "b"}}', RootTask.QUESTION_ANSWERING),
        (b'{"inputs": {"source_sentence": "a", "sentences": ["b"]}}', RootTask.SENTENCE_SIMILARITY),
        (b'{"inputs": "a", "parameters": {"candidate_labels": ["b"]}}', RootTask.ZERO_SHOT),
        (b'{"inputs": "a", "parameters": {"src_lang": "b"}}', RootTask.TRANSLATION),
        (b'{"inputs": "a", "parameters": {"truncation": "only_first"}}', RootTask.TRANSLATION),
        (b'{"inputs": "a"}', RootTask.TEXT_GENERATION),
    ):
        assert RootBody(body).task([]) is task
