"""N-gram drafts change no output, save steps where text repeats, and cost little where it does not."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from zlib import crc32

import pytest

from tests.engine.scripted import Harness
from tests.engine.support import request
from tests.matrix import rest_is_slow
from tests.model.checkpoints import native_backends, saved
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import Request, TokenOutput
from triptych.model.config.cache import PoolSize, StateSize
from triptych.model.engine.builder import LoadedModel, load
from triptych.model.engine.speculation import propose
from triptych.model.engine.speculation.ngrams import LENGTHS, KnownText, NgramDrafts, NgramTables, hash_end
from triptych.model.engine.speculation.propose import MAX_VERIFIED_ROWS


def copying(source: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the token 23 positions back or one of the source, sometimes another; depends on all tokens."""
    chance = crc32(repr((list(source), list(tokens))).encode())
    if chance % 11 == 0:
        return chance // 11 % 50
    if source:
        return source[len(tokens) % len(source)]
    return tokens[-23] if len(tokens) >= 23 else tokens[-1]


def outcomes(outputs: Sequence[TokenOutput]) -> dict[tuple[str, int], tuple[object, ...]]:
    """Return the tokens and the end of each sequence."""
    found: dict[tuple[str, int], tuple[object, ...]] = {}
    for output in outputs:
        key = (output.request_id, output.index)
        tokens, *_ = found.get(key, ([],))
        assert isinstance(tokens, list)
        tokens += output.token_ids
        found[key] = (tokens, output.finish_reason, output.stop_reason, output.error)
    return found


def crowd(harness: Harness, seed: int) -> Harness:
    """Add requests of all kinds over time and abort some of them."""
    rng = random.Random(seed)
    for number in range(14):
        prompt = [rng.randrange(20) for _ in range(rng.randint(1, 40))]
        settings = {"max_tokens": rng.randint(1, 60), "n": rng.choice((1, 1, 1, 3)), "min_tokens": 0}
        if rng.random() < 0.4:
            settings |= {"stop_token_ids": (rng.randrange(50),), "min_tokens": rng.choice((0, 1))}
        if rng.random() < 0.2:
            settings["stop"] = ("never said",)
        if rng.random() < 0.3:
            settings["source"] = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
            prompt = prompt[:3]
        if rng.random() < 0.2:
            settings["num_speculative_tokens"] = rng.choice((0, 1, 30))
        harness.add(f"r{number}", prompt, priority=rng.choice((0, 0, 1)), **settings)
        for _ in range(rng.randrange(4)):
            harness.step()
    return harness.run()


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("seed", rest_is_slow(range(12), lambda seed: seed < 6))
def test_outputs_are_the_same_with_and_without(seed: int, overlap: bool) -> None:
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
    if seed % 4 >= 2:  # recurrent layers, with few snapshots or many
        settings["states"] = StateSize(settings["max_num_seqs"], rng.choice((4, 40)))
    plain = crowd(Harness(**settings), seed)
    drafted = crowd(Harness(**settings, overlap=overlap, num_speculative_tokens=rng.choice((1, 4, 12))), seed)
    assert outcomes(drafted.outputs) == outcomes(plain.outputs)
    stats = drafted.engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 0  # some were rejected, some accepted
    assert len(drafted.runner.steps) < len(plain.runner.steps) or overlap


def collected(outputs: Iterable[TokenOutput]) -> dict[tuple[str, int], list[object]]:
    """Return each sequence's tokens with their exact log-probabilities, and its end."""
    found: dict[tuple[str, int], list[object]] = {}
    for output in outputs:
        ones = found.setdefault((output.request_id, output.index), [])
        ones += zip_longest(output.token_ids, output.logprobs or ())
        if output.finish_reason is not None:
            ones.append((output.finish_reason, output.stop_reason))
    return found


def of_each_way(kind: str) -> list[Request]:
    """Return greedy, sampled, penalised, banned, biased and scored requests."""
    ways: list[dict[str, object]] = [
        {"logprobs": 2},
        {"temperature": 0.3, "top_k": 4, "seed": 3, "logprobs": 0},
        {"temperature": 0.4, "top_p": 0.8, "min_p": 0.1, "n": 2, "seed": 5},
        {"temperature": 0.3, "typical_p": 0.9, "seed": 6},
        {"repetition_penalty": 1.05, "logprobs": 1},
        {"presence_penalty": 0.1, "frequency_penalty": 0.01},
        {"no_repeat_ngram_size": 9, "min_tokens": 20, "ignore_eos": False, "stop_token_ids": tuple(range(40, 60))},
        {"logit_bias": {7: 3.0}, "prompt_logprobs": 1},
        {"num_beams": 3, "n": 2},
    ]
    return [
        request(kind, f"r{at}", 3 + 5 * at, at, **{"max_tokens": 40, **way})  # type: ignore[arg-type]
        for at, way in enumerate(ways)
    ]


def generated(model: LoadedModel, requests: Iterable[Request]) -> dict[tuple[str, int], list[object]]:
    engine, outputs = model.generate, list[TokenOutput]()
    assert engine is not None
    engine.block_manager.clear_cache()
    for one in requests:
        engine.add(one)
    while engine.has_work:
        outputs += engine.step()[0]
        engine.check_invariants()
    assert engine.block_manager.is_empty
    return collected(outputs)


def predicted(one: Request, output: list[object]) -> Request:
    """Return the request with a prediction of its output that is wrong at every seventh token."""
    tokens = [token for token, _ in output[:-1]]  # type: ignore[misc]
    return replace(one, prediction=tuple(1 + token % 7 if at % 7 == 3 else token for at, token in enumerate(tokens)))


def drafting(max_tokens: int, prompt: Sequence[int], source: tuple[int, ...] = ()) -> NgramDrafts:
    """Return drafts over a prompt that is fully indexed."""
    known = KnownText(tuple(prompt), source)
    known.read(len(prompt) + len(source))
    return NgramDrafts(max_tokens, known)


CASES = rest_is_slow(
    [
        *(("llama-gqa", *one) for one in (("float32", "none"), ("float32", "int8"), ("bfloat16", "none"))),
        *(("gemma3", "bfloat16", quantization) for quantization in ("none", "int8", "int4")),
        *((kind, "float32", "none") for kind in ("t5-relu", "bloom", "qwen3-next", "phi3-longrope")),
        ("qwen3-next", "bfloat16", "int8"),
    ],
    lambda kind, dtype, quantization: (
        (kind, dtype, quantization) in (("llama-gqa", "bfloat16", "none"), ("gemma3", "bfloat16", "int8"))
        or kind in ("t5-relu", "phi3-longrope")
        or (kind, quantization) in (("gemma3", "int4"), ("qwen3-next", "int8"))
    ),
)


@pytest.mark.parametrize(("kind", "dtype", "quantization"), CASES)
def test_results_have_the_same_bits_with_and_without(kind: str, dtype: str, quantization: str) -> None:
    if not native_backends() and (dtype, quantization) != ("float32", "none"):
        pytest.skip("no native kernels")
    config = EngineConfig(
        device="cpu", dtype=dtype, quantization=quantization, block_size=4, kv_cache_memory=1 << 20, max_model_len=100
    )
    model = load(ModelSpec(kind, str(saved(kind).path), config))
    assert model.generate is not None
    plain = generated(model, of_each_way(kind))
    assert model.generate.stats().drafts == 0
    found = generated(model, [predicted(one, plain[one.request_id, 0]) for one in of_each_way(kind)])
    assert found == plain
    stats = model.generate.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 100


def test_drafts_cease_where_they_are_wrong_and_begin_again() -> None:
    rng = random.Random(1)
    tokens, counts = [rng.randrange(30) for _ in range(200)], []
    drafts = drafting(8, tokens)
    for at in range(400):
        tokens.append(rng.randrange(30) if at < 300 else tokens[at - 300])
        counts.append(len(drafts.propose(tokens, 200)))
    assert 0 < sum(counts[:30]) < 30
    assert sum(counts[100:300]) < 30  # the 200 tokens all occurred before; one guess in 30 is right by chance
    assert sum(counts[300:310]) > 10 and min(counts[320:]) == 8


def test_a_run_that_repeats_itself_is_drafted_beyond_its_first_copy() -> None:
    tokens = [9, *(5, 6, 7) * 4]
    assert drafting(10, tokens[:5]).propose(tokens, 5) == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]


def test_what_is_known_before_an_output_is_read_over_several_steps() -> None:
    tokens = [*range(20), 1, 2, 3, 4, 52, 53]
    known = KnownText(tuple(tokens[:24]), tuple(range(50, 60)), tuple(range(100, 107)))
    drafts, found = NgramDrafts(4, known), []
    while count := known.read(9):
        found.append((count, drafts.propose(tokens, 24)))
    assert found == [(9, []), (9, []), (9, []), (9, []), (5, [54, 55, 56])]


def test_places_are_found_as_a_table_of_all_n_grams_would() -> None:
    """Check that few places are missed: n-grams share slots, and the latest place stays."""
    rng, latest, found, missed = random.Random(4), dict[bytes, int](), 0, 0
    known = KnownText(tuple(rng.choices(range(1, 100), k=900)))
    while known.read(rng.choice((1, 2, 70))):
        pass
    tokens, own = known.tokens[:], NgramTables(900)
    for place in range(1, 1200):
        if place >= 900:
            before = hash_end(tokens)
            tokens.append(rng.randrange(1, 100))
            own.put(before, tokens)
            places = zip(own.find(hash_end(tokens)), known.tables.find(hash_end(tokens)), strict=True)
        for length in LENGTHS:
            if place >= length:
                latest[tokens[place - length : place].tobytes()] = place
        for length, pair in zip(LENGTHS, places if place >= 900 else (), strict=place >= 900):
            right = latest.get(tokens[-length:].tobytes())
            found += right is not None and right == max(pair)
            missed += right is not None and right != max(pair)
    assert found > 10 * missed > 0


def test_a_long_prompt_takes_little_memory_and_is_shared() -> None:
    harness = Harness(num_speculative_tokens=4)
    harness.add("r", [number * 7 % 991 for number in range(4000)], n=3)
    known = {id(one.drafting.known): one.drafting.known for one in harness.engine.scheduler if one.drafting is not None}
    assert [one.tables.nbytes / 4000 < 50 for one in known.values()] == [True]


def test_a_prompt_is_read_while_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "READ_AT_ONCE", 10)
    harness = Harness(budget=10, script=lambda source, tokens: tokens[-20], num_speculative_tokens=4)
    harness.add("r", [*range(20), *range(20)], max_tokens=20)
    harness.run()
    steps = [(s.num_tokens, len(s.drafts)) for step in harness.runner.steps for s in step.scheduled]
    assert steps[:5] == [(10, 0)] * 4 + [(5, 4)]


def test_a_step_reads_so_many_tokens_for_all_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "READ_AT_ONCE", 10)
    harness = Harness(budget=200, script=lambda source, tokens: 7, num_speculative_tokens=4)
    for number in range(3):
        harness.add(f"r{number}", [number] * 30, max_tokens=30)
    drafts, read = [one.drafting for one in harness.engine.scheduler], []
    for _ in range(2):
        harness.step()
        read.append(sum(len(one.known.tokens) for one in drafts if one is not None))
    assert read == [10, 20]
    harness.run()
    assert harness.engine.stats().accepted_tokens > 20


def test_an_encoder_decoder_drafts_from_its_source() -> None:
    drafts = drafting(4, [1], source=tuple(range(50, 60)))
    assert drafts.propose([1], 1) == []
    assert drafts.propose([1, 52, 53], 1) == [54, 55, 56]


@pytest.mark.parametrize("source", [False, True])
def test_a_suffix_is_read_and_the_prefix_continued(source: bool) -> None:
    prefix, suffix = (1, 2, 3), (9, 1, 2, 3, 4, 5, 6)
    text, place = (90, *prefix, 91, *suffix, 92), (1, 4)
    known = KnownText((0,), text, (), place) if source else KnownText(text, continued=place)
    assert known.read(100) == len(text)
    tokens = [0] if source else list(text)
    assert NgramDrafts(4, known).propose(tokens, len(tokens)) == [4, 5, 6]


def test_drafts_leave_half_of_the_snapshots_where_they_are() -> None:
    """Check that drafts take free slots first, then the oldest snapshots."""
    harness = Harness(num_blocks=200, states=StateSize(2, 8), script=lambda source, tokens: 7, num_speculative_tokens=8)
    for number in range(9):
        harness.add(f"r{number}", [100 + number] * 9, max_tokens=1)
    harness.run()
    assert harness.engine.stats().cached_states == 8
    harness.add("copies", [7] * 6, max_tokens=60)
    stats = harness.run().engine.stats()
    assert stats.accepted_tokens > 40
    assert stats.cached_states >= 4
    for number in (7, 8):  # their snapshots stayed
        harness.add(f"again{number}", [100 + number] * 9, max_tokens=1)
    harness.run()
    assert [sum(o.cached_tokens for o in harness.outputs if o.request_id == f"again{n}") for n in (7, 8)] == [8, 8]


def test_without_slots_to_spare_a_recurrent_model_drafts_nothing() -> None:
    settings = {"states": StateSize(2, 0), "max_num_seqs": 2, "prefix_caching": False, "num_speculative_tokens": 8}
    harness = Harness(script=lambda source, tokens: 7, **settings)
    for number in range(2):
        harness.add(f"r{number}", [7] * 6, max_tokens=20)
    for _ in range(12):
        harness.step()
    assert harness.engine.stats().draft_tokens == 0
    harness.run()


def test_drafts_take_only_what_is_left() -> None:
    """Check blocks for five tokens of each sequence and no draft: no preemption, and all blocks are freed."""
    harness = Harness(num_blocks=6, block_size=4, script=lambda source, tokens: 7, num_speculative_tokens=8)
    made = [harness.add(f"r{number}", [7] * 6, max_tokens=7) for number in range(2)]
    harness.run()
    assert harness.engine.stats().preemptions == 0
    assert [harness.tokens(one.request_id) for one in made] == [[7] * 7] * 2
    drafted = [len(s.drafts) for step in harness.runner.steps for s in step.scheduled]
    assert 0 < max(drafted) <= 6


def test_drafts_take_no_block_that_a_step_launched_ahead_needs() -> None:
    """Check that a rejected draft of one sequence leaves the last three blocks to three others."""
    settings = {"num_blocks": 11, "budget": 64, "overlap": True, "prefix_caching": False}
    harness = Harness(script=lambda source, tokens: 20 + len(tokens), **settings)
    harness.add("r", [7] * 6, max_tokens=12, num_speculative_tokens=16)
    for number in range(3):
        harness.add(f"s{number}", [7] * 8, max_tokens=2)
    stats = harness.run().engine.stats()
    assert stats.draft_tokens > 0 and stats.preemptions == 0


def test_a_batch_without_room_for_drafts_runs_ahead() -> None:
    harness = Harness(num_blocks=400, max_num_seqs=32, budget=400, script=lambda source, tokens: 7, overlap=True)
    for number in range(MAX_VERIFIED_ROWS):
        harness.add(f"r{number}", [7] * 6, max_tokens=20, num_speculative_tokens=8)
    for _ in range(4):
        harness.step()
    assert all(one.has_placeholder for one in harness.engine.scheduler.running)
    harness.run()


def test_drafts_are_counted_with_the_tokens_that_they_became() -> None:
    """Check the counts where a stop string ends the text at any token of a draft."""
    harness = Harness(
        num_blocks=100, script=lambda source, tokens: 7 + len(tokens) % 12 // 11, num_speculative_tokens=8
    )
    harness.add("r", [7] * 6, max_tokens=60)
    stats = harness.run().engine.stats()
    assert all(output.accepted_tokens <= len(output.token_ids) == 1 for output in harness.outputs)
    assert sum(output.accepted_tokens for output in harness.outputs) == stats.accepted_tokens > 20
    assert sum(output.drafted_tokens for output in harness.outputs) == stats.draft_tokens > stats.accepted_tokens


def test_a_full_batch_has_no_drafts() -> None:
    harness = Harness(num_blocks=400, max_num_seqs=40, budget=400, script=lambda source, tokens: 7)
    for number in range(40):
        harness.add(f"r{number}", [7] * 6, max_tokens=5 + number, num_speculative_tokens=8)
    harness.run()
    steps = [step.scheduled for step in harness.runner.steps[1:]]
    rows = [sum(s.num_tokens for s in step) for step in steps if any(s.drafts for s in step)]
    assert max(rows) == MAX_VERIFIED_ROWS
    assert max(len(step) for step in steps) == 40
    assert harness.engine.stats().accepted_tokens > 100
