"""Translation, summarization and text2text-generation as `InferenceClient` asks for them, by tiny published folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.engine.test_published_folders import GENERATORS, published
from tests.engine.thread_transport import ThreadTransport
from tests.model.test_checkpoint import edit_json
from tests.model.test_generation_defaults import TASKS
from tests.service.support import live
from tests.service.test_bad_requests import check_error
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.settings.service_settings import ServiceSettings

pytestmark = pytest.mark.usefixtures("hub_client")
KINDS = ("t5", "marian", "m2m-100", "mbart", "bart")
TEXT = "Grüße aus Köln"
Model = tuple[Path, Tokenizer, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for kind in KINDS:
        folder, _, model = published(tmp_path_factory.mktemp(kind), kind, *GENERATORS[kind])
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer is not None
        found[kind] = folder, tokenizer, model
    edit_json(found["t5"][0] / "config.json", task_specific_params=TASKS)
    edit_json(found["bart"][0] / "config.json", task_specific_params={"summarization": {"max_length": 9}})
    edit_json(found["marian"][0] / "tokenizer_config.json", source_lang="en", target_lang="ROMANCE")
    return found


@pytest.fixture(scope="module")
def url(models: dict[str, Model]) -> Iterator[str]:
    config = EngineConfig(kv_cache_memory=4 << 20, device="cpu", dtype="float32", max_model_len=64)
    tokenizers = {kind: Tokenizer.from_folder(folder) for kind, (folder, _, _) in models.items()}
    specs = [ModelSpec(kind, str(folder), config) for kind, (folder, _, _) in models.items()]
    models = Models(
        ServedModel(kind, read_checkpoint(folder), tokenizers[kind], config) for kind, (folder, _, _) in models.items()
    )
    app = create_app(AsyncEngine(specs, ThreadTransport, tokenizers), models, ServiceSettings())
    with live(app) as address:
        yield address


def client(url: str, task: str, model: str) -> InferenceClient:
    return InferenceClient(model=f"{url}/pipeline/{task}?model={model}", token="any")


def reference(model: Model, text: str, source: str | None = None, target: str | None = None, **options: Any) -> str:
    """Return the output of `transformers` for a text, marked with its languages by the tokenizer's tokens."""
    _, tokenizer, network = model
    ids, languages = tokenizer.encode(text).ids, tokenizer.source_languages
    if source is not None:
        assert languages is not None
        marked = languages.token(source)
        assert marked is not None
        ids = languages.mark(ids, marked)
    forced = {} if target is None else {"forced_bos_token_id": tokenizer.language_token(target)}
    options = {"do_sample": False, "num_beams": 1, **options}
    with torch.inference_mode():
        [made] = network.generate(torch.tensor([ids]), **forced, **options)
    return tokenizer.decode(made.tolist()[1:] if target is None else made.tolist()[2:], skip_special_tokens=True)


OPTIONS = {"max_length": 12, "num_beams": 1}


@pytest.mark.parametrize(("kind", "source", "target"), [("m2m-100", "de", "fr"), ("mbart", "de_DE", "ro_RO")])
def test_languages_by_tokens(url: str, models: dict[str, Model], kind: str, source: str, target: str) -> None:
    asks = client(url, "translation", kind)
    found = asks.translation(TEXT, src_lang=source, tgt_lang=target, generate_parameters=OPTIONS)
    assert found.translation_text == reference(models[kind], TEXT, source, target, max_length=12)
    other = asks.translation(TEXT, src_lang=target, tgt_lang=source, generate_parameters=OPTIONS)
    assert other.translation_text == reference(models[kind], TEXT, target, source, max_length=12)
    new = asks.translation(TEXT, src_lang=source, tgt_lang=target, generate_parameters={"max_new_tokens": 7})
    assert new.translation_text == reference(models[kind], TEXT, source, target, max_new_tokens=7)
    for options in ({"num_beams": 4, "length_penalty": 3.0}, {"num_beams": 3, "length_penalty": -2.0}):
        asked = {"max_length": 12, **options}
        beams = asks.translation(TEXT, src_lang=source, tgt_lang=target, generate_parameters=asked)
        assert beams.translation_text == reference(models[kind], TEXT, source, target, **asked)


def test_languages_by_a_task(url: str, models: dict[str, Model]) -> None:
    found = client(url, "translation", "t5").translation(
        TEXT, src_lang="en", tgt_lang="de", generate_parameters=OPTIONS
    )
    assert found.translation_text == reference(models["t5"], f"translate English to German: {TEXT}", max_length=12)


def test_a_target_by_a_mark(url: str, models: dict[str, Model]) -> None:
    asks = client(url, "translation", "marian")
    found = asks.translation(TEXT, src_lang="en", tgt_lang="fr", generate_parameters=OPTIONS)
    assert found.translation_text == reference(models["marian"], f">>fr<< {TEXT}", max_length=12)
    plain = asks.translation(f">>de<< {TEXT}", generate_parameters=OPTIONS)
    assert plain.translation_text == reference(models["marian"], f">>de<< {TEXT}", max_length=12)


@pytest.mark.parametrize(
    ("kind", "source", "target", "field", "words"),
    [
        ("m2m-100", "xx", "fr", "src_lang", "has no language 'xx'; it has af, am"),
        ("m2m-100", "fr", "xx", "tgt_lang", "no such language token; it has af"),
        ("mbart", "fr", "ro_RO", "src_lang", "has no language 'fr'; it has ar_AR"),
        ("mbart", "de_DE", "</s>", "tgt_lang", "no such language token"),
        ("t5", "en", "xx", "tgt_lang", "has no language 'xx'; it has en to de"),
        ("t5", "xx", "de", "src_lang", "has no language 'xx'; it has en to de"),
        ("marian", "en", "xx", "tgt_lang", "has no language 'xx'; it has en to ROMANCE"),
        ("marian", "xx", "ROMANCE", "src_lang", "has no language 'xx'; it has en to ROMANCE"),
        ("bart", "en", "de", "tgt_lang", "does not tell languages apart"),
    ],
)
def test_unknown_languages(url: str, kind: str, source: str, target: str, field: str, words: str) -> None:
    with pytest.raises(HfHubHTTPError, match=f"parameters.{field}") as error:
        client(url, "translation", kind).translation(TEXT, src_lang=source, tgt_lang=target)
    assert words in str(error.value) and error.value.response.status_code == 400


def test_each_shows_an_example_that_works(url: str) -> None:
    """The languages, or the task, are some that the model has."""
    found = {one["name"]: one["capabilities"] for one in httpx.get(f"{url}/info").json()["models"]}
    assert {name: [one["name"] for one in able] for name, able in found.items()} == {
        "t5": ["translate", "summarize"],
        "marian": ["translate"],
        "m2m-100": ["translate"],
        "mbart": ["translate"],
        "bart": ["summarize", "rewrite"],
    }
    for one in (one for able in found.values() for one in able):
        assert httpx.post(f"{url}{one['path']}", json=one["body"]).status_code == 200, one
    body = found["m2m-100"][0]["body"]
    assert (body["source_language"], body["target_language"]) == ("en", "fr")


def test_summaries_by_a_task(url: str, models: dict[str, Model]) -> None:
    found = client(url, "summarization", "t5").summarization(TEXT, generate_parameters=OPTIONS | {"min_length": 0})
    expected = reference(models["t5"], f"summarize: {TEXT}", max_length=12, no_repeat_ngram_size=3)
    assert found.summary_text == expected
    short = client(url, "summarization", "bart").summarization(TEXT)
    assert short.summary_text == reference(models["bart"], TEXT, max_length=9)


@pytest.mark.parametrize("at", ["generate_parameters", "generate_kwargs", None])
def test_options_within_and_beside(url: str, models: dict[str, Model], at: str | None) -> None:
    options = {"max_length": 12, "min_length": 6, "num_beams": 3, "length_penalty": 0.5, "repetition_penalty": 1.3}
    parameters = options if at is None else {at: options}
    body = {"inputs": TEXT, "parameters": parameters}
    reply = httpx.post(f"{url}/pipeline/text2text-generation?model=marian", json=body)
    assert reply.json() == [{"generated_text": reference(models["marian"], TEXT, **options)}]


def test_several_inputs_and_outputs(url: str, models: dict[str, Model]) -> None:
    body: dict[str, Any] = {"inputs": [TEXT, "ab"], "parameters": OPTIONS}
    reply = httpx.post(f"{url}/pipeline/translation?model=marian", json=body).json()
    assert reply == [{"translation_text": reference(models["marian"], text, max_length=12)} for text in (TEXT, "ab")]
    body = {"inputs": TEXT, "parameters": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}}
    assert len(httpx.post(f"{url}/pipeline/summarization?model=marian", json=body).json()) == 2


def test_long_inputs_are_refused_or_cut(url: str, models: dict[str, Model]) -> None:
    text = TEXT * 40
    for kind in ("marian", "t5", "m2m-100"):
        asks = client(url, "summarization", kind)
        with pytest.raises(HfHubHTTPError, match=r"inputs has \d+ tokens|maximum context length"):
            asks.summarization(text)
        assert asks.summarization(text, truncation="only_first", generate_parameters=OPTIONS).summary_text is not None


def test_spaces_are_removed_if_that_is_asked_for(url: str) -> None:
    found = client(url, "translation", "t5").translation(TEXT, clean_up_tokenization_spaces=True)
    assert found.translation_text is not None


@pytest.mark.parametrize(
    ("task", "parameters", "param", "code"),
    [
        ("translation", {"src_lng": "en"}, "parameters.src_lng", "unknown_field"),
        ("summarization", {"src_lang": "en"}, "parameters.src_lang", "unknown_field"),
        ("translation", {"generate_parameters": {"max_lenght": 3}}, "parameters.generate_parameters.max_lenght", ""),
        (
            "translation",
            {"max_length": 3, "generate_kwargs": {"max_length": 4}},
            "parameters.generate_kwargs.max_length",
            "",
        ),
        ("translation", {"generate_parameters": {"num_beams": 99}}, "parameters.generate_parameters.num_beams", ""),
        ("translation", {"max_length": 999}, "parameters.max_length", ""),
        ("translation", {"truncation": "only_second"}, "parameters.truncation", ""),
        ("translation", {"forced_bos_token_id": 3}, "parameters.forced_bos_token_id", "not_supported"),
    ],
)
def test_refusals(url: str, task: str, parameters: dict[str, Any], param: str, code: str) -> None:
    reply = httpx.post(f"{url}/pipeline/{task}?model=marian", json={"inputs": TEXT, "parameters": parameters})
    error = check_error(reply, 400)
    assert error["param"] == param and code in ("", error["code"]), reply.text


def test_other_models_are_refused(url: str) -> None:
    reply = httpx.post(f"{url}/pipeline/translation", json={"inputs": TEXT})
    check_error(reply, 400, "model", "missing_field")
