"""A classifier's folder decides how logits become scores, and every route applies it alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.model.checkpoints import BERT
from tests.service.encode_models import TEXT, Client, client_of, encode_app, hf_tokenizer, raw_tokenizer
from tests.service.test_rerankers import save
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.errors import ConfigError

PAIR = ("the cat", "Ada Lovelace in London")
_ACTIVATION = "torch.nn.modules.activation."
_MULTI, _SINGLE = {"problem_type": "multi_label_classification"}, {"problem_type": "single_label_classification"}
_REGRESSION = {"problem_type": "regression"}
# By folder: labels, what config.json has, and the function of torch.nn that follows from it.
FOLDERS: dict[str, tuple[int, dict[str, Any], nn.Module]] = {
    "plain-1": (1, {}, nn.Sigmoid()),
    "plain-3": (3, {}, nn.Softmax(-1)),
    "multi-3": (3, _MULTI, nn.Sigmoid()),
    "single-3": (3, _SINGLE, nn.Softmax(-1)),
    "regression-1": (1, _REGRESSION, nn.Identity()),
    "regression-3": (3, _REGRESSION, nn.Identity()),
    "softplus-1": (1, {"sentence_transformers": {"activation_fn": f"{_ACTIVATION}Softplus"}}, nn.Softplus()),
    "tanh-3": (3, {"sbert_ce_default_activation_function": f"{_ACTIVATION}Tanh"}, nn.Tanh()),
    "softmax-3": (3, _MULTI | {"sentence_transformers": {"activation_fn": f"{_ACTIVATION}Softmax"}}, nn.Softmax(-1)),
    "identity-1": (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, nn.Identity()),
    "identity-3": (3, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, nn.Softmax(-1)),
}
PIPELINE = tuple(name for name in FOLDERS if name.startswith(("plain", "multi", "single", "regression")))


def written(into: Path, labels: int, settings: dict[str, Any]) -> Path:
    model_class = transformers.BertForSequenceClassification
    folder = save(model_class, model_class.config_class(**BERT, num_labels=labels), raw_tokenizer(), into)
    config = json.loads((folder / "config.json").read_text()) | settings
    config["id2label"] = {str(at): f"L{at}" for at in range(labels)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    return {name: written(root / name, labels, settings) for name, (labels, settings, _) in FOLDERS.items()}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path]) -> Iterator[Client]:
    with client_of(encode_app(**folders)) as client:
        yield client


def expected(folder: Path, name: str, *texts: str) -> tuple[list[float], list[float]]:
    """Return logits and scores by `transformers` and torch."""
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(**hf_tokenizer("bert")(*texts, return_tensors="pt")).logits[0]
    return logits.tolist(), FOLDERS[name][2](logits).tolist()


def by_label(found: list[dict[str, Any]]) -> list[float]:
    return [one["score"] for one in sorted(found, key=lambda one: str(one["label"]))]


@pytest.mark.parametrize("name", FOLDERS)
def test_all_routes_agree(client: Client, folders: dict[str, Path], name: str) -> None:
    logits, scores = expected(folders[name], name, TEXT)
    same = pytest.approx(scores, abs=1e-4)
    assert client.encode(model=name, input=TEXT, output="scores")["data"][0]["scores"] == same
    assert client.encode(model=name, input=TEXT, output="logits")["data"][0]["scores"] == pytest.approx(
        logits, abs=1e-4
    )
    [classified] = client.post("/v1/classify", model=name, input=TEXT).json()["data"]
    assert classified["probs"] == same and classified["label"] == f"L{scores.index(max(scores))}"
    assert by_label(client.post("/predict", model=name, inputs=TEXT).json()) == same
    assert by_label(client.post("/predict", model=name, inputs=TEXT, raw_scores=True).json()) == pytest.approx(
        logits, abs=1e-4
    )
    assert by_label(client.post("/pipeline/text-classification", model=name, inputs=TEXT).json()[0]) == same


@pytest.mark.parametrize("name", FOLDERS)
def test_pairs_are_scored_by_the_last_label(client: Client, folders: dict[str, Path], name: str) -> None:
    query, text = PAIR
    logits, scores = expected(folders[name], name, *PAIR)
    same = pytest.approx(scores[-1], abs=1e-4)
    assert client.post("/v1/score", model=name, text_1=query, text_2=text).json()["data"][0]["score"] == same
    for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
        [ranked] = client.post(route, model=name, query=query, documents=[text]).json()["results"]
        assert ranked["relevance_score"] == same
    for raw, value in ((False, scores), (True, logits)):
        [tei] = client.post("/rerank", model=name, query=query, texts=[text], raw_scores=raw).json()
        assert tei["score"] == pytest.approx(value[-1], abs=1e-4)


@pytest.mark.parametrize("name", PIPELINE)
def test_as_the_pipeline_of_transformers(client: Client, folders: dict[str, Path], name: str) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(folders[name])
    judge = transformers.pipeline("text-classification", model=model, tokenizer=hf_tokenizer("bert"), device="cpu")
    found = client.post("/pipeline/text-classification", model=name, inputs=TEXT).json()[0]
    reference = judge(TEXT, top_k=None)
    assert [one["label"] for one in found] == [one["label"] for one in reference]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in reference], abs=1e-4)


@pytest.mark.parametrize("named", ["my.own.Sigmoid", f"{_ACTIVATION}PReLU", f"{_ACTIVATION}GLU", "Sigmoid", 7])
def test_others_are_refused_by_name(tmp_path: Path, named: Any) -> None:
    folder = written(tmp_path / "odd", 1, {"sentence_transformers": {"activation_fn": named}})
    with pytest.raises(ConfigError, match=r"activation_fn .* is not served; served are torch.nn's CELU, ELU"):
        read_checkpoint(folder)
