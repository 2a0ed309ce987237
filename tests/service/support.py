"""Applications over a scripted engine and tiny tokenizers: HTTP semantics in milliseconds, no torch, no checkpoint.

Models: `gen` (decoder-only, byte-level), `seq` (encoder-decoder), `enc` (encoder-only, words between [CLS] and
[SEP]), `bare` (decoder-only without a tokenizer, only in the applications that ask for it).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import uvicorn
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from model.api.messages import ModelSpec
from model.api.request import Pooling
from model.api.stats import ModelInfo, StepStats
from model.checkpoint.folder import Checkpoint
from model.checkpoint.sentence_transformers import SentenceSettings
from model.config.layer import Activation, AttentionConfig, LayerConfig, MLPConfig, Norms
from model.config.model import EmbeddingConfig, HeadConfig, ModelConfig, StackConfig
from model.text.tokenizer import Encoded, Tokenizer
from service.app import Application, create_app
from service.core.fake_engine import FakeEngineClient, Script
from service.core.model_registry import Registry, ServedModel
from service.http.bounded_protocol import bounded_protocol
from service.lifecycle.state import Service
from service.observability.metrics import Metrics
from service.settings.service_settings import ServiceSettings

T = TypeVar("T")
VOCAB = 300
WORDS = ["[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]


def byte_tokenizer() -> Tokenizer:
    """Id = place in the byte-level alphabet, 0-255; 256 is <s>, put before every text; 257 and 258 are languages."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<s>", "fr_XX", "__de__"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(raw)


def word_tokenizer() -> Tokenizer:
    return Tokenizer(_words())


def _words() -> RawTokenizer:
    raw = RawTokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [("[CLS]", 1), ("[SEP]", 2)]
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=specials
    )
    return raw


class HeldTokenizer(Tokenizer):
    """Of words; tokenises when it is let go, as if the text took long."""

    def __init__(self) -> None:
        super().__init__(_words())
        self.asked, self.go = threading.Event(), threading.Event()

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Encoded:
        self.asked.set()
        assert self.go.wait(60), "nobody let it go"
        return super().encode(text, pair, add_special_tokens=add_special_tokens)


def stack(*, causal: bool, cross: bool = False, token_types: int = 0) -> StackConfig:
    attention, sublayers = AttentionConfig(2, 2, 4, 0.5), 3 if cross else 2
    layer = LayerConfig(attention, MLPConfig(16, Activation.GELU), (Norms(),) * sublayers, attention if cross else None)
    return StackConfig((layer,), hidden_size=8, causal=causal, token_types=token_types)


def config(form: str) -> ModelConfig:
    embedding = EmbeddingConfig(VOCAB, 8)
    if form == "encoder-only":
        return ModelConfig("bert", embedding, encoder=stack(causal=False, token_types=2))
    decoder = stack(causal=True, cross=form == "encoder-decoder")
    encoder = stack(causal=False) if form == "encoder-decoder" else None
    head = HeadConfig(tied=True)
    return ModelConfig("tiny", embedding, encoder=encoder, decoder=decoder, head=head, decoder_start_token_id=0)


# What the encoder's folder says: a length, and prompts of which one is put in front of texts on request.
SENTENCES = SentenceSettings(
    (Pooling.MEAN,),
    include_prompt=False,
    max_tokens=10,
    prompts={"query": "w1 w2 ", "title": "w5 "},
    similarity="cosine",
)


def served(name: str, form: str, tokenizer: Tokenizer | None, **checkpoint: Any) -> ServedModel:
    return ServedModel(name, Checkpoint(Path("."), config(form), (), "float32", **checkpoint), tokenizer)


def info(name: str, form: str, **changes: Any) -> ModelInfo:
    values: dict[str, Any] = dict(
        name=name,
        form=form,
        model_type="tiny",
        parameters=1000,
        weight_bytes=4000,
        dtype="float32",
        dtype_reason="scripted",
        device="cpu",
        attention_backend="reference",
        attention_reason="scripted",
        max_model_len=64,
        max_model_len_reason="scripted",
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_queued_requests=32,
        max_queued_tokens=384,
        block_size=4,
        num_blocks=20,
        kv_bytes_per_token=64,
        embedding_size=8,
        load_seconds=0.5,
    )
    return ModelInfo(**(values | changes))


@dataclass
class App:
    """Holds an application and its parts."""

    app: Application
    client: FakeEngineClient
    metrics: Metrics
    served: dict[str, ServedModel] = field(default_factory=dict)
    reader: ScriptedReader = field(default_factory=lambda: ScriptedReader())

    @property
    def script(self) -> Script:
        return self.client.script

    @property
    def service(self) -> Service:
        service: Service = self.app.state.service
        return service


class ScriptedReader:
    """Reads models out of nothing, after `delay_s`: a decoder of the name that is asked for."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.located: list[ModelSpec] = []

    async def locate(self, spec: ModelSpec) -> ModelSpec:
        self.located.append(spec)
        await asyncio.sleep(self.delay_s)
        return spec

    async def read(self, spec: ModelSpec) -> ServedModel:
        if self.error is not None:
            raise self.error
        return served(spec.name, "decoder-only", byte_tokenizer())


def make_app(
    *extra: str | ServedModel,
    settings: ServiceSettings | None = None,
    loadable: Sequence[ModelInfo] = (),
    max_model_len: int = 64,
    **script: Any,
) -> App:
    """`extra`: more models; "bare" is the one without a tokenizer. The script emits "hello " over and over.

    `loadable` are what the engine can load later, whatever a `ScriptedReader` reads.
    """
    byte_level = byte_tokenizer()
    found = [
        served("gen", "decoder-only", byte_level),
        served("seq", "encoder-decoder", byte_level),
        served("enc", "encoder-only", word_tokenizer(), sentences=SENTENCES),
    ]
    if "bare" in extra:
        found.append(served("bare", "decoder-only", None))
    found.extend(one for one in extra if isinstance(one, ServedModel))
    room = {"max_model_len": max_model_len, "num_blocks": max(20, max_model_len // 4)}
    infos = [info(model.name, model.config.form, **room) for model in found]
    ids = byte_level.encode("hello ", add_special_tokens=False).ids
    tokenizers = {model.name: model.tokenizer for model in found}
    client = FakeEngineClient(infos, tokenizers, Script(**{"token_ids": ids, **script}), loadable)
    reader = ScriptedReader()
    app = create_app(client, Registry(found), settings or ServiceSettings(), reader)
    return App(app, client, app.state.service.metrics, {model.name: model for model in found}, reader)


@asynccontextmanager
async def opened(app: App, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application in this event loop, with its lifespan around it."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with (
        app.app.router.lifespan_context(app.app),
        httpx.AsyncClient(transport=transport, base_url="http://test", **options) as client,
    ):
        yield client


def run(app: App, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Return the result of `work(client)` in a new event loop."""

    async def main() -> T:
        async with opened(app, **options) as client:
            return await work(client)

    return asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    """Return once `condition` holds; fail after a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def hold(app: App) -> asyncio.Event:
    """Make the engine give no output until the event is set."""
    free, work = asyncio.Event(), app.client._work

    async def held(*arguments: Any) -> None:
        await free.wait()
        await work(*arguments)

    app.client._work = held  # type: ignore[method-assign]
    return free


def let_time_pass(app: App, monkeypatch: pytest.MonkeyPatch, seconds: float, *, outputs: int) -> None:
    """So much of it, when the engine has given out so many."""
    given, now = [0], time.monotonic

    def step(_: StepStats) -> None:
        given[0] += 1

    app.client.on_step(step)
    monkeypatch.setattr(time, "monotonic", lambda: now() + (seconds if given[0] > outputs else 0.0))


def ask(app: App, method: str, path: str, **options: Any) -> httpx.Response:
    """One request."""
    return run(app, lambda client: client.request(method, path, **options))


def events(text: str) -> list[Any]:
    """The events of a stream, the last being "[DONE]"."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@contextmanager
def live(app: App) -> Iterator[str]:
    """The URL of the application under a real uvicorn in a thread, on a port of its own."""
    protocol: Any = bounded_protocol(app.service.limits, app.app.refusals)
    settings = uvicorn.Config(
        app.app, port=0, http=protocol, log_level="error", access_log=False, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive(), "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)


def samples(app: App, name: str) -> dict[tuple[str, ...], float]:
    """A metric's values by its labels' values, in the order of their names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in app.metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def counted(app: App, name: str) -> dict[tuple[str, ...], float]:
    """Return `samples` that are not 0."""
    return {labels: value for labels, value in samples(app, name).items() if value}


def check_accounts(app: App) -> None:
    """Check that all requests are counted: received, accepted or rejected, and ended."""
    received = sum(samples(app, "triptych_requests_received_total").values())
    accepted = sum(samples(app, "triptych_requests_accepted_total").values())
    rejected = sum(samples(app, "triptych_rejections_total").values())
    ended = sum(samples(app, "triptych_requests_total").values())
    assert received == accepted + rejected
    assert accepted == ended
    assert len(app.service.jobs) == 0
    assert not app.client.running
