"""Tiny models with heads of every kind, in the service and as pipelines of `transformers`; and a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from starlette.applications import Starlette
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import VOCAB, copied, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.app import create_app
from triptych.service.core.models import Models, ServedModel
from triptych.service.schemas.replies import EncodeReply
from triptych.service.settings.service_settings import ServiceSettings

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "a", "mat", "Ada", "Love", "##lace"]
PROJECTION = torch.empty(7, 32).normal_(generator=torch.Generator().manual_seed(1))  # of late interaction
TEXT = "Ada Lovelace sat on a mat , in Londonx the cat sat"


def raw_tokenizer() -> RawTokenizer:
    """Return a WordPiece tokenizer over all ids of the models: words, continuations, special tokens."""
    names = [*WORDS, "##x", "London", ",", "in"]
    names += [f"{'##' if at % 3 else ''}p{at}" for at in range(VOCAB - len(names))]
    raw = RawTokenizer(models.WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.add_special_tokens(WORDS[:5])
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return raw


def bart_tokenizer() -> RawTokenizer:
    """Return the same with BART's special tokens around texts: its end of sequence is id 2."""
    raw = raw_tokenizer()
    raw.post_processor = processors.TemplateProcessing(
        single="[PAD] $A [CLS]", pair="[PAD] $A [CLS] [CLS] $B [CLS]", special_tokens=[("[PAD]", 0), ("[CLS]", 2)]
    )
    return raw


def encode_app(*kinds: str, tokenizer: Tokenizer | None = None, **folders: Path) -> Starlette:
    """Return the application over real engines of these kinds and `folders`; BERT's tokenizer by default."""
    paths = {kind: saved(kind).path for kind in kinds} | folders
    config = EngineConfig(kv_cache_memory=1 << 20, device="cpu", dtype="float32")
    tokenizers = {
        name: tokenizer or Tokenizer(bart_tokenizer() if name.startswith("bart") else raw_tokenizer()) for name in paths
    }
    specs = [ModelSpec(name, str(path), config) for name, path in paths.items()]
    models = Models(ServedModel(name, read_checkpoint(path), tokenizers[name], config) for name, path in paths.items())
    return create_app(AsyncEngine(specs, ThreadTransport, tokenizers), models, ServiceSettings())


class Client:
    """A client of the application for synchronous tests."""

    def __init__(self, loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient, app: Starlette) -> None:
        self._loop = loop
        self._http = http
        self.app = app
        self.limits = app.state.service.limits
        self.images = app.state.service.images

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of asynchronous work, such as that of an official client over `asgi`."""
        return self._loop.run_until_complete(work)

    def asgi(self) -> httpx.AsyncClient:
        """Return an HTTP client of the application."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app))

    def post(self, path: str = "/encode", **body: Any) -> httpx.Response:
        return self._loop.run_until_complete(self._http.post(path, json=body))

    def call(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request in the terms of ASGI."""
        self._loop.run_until_complete(self.app(scope, receive, send))

    def get(self, path: str) -> httpx.Response:
        return self._loop.run_until_complete(self._http.get(path))

    def send(self, path: str, file: bytes, media_type: str) -> httpx.Response:
        headers = {"Content-Type": media_type}
        return self._loop.run_until_complete(self._http.post(path, content=file, headers=headers))

    def encode(self, **body: Any) -> dict[str, Any]:
        reply = self.post(**body)
        assert reply.status_code == 200, reply.text
        EncodeReply.model_validate_json(reply.content)
        found: dict[str, Any] = reply.json()
        return found


@contextmanager
def client_of(app: Starlette) -> Iterator[Client]:
    """A client of the application, which serves until the end of the block."""
    loop = asyncio.new_event_loop()
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    lifespan = app.router.lifespan_context(app)
    loop.run_until_complete(lifespan.__aenter__())
    try:
        yield Client(loop, http, app)
    finally:
        loop.run_until_complete(http.aclose())
        loop.run_until_complete(lifespan.__aexit__(None, None, None))
        loop.close()


def hf_tokenizer(kind: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    raw = bart_tokenizer() if kind.startswith("bart") else raw_tokenizer()
    inputs = ["input_ids", "attention_mask"]
    if kind.startswith(("bert", "albert", "electra", "ernie")):
        inputs.insert(1, "token_type_ids")
    names = dict(unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]")
    return PreTrainedTokenizerFast(tokenizer_object=raw, model_input_names=inputs, **names)


def pipeline(task: str, kind: str) -> Any:
    import transformers

    model = saved(kind).reference
    return transformers.pipeline(task, model=model, tokenizer=hf_tokenizer(kind), device="cpu")


def reference_logits(kind: str, text: str, pair: str | None = None) -> torch.Tensor:
    tokens = hf_tokenizer(kind)(text, pair, return_tensors="pt")
    with torch.inference_mode():
        return saved(kind).reference(**tokens).logits[0]  # type: ignore[no-any-return]


def hidden_states(ids: Sequence[int], visible: int | None = None) -> torch.Tensor:
    """Return `[L, d]` by `transformers`; tokens after the first `visible` ones are masked."""
    mask = torch.tensor([[at < (visible or len(ids)) for at in range(len(ids))]]).long()
    with torch.inference_mode():
        found = saved("bert").reference(input_ids=torch.tensor([list(ids)]), attention_mask=mask).last_hidden_state[0]
    return found  # type: ignore[no-any-return]


def late_folder(folder: Path, **settings: Any) -> Path:
    """Write a folder of late interaction as pylate does, with BERT and a projection to 7 dimensions."""
    copied("bert", folder.parent).rename(folder)
    names = {"query_prefix": "Ada", "document_prefix": "Love", "query_length": 12, "document_length": 20}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(names | settings))
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense")]
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in modules]))
    (folder / "1_Dense").mkdir()
    dense = dict(in_features=32, out_features=7, bias=False, activation_function="torch.nn.modules.linear.Identity")
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": PROJECTION}, folder / "1_Dense" / "model.safetensors")
    return folder
