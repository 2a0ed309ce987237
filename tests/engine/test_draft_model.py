"""A draft model changes no output, saves steps if it is right, and costs little if it is wrong."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.scripted import Harness, request
from tests.engine.test_speculation import copying, crowd, generated, of_each_way, outcomes
from tests.matrix import rest_is_slow
from tests.model.checkpoints import native_backends, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.config.cache import NO_STATE, PoolSize, StateSize
from triptych.model.engine import warmup
from triptych.model.engine.builder import LoadedModel, load
from triptych.model.engine.execution.batch import BatchLayout, pack
from triptych.model.engine.execution.model_runner import ModelRunner
from triptych.model.engine.scheduling.block_pool import BlockHasher
from triptych.model.engine.scheduling.scheduled_step import ScheduledSequence
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.state_slots import StateSlots
from triptych.model.engine.speculation import propose
from triptych.model.engine.speculation.model_drafts import DraftOdds, ModelDrafts
from triptych.model.errors import ConfigError
from triptych.model.linear.base import linears
from triptych.model.linear.native import NativeLinear
from triptych.model.llm import LLM
from triptych.model.native.library import Kind
from triptych.model.pretrained import embedded_models
from triptych.model.quantization.folder import quantize
from triptych.model.system.background_work import Work, finish


@pytest.fixture(autouse=True)
def measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the initial estimate of the draft model's cost."""
    monkeypatch.setattr(DraftOdds, "measured", lambda self, **times: None)


def nearly(source: Sequence[int], tokens: Sequence[int]) -> int:
    """Copy without the source, but generate 3 for about every fifth token."""
    return copying((), tokens) if crc32(repr(list(tokens)).encode()) % 5 else 3


def fresh(source: Sequence[int], tokens: Sequence[int]) -> int:
    """Return a token that no n-gram predicts."""
    return crc32(repr(list(tokens)).encode()) % 1000


def drafting(**settings: object) -> Harness:
    """Return an engine with plenty of room and a draft model, which is `fresh` by default."""
    room = {"num_blocks": 900, "max_model_len": 2000, "budget": 600, "script": fresh, "num_speculative_tokens": 4}
    return Harness(**{**room, "draft_script": fresh, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("seed", rest_is_slow(range(8), lambda seed: seed < 4))
def test_outputs_are_the_same_with_and_without(seed: int, overlap: bool) -> None:
    """Check the draft model's keys through preemption, shared prefixes and rejected drafts."""
    rng = random.Random(seed)
    settings = {
        "num_blocks": rng.choice((44, 60, 200)),
        "budget": rng.choice((8, 20, 64)),
        "max_num_seqs": rng.choice((3, 8)),
        "script": copying,
        "prefix_caching": rng.random() < 0.7,
    }
    if seed % 3 == 0:
        settings["pools"] = [PoolSize(60), PoolSize(50, 9)]
    if seed % 4 >= 2:
        settings["states"] = StateSize(settings["max_num_seqs"], 40)
    plain = crowd(Harness(**settings), seed)
    drafts = rng.choice((1, 4, 12))
    drafted = crowd(Harness(**settings, overlap=overlap, num_speculative_tokens=drafts, draft_script=nearly), seed)
    assert outcomes(drafted.outputs) == outcomes(plain.outputs)
    stats = drafted.engine.stats()
    assert stats.model_draft_tokens > stats.model_accepted_tokens > 0


def test_a_draft_model_that_is_right_saves_steps() -> None:
    harness = drafting()
    harness.add("r", range(30), max_tokens=100)
    stats = harness.run().engine.stats()
    assert stats.model_draft_tokens == stats.model_accepted_tokens > 70 and len(harness.runner.steps) < 30


def asked(odds: DraftOdds, num_tokens: int, first_right: int | None) -> tuple[int, int]:
    """Return the steps and drafts of a sequence whose drafts are right from token `first_right` on, or never (None)."""
    drafts, at, steps, count = ModelDrafts(4, odds), 1, 0, 0
    while at < num_tokens:
        wanted = drafts.wanted(at, 8)
        steps, count, right = steps + 1, count + wanted, 0
        if wanted:
            right = wanted if first_right is not None and at >= first_right else 0
            drafts.begin(at)
            drafts.ask(wanted)
            drafts.computed(at + wanted - 1, wanted)
            drafts.verified(right)
        at += 1 + right
    return steps, count


def test_a_draft_model_is_asked_ever_more_seldom_while_it_is_wrong() -> None:
    odds = DraftOdds()
    assert asked(odds, 1000, None)[1] < 45
    assert asked(odds, 1000, None)[1] < 20  # a new sequence starts with the odds that earlier ones learned
    assert sum(asked(odds, 60, None)[1] for _ in range(5)) < 6


def test_a_draft_model_that_is_right_again_is_asked_again() -> None:
    odds = DraftOdds()
    assert asked(odds, 1000, None)[0] == 999
    steps, _ = asked(odds, 2000, 1000)
    assert steps < 1000 + 128 + 300


def test_no_more_is_drafted_than_is_worth_it() -> None:
    odds = DraftOdds()
    for rate in (0.1, 0.3, 0.6, 0.8, 0.95, 1.0):
        drafts = ModelDrafts(16, odds)
        drafts.rate, odds.pause = rate, 100
        odds.begin_trial()
        tokens_a_second = [sum(rate**place for place in range(1 + k)) / (1 + odds.cost * k) for k in range(17)]
        assert drafts.wanted(5, 16) == tokens_a_second.index(max(tokens_a_second))


def test_a_prompt_is_computed_by_the_draft_model_in_parts_and_once_for_all_that_begin_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(propose, "COMPUTED_AT_ONCE", 20)
    harness = drafting()
    harness.add("r", range(50), max_tokens=12)
    runs = harness.run().runner.draft_runs
    assert [(run.start, run.stop, run.num_drafts) for run in runs[:3]] == [(0, 20, 0), (20, 40, 0), (40, 53, 3)]
    runs.clear()
    harness.add("s", [*range(46), 5, 5], max_tokens=12)
    harness.run()
    assert (runs[0].start, runs[0].stop) == (44, 49)


def test_no_sequence_waits_for_the_prompt_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "COMPUTED_AT_ONCE", 20)
    harness = drafting()
    harness.add("long", range(400), max_tokens=40)
    harness.add("short", range(500, 510), max_tokens=40)
    runs = harness.run().runner.draft_runs
    short = [run for run in runs if run.sequence.request.request_id == "short"]
    drafts = [run for run in short if run.num_drafts]
    assert all(run.num_tokens for run in runs) and len(short) - 3 < len(drafts) < 15


def test_the_draft_models_context_bounds_its_drafts() -> None:
    harness = drafting()
    harness.engine.speculation.draft_context = 50
    harness.add("r", range(20), max_tokens=80)
    harness.run()
    assert 45 < max(run.stop + run.num_drafts for run in harness.runner.draft_runs) <= 50
    assert len(harness.tokens("r")) == 80


def test_sequences_go_on_without_a_draft_model_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runs: object) -> None:
        raise RuntimeError("no")

    harness = drafting()
    monkeypatch.setattr(harness.runner, "draft", fail)
    harness.add("r", range(20), max_tokens=30)
    assert harness.run().engine.stats().model_draft_tokens == 0
    assert len(harness.tokens("r")) == 30 and harness.engine.block_manager.is_empty


def test_a_recorded_step_leaves_its_state_in_front_of_those_of_drafts_that_were_not_said() -> None:
    """Check the state columns when slots for draft states are allocated and the draft model proposes nothing."""
    slots = StateSlots(StateSize(2, 6), 4, BlockHasher(4, across_requests=True), keeps=True)
    sequence = SequenceState.of(request("r", 5), 0, 0, ())
    sequence.tables[0].extend([1, 2])
    sequence.num_computed_tokens = 4
    slots.allocate(sequence, 1)
    assert slots.extend(sequence, 3) == 3
    layout = BatchLayout(tokens=2, segments=2, blocks=2, state_columns=3)  # the recorded one is not used
    states = layout.split(pack(layout, [ScheduledSequence(sequence, 4, 1, False)], 4, {})).states
    assert states.tolist() == [[0, 1], [NO_STATE, NO_STATE], [dict(sequence.state_writes)[5], NO_STATE]]


def spec_of(kind: str, draft: Path | str | None = None, **settings: object) -> ModelSpec:
    config = {"device": "cpu", "block_size": 4, "kv_cache_memory": 1 << 20, "max_model_len": 100, **settings}
    if draft is not None:
        config = {"num_speculative_tokens": 4, "draft_model": str(draft), **config}
    return ModelSpec(kind, str(saved(kind).path), EngineConfig(**config))  # type: ignore[arg-type]


def built(kind: str, draft: Path | str | None = None, **settings: object) -> LoadedModel:
    return load(spec_of(kind, draft, **settings))


CASES = [("llama-gqa", "bfloat16", "none"), ("gemma3", "float32", "int8"), ("bloom", "float32", "none")]


@pytest.mark.parametrize(("kind", "dtype", "quantization"), CASES)
def test_a_model_that_drafts_for_itself_is_always_right(kind: str, dtype: str, quantization: str) -> None:
    """Check greedy, sampled, penalised, banned and biased requests: results have the same bits without drafts."""
    if not native_backends() and (dtype, quantization) != ("float32", "none"):
        pytest.skip("no native kernels")
    settings = {"dtype": dtype, "quantization": quantization}
    plain, drafted = built(kind, **settings), built(kind, saved(kind).path, **settings)
    assert generated(drafted, of_each_way(kind)) == generated(plain, of_each_way(kind))
    assert drafted.generate is not None
    stats = drafted.generate.stats()
    assert stats.model_accepted_tokens == stats.model_draft_tokens > 100


@pytest.mark.parametrize(("kind", "draft"), [("llama-gqa", "gemma3"), ("qwen3-next", "llama-gqa")])
def test_another_model_changes_nothing(kind: str, draft: str) -> None:
    """Check an untrained draft model with windows, or without the served model's recurrent layers."""
    plain, drafted = built(kind), built(kind, saved(draft).path)
    assert generated(drafted, of_each_way(kind)) == generated(plain, of_each_way(kind))
    assert drafted.generate is not None
    stats = drafted.generate.stats()
    assert stats.model_draft_tokens > 5 * stats.model_accepted_tokens


@pytest.mark.skipif(not native_backends(), reason="no native kernels")
def test_each_is_served_as_it_is_stored(tmp_path: Path) -> None:
    quantize(saved("llama-gqa").path, tmp_path / "served", "int8")
    drafted = load(replace(spec_of("llama-gqa", saved("llama-gqa").path), path=str(tmp_path / "served")))
    assert drafted.generate is not None and isinstance(drafted.generate.runner, ModelRunner)
    kinds = [
        {linear.kind for linear in linears(model) if isinstance(linear, NativeLinear)}
        for model in (drafted.generate.runner.model, drafted.generate.runner.draft_model.model)  # type: ignore[union-attr]
    ]
    assert Kind.INT8 in kinds[0] and Kind.INT8 not in kinds[1]


def test_memory_is_planned_for_both() -> None:
    plain, drafted = built("llama-gqa"), built("llama-gqa", saved("llama-gqa").path)
    assert drafted.info.draft_model == "llama-gqa" and not plain.info.draft_model
    pages = drafted.info.num_blocks * drafted.info.cache_pools[0].bytes_per_token * 4
    assert pages <= 1 << 20 and drafted.info.memory_bytes >= 2 * plain.info.weight_bytes + pages
    assert drafted.info.cache_pools[0].bytes_per_token == 2 * plain.info.cache_pools[0].bytes_per_token


def test_what_it_launches_is_compiled_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = built("llama-gqa", saved("gemma3").path)
    assert loaded.generate is not None and isinstance(loaded.generate.runner, ModelRunner)
    draft = loaded.generate.runner.draft_model
    assert draft is not None
    compiled: list[object] = []

    def compiling(*given: object) -> Work[int]:
        compiled.append(given)
        yield None
        return 0

    monkeypatch.setattr(warmup, "compile_attention", compiling)
    monkeypatch.setattr(warmup, "compile_products", compiling)
    finish(warmup.warm_up(loaded.encode, loaded.generate, loaded.info.max_model_len))
    context = loaded.generate.speculation.draft_context
    assert context is not None and compiled[2:] == [(draft.model, draft.cache, context, context), (draft.model,)]


def without_last_layer(into: Path, vocab_size: int) -> Path:
    """Return the embedded code model without its last layer, with a vocabulary of this size."""
    folder = embedded_models()["code"]
    config = json.loads((folder / "config.json").read_text())
    tensors, num_layers = load_file(folder / "model.safetensors"), config["num_hidden_layers"] - 1
    kept = {name: one for name, one in tensors.items() if f"layers.{num_layers}." not in name}
    table = kept["embed_tokens.weight"]
    kept["embed_tokens.weight"] = table.repeat(2, 1)[:vocab_size].contiguous()
    shutil.copy(folder / "tokenizer.json", into)
    save_file(kept, into / "model.safetensors")
    (into / "config.json").write_text(
        json.dumps(
            {**config, "num_hidden_layers": num_layers, "vocab_size": vocab_size, "max_position_embeddings": 120}
        )
    )
    return into


@pytest.mark.parametrize("vocab_size", [3000, 3200])
def test_tables_of_other_sizes_grammars_and_a_shorter_context(
    tmp_path: Path, vocab_size: int, packed_here: None
) -> None:
    draft = without_last_layer(tmp_path, vocab_size)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_memory=8 << 20, max_model_len=200)
    plain = LLM(embedded_models()["code"], config)
    drafted = LLM(plain.checkpoint.path, replace(config, draft_model=str(draft), num_speculative_tokens=3))
    asks = ["def add(a, b):", "class Stack:\n    def __init__(self):"]
    ways = [
        SamplingParams(max_tokens=130),
        SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=4),
        SamplingParams(max_tokens=40, temperature=0.6, grammar="start: /[a-z]+( [a-z]+)*\\./", seed=2),
    ]
    for params in ways:
        assert drafted.generate(asks, params) == plain.generate(asks, params)
    stats = drafted._generate.stats() if drafted._generate is not None else None
    assert stats is not None and stats.model_draft_tokens > stats.model_accepted_tokens > 20


@pytest.mark.parametrize(
    ("served", "draft", "settings", "reason"),
    [
        ("t5-relu", "llama-gqa", {}, "the served model is encoder-decoder"),
        ("llama-gqa", "t5-relu", {}, "t5-relu is encoder-decoder"),
        ("llama-gqa", "qwen3-next", {}, "recurrent layers"),
        ("mistral", "llama-gqa", {}, "keeps more than 4 tokens"),
        ("llama-gqa", "llama-gqa", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ("llama-gqa", "llama-gqa", {"num_speculative_tokens": 0}, "draft_model needs num_speculative_tokens"),
        ("llama-gqa", "code", {}, "code has another vocabulary"),
        ("llama-gqa", "nothing", {}, "nothing"),
    ],
)
def test_what_cannot_be_drafted_is_refused_by_name(
    served: str, draft: str, settings: dict[str, object], reason: str
) -> None:
    found = embedded_models().get(draft) or (saved(draft).path if draft != "nothing" else Path("/nothing"))
    with pytest.raises(ConfigError, match=reason):
        built(served, found, **settings)


@pytest.mark.parametrize(("kind", "drafts"), [("llama-gqa", 4), ("llama-gqa", 0), ("t5-relu", 4), ("bert", 4)])
def test_one_for_all_models_is_left_out_where_it_is_of_no_use(kind: str, drafts: int) -> None:
    shared = {"draft_model_shared": True, "num_speculative_tokens": drafts, "max_model_len": 60}
    found = built(kind, saved("llama-gqa").path, **shared)
    assert found.info.draft_model == ("llama-gqa" if (kind, drafts) == ("llama-gqa", 4) else "")


def test_one_for_all_models_is_refused_by_the_name_of_a_decoder_with_another_vocabulary() -> None:
    reason = (
        r"^llama-gqa: draft_model: code has another vocabulary .*; num_speculative_tokens 0 serves this model without"
    )
    with pytest.raises(ConfigError, match=reason):
        built("llama-gqa", embedded_models()["code"], draft_model_shared=True)
