"""Classifiers: what a decoder begins with, and which label means entailment, as in `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.test_encode_engine import encoded
from tests.model.checkpoints import BART, BERT, CPU, by_layer, prompt, randomise
from tests.model.decoder_rows import BLOOM, LLAMA, random_model
from triptych.model.api.request import EncodeRequest, EncodeTask, Pooling, token_source
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.checkpoint.sentence_transformers import SentenceSettings
from triptych.model.engine.encode_engine import EncodeEngine
from triptych.model.families import read_settings
from triptych.model.linear.factory import LinearFactory
from triptych.model.network.weights import load_model

END, LANGUAGE = 2, 50
MARKED = (*prompt(9), END, LANGUAGE)  # as mBART's tokenizer ends a text


def folder_of(into: Path, architecture: str, settings: dict[str, Any]) -> Path:
    """Save a random classifier."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = random_model(architecture, settings, num_labels=3)()
        randomise(model)
    model.save_pretrained(into)
    return into


def ours(folder: Path, texts: list[tuple[int, ...]], *, together: bool = False) -> list[np.ndarray]:
    checkpoint, dtype = read_checkpoint(folder), torch.float32
    model = load_model(checkpoint, by_layer(SdpaBackend(), checkpoint.config, dtype), LinearFactory(dtype))
    made = EncodeEngine(
        "m", model, CPU, max_num_seqs=8, max_num_batched_tokens=200, sentences=SentenceSettings((Pooling.MEAN,))
    )
    made._labels.together = together  # as on a GPU
    return encoded(
        made, [EncodeRequest(str(at), "m", token_source(ids), EncodeTask.LOGITS) for at, ids in enumerate(texts)]
    )


def theirs(folder: Path, texts: list[tuple[int, ...]]) -> list[np.ndarray]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].numpy() for ids in texts]


def assert_equal(folder: Path, texts: list[tuple[int, ...]]) -> None:
    expected = theirs(folder, texts)
    assert np.std(np.stack(expected), axis=0).min() > 0.02
    for together in (False, True):
        for found, one in zip(ours(folder, texts, together=together), expected, strict=True):
            np.testing.assert_allclose(found, one, atol=1e-4)


@pytest.mark.parametrize("kind", ["Bart", "Mvp", "MBart", "PLBart"])
def test_the_decoder_begins_as_that_of_its_family(kind: str, tmp_path: Path) -> None:
    """mBART and PLBART begin with the language of the text, which is its last token."""
    folder = folder_of(tmp_path / kind, f"{kind}ForSequenceClassification", BART)
    assert_equal(folder, [MARKED, (*prompt(4), END, LANGUAGE + 1), (*prompt(6), END), (*prompt(5), END, LANGUAGE, 1)])


@pytest.mark.parametrize(
    ("architecture", "settings", "padding"),
    [
        ("GemmaForSequenceClassification", {**LLAMA, "head_dim": 16}, 0),
        ("LlamaForSequenceClassification", LLAMA, 0),  # which its class has not
        ("BloomForSequenceClassification", BLOOM, 3),
        ("MBartForSequenceClassification", BART, 1),
    ],
)
def test_padding_that_a_folder_does_not_name_is_that_of_its_class(
    architecture: str, settings: dict[str, Any], padding: int, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "m", architecture, settings)
    config = json.loads((folder / "config.json").read_text())
    del config["pad_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    assert_equal(folder, [(*prompt(7), END, padding), (*prompt(4), END, LANGUAGE, padding, padding), (*prompt(5), END)])


@pytest.mark.parametrize(("kind", "count"), [("Bart", 3), ("MBart", 2), ("Mvp", 2), ("Bert", 2), ("Deberta", 2)])
def test_without_names_there_are_as_many_labels_as_the_class_has(kind: str, count: int) -> None:
    config = getattr(transformers, f"{kind}Config")()
    assert config.num_labels == count
    raw = config.to_dict() | {"architectures": [f"{kind}ForSequenceClassification"]}
    del raw["id2label"], raw["label2id"]
    head = read_settings(raw)[0].classifier
    assert head is not None and head.labels == tuple(f"LABEL_{at}" for at in range(count))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_number_of_labels_holds_where_names_are_more_or_fewer(count: int) -> None:
    raw: dict[str, Any] = {**BERT, "architectures": ["BertForSequenceClassification"]}
    raw |= {"model_type": "bert", "num_labels": count}
    raw["id2label"] = {"0": "entailment", "1": "b", "2": "c"}
    raw["label2id"] = {"entailment": 0, "b": 1, "c": 2}
    head = read_settings(raw)[0].classifier
    assert head is not None and head.labels == tuple(transformers.BertConfig(**raw).id2label.values())
    assert head.entailment == (0 if count == 3 else None)


_NLI = {"0": "entailment", "1": "neutral", "2": "contradiction"}


@pytest.mark.parametrize(
    ("names", "places", "expected"),
    [
        (_NLI, {"contradiction": 0, "entailment": 2, "neutral": 1}, 2),  # which contradict each other
        ({"0": "LABEL_0", "1": "LABEL_1"}, {"not_entailment": 0, "Entailed": 1}, 1),
        (_NLI, None, 0),
        (_NLI, {"entailment": 3, "neutral": 1}, 0),  # of a label that is not there
        (None, {"neutral": 0, "entailment": 1}, None),  # without id2label, label2id is replaced
    ],
)
def test_the_label_of_entailment_is_that_of_label2id(
    names: dict[str, str] | None, places: dict[str, int] | None, expected: int | None
) -> None:
    """So it is in the zero-shot pipeline of `transformers`; where that has none, `id2label` says it."""
    raw = {**BERT, "id2label": names, "label2id": places, "architectures": ["BertForSequenceClassification"]}
    head = read_settings({**raw, "model_type": "bert"})[0].classifier
    assert head is not None and head.entailment == expected
    theirs = transformers.BertConfig(**raw).label2id
    begins = [place for name, place in (theirs or {}).items() if name.lower().startswith("entail")]
    assert begins[:1] in ([], [expected], [3])
