"""Scheduling policy, without a model: which sequences run when, and how they end."""

from __future__ import annotations

import random
import time
from itertools import product

import pytest

from tests.engine.scripted import Harness, expected_tokens, next_token
from tests.matrix import rest_is_slow
from triptych.model.api.messages import Abort
from triptych.model.api.request import FinishReason
from triptych.model.api.sampling_params import Probe
from triptych.model.engine.scheduling.scheduled_step import UNLIMITED, SampledToken, StepBudget
from triptych.model.engine.scheduling.sequence import SequenceState


def test_sequences_join_and_leave_a_running_batch() -> None:
    harness = Harness()
    harness.add("long", max_tokens=10)
    harness.step()
    harness.step()
    harness.add("short", max_tokens=2)
    assert {o.request_id for o in harness.step()} == {"long", "short"}
    harness.step()
    assert harness.ends() == {("short", 0): FinishReason.LENGTH}
    harness.run()
    assert len(harness.tokens("long")) == 10
    assert len(harness.runner.steps) == 10  # no request waited


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_decoding() -> None:
    harness = Harness(budget=8, max_num_seqs=4)
    harness.add("decoding", 3, max_tokens=20)
    harness.step()
    made = harness.add("long", 30, max_tokens=3)
    harness.run()
    chunks = [s.num_tokens for step in harness.runner.steps for s in step.scheduled if s.sequence.request is made]
    assert chunks[:4] == [7, 7, 7, 7]
    assert sum(chunks) == 30 + 2
    assert all(
        any(s.sequence.request.request_id == "decoding" for s in step.scheduled) for step in harness.runner.steps[:20]
    )
    assert harness.tokens("long") == expected_tokens(made)


def test_prefill_does_not_displace_decodes() -> None:
    harness = Harness(budget=8, max_num_seqs=8)
    for i in range(3):
        harness.add(f"decoding-{i}", 1, priority=1, max_tokens=30)
    harness.step()
    harness.add("prompt", 60, priority=0, max_tokens=1)
    harness.run()
    sizes = [{s.sequence.request.request_id: s.num_tokens for s in step.scheduled} for step in harness.runner.steps]
    assert [size["prompt"] for size in sizes if "prompt" in size] == [5] * 12
    assert len(sizes) == 30


def test_questions_do_not_count_as_a_queue_that_slows_streams() -> None:
    """The pacer slows streams down for waiting sequences, since these are to join them; a question never does."""
    harness = Harness(max_num_seqs=2)
    for i in range(4):
        harness.add(f"question-{i}", 3, max_tokens=1, probe=Probe(2, (1, 2)))
    assert (harness.engine.demand().waiting, harness.engine.stats().waiting) == (0, 4)
    harness.add("probed first", 3, max_tokens=2, probe=Probe(2, (1, 2)))
    harness.add("prompt", 3, max_tokens=1)
    assert harness.engine.demand().waiting == 2


def test_first_come_first_served_within_a_priority() -> None:
    harness = Harness(max_num_seqs=1)
    for name in "abcde":
        harness.add(name, max_tokens=2)
    assert harness.run().first_steps == list("abcde")


def test_a_lower_priority_number_goes_first() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in (("later-1", 5), ("first", -1), ("normal-1", 0), ("later-2", 5), ("normal-2", 0)):
        harness.add(name, priority=priority, max_tokens=2)
    assert harness.run().first_steps == ["first", "normal-1", "normal-2", "later-1", "later-2"]


def test_a_large_request_is_not_overtaken_forever() -> None:
    harness = Harness(num_blocks=12, block_size=4, budget=64)
    harness.add("running", 20, max_tokens=8)
    harness.step()
    harness.add("large", 40, max_tokens=2)
    for i in range(5):
        harness.add(f"small-{i}", 2, max_tokens=2)
    assert harness.run().first_steps[:2] == ["running", "large"]


def test_preemption_recomputes_to_the_same_tokens() -> None:
    harness = Harness(num_blocks=12, block_size=4, budget=16)
    made = [harness.add(f"r{i}", 3 + i, max_tokens=25) for i in range(5)]
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    for request in made:
        assert harness.tokens(request.request_id) == expected_tokens(request)


def test_the_oldest_is_never_preempted() -> None:
    harness = Harness(num_blocks=10, block_size=2, budget=16)
    harness.add("oldest", 2, max_tokens=16)
    for i in range(6):
        harness.add(f"r{i}", 2, max_tokens=14)
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    starts = [
        s.start for step in harness.runner.steps for s in step.scheduled if s.sequence.request.request_id == "oldest"
    ]
    assert starts == sorted(set(starts))
    assert next(iter(harness.ends())) == ("oldest", 0)


def test_a_low_priority_is_preempted_before_a_high_one_that_came_later() -> None:
    harness = Harness(num_blocks=8, block_size=2, budget=16)
    harness.add("low", 2, priority=9, max_tokens=10)
    harness.add("high", 2, priority=0, max_tokens=10)
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    assert list(harness.ends()) == [("high", 0), ("low", 0)]


def test_an_encoder_decoder_is_admitted_with_its_source_and_encoded_once() -> None:
    harness = Harness(num_blocks=16, block_size=4)
    made = harness.add("r", 1, source=10, max_tokens=6)
    harness.step()
    (sequence,) = harness.engine.scheduler.running
    assert (len(sequence.source_tables[0]), len(sequence.tables[0])) == (3, 1)
    harness.run()
    assert [s.encode_source for step in harness.runner.steps for s in step.scheduled] == [True] + [False] * 5
    assert harness.tokens("r") == expected_tokens(made)


def test_sources_have_a_bound_of_their_own_in_a_step() -> None:
    harness = Harness(budget=32, num_blocks=64)
    for i in range(5):
        harness.add(f"r{i}", 1, source=15, max_tokens=4)
    harness.run()
    read = [sum(s.sequence.source_length for s in step.scheduled if s.encode_source) for step in harness.runner.steps]
    assert read[:3] == [30, 30, 15]
    assert sum(read) == 75


def test_a_source_is_cut_between_layers_where_a_step_has_no_time_for_it() -> None:
    harness = Harness(budget=32, num_blocks=64, encoder_layers=4)
    stream = harness.add("stream", 1, source=4, max_tokens=20)
    harness.step()
    first, second = (harness.add(name, 1, source=12, max_tokens=3) for name in ("first", "second"))
    scheduler = harness.engine.scheduler
    seen = []
    for limit in (3, 7, 5, 2, 8, 12):
        harness.limits = StepBudget(whole_tokens=limit)
        demand = harness.engine.demand()
        harness.step()
        begun = [s.sequence.request.request_id for s in harness.runner.steps[-1].scheduled if s.encode_source]
        seen.append((demand.whole_tokens, demand.all_whole_tokens, len(harness.runner.ahead), begun))
    assert [layers for _, layers in harness.runner.ahead] == [1, 2, 1, 2]
    assert seen == [
        (3, 24, 1, []),
        (3, 21, 2, []),
        (3, 15, 2, ["first"]),
        (3, 12, 3, []),
        (3, 9, 4, []),
        (3, 3, 4, ["second"]),
    ]
    harness.limits = UNLIMITED
    harness.run()
    assert scheduler.source_passes.current is None
    assert all(harness.tokens(one.request_id) == expected_tokens(one) for one in (stream, first, second))


def test_a_source_that_is_begun_is_forgotten_or_left_whole() -> None:
    harness = Harness(budget=32, num_blocks=64, encoder_layers=4)
    harness.limits = StepBudget(whole_tokens=3)
    harness.add("gone", 1, source=12)
    harness.step()
    assert harness.runner.ahead == [(harness.engine.scheduler.waiting[0].request.source.token_ids, 1)]  # type: ignore[union-attr]
    harness.abort("gone")
    assert harness.engine.scheduler.source_passes.current is None

    def fail(*_: object) -> None:
        raise RuntimeError("a fault of this source")

    harness.runner.encode_ahead = fail  # type: ignore[method-assign]
    failed = harness.add("failed", 1, source=12, max_tokens=2)
    harness.step()
    assert harness.engine.demand().whole_tokens == 12
    harness.run()
    assert harness.tokens("failed") == expected_tokens(failed)
    urgent = Harness(budget=32, num_blocks=64, encoder_layers=4)
    urgent.limits = StepBudget(whole_tokens=3)
    made = [urgent.add("low", 1, source=12, max_tokens=2, priority=5)]
    urgent.step()
    made.append(urgent.add("high", 1, source=8, max_tokens=2))
    urgent.run()
    assert urgent.first_steps == ["high", "low"]
    assert all(urgent.tokens(one.request_id) == expected_tokens(one) for one in made)


def test_an_urgent_request_goes_on_with_the_source_that_another_has_begun() -> None:
    harness, source = Harness(budget=32, num_blocks=64, encoder_layers=4), range(700, 712)
    harness.limits = StepBudget(whole_tokens=6)
    harness.add("low", 1, source=source, max_tokens=1, priority=5, cache_salt="a")
    harness.step()
    harness.add("high", 1, source=source, max_tokens=1, cache_salt="b")
    seen = []
    while harness.engine.has_work:
        left = harness.engine.demand().all_whole_tokens
        outputs, stats = harness.engine.step(harness.limits)
        assert stats is not None
        seen.append((left, stats.num_whole_tokens, [output.request_id for output in outputs]))
    # `high` uses the source layers computed for `low`, which then starts again.
    assert seen == [(12, 6, ["high"]), (12, 6, []), (6, 6, ["low"])]
    assert harness.runner.ahead == [(tuple(source), 2)] * 2


def test_encoder_decoders_wait_for_cross_blocks() -> None:
    harness = Harness(num_blocks=6, block_size=4)
    made = [harness.add(f"r{i}", 1, source=12, max_tokens=4) for i in range(3)]
    harness.step()
    assert len(harness.engine.scheduler.running) == 1  # 3 + 1 blocks of 6
    harness.run()
    assert all(harness.tokens(r.request_id) == expected_tokens(r) for r in made)


def test_preempted_encoder_decoders_encode_their_source_again() -> None:
    harness = Harness(num_blocks=10, block_size=4, budget=32)
    made = [harness.add(f"r{i}", 1, source=6, max_tokens=14) for i in range(3)]
    harness.run()
    assert harness.engine.scheduler.num_preemptions > 0
    assert all(harness.tokens(r.request_id) == expected_tokens(r) for r in made)


def test_aborts_of_one_frame_look_at_the_sequences_once(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(max_num_seqs=1)
    for at in range(40):
        harness.add(f"r{at}", max_tokens=3, n=2)
    harness.step()
    passes, scheduler = [], type(harness.engine.scheduler)
    all_of = scheduler.__iter__
    monkeypatch.setattr(scheduler, "__iter__", lambda self: passes.append(1) or all_of(self))  # type: ignore[func-returns-value]
    cancelled, stopped = FinishReason.CANCELLED, FinishReason.STOP
    aborts = [Abort("scripted", f"r{at}", None, cancelled) for at in range(1, 39)]
    harness.outputs += harness.engine.abort_all([*aborts, Abort("scripted", "r39", 1, stopped)])
    assert len(passes) == 1
    monkeypatch.undo()
    harness.run()
    ended = harness.ends()
    assert {ended[f"r{at}", index] for at in range(1, 39) for index in (0, 1)} == {cancelled}
    assert (ended["r39", 0], ended["r39", 1]) == (FinishReason.LENGTH, stopped)


def test_deadlines_end_running_and_waiting_sequences() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("running", max_tokens=100, deadline=time.monotonic() + 3600)
    harness.add("patient", max_tokens=1)
    harness.step()
    harness.add("waiting", deadline=time.monotonic() - 1)
    harness.step()
    assert harness.ends() == {("waiting", 0): FinishReason.DEADLINE}
    harness.engine._end_expired(time.monotonic() + 3601)
    harness.step()
    assert harness.ends()["running", 0] is FinishReason.DEADLINE
    harness.run()
    assert harness.ends()["patient", 0] is FinishReason.LENGTH


def test_abort_frees_the_blocks_at_once_and_is_idempotent() -> None:
    harness = Harness(max_num_seqs=2)
    for name in "abc":
        harness.add(name, max_tokens=50)
    harness.step()
    for name in ("a", "c", "a", "unknown"):
        harness.abort(name)
    assert harness.ends() == {("a", 0): FinishReason.CANCELLED, ("c", 0): FinishReason.CANCELLED}
    held = {s.request.request_id for s in harness.engine.scheduler if s.tables[0]}
    assert held == {"b"}
    harness.run()
    assert len(harness.tokens("b")) == 50


def test_one_of_n_sequences_can_be_aborted() -> None:
    harness = Harness()
    harness.add("r", n=3, max_tokens=4)
    harness.step()
    harness.step()
    harness.abort("r", 1)
    harness.run()
    assert harness.ends() == {
        ("r", 1): FinishReason.CANCELLED,
        ("r", 0): FinishReason.LENGTH,
        ("r", 2): FinishReason.LENGTH,
    }
    assert [len(harness.tokens("r", i)) for i in range(3)] == [4, 2, 4]


class Broken:
    """A grammar that accepts no token."""

    def accept(self, token_id: int) -> None:
        raise RuntimeError("of this output alone")

    def fork(self) -> Broken:
        return self


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_sequence_that_cannot_take_its_token_fails_alone(overlap: bool) -> None:
    harness = Harness(overlap=overlap)
    made = [harness.add(f"r{i}", 5 + i, max_tokens=8) for i in range(3)]
    harness.step()
    harness.engine.scheduler.running[1].matcher = Broken()  # type: ignore[assignment]
    harness.run()
    assert harness.ends() == {("r0", 0): "length", ("r1", 0): "error", ("r2", 0): "length"}
    assert harness.tokens("r2") == expected_tokens(made[2])


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("when", range(1, 7))
def test_recover_ends_each_sequence_once_and_resets_the_engine(
    when: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(overlap=overlap, max_num_seqs=3)
    for number in range(5):
        harness.add(f"r{number}", 5, max_tokens=2 + number, n=1 + number % 2)
    calls = []
    take = harness.engine._append_token

    def breaks(sequence: SequenceState, token: SampledToken) -> None:
        calls.append(sequence)
        assert len(calls) != 2 * when, "blocks lost or doubled"
        take(sequence, token)

    monkeypatch.setattr(harness.engine, "_append_token", breaks)
    with pytest.raises(AssertionError, match="lost or doubled"):
        harness.run()
    harness.outputs += harness.engine.recover()
    assert len(harness.ends()) == 7
    assert "error" in harness.ends().values()
    assert not harness.engine.has_work
    harness.engine.check_invariants()
    made = harness.add("again", 9, max_tokens=8)
    harness.run()
    assert harness.tokens("again") == expected_tokens(made)


def seventh(source: object, tokens: list[int]) -> int:
    """Return token 7 at each fifth position, else a token unique to the position."""
    return 7 if len(tokens) % 5 == 0 else 100 + len(tokens)


@pytest.mark.parametrize(
    ("settings", "length", "reason"),
    [
        ({}, 1, FinishReason.STOP),  # the prompt has 5 tokens, so the first is the end-of-sequence id
        ({"min_tokens": 1}, 6, FinishReason.STOP),
        ({"min_tokens": 6}, 11, FinishReason.STOP),
        ({"ignore_eos": True}, 30, FinishReason.LENGTH),
        ({"ignore_eos": True, "stop_token_ids": (103, 106)}, 2, FinishReason.STOP),
        ({"ignore_eos": True, "stop_token_ids": (7,)}, 1, FinishReason.STOP),
        ({"max_tokens": 1, "min_tokens": 1}, 1, FinishReason.LENGTH),
        ({"max_tokens": 1}, 1, FinishReason.STOP),  # an end at the last place is a stop
        ({"ignore_eos": True, "max_tokens": 500}, 123, FinishReason.LENGTH),  # the context is full: 128 - 5
    ],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_when_a_sequence_ends(settings: dict[str, object], length: int, reason: FinishReason, overlap: bool) -> None:
    harness = Harness(eos_token_ids=(7,), script=seventh, overlap=overlap)
    harness.add("r", 5, **{"max_tokens": 30, **settings})
    harness.run()
    assert (len(harness.tokens("r")), harness.ends()["r", 0]) == (length, reason)
    stop = harness.outputs[-1].stop_reason
    assert stop == (harness.tokens("r")[-1] if reason is FinishReason.STOP else None)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_prompt_that_fills_context_and_pool_still_gets_a_token(overlap: bool) -> None:
    harness = Harness(num_blocks=10, block_size=4, budget=16, max_model_len=40, overlap=overlap)
    made = harness.add("r", 40, max_tokens=1)
    harness.run()
    assert harness.tokens("r") == expected_tokens(made)
    assert harness.ends()["r", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("source", [0, 40])
def test_what_fits_in_an_empty_engine_finishes(source: int, overlap: bool) -> None:
    """Check requests of the full context, each needing the whole pool, together with small ones."""
    harness = Harness(num_blocks=20 if source else 10, block_size=4, budget=40, max_model_len=40, overlap=overlap)
    made = [harness.add(f"full-{i}", 1 if source else 30, source=source, max_tokens=10) for i in range(4)]
    made += [harness.add(f"small-{i}", 2, source=source and 2, max_tokens=38) for i in range(6)]
    harness.run()
    for request in made:
        assert harness.tokens(request.request_id) == expected_tokens(request)


RANDOM = rest_is_slow(
    product(range(6), (False, True), (False, True)),
    lambda seed, encoder, overlap: seed < 3 and overlap == (encoder == (seed == 1)),
)


@pytest.mark.parametrize(("seed", "encoder", "overlap"), RANDOM)
def test_a_thousand_random_steps_leave_every_block_free(seed: int, encoder: bool, overlap: bool) -> None:
    chance = random.Random(seed)
    size = chance.choice([1, 3, 4, 16])
    context = 48
    harness = Harness(
        num_blocks=(2 if encoder else 1) * -(-context // size) + chance.randrange(10),
        block_size=size,
        max_num_seqs=chance.choice([1, 3, 8]),
        budget=chance.choice([context, 60, 200]) if encoder else chance.choice([8, 17, 64]),
        max_model_len=context,
        eos_token_ids=tuple(range(1, 12)),
        prefix_caching=seed % 3 != 2,
        overlap=overlap,
    )
    made = {}
    beginnings = [chance.randrange(VOCAB) for _ in range(context)]
    for at in range(1000):
        event = chance.random()
        if event < 0.12:
            prompt = chance.randint(1, 4 if encoder else 30)
            made[f"r{at}"] = harness.add(
                f"r{at}",
                [chance.randrange(VOCAB)] * prompt if chance.random() < 0.5 else [*beginnings[: prompt - 1], at % 7],
                source=[chance.randrange(3)] * chance.choice([7, context // 2, context]) if encoder else 0,
                max_tokens=chance.randint(1, context - prompt),
                n=chance.choice([1, 1, 1, 3]),
                priority=chance.choice([0, 0, 1, -1]),
                ignore_eos=chance.random() < 0.3,
                min_tokens=chance.choice([0, 0, 5]),
                no_repeat_ngram_size=chance.choice([0, 0, 0, 9]),  # has to see each token before the next step
                deadline=time.monotonic() - 1 if chance.random() < 0.05 else None,
            )
        elif event < 0.16 and made:
            harness.abort(chance.choice(list(made)), chance.choice([None, 0, 1]))
        harness.step()
    harness.run()
    ends = harness.ends()
    assert len(ends) == sum(request.params.n for request in made.values())  # each ended exactly once
    assert set(ends.values()) >= {FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.DEADLINE}
    for (name, index), reason in ends.items():
        tokens = harness.tokens(name, index)
        assert tokens == expected_tokens(made[name])[: len(tokens)]
        assert reason is not FinishReason.LENGTH or len(tokens) == made[name].params.max_tokens
    if harness.engine.scheduler.max_num_seqs > 3:
        assert harness.engine.scheduler.num_preemptions > 0


VOCAB = 1000


def test_control_the_script_depends_on_every_token() -> None:
    assert len({next_token((), tokens) for tokens in ([1, 2, 3], [1, 2, 4], [3, 2, 1], [1, 2])}) == 4
