"""The benchmark models' tokenizers: ids that config.json names, texts that come back, and folders that are served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lab.bench import models, vocabularies
from lab.training.corpus import Document, held_out_sample
from tests.engine.thread_transport import ThreadTransport
from tests.lab.bench_models import SMALL, small_models
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.token_bytes import token_bytes
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.settings.service_settings import ServiceSettings

CODE = "def add(a, b):\n\n    return  a + b\t# na\u00efve \u65e5\u672c \U0001f600"
WORDS = "the quick brown house was in the mountain"
SPECIAL = {  # what the ids of config.json are called
    "D1": {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"},
    "D2": {"bos_token_id": "<s>", "eos_token_id": "</s>"},
    "E1": {"pad_token_id": "<pad>", "eos_token_id": "</s>", "decoder_start_token_id": "<pad>"},
    "E2": {"bos_token_id": "<s>", "pad_token_id": "<pad>", "eos_token_id": "</s>", "decoder_start_token_id": "</s>"},
    "N1": {"pad_token_id": "[PAD]"},
    "N3": {"cls_token_id": "[CLS]", "sep_token_id": "[SEP]", "pad_token_id": "[PAD]"},
    "N4": {"bos_token_id": "<s>", "pad_token_id": "<pad>", "eos_token_id": "</s>"},
}
AROUND = {  # special tokens before and after a text's
    "D1": ([], []),
    "D2": (["<s>"], []),
    "E1": ([], ["</s>"]),
    "E2": (["<s>"], ["</s>"]),
    "N1": (["[CLS]"], ["[SEP]"]),
    "N3": (["[CLS]"], ["[SEP]"]),
    "N4": (["<s>"], ["</s>"]),
}
CONFIGS, TRAINING_TEXTS = models.CONFIGS, vocabularies.training_texts
WITHOUT_TEXT = 28  # outputs of T5


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of small benchmark models."""
    with small_models():
        yield tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def folders(cache: Path) -> dict[str, Path]:
    return {name: models.built(name, cache) for name in SMALL}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    found = {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}
    return {name: tokenizer for name, tokenizer in found.items() if tokenizer is not None}


@pytest.mark.parametrize("name", SMALL)
def test_special_tokens_are_where_config_json_says(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    raw, tokenizer = models.CONFIGS[name], tokenizers[name]
    named = {key: value for key, value in raw.items() if key.endswith("_token_id")}
    assert named.keys() == SPECIAL[name].keys()
    for key, text in SPECIAL[name].items():
        assert tokenizer.special_token_id(text) == named[key]
        assert tokenizer.decode([named[key]]) == ""
    before, after = AROUND[name]
    with_special = tokenizer.encode(WORDS).ids
    plain = tokenizer.encode(WORDS, add_special_tokens=False).ids
    assert with_special == (
        *map(tokenizer.special_token_id, before),
        *plain,
        *map(tokenizer.special_token_id, after),
    )


@pytest.mark.parametrize("name", SMALL)
def test_texts_come_back(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    for text in (WORDS, CODE, " two spaces in front", "") if name in ("D1", "D2", "E2") else (WORDS,):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(WORDS).ids) <= len(WORDS) // 2  # pieces were learnt


@pytest.mark.parametrize("name", SMALL)
def test_every_output_is_an_entry_and_nearly_every_one_a_text(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Where the text yields too few entries, too; a grammar can judge them."""
    size = models.CONFIGS[name]["vocab_size"]
    tokenizer = tokenizers[name]
    spare = WITHOUT_TEXT if name == "E1" else 0
    assert tokenizer.vocab_size == size - spare
    assert all(tokenizer.decode([number]) == "" for number in range(size - spare, size))
    forms = token_bytes(tokenizer, size).later
    assert sum(map(bool, forms)) >= size - spare - 104  # T5 has 103 special ones
    unused = [number for number in range(104, size - spare) if tokenizer.token_text(number).startswith("[unused")]
    assert len(unused) > size // 5  # of this short text


@pytest.mark.parametrize("name", SMALL)
def test_a_vocabulary_is_the_same_each_time(name: str, cache: Path, folders: dict[str, Path]) -> None:
    again = vocabularies.trained(models.CONFIGS[name], [held_out_sample()])
    assert again.to_str(pretty=True) == (folders[name] / "tokenizer.json").read_text("utf-8")


@pytest.mark.parametrize("there", [True, False])
def test_training_texts_are_there_without_the_librarys_sources(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    documents = [Document("a.py", "a = 1\n")] if there else []
    monkeypatch.setattr(vocabularies, "documents", lambda *, held_out: documents)
    assert TRAINING_TEXTS() == ["a = 1\n" if there else held_out_sample()]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_library_yields_published_vocabularies(name: str) -> None:
    raw = CONFIGS[name]
    tokenizer = vocabularies.trained(raw, TRAINING_TEXTS())
    unused = sum(text.startswith("[unused") for text in tokenizer.get_vocab())
    assert unused < raw["vocab_size"] / 10
    assert len(tokenizer.encode(WORDS, add_special_tokens=False).ids) < 2 * len(WORDS.split())


def test_all_forms_are_served_with_their_texts(folders: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    config = EngineConfig(kv_cache_memory=64 << 20, device="cpu", dtype="float32")
    specs = [ModelSpec(name, str(folder), config) for name, folder in folders.items()]
    models = Models(
        ServedModel(name, read_checkpoint(folder), tokenizers[name], config) for name, folder in folders.items()
    )
    app = create_app(AsyncEngine(specs, ThreadTransport, tokenizers), models, ServiceSettings())

    async def answers() -> dict[str, dict[str, Any]]:
        found = {}
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t") as http,
        ):
            for name in folders:
                path, body = ("/encode", {"input": WORDS}) if name[0] == "N" else ("/generate", {"prompt": WORDS})
                if name[0] != "N":
                    body |= {
                        "max_tokens": 12,
                        "ignore_eos": True,
                        "temperature": 1,
                        "seed": 7,
                        "return_token_ids": True,
                    }
                reply = await http.post(path, json={"model": name, **body})
                assert reply.status_code == 200, reply.text
                found[name] = reply.json()
        return found

    for name, reply in asyncio.run(answers()).items():
        assert reply["usage"]["prompt_tokens"] == len(tokenizers[name].encode(WORDS).ids)
        if name[0] == "N":
            assert len(reply["data"][0]["embedding"]) == 32
            continue
        [choice] = reply["choices"]
        assert len(choice["token_ids"]) == reply["usage"]["completion_tokens"] == 12
        assert choice["text"] == Detokenizer(tokenizers[name]).push(choice["token_ids"], final=True) != ""
