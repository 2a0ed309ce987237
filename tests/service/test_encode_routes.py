"""What the routes over encoders have in common: the model that answers where none is named, and clients that leave."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import saved
from tests.service.encode_models import TEXT, raw_tokenizer
from tests.service.support import App, ask, live, make_app
from tests.service.test_bad_requests import check_error
from tests.service.test_live import _post, eventually, settled
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.runtimes.model_reader import FolderReader
from triptych.service.settings.service_settings import ModelSettings, ServiceSettings

_SENTENCES = {"inputs": {"source_sentence": "the cat", "sentences": ["a mat"]}}
_RANKED = {"query": "the cat", "documents": ["a mat", "the cat"]}
_LABELS = {"parameters": {"candidate_labels": ["cat", "mat"]}}
# Each route with a body, and the kind of model that can answer it.
ROUTES: list[tuple[str, str, dict[str, Any]]] = [
    ("/predict", "bert-nli", {"inputs": "the cat"}),
    ("/rerank", "bert-nli", {"query": "the cat", "texts": ["a mat"]}),
    ("/rerank", "bert-nli", _RANKED),
    ("/v1/rerank", "bert-nli", _RANKED),
    ("/v2/rerank", "bert-nli", _RANKED),
    ("/v1/score", "bert-nli", {"text_1": "the cat", "text_2": "a mat"}),
    ("/score", "bert-nli", {"text_1": "the cat", "text_2": "a mat"}),
    ("/v1/classify", "bert-nli", {"input": "the cat"}),
    ("/classify", "bert-nli", {"input": "the cat"}),
    ("/pipeline/text-classification", "bert-nli", {"inputs": "the cat"}),
    ("/pipeline/zero-shot-classification", "bert-nli", {"inputs": "the cat", **_LABELS}),
    ("/pipeline/fill-mask", "bert-masked", {"inputs": "the [MASK] sat"}),
    ("/embed_sparse", "bert-masked", {"inputs": "the cat"}),
    ("/pipeline/token-classification", "bert-entities", {"inputs": TEXT}),
    ("/pipeline/question-answering", "bert-answers", {"inputs": {"question": "the cat", "context": TEXT}}),
]
VECTORS: list[tuple[str, str, dict[str, Any]]] = [
    ("/encode", "bert", {"input": "the cat"}),
    ("/embed", "bert", {"inputs": ["the cat", "a mat"]}),
    ("/embed_all", "bert", {"inputs": "the cat"}),
    ("/v1/embeddings", "bert", {"input": ["the cat", "a mat"], "late_chunking": True}),
    ("/v1/embed", "bert", {"texts": ["the cat", "a mat"]}),
    ("/v2/embed", "bert", {"texts": ["the cat", "a mat"]}),
    ("/v1/rerank", "bert", _RANKED),
    ("/similarity", "bert", _SENTENCES),
    ("/pipeline/sentence-similarity", "bert", _SENTENCES),
    ("/pipeline/feature-extraction", "bert", {"inputs": "the cat"}),
]
KINDS = ("bert-nli", "bert-masked", "bert-entities", "bert-answers")


def folder_of(kind: str, at: Path) -> None:
    shutil.copytree(saved(kind).path, at)
    raw_tokenizer().save(str(at / "tokenizer.json"))


@asynccontextmanager
async def over(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    """A client of a service that has loaded nothing yet of a folder of models, and its engine."""
    settings = ServiceSettings(models=ModelSettings(models_dir=str(folder)))
    engine = AsyncEngine([], ThreadTransport, {})
    app = create_app(engine, Models([]), settings, FolderReader(0, settings.log_format, 8))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client,
    ):
        yield client, engine


def test_the_only_model_that_can_answers_also_if_it_must_be_loaded(tmp_path: Path) -> None:
    for kind in KINDS:
        folder_of(kind, tmp_path / kind)

    async def work() -> None:
        async with over(tmp_path) as (client, engine):
            for path, kind, body in ROUTES:
                reply = await client.post(path, json=body)
                assert reply.status_code == 200, f"{path}: {reply.text}"
                assert kind in engine.models

    asyncio.run(work())


def test_a_model_that_cannot_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for name, kind in (("entities", "bert-entities"), ("first", "bert-nli"), ("second", "bert-nli")):
        folder_of(kind, tmp_path / name)
    asked: list[tuple[str, dict[str, Any], str, str]] = [
        (
            *("/predict", {"inputs": "the cat", "model": "entities"}, "wrong_task"),
            "model entities is not one that classifies texts; models that do: first, second",
        ),
        (
            *("/classify", {"input": "the cat"}, "missing_field"),
            "model is required: more than one classifies texts: first, second",
        ),
        ("/pipeline/fill-mask", {"inputs": "the [MASK]"}, "wrong_task", "no model has the output fill_mask"),
    ]

    async def work() -> None:
        async with over(tmp_path) as (client, engine):
            for path, body, code, words in asked:
                reply = await client.post(path, json=body)
                assert check_error(reply, 400, "model", code)["message"] == words
            assert not engine.models

    asyncio.run(work())


@pytest.mark.parametrize(
    ("body", "chosen"),
    [
        ({"input": "the cat"}, "enc"),  # not the classifier of texts, nor the decoder
        ({"input": "the cat", "output": "tokens"}, "enc"),
        ({"input": "the cat", "output": "logits"}, "bert-nli"),
        ({"input": "the cat", "output": "zero_shot", "labels": ["cat"]}, "bert-nli"),
    ],
)
def test_vectors_come_from_the_encoder_that_classifies_nothing(body: dict[str, Any], chosen: str) -> None:
    app = make_app(ServedModel("bert-nli", read_checkpoint(saved("bert-nli").path), Tokenizer(raw_tokenizer())))
    ask(app, "POST", "/encode", json=body)
    assert [one.model for one in app.client.encoded] == [chosen]


@pytest.fixture(scope="module")
def app() -> App:
    """An engine that takes a minute for everything."""
    loaded = [
        ServedModel(kind, read_checkpoint(saved(kind).path), Tokenizer(raw_tokenizer())) for kind in ("bert", *KINDS)
    ]
    return make_app(*loaded, delay_s=60)


@pytest.fixture(scope="module")
def url(app: App) -> Iterator[str]:
    with live(app) as address:
        yield address


@pytest.mark.parametrize(("path", "kind", "body"), [*ROUTES, *VECTORS])
def test_a_client_that_leaves_aborts_its_work(app: App, url: str, path: str, kind: str, body: dict[str, Any]) -> None:
    app.client.aborted.clear()
    connection = _post(url, path, {"model": kind, **body})
    eventually(lambda: app.client.running)
    ids = set(app.client.running)
    connection.close()
    eventually(lambda: not app.client.running)
    settled(app)
    assert set(app.client.aborted) == ids
