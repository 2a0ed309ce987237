"""Adapters of all forms over HTTP: requests of several at once are answered as by services of merged models."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine.test_lora import SMALL, STACKS
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import saved
from tests.model.lora import matrices, merged, write_adapter
from tests.service import whisper
from tests.service.encode_models import raw_tokenizer
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.client.async_engine import AsyncEngine
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.runtimes.model_reader import read_adapted, read_model
from triptych.service.settings.service_settings import ServiceSettings

ENGINE = EngineConfig(**SMALL)
RANKS = {"sql": 4, "fr": 8}
NAMES = ("base", *RANKS)
TEXTS = ("the cat sat on a mat", "Ada Lovelace sat", "in London , the cat", "a mat on the cat on a mat on Ada")


@dataclass(frozen=True, slots=True)
class Form:
    """How a form is asked: its kind of checkpoint, the route, and what of a reply is compared."""

    kind: str
    path: str
    field: str = "input"
    more: tuple[tuple[str, Any], ...] = ()


FORMS = {
    "t5": Form("t5-relu", "/v1/completions", "prompt", (("max_tokens", 12), ("temperature", 0))),
    "classifier": Form("bert-sequence", "/classify"),
    "embedding": Form("bert", "/v1/embeddings"),
    "whisper": Form("", "/v1/audio/transcriptions"),
}


def write_models(root: Path, form: Form) -> dict[str, Path]:
    """Write a base model, its adapters, and the models that come of merging them."""
    root.mkdir()
    if form.kind:
        reference = saved(form.kind).reference
        shutil.copytree(saved(form.kind).path, root / "base")
        raw_tokenizer().save(str(root / "base" / "tokenizer.json"))
    else:
        reference = whisper.whisper(root / "base")
    found = {"base": root / "base"}
    for name, rank in RANKS.items():
        pairs = matrices(reference, STACKS, rank, seed=rank, std=0.15)
        found[name] = write_adapter(root / name, pairs)
        whole = found[f"merged-{name}"] = root / f"merged-{name}"
        merged(reference, pairs).save_pretrained(whole)
        for file in (root / "base").glob("*.json"):
            if not file.name.startswith("model"):
                shutil.copy(file, whole)
    return found


@asynccontextmanager
async def service(folders: dict[str, Path]) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a base with its adapters and, as models of their own, those that are merged."""
    served: dict[str, ServedModel] = {}
    specs = []
    for name, path in folders.items():
        adapter_of = "base" if name in RANKS else None
        specs.append(spec := ModelSpec(name, str(path), ENGINE, adapter_of=adapter_of))
        served[name] = read_adapted(spec, served["base"]) if adapter_of else read_model(spec)
    engine = AsyncEngine(specs, ThreadTransport, {name: one.tokenizer for name, one in served.items()})
    app = create_app(engine, Models(served.values()), ServiceSettings())
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, form: Form, model: str, place: int) -> Any:
    """Return what a model says of the input at `place`: a text, or numbers."""
    if form.path.startswith("/v1/audio"):
        file = whisper.wave_file(whisper.noise(1.5 + place / 4, seed=place))
        body = {"model": model, "language": "en", "response_format": "verbose_json"}
        reply = await client.post(form.path, data=body, files={"file": ("a.wav", file)})
    else:
        reply = await client.post(form.path, json={"model": model, form.field: TEXTS[place], **dict(form.more)})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    if form.path.startswith("/v1/audio"):
        return [one["tokens"] for one in found["segments"]]
    if "choices" in found:
        assert found["model"] == model
        return found["choices"][0]["text"]
    [item] = found["data"]
    return np.array(item["embedding"] if "embedding" in item else item["probs"])


@pytest.mark.parametrize("name", FORMS)
def test_requests_of_adapters_at_once_are_those_of_merged_models(name: str, tmp_path: Path) -> None:
    form = FORMS[name]

    async def work() -> None:
        async with service(write_models(tmp_path / name, form)) as client:
            asked = [(NAMES[at % 3], at // 3 % len(TEXTS)) for at in range(16)]
            found = await asyncio.gather(*(ask(client, form, *one) for one in asked))
            answers = {}
            for (model, place), one in zip(asked, found, strict=True):
                whole = model if model == "base" else f"merged-{model}"
                wanted = answers[model, place] = await ask(client, form, whole, place)
                if isinstance(wanted, np.ndarray):
                    np.testing.assert_allclose(one, wanted, atol=1e-4 * abs(wanted).max())
                else:
                    assert one == wanted
            first = [str(answers[model, 0]) for model in NAMES]
            assert len(set(first)) == len(NAMES), "the adapters change nothing"

    asyncio.run(asyncio.wait_for(work(), 120))
