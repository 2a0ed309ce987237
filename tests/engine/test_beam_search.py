"""Beam search gives the sequences and scores of `transformers`, alone and in a batch, with shared blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.scripted import Harness, Late, ScriptedRunner, expected_tokens, next_token, source_ids
from tests.engine.support import running
from tests.model.checkpoints import DECODERS, START, prompt, saved
from triptych.model.api.request import FinishReason, Request, TokenOutput, token_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.engine.scheduling.beam_search import BeamSearch
from triptych.model.engine.scheduling.scheduled_step import SampledToken, ScheduledSequence, SchedulerOutput

SETTINGS: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 5, "length_penalty": 0.3, "early_stopping": True},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 4, "no_repeat_ngram_size": 2},
    {"num_beams": 3, "repetition_penalty": 1.5, "min_tokens": 6},
]
KINDS = ["t5-relu", "bart", "marian", "llama", "phi3-longrope"]
MAX_TOKENS = 12
EOS = (2, 5, 17, 33)  # random models generate these, so hypotheses end at different lengths


def asked(kind: str, name: str, length: int, **settings: Any) -> Request:
    params = SamplingParams(max_tokens=MAX_TOKENS, n=settings.get("num_beams", 1), **settings)
    ids = prompt(length, length)
    return (
        Request(name, kind, ids, params)
        if kind in DECODERS
        else Request(name, kind, (START,), params, token_source(ids))
    )


@torch.inference_mode()
def theirs(kind: str, request: Request, eos: tuple[int, ...], **more: int) -> list[tuple[list[int], float]]:
    """Return the sequences (without padding) and scores of `transformers`' beam search, best first."""
    params = request.params
    model = saved(kind).reference
    settings = {
        "num_beams": params.num_beams,
        "length_penalty": params.length_penalty,
        "early_stopping": params.early_stopping,
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "repetition_penalty": params.repetition_penalty,
        "min_new_tokens": params.min_tokens,
        **more,
    }
    if request.source is not None:
        settings["decoder_start_token_id"] = START
    found = model.generate(
        torch.tensor([source_ids(request) or request.prompt_token_ids]),
        max_new_tokens=MAX_TOKENS,
        num_return_sequences=params.num_beams,
        do_sample=False,
        eos_token_id=list(eos),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    begin = len(request.prompt_token_ids)
    return [
        (_until(row.tolist()[begin:], eos), score)
        for row, score in zip(found.sequences, found.sequences_scores.tolist(), strict=True)
    ]


def _until(ids: list[int], eos: tuple[int, ...]) -> list[int]:
    ends = [at for at, token in enumerate(ids) if token in eos]
    return ids[: ends[0] + 1] if ends else ids


def ours(outputs: list[TokenOutput], name: str) -> list[tuple[list[int], float]]:
    mine = sorted((o for o in outputs if o.request_id == name), key=lambda o: o.index)
    return [(o.token_ids, o.score or 0.0) for o in mine]


def check(found: list[tuple[list[int], float]], expected: list[tuple[list[int], float]]) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=2e-6, abs=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_and_scores_are_transformers(kind: str, settings: dict[str, Any]) -> None:
    engine = running(kind)
    engine.engine.eos_token_ids = EOS
    requests = [asked(kind, f"r{length}", length, **settings) for length in (5, 11)]
    for request in requests:
        engine.engine.add(request)
    engine.run()
    for request in requests:
        check(ours(engine.outputs, request.request_id), theirs(kind, request, EOS))


LANGUAGE = 40


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("kind", ["m2m-100", "mbart"])
def test_a_forced_language_counts_where_hypotheses_are_compared(kind: str, settings: dict[str, Any]) -> None:
    """`transformers` generates it, so their lengths have one token more than what follows it."""
    engine = running(kind)
    engine.engine.eos_token_ids = EOS
    requests = []
    for length in (5, 11):
        one = asked(kind, f"r{length}", length, **settings)
        params = replace(one.params, max_tokens=MAX_TOKENS - 1)
        requests.append(replace(one, prompt_token_ids=(START, LANGUAGE), params=params, num_forced=1))
        engine.engine.add(requests[-1])
    engine.run()
    for request in requests:
        expected = theirs(kind, request, EOS, forced_bos_token_id=LANGUAGE)
        check(ours(engine.outputs, request.request_id), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_same_in_a_batch_and_when_preempted(kind: str) -> None:
    alone = running(kind)
    alone.engine.add(asked(kind, "beam", 9, num_beams=4))
    alone.run()
    crowd = running(kind, num_blocks=24, budget=16, max_num_seqs=16)
    for number in range(6):
        crowd.engine.add(asked(kind, f"greedy{number}", 7 + number))
        crowd.engine.add(asked(kind, f"beam{number}", 9, num_beams=4))
    crowd.run()
    assert crowd.engine.scheduler.num_preemptions > 0
    for number in range(6):
        check(ours(crowd.outputs, f"beam{number}"), ours(alone.outputs, "beam"))


def test_beams_share_the_prompts_blocks_and_the_source() -> None:
    engine = running("t5-relu", num_blocks=64)
    engine.engine.add(asked("t5-relu", "r", 24, num_beams=4))
    engine.step(3)
    beams = engine.engine.scheduler.running
    assert len(beams) == 4
    assert len({tuple(beam.source_tables[0]) for beam in beams}) == 1
    used = engine.engine.block_manager.num_blocks - engine.engine.block_manager.num_free
    assert used <= 6 + 4  # one source and a block for each beam


class BeamRunner(ScriptedRunner):
    """A scripted runner that returns beam candidates instead of tokens."""

    def _compute(self, step: ScheduledSequence, tokens: list[int]) -> SampledToken | None:
        beams = step.sequence.beams
        made = super()._compute(step, tokens)
        if made is None or beams is None:
            return made
        first = next_token(source_ids(step.sequence.request), tokens)
        found = [((first + offset) % 1000, -0.1 - offset) for offset in range(beams.search.num_candidates)]
        return SampledToken(found[0][0], candidates=found)

    def launch(self, output: SchedulerOutput, before: Late | None = None) -> Late:
        size = self.block_manager.block_size
        contents = {
            (copy.pool, copy.target): [self.written.get((copy.pool, copy.source * size + i)) for i in range(size)]
            for copy in output.copies
        }
        for (pool, target), content in contents.items():
            self.written |= {(pool, target * size + i): one for i, one in enumerate(content)}
        return super().launch(output, before)


def beam_harness(**settings: Any) -> Harness:
    harness = Harness(**settings)
    harness.engine.runner = harness.runner = BeamRunner(harness.engine.block_manager)
    return harness


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("num_blocks", [200, 22])
def test_every_beam_reads_its_own_keys_whatever_the_pool(num_blocks: int, overlap: bool) -> None:
    harness = beam_harness(num_blocks=num_blocks, max_num_seqs=9, overlap=overlap)
    for number in range(5):
        harness.add(f"s{number}", 6, source=5, num_beams=4, n=2, max_tokens=9, seed=number)
        harness.add(f"g{number}", 7, max_tokens=9)
    harness.run()
    ends = harness.ends()
    assert len(ends) == 5 * 2 + 5
    assert set(ends.values()) == {FinishReason.LENGTH}
    assert (harness.engine.scheduler.num_preemptions > 0) == (num_blocks < 200)


def test_search_reserves_slots_for_all_beams_at_admission() -> None:
    harness = beam_harness(max_num_seqs=8)
    for number in range(4):
        harness.add(f"s{number}", 3, num_beams=4, max_tokens=5)
    harness.run()  # the harness checks in every step that at most eight sequences run


def hypotheses(harness: Harness, name: str) -> list[list[int]]:
    return [harness.tokens(name, index) for index in range(2)]


def undisturbed(*arguments: Any, **settings: Any) -> list[list[int]]:
    harness = beam_harness(num_blocks=400, budget=200, max_num_seqs=32)
    harness.add("s", *arguments, **settings)
    return hypotheses(harness.run(), "s")


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["", "uncached"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("steps", [5, 13])
def test_preempted_search_needs_no_more_blocks_than_before(steps: int, overlap: bool, prefix_caching: bool) -> None:
    asked = {"prompt": 60, "num_beams": 6, "n": 2, "max_tokens": 20}
    harness = beam_harness(num_blocks=60, max_num_seqs=16, budget=64, overlap=overlap, prefix_caching=prefix_caching)
    old = harness.add("old", [7] * 61, max_tokens=60)
    harness.add("s", **asked)
    scheduler, manager = harness.engine.scheduler, harness.engine.block_manager
    for _ in range(steps):
        harness.step()
    held = {block for one in scheduler.running if one.beams is not None for block in one.tables[0]}
    scheduler.preempt(scheduler.running[-1])
    newcomer = harness.add("newcomer", 4, max_tokens=30)
    before = manager.num_free
    for _ in range(3):
        harness.step()
    assert {one.request.request_id for one in scheduler.running} == {"old", "s", "newcomer"}
    assert before - manager.num_free <= len(held) + 6 + 2  # at most one more for each beam, and the newcomer's
    recomputed = sum(s.num_tokens for step in harness.runner.steps[-3:] for s in step.scheduled if s.sequence.beams)
    assert recomputed <= 60 + 6 * (steps + 3)  # the prompt is recomputed once
    harness.run()
    assert scheduler.num_preemptions == 1
    assert hypotheses(harness, "s") == undisturbed(**asked)
    assert harness.tokens("old") == expected_tokens(old)
    assert harness.tokens("newcomer") == expected_tokens(newcomer)


def test_preempted_search_of_many_beams_resumes_beside_a_prompt() -> None:
    asked = {"prompt": 9, "num_beams": 17, "n": 2, "max_tokens": 8}
    harness = beam_harness(num_blocks=300, max_num_seqs=24, budget=24, max_model_len=300)
    harness.add("s", **asked)
    for _ in range(4):
        harness.step()
    scheduler = harness.engine.scheduler
    scheduler.preempt(scheduler.running[-1])
    long = harness.add("long", 250, priority=-1, max_tokens=1)  # takes half of a step's token budget
    while not harness.tokens("s"):
        harness.step()
    assert not harness.tokens("long")
    harness.run()
    assert hypotheses(harness, "s") == undisturbed(**asked)
    assert harness.tokens("long") == expected_tokens(long)


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["", "uncached"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 182])
def test_random_preemption_does_not_change_searches(seed: int, overlap: bool, prefix_caching: bool) -> None:
    chance = random.Random(seed)
    harness = beam_harness(
        num_blocks=chance.choice([40, 60, 90]),
        block_size=chance.choice([1, 3, 4]),
        max_num_seqs=12,
        budget=chance.choice([12, 30, 64]),
        prefix_caching=prefix_caching,
        overlap=overlap,
    )
    scheduler, size = harness.engine.scheduler, harness.engine.block_manager.block_size
    made = {}
    for number in range(12):
        beams = chance.choice([2, 4, 6])
        longest = harness.engine.block_manager.num_blocks * size // (beams + 1) - 10
        asked = {"prompt": [chance.randrange(2)] * chance.randint(1, max(1, longest - 10)), "num_beams": beams, "n": 2}
        made[f"s{number}"] = asked | {"max_tokens": chance.randint(2, 9), "source": chance.choice([(), (5,) * 7])}
        harness.add(f"s{number}", **made[f"s{number}"])
    for _ in range(5000):
        if not harness.engine.has_work:
            break
        if scheduler.running and chance.random() < 0.2:
            scheduler.preempt(chance.choice(scheduler.running))
        harness.step()
    assert scheduler.num_preemptions > 3
    for name, asked in made.items():
        assert hypotheses(harness, name) == undisturbed(**asked)


class NarrowRunner(BeamRunner):
    """A beam runner that allows fewer continuations than beams for the first tokens, as a grammar may."""

    def _compute(self, step: ScheduledSequence, tokens: list[int]) -> SampledToken | None:
        made = super()._compute(step, tokens)
        if made is not None and made.candidates and step.sequence.num_output_tokens < 4:
            made.candidates[2:] = [(token, float("-inf")) for token, _ in made.candidates[2:]]  # type: ignore[index]
        return made


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_search_keeps_its_slots_while_it_has_fewer_beams(overlap: bool) -> None:
    harness = Harness(max_num_seqs=8, budget=8, overlap=overlap, num_blocks=200)
    harness.engine.runner = harness.runner = NarrowRunner(harness.engine.block_manager)
    for number in range(4):
        harness.add(f"s{number}", 3 + number, num_beams=4, max_tokens=9)
    harness.add("greedy", 3, max_tokens=9)
    harness.run()  # the harness checks that at most eight run and that all of them get their token
    assert max(len(step.scheduled) for step in harness.runner.steps) == 8


@pytest.mark.parametrize("when", [0, 1, 4])
def test_aborted_search_ends_each_of_its_n_outputs_once(when: int) -> None:
    harness = beam_harness()
    harness.add("s", 6, num_beams=4, n=3, max_tokens=20)
    for _ in range(when):
        harness.step()
    harness.abort("s")
    harness.run()
    assert harness.ends() == {("s", index): FinishReason.CANCELLED for index in range(3)}
    assert (len(harness.tokens("s", 0)) > 0) == (when > 0)


def test_search_past_its_deadline_returns_its_hypotheses() -> None:
    harness = beam_harness()
    harness.add("s", 6, num_beams=2, n=2, max_tokens=20, deadline=0.0)
    harness.step()
    assert harness.ends() == {("s", index): FinishReason.DEADLINE for index in range(2)}


def test_fewer_continuations_than_beams_are_enough() -> None:
    search = BeamSearch(3, 1.0, False, 4, frozenset({9}))
    assert search.advance([[(1, -0.5), (2, float("-inf"))]], [[]]) == [(0, 1)]
    assert not search.done
    assert search.advance([[(9, -0.1), (4, -0.2)]], [[1]]) == [(0, 4)]
    assert search.finished[0].token_ids == (1, 9)
    assert search.finished[0].score == pytest.approx(-0.6 / 2)


def test_hypotheses_that_end_at_once_compete_even_where_the_first_of_them_is_enough() -> None:
    """Check that `early_stopping` counts hypotheses between steps, not within a step."""
    search = BeamSearch(2, 1.0, True, 4, frozenset({9}))
    assert search.advance([[(4, -2.9), (9, -3.0), (5, -3.1)]], [[]]) == [(0, 4), (0, 5)]
    search.advance([[(9, -0.3), (6, -9.0)], [(9, -0.3), (6, -9.0)]], [[4], [5]])
    assert search.done
    assert [one.token_ids for one in search.best([])] == [(4, 9), (5, 9)]  # (9,) has a worse score
