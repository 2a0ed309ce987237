"""A search for bodies that hold the event loop: any field of any body, filled with much data."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.service.dialects.support import chat_app
from tests.service.test_worst_bodies import LONGEST_S, longest_hold
from triptych.service.dialects.embeddings import EmbeddingBody
from triptych.service.dialects.huggingface import EmbedBody, PredictBody, RerankBody, TextGenerationBody
from triptych.service.dialects.messages_bodies import CountBody, MessagesBody
from triptych.service.dialects.ollama_bodies import OllamaChatBody
from triptych.service.dialects.openai_bodies import ChatBody, CompletionBody
from triptych.service.dialects.pipelines import EntityBody, FillMaskBody, QuestionBody, SimilarityBody, ZeroShotBody
from triptych.service.dialects.ranking import ClassifyBody, CohereEmbedBody, RankBody, ScoreBody
from triptych.service.dialects.responses_bodies import InputTokensBody, ResponsesBody
from triptych.service.runtimes.assembly import tune_garbage_collector
from triptych.service.schemas.bodies import DetokenizeBody, GenerateBody, TokenizeBody
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.field_paths import walk

_HI = [{"role": "user", "content": "x"}]
# An output is short, so that what is measured is the body.
ROUTES: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatBody, {"model": "chat", "max_tokens": 2, "messages": _HI}),
    ("/v1/completions", CompletionBody, {"model": "gen", "prompt": "x", "max_tokens": 2}),
    ("/v1/messages", MessagesBody, {"model": "chat", "max_tokens": 2, "messages": _HI}),
    ("/api/chat", OllamaChatBody, {"model": "chat", "messages": _HI, "options": {"num_predict": 2}}),
    ("/v1/messages/count_tokens", CountBody, {"model": "chat", "messages": _HI}),
    ("/v1/responses", ResponsesBody, {"model": "chat", "input": "x", "max_output_tokens": 2}),
    ("/v1/responses/input_tokens", InputTokensBody, {"model": "chat", "input": "x"}),
    ("/v1/embeddings", EmbeddingBody, {"model": "enc", "input": "w1"}),
    ("/generate", GenerateBody, {"model": "gen", "prompt": "x", "max_tokens": 2}),
    ("/generate", TextGenerationBody, {"model": "gen", "inputs": "x", "parameters": {"max_new_tokens": 2}}),
    ("/encode", EncodeBody, {"model": "enc", "input": "w1"}),
    ("/embed", EmbedBody, {"model": "enc", "inputs": "w1"}),
    ("/rerank", RerankBody, {"model": "enc", "query": "w1", "texts": ["w1"]}),
    ("/predict", PredictBody, {"model": "enc", "inputs": "w1"}),
    ("/v1/rerank", RankBody, {"model": "enc", "query": "w1", "documents": ["w1"]}),
    ("/v1/score", ScoreBody, {"model": "enc", "text_1": "w1", "text_2": "w1"}),
    ("/v1/classify", ClassifyBody, {"model": "enc", "input": "w1"}),
    ("/v2/embed", CohereEmbedBody, {"model": "enc", "texts": ["w1"], "input_type": "x"}),
    ("/tokenize", TokenizeBody, {"model": "gen", "text": "x"}),
    ("/detokenize", DetokenizeBody, {"model": "gen", "token_ids": [1]}),
    ("/pipeline/fill-mask", FillMaskBody, {"model": "enc", "inputs": "w1"}),
    ("/pipeline/token-classification", EntityBody, {"model": "enc", "inputs": "w1"}),
    ("/pipeline/question-answering", QuestionBody, {"model": "enc", "inputs": {"question": "w1", "context": "w1"}}),
    ("/pipeline/zero-shot-classification", ZeroShotBody, {"model": "enc", "inputs": "w1"}),
    ("/pipeline/sentence-similarity", SimilarityBody, {"model": "enc", "inputs": {}}),
]
_MUCH = '"\x00much"'  # in the place of what is filled in
_TEXTS = (
    "a",
    " ",
    "\\n",
    "\\u0041",
    "\\\\",
    "{",
    "[",
    "é",
    "(a*)*",
    "w1 ",
    '{\\"a\\":1},',
    "1.5e-300,",
    "0,",
    "<|im_end|>",
)
_ITEMS = ("{}", "[]", '""', "0", "null", "1.2345678901234567890123e-300", "9" * 4000, '"w1"', "[[0]]", '{"a":{}}')


def _filled(rng: random.Random, values: int, size: int) -> str:
    """Return JSON with about `values` values, within the size."""
    kind = rng.randrange(5)
    if kind == 0:
        text = rng.choice(_TEXTS)
        return '"' + rng.choice(("", "[", '{\\"a\\":[')) + text * (size // len(text.encode())) + '"'
    if kind == 1:
        return "{" + ",".join(f'"k{at}":{rng.choice(_ITEMS[:6])}' for at in range(min(values // 2, size // 20))) + "}"
    if kind == 2:
        depth = rng.choice((50, 150, 190, 1_000))
        return '{"a":[' * (depth // 2) + "0" + "]}" * (depth // 2)
    item = rng.choice(_ITEMS)
    if kind == 4:  # something that the place takes
        part = '{"type":"text","text":"a"}'
        call = '{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
        item = rng.choice(
            (
                '{"role":"user","content":"a"}',
                f'{{"role":"user","content":[{part},{part}]}}',
                part,
                call,
                '{"type":"function","name":"a","parameters":{}}',
                '{"type":"tool_use","id":"a","name":"b","input":{}}',
                '{"text":"a","text_pair":"b"}',
                '{"name":"a","input_schema":{}}',
                '["a","b"]',
                '["a"]',
            )
        )
    weight = item.count('"') // 2 + item.count("{") + item.count("[") or 1
    return "[" + ",".join([item] * max(1, min(values // weight, size // (len(item) + 1)))) + "]"


def bodies(rng: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """Yield forever a route, the path of a field, and a body that has much data there."""
    places = [(route, base, path) for route, model, base in ROUTES for path in dict(walk(model))]
    while True:
        route, base, path = rng.choice(places)
        values, size = rng.choice((1_000, 5_000, 20_000, 49_000, 10**6)), rng.choice((60_000, 300_000, 1_900_000))
        made: Any = json.loads(_MUCH.replace("\x00", "\\u0000"))
        for part in reversed(path.split(".")):
            name = part.partition("[")[0]
            made = {name: [made] if part.endswith("[]") else made}
        raw = json.dumps({**base, **made}).replace('"\\u0000much"', _filled(rng, values, size))
        yield route, path, raw.encode()[:1_999_000] if len(raw) > 2_000_000 else raw.encode()


def _slow(seed: int, number: int) -> list[str]:
    app, rng = chat_app(max_model_len=65_536, max_num_batched_tokens=65_536), random.Random(seed)
    tune_garbage_collector()

    async def work() -> list[str]:
        found = []
        async with app.app.router.lifespan_context(app.app):
            for (route, path, body), _ in zip(bodies(rng), range(number), strict=False):
                tries: list[float] = []
                while len(tries) < 4 and (not tries or min(tries) > LONGEST_S):
                    held, status, reply = await longest_hold(app, route, body)
                    tries.append(held)
                    assert status != 500, (route, path, body[:300], reply[:300])
                if min(tries) > LONGEST_S:
                    found.append(f"{route} {path} {status} {1000 * min(tries):.0f} ms: {body[:200]!r} {reply[:120]!r}")
        return found

    return asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_field_filled_with_much_holds_the_event_loop(seed: int) -> None:
    assert not _slow(seed, 150)


@pytest.mark.alone
def test_a_few_fields_filled_with_much() -> None:
    assert not _slow(99, 20)
