"""Random scenarios with pictures: each output has the bits of its request alone, with nothing cached.

A scenario draws a number format, the pools and limits of an engine, and requests whose prompts share texts and
pictures: equal ones at equal and at other places, and ones that differ in a pixel. Sequences are preempted and
encodings forgotten between any two steps. `make test-slow` runs many more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine.test_random_scenarios import TEXTS, drawn_params, least_blocks, play_alone, said
from tests.matrix import rest_is_slow
from tests.model.checkpoints import CPU, _root, load_native, loaded, native_backends, prompt, saved
from tests.model.decoder_rows import VOCAB
from tests.model.lora import matrices, write_adapter
from tests.model.picture_models import IMAGE, SQUARES, picture, with_pictures
from triptych.model.api.request import FinishReason, Request, Source, TokenOutput, image_source
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.adapter_tensors import read_adapter
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.config.cache import PoolSize, StateSize, paged_specs, pools_of
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.execution.pictures import PictureStore
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import UNLIMITED, StepBudget
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.speculation.draft_model import DraftModel
from triptych.model.network.lora_weights import load_adapter
from triptych.model.network.transformer import Transformer
from triptych.model.text.grammar_matcher import Grammars
from triptych.model.text.token_bytes import TokenBytes

pytestmark = pytest.mark.skipif(not native_backends(), reason="no native kernels, whose bits depend on no batch")

MAX_LEN = 120
ROW_ENDS = {"mistral3": 7, "llava-pixtral": 7}
# Recurrent layers; windows and both ways; rows that later layers add; windows of the tower; row ends; tiles; one size.
KINDS = [
    *("qwen3-5-pictures", "gemma3-pictures", "qwen3-vl-pictures", "qwen2-5-vl-pictures"),
    *("mistral3", "idefics3", "llava", "gemma4-pictures", "gemma4-dense-pictures", "gemma4-experts-pictures"),
]
FORMATS = [
    *((torch.float32, "none", torch.float32), (torch.float32, "none", torch.int8)),
    *((torch.bfloat16, "none", torch.bfloat16), (torch.float32, "int8", torch.float32)),
    (torch.bfloat16, "int8", torch.int8),
]


@cache
def network(kind: str, dtype: torch.dtype, quantization: str) -> Transformer:
    """Return a model with two adapters, which change its tower too; quantised ones have none."""
    (backend,) = native_backends()
    model = load_native(read_checkpoint(saved(kind).path), backend.library, dtype, quantization=quantization)
    if quantization == "none":
        for name, rank in (("sql", 3), ("fr", 33)):
            folder = _root() / f"picture-scenarios-{os.getpid()}" / f"{kind}-{dtype}" / name
            targets = r"(language_model|text_model).*self_attn\.[qo]"
            if kind != "gemma4-pictures":  # whose tower has bounds, and may have no adapters
                targets += r"|(visual|vision).*(q_proj|qkv|mlp.*fc1)"
            write_adapter(folder, matrices(saved(kind).reference, targets, rank, seed=rank))
            model.lora[name] = load_adapter(name, read_adapter(folder), model)
    return model


def drawn_pictures(kind: str, chance: random.Random) -> list[Source]:
    """Return pictures; two of them differ in the last byte."""
    side = SQUARES.get(kind)
    sizes = [(side, side)] if side else [(8, 8), (16, 40), (40, 24), (24, 24), (8, 64)]
    made = [picture(*chance.choice(sizes), chance.randrange(99)) for _ in range(3)]
    last = made[0].features[-1]
    features = made[0].features[:-1] + bytes([(last + 128) % 256])
    return [*made, image_source(features, made[0].shape, made[0].num_positions)]


def drawn_requests(kind: str, chance: random.Random, names: Sequence[str]) -> list[Request]:
    """Return requests whose prompts share beginnings; of some, a picture in it is another one."""
    shown = drawn_pictures(kind, chance)
    texts = [prompt(chance.choice((1, 3, 9)), chance.randrange(99)) for _ in range(3)] + [prompt(3, 5) * 4, ()]
    beginnings: list[list[Sequence[int] | Source]] = [
        [one for _ in range(chance.choice((1, 2))) for one in (chance.choice(texts), shown[0])] for _ in range(3)
    ]
    made: list[Request] = []
    for number in range(10):
        parts = [
            chance.choice(shown) if isinstance(part, Source) and chance.random() < 0.3 else part
            for part in chance.choice(beginnings)[: chance.choice((1, 2, 4))]
        ]
        longer = (chance.choice(texts), shown[0], prompt(chance.choice((0, 1))))  # it may end with the picture
        parts += chance.choice(((prompt(1, number),), (prompt(2, number % 3),), longer))
        ids, images = with_pictures(parts, ROW_ENDS.get(kind))
        params = drawn_params(chance)
        if len(ids) + params.max_tokens > MAX_LEN:
            continue
        suppressed = () if params.grammar else (IMAGE,) if chance.random() < 0.5 else ()
        params = replace(params, suppress_tokens=(*params.suppress_tokens, *suppressed))
        salt, urgency = chance.choice(("", "", "salt")), chance.choice((0, 0, 1))
        request = Request(f"r{number}", chance.choice(names), ids, params, None, urgency, salt)
        made.append(replace(request, streams=chance.random() < 0.5, images=images, tenant="ab"[number % 3 == 2]))
    return made


def engine_of(
    model: Transformer, kind: str, pools: list[int], size: int, settings: Mapping[str, Any]
) -> GenerateEngine:
    chosen: dict[str, Any] = {"num_seqs": 8, "budget": 256, "shares": False, "rows": 64, "snapshots": 0, **settings}
    decoder, pictures = model.config.decoder, model.config.pictures
    assert decoder is not None and pictures is not None
    specs = pools_of(paged_specs(decoder, "float32"))
    sizes = [PoolSize(count, spec.window) for count, spec in zip(pools, specs, strict=True)]
    states = StateSize(chosen["num_seqs"], chosen["snapshots"]) if decoder.recurrences else None
    blocks = BlockManager(sizes, size, prefix_caching=chosen["shares"], states=states)
    slots = states.num_slots if states is not None else 0
    pages = KVCache(decoder, [one.num_pages for one in sizes], size, chosen["cache"], CPU, slots)
    processing = read_checkpoint(saved(kind).path).pictures
    assert processing is not None
    runner = ModelRunner(model, pages, blocks, pictures=PictureStore(model, processing, chosen["rows"]))
    layers = pictures.tower.num_layers
    scheduler = Scheduler(
        blocks, chosen["num_seqs"], chosen["budget"], layers, chosen["rows"], both_ways=pictures.both_ways
    )
    engine = GenerateEngine(
        kind,
        runner,
        scheduler,
        max_model_len=MAX_LEN,
        eos_token_ids=model.config.eos_token_ids,
        grammars=Grammars(lambda: TokenBytes(TEXTS, TEXTS)),
        overlap=chosen.get("overlap", False),
        num_speculative_tokens=chosen.get("drafts", 0),
        adapters=model.lora,
    )
    if chosen.get("drafts") and chosen.get("small") and specs[0].window is None:
        small = loaded("llama-gqa", *native_backends())
        assert small.decoder is not None
        own = KVCache(small.decoder.config, pages.num_pages[:1], size, torch.float32, CPU)
        runner.draft_model = DraftModel(small, own, VOCAB, has_rules=False)
        engine.speculation.draft_context = MAX_LEN
    return engine


def play(engine: GenerateEngine, requests: list[Request], chance: random.Random) -> tuple[list[TokenOutput], set[str]]:
    """Run all requests; return all outputs and the aborted requests."""
    outputs, aborted, waiting, scheduler = list[TokenOutput](), set[str](), list(requests), engine.scheduler
    for _ in range(4000):
        while waiting and (not engine.has_work or chance.random() < 0.3):
            engine.add(waiting.pop(0))
        if chance.random() < 0.03:
            request = chance.choice(requests)
            if request not in waiting:
                aborted.add(request.request_id)
                outputs += engine.abort(request.request_id, None, FinishReason.CANCELLED)
        idle = not engine.overlap and len(outputs) < 400
        if idle and scheduler.running and chance.random() < 0.1:
            scheduler.preempt(chance.choice(scheduler.running))
        if idle and chance.random() < 0.05:
            scheduler.pictures.reset()
        engine.demand()
        budgets = (UNLIMITED, StepBudget(True, chance.choice((None, 1, 5)), chance.choice((None, 1, 9))))
        engine.wait_for_grammars(1.0)
        outputs += engine.step(chance.choice(budgets))[0]
        engine.check_invariants()
        if not waiting and not engine.has_work:
            return outputs, aborted
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("seed", rest_is_slow(range(60), lambda seed: seed < len(FORMATS)))
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_bits_of_each_request_alone(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    dtype, quantization, cached = FORMATS[seed % len(FORMATS)]
    model = network(kind, dtype, quantization)
    requests = drawn_requests(kind, chance, (kind, kind, *model.lora))
    decoder, pictures = model.config.decoder, model.config.pictures
    assert decoder is not None and pictures is not None
    windows = [spec.window for spec in pools_of(paged_specs(decoder, "float32"))]
    size, num_seqs = chance.choice((1, 3, 4, 16)), chance.choice((4, 8))
    budget = chance.choice((16, 24, 200) if pictures.both_ways else (num_seqs, 20, 200))
    pools = [chance.choice((1, 1, 2)) * least_blocks(window, size, requests, budget) for window in windows]
    settings = {
        **{"num_seqs": num_seqs, "budget": budget, "shares": chance.random() < 0.8, "cache": cached},
        **{"rows": chance.choice((16, 64)), "snapshots": chance.choice((0, 3)), "overlap": chance.random() < 0.2},
        **{"drafts": chance.choice((0, 3)), "small": chance.random() < 0.5},
    }
    engine = engine_of(model, kind, pools, size, settings)
    outputs, aborted = play(engine, requests, chance)
    assert engine.block_manager.is_empty
    found, lonely = said(outputs), engine_of(model, kind, [400] * len(windows), 16, {"cache": cached})
    for request in requests:
        plain = replace(request.params, num_speculative_tokens=None)
        lonely.scheduler.pictures.reset()
        for key, whole in said(play_alone(lonely, replace(request, params=plain))).items():
            ours = found[key]
            if request.request_id not in aborted or ours["end"] is not FinishReason.CANCELLED:
                assert all(ours.get(name) == value for name, value in whole.items()), (key, ours, whole)
            elif request.params.num_beams == 1:
                assert ours["ids"] == whole["ids"][: len(ours["ids"])]
