"""Random scenarios: a request's output does not depend on what else runs, nor on preemption.

A scenario draws the pools, limits and number format of an engine, requests that share prefixes or not and name
adapters or not, the budgets of its steps, and when requests arrive and are aborted. `make test-slow` runs many more.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine.test_encoder_graphs import TextsBackend
from tests.engine.test_overlap import recorded
from tests.matrix import rest_is_slow
from tests.model.checkpoints import (
    AUDIO,
    CPU,
    DECODERS,
    START,
    _root,
    loaded,
    native_backends,
    prompt,
    saved,
    source_of,
)
from tests.model.decoder_rows import VOCAB
from tests.model.lora import matrices, write_adapter
from triptych.model.api.request import FinishReason, Request, TokenLogprob, TokenOutput
from triptych.model.api.sampling_bounds import check_sampling
from triptych.model.api.sampling_params import Probe, SamplingParams
from triptych.model.cache.kv_cache import KVCache
from triptych.model.checkpoint.adapter_tensors import read_adapter
from triptych.model.config.cache import PoolSize, StateSize, paged_specs, pools_of
from triptych.model.engine.execution import encoder_graphs, mixed_graphs
from triptych.model.engine.execution.cuda_graphs import DecodeGraphs
from triptych.model.engine.execution.encoder_graphs import EncoderGraphs
from triptych.model.engine.execution.mixed_graphs import MixedGraphs, can_record_prompts
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.engine.scheduling.block_manager import BlockManager
from triptych.model.engine.scheduling.scheduled_step import DECODES_ONLY, UNLIMITED, StepBudget
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.engine.speculation.draft_model import DraftModel
from triptych.model.engine.speculation.propose import MAX_VERIFIED_ROWS
from triptych.model.network.lora_weights import load_adapter
from triptych.model.network.transformer import Transformer
from triptych.model.system.background_work import finish
from triptych.model.text.grammar import choice_grammar, regex_grammar
from triptych.model.text.grammar_matcher import Grammars
from triptych.model.text.token_bytes import TokenBytes

MAX_LEN = 80
# Windows and sinks, experts, recurrent layers; text and sound encoders.
KINDS = ["llama-gqa", "phi3-longrope", "gemma3", "gpt-oss", "qwen3-moe", "qwen3-next", "t5-relu", "bart", "whisper"]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))]
TEXTS = (b"", b"", b"", *(bytes([32 + place]) for place in range(VOCAB - 3)))
GRAMMARS = (regex_grammar("[a-z]{2,6}(-[A-Z]+)*"), choice_grammar(["abc", "abd", "x"]), regex_grammar("[012]*9"))


@cache
def network(kind: str, *, records: bool = False) -> Transformer:
    """Return a model; `records`: its steps can be recorded, as all lengths are read where a GPU's kernels read them."""
    return loaded(kind, TextsBackend() if records else next(iter(native_backends()), None))


@cache
def adapted_network(kind: str) -> Transformer:
    """Return a model with two adapters, of attention alone where the rest may have none."""
    model, attention = loaded(kind, next(iter(native_backends()), None)), r"self_attn\."
    targets = attention if kind in ("gpt-oss", "qwen3-moe", "qwen3-next") else r"(layers|block)\.\d+\."
    for name, rank in (("sql", 3), ("fr", 33)):
        folder = _root() / f"scenarios-{os.getpid()}" / kind / name
        write_adapter(folder, matrices(saved(kind).reference, targets, rank, seed=rank))
        model.lora[name] = load_adapter(name, read_adapter(folder), model)
    return model


def recorded_graphs(model: Transformer, pages: KVCache, num_seqs: int) -> dict[str, Any]:
    """Return what a GPU replays of a model, recorded without one."""
    sizes: dict[str, Any] = {"max_num_seqs": num_seqs, "max_model_len": MAX_LEN, "record": recorded}
    found: dict[str, Any] = {"graphs": DecodeGraphs(model, pages, **sizes)}
    if can_record_prompts(model):
        found["mixed_graphs"] = MixedGraphs(model, pages, **sizes)
    if model.encoder is not None:
        found["encoder_graphs"] = EncoderGraphs(model, max_num_seqs=num_seqs, max_num_tokens=256, record=recorded)
    for one in found.values():
        finish(one.record_each())
    return found


def maybe(chance: random.Random, probability: float, **fields: Any) -> dict[str, Any]:
    return fields if chance.random() < probability else {}


def drawn_params(chance: random.Random) -> SamplingParams:
    length, some = chance.choice((1, 2, 5, 12, 30)), tuple(chance.sample(range(3, VOCAB), 10))
    drawn = {"temperature": chance.choice((0.3, 1.0)), "seed": chance.randrange(9), "n": chance.choice((1, 1, 3))}
    search = {"num_beams": 3, "n": chance.choice((1, 3)), "length_penalty": chance.choice((0.0, 1.0, 2.0))}
    scored = {"logprobs": 2, "prompt_logprobs": 1, "num_speculative_tokens": chance.choice((None, 0, 9))}
    fields = {
        **maybe(chance, 0.3, top_k=5),
        **maybe(chance, 0.3, top_p=0.8),
        **chance.choice(({}, drawn, {**drawn, **scored}, scored, search)),
        **maybe(chance, 0.2, stop_token_ids=some),
        **maybe(chance, 0.2, min_tokens=chance.randint(0, length)),
        **maybe(chance, 0.2, repetition_penalty=1.3, frequency_penalty=0.3),
        **maybe(chance, 0.1, no_repeat_ngram_size=2),
        **maybe(chance, 0.1, logit_bias={some[0]: 4.0}, suppress_tokens=some[1:3]),
        **maybe(chance, 0.2, cumulative_logprob=True),
        **chance.choice(({}, {}, {}, {"grammar": chance.choice(GRAMMARS)}, {"allowed_token_ids": some})),
    }
    return SamplingParams(max_tokens=length, ignore_eos=chance.random() < 0.6, **fields)


def drawn_requests(kind: str, chance: random.Random) -> list[Request]:
    """Return requests whose prompts share prefixes, and which share sources."""
    prefixes = [prompt(chance.choice((2, 12, 40)), chance.randrange(99)) for _ in range(3)]
    prefixes.append(prompt(4, 5) * 6)  # repeats itself, so n-grams predict it
    sources = [None] if kind in DECODERS else [source_of(AUDIO.get(kind), chance.randint(1, 20), i) for i in range(2)]
    made = []
    for number in range(10):
        prefix, params, source = chance.choice(prefixes), drawn_params(chance), chance.choice(sources)
        tail = prompt(chance.choice((1, 3)), number)
        ids = (*prefix[: chance.randint(0, len(prefix))], *tail) if source is None else (START, *prefix[:number])
        params = replace(params, **maybe(chance, 0.1, probe=Probe(len(ids) - 1, (3, 4))))
        check_sampling(params, VOCAB)
        salt, urgency = chance.choice(("", "", "salt")), chance.choice((0, 0, 1))
        request = Request(f"r{number}", kind, ids, params, source, urgency, salt, streams=chance.random() < 0.5)
        keeps = source is not None and chance.random() < 0.3
        made.append(replace(request, keeps_source=keeps, tenant="b" if number % 3 == 2 else "a"))
    return made


def least_blocks(window: int | None, size: int, requests: list[Request], budget: int) -> int:
    """Return the fewest blocks of a pool in which each request fits alone."""

    def of(request: Request) -> int:
        params, source = request.params, request.source
        each = -(-min(MAX_LEN, len(request.prompt_token_ids) + params.max_tokens) // size)
        shared = -(-source.num_positions // size) if source is not None else 0
        if window is None:
            return params.num_beams * each + shared
        kept = min(each, -(-(window - 1) // size) + 1)
        return shared + max(params.num_beams * kept, kept + min(-(-MAX_LEN // size) - kept, -(-budget // size)))

    return max(map(of, requests))


def engine_of(kind: str, pools: list[int], size: int, cache_dtype: torch.dtype, **settings: Any) -> GenerateEngine:
    chosen = {"num_seqs": 8, "budget": 256, "shares": False, "overlap": False, "records": False, **settings}
    model = adapted_network(kind) if chosen.get("adapted") else network(kind, records=chosen["records"])
    decoder, encoder = model.config.decoder, model.config.encoder
    assert decoder is not None
    specs = pools_of(paged_specs(decoder, "float32"))
    sizes = [PoolSize(count, spec.window) for count, spec in zip(pools, specs, strict=True)]
    states = StateSize(chosen["num_seqs"], chosen.get("snapshots", 0)) if decoder.recurrences else None
    short, shares = model.config.short_context, chosen["shares"]
    blocks = BlockManager(sizes, size, prefix_caching=shares, short_context=short, states=states)
    slots = states.num_slots if states is not None else 0
    pages = KVCache(decoder, [one.num_pages for one in sizes], size, cache_dtype, CPU, slots)
    replays = chosen.get("replays", False)
    runner = ModelRunner(model, pages, blocks, **recorded_graphs(model, pages, chosen["num_seqs"]) if replays else {})
    layers = encoder.num_layers if encoder is not None and not chosen["overlap"] else 1
    drafts = chosen.get("drafts", 0)
    engine = GenerateEngine(
        kind,
        runner,
        Scheduler(blocks, chosen["num_seqs"], chosen["budget"], layers),
        max_model_len=MAX_LEN,
        eos_token_ids=model.config.eos_token_ids,
        grammars=Grammars(lambda: TokenBytes(TEXTS, TEXTS)),
        overlap=chosen["overlap"],
        num_speculative_tokens=drafts,
        adapters=model.lora,
    )
    if drafts and encoder is None and specs[0].window is None and chosen["small"]:
        small = network("llama-gqa", records=chosen["records"])
        assert small.decoder is not None
        cache_of_small = KVCache(small.decoder.config, pages.num_pages[:1], size, torch.float32, CPU)
        graphs = recorded_graphs(small, cache_of_small, MAX_VERIFIED_ROWS) if replays else {}
        runner.draft_model = DraftModel(small, cache_of_small, VOCAB, has_rules=False, **graphs)
        engine.speculation.draft_context = MAX_LEN
    return engine


def play(engine: GenerateEngine, requests: list[Request], chance: random.Random) -> tuple[list[TokenOutput], set[str]]:
    """Run all requests; return all outputs and the aborted requests."""
    outputs, aborted, waiting = list[TokenOutput](), set[str](), list(requests)
    for _ in range(3000):
        while waiting and (not engine.has_work or chance.random() < 0.3):
            engine.add(waiting.pop(0))
        if chance.random() < 0.04:
            request = chance.choice(requests)
            if request not in waiting:
                aborted.add(request.request_id)
                outputs += engine.abort(request.request_id, None, FinishReason.CANCELLED)
        demand = engine.demand()
        whole = chance.choice((None, demand.whole_tokens))
        budgets = (UNLIMITED, StepBudget(True, chance.choice((None, 1, 7)), whole))
        engine.wait_for_grammars(1.0)
        outputs += engine.step(DECODES_ONLY if demand.decodes and chance.random() < 0.1 else chance.choice(budgets))[0]
        engine.check_invariants()
        if not waiting and not engine.has_work:
            return outputs, aborted
    raise AssertionError("the engine does not come to an end")


def play_alone(engine: GenerateEngine, request: Request) -> list[TokenOutput]:
    engine.block_manager.clear_cache()
    engine.add(request)
    outputs = list[TokenOutput]()
    while engine.has_work:
        engine.wait_for_grammars(1.0)
        outputs += engine.step()[0]
    return outputs


def said(outputs: list[TokenOutput]) -> dict[tuple[str, int], dict[str, Any]]:
    """Join the outputs of each sequence; check that none follows its end."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for output in outputs:
        one = found.setdefault((output.request_id, output.index), {"ids": [], "logprobs": [], "end": None})
        assert one["end"] is None, "a sequence was heard of after its end"
        one["ids"] += output.token_ids
        one["logprobs"] += output.logprobs or ()
        one["end"] = output.finish_reason
        names = ("stop_reason", "error", "score", "cumulative_logprob", "prompt_logprobs", "probe_logprobs")
        one |= {name: value for name in names if (value := getattr(output, name)) is not None}
    return found


def alike(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, except that numbers may differ by rounding."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    if isinstance(ours, TokenLogprob) and isinstance(theirs, TokenLogprob):
        return ours.token_id == theirs.token_id and alike(ours.logprob, theirs.logprob)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_each_request_alone(kind: str, seed: int) -> None:
    run_scenario(kind, seed)


@pytest.mark.parametrize("seed", SEEDS[:12])
@pytest.mark.parametrize("kind", rest_is_slow(KINDS, lambda kind: kind in ("gemma3", "bart")))
def test_recorded_steps_change_no_output(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "_DECODES", (0, 2, 8))
    monkeypatch.setattr(mixed_graphs, "_TOKENS", (8, 24, 64))
    monkeypatch.setattr(encoder_graphs, "most_tokens", lambda config: 192)
    run_scenario(kind, seed, records=True)


def run_scenario(kind: str, seed: int, *, records: bool = False) -> None:
    """Run drawn requests together, by recorded steps if `records`, then each alone."""
    chance = random.Random(f"{kind} {seed}")
    requests = drawn_requests(kind, chance)
    adapted = not records and seed % 2 == len(kind) % 2
    if adapted:
        naming = random.Random(f"adapters {kind} {seed}")
        requests = [replace(request, model=naming.choice((kind, "sql", "fr"))) for request in requests]
    decoder = network(kind).config.decoder
    assert decoder is not None
    windows = [spec.window for spec in pools_of(paged_specs(decoder, "float32"))]
    size, num_seqs = chance.choice((1, 3, 4, 16)), chance.choice((4, 8))
    budget = chance.choice((num_seqs, 20, 200))
    room = chance.choice((1, 1, 2))
    pools = [room * least_blocks(window, size, requests, budget) for window in windows]
    dtype = torch.int8 if native_backends() and not records and chance.random() < 0.2 else torch.float32
    settings = {
        **{"num_seqs": num_seqs, "budget": budget, "shares": chance.random() < 0.7, "overlap": chance.random() < 0.3},
        **{"drafts": chance.choice((0, 3)), "small": chance.random() < 0.5, "snapshots": chance.choice((0, 3))},
        "adapted": adapted,
    }
    engine = engine_of(kind, pools, size, dtype, records=records, replays=records, **settings)
    outputs, aborted = play(engine, requests, chance)
    stats = engine.stats()
    assert engine.block_manager.is_empty
    assert sum(one.drafted_tokens for one in outputs) == stats.draft_tokens
    assert sum(one.accepted_tokens for one in outputs) == stats.accepted_tokens
    found, lonely = said(outputs), engine_of(kind, [400] * len(windows), 16, dtype, records=records, adapted=adapted)
    for request in requests:
        plain = replace(request.params, num_speculative_tokens=None)
        for key, whole in said(play_alone(lonely, replace(request, params=plain))).items():
            ours = found[key]
            if request.request_id not in aborted or ours["end"] is not FinishReason.CANCELLED:
                assert all(alike(ours.get(name), value) for name, value in whole.items()), (key, ours, whole)
            elif request.params.num_beams == 1:
                assert ours["ids"] == whole["ids"][: len(ours["ids"])]
