"""The step pacer: no work delays a stream beyond its limit, and no work starves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.engine.scripted import Harness, Late, ScriptedRunner, expected_tokens, request
from tests.engine.simulated import Simulated, Streams, Texts, Translations, simulate
from triptych.model.engine import generate_engine as engine_module
from triptych.model.engine.scheduling.scheduled_step import (
    DECODES_ONLY,
    SampledToken,
    SchedulerOutput,
    StepBudget,
    StepDemand,
)
from triptych.model.engine.step_pacer import (
    FIRST_TOKENS,
    MAX_STEP_SECONDS,
    MIN_GPU_TOKENS,
    MIN_TOKENS,
    SLOWDOWN,
    EngineKey,
    StepPacer,
    StepWork,
)

CODE, EMBED, NORMALIZE = ("code", "generate"), ("embed", "encode"), ("normalize", "generate")
OTHER = ("other", "encode")


def code() -> Streams:
    return Streams(4, 0.004)


def texts() -> Texts:
    return Texts([5 + 7 * i % 55 for i in range(128)])


def translations(streams: bool = False) -> Translations:
    return Translations(8, 200, 40, streams=streams)


def decoding(decodes: int = 8, prompt: int = 0, waiting: int = 0) -> dict[tuple[str, str], StepDemand]:
    return {CODE: StepDemand(decodes, True, waiting, prompt)}


def measured() -> StepPacer:
    """Return a pacer that has observed 10 ms for a decode step and 0.2 ms for a prompt token."""
    pacer = StepPacer()
    for tokens in (25, 100, 400) * 20:
        pacer.observe(CODE, StepWork(0.010, 8))
        pacer.observe(CODE, StepWork(0.010 + tokens * 0.0002, 8, tokens))
    pacer.observe(CODE, StepWork(0.010, 8))
    return pacer


def prompt_limit(pacer: StepPacer, waiting: int = 0) -> int:
    """Return the prompt tokens allowed in a step with decodes, once earlier prompts are paid for."""
    limits = []
    for _ in range(40):
        turn = pacer.next(decoding(prompt=10_000, waiting=waiting))
        assert turn is not None
        limits.append(turn.budget.prompt_tokens or 0)
    return limits[-1]


def test_first_step_only_decodes() -> None:
    turn = StepPacer().next(decoding(prompt=100))
    assert turn is not None and turn.budget == DECODES_ONLY


def test_steps_with_prompts_last_slowdown_times_a_decode_step() -> None:
    assert 0.010 + prompt_limit(measured()) * 0.0002 == pytest.approx(SLOWDOWN * 0.010, rel=0.05)


def test_a_queue_lets_steps_last_longer_up_to_a_bound() -> None:
    limits = [prompt_limit(measured(), waiting) for waiting in (0, 8, 24, 1000)]
    assert limits == pytest.approx([50 * (SLOWDOWN - 1 + extra) for extra in (0, 1, 3)] + [350], rel=0.05)


def test_outlier_hardly_counts_and_a_lasting_change_does() -> None:
    pacer = measured()
    pacer.observe(CODE, StepWork(3.0, 8, 100))  # in a paused container
    assert prompt_limit(pacer) == pytest.approx(50 * (SLOWDOWN - 1), rel=0.5)
    for tokens in (25, 100, 400) * 20:  # another program uses most of the CPU
        pacer.observe(CODE, StepWork(0.100, 8))
        pacer.observe(CODE, StepWork(0.100 + tokens * 0.002, 8, tokens))
    pacer.observe(CODE, StepWork(0.100, 8))
    assert 0.100 + prompt_limit(pacer) * 0.002 == pytest.approx(SLOWDOWN * 0.100, rel=0.1)


def test_under_lasting_load_the_cost_of_decoding_is_measured_again() -> None:
    engine = Streams(4, 0.004, prompts=[10**9])
    pacer = StepPacer()
    simulate({CODE: engine}, 2.0, pacer)
    engine.sequences, engine.decode = 30, 0.012
    shares = simulate({CODE: engine}, 8.0, pacer)
    alone = [work for _, work in shares.steps if not work.prompt_tokens]
    assert 0.02 < len(alone) / len(shares.steps) < 0.05
    assert shares.steps[-1][1].seconds == pytest.approx(SLOWDOWN * 0.012, rel=0.1)


def test_a_step_without_decodes_is_cut_by_time() -> None:
    pacer = StepPacer()
    unknown = pacer.next(decoding(0, prompt=10_000))
    assert unknown is not None and unknown.budget.prompt_tokens == FIRST_TOKENS
    for tokens in (200, 20):
        pacer.observe(CODE, StepWork(0.005 * tokens, 0, tokens))
    known = pacer.next(decoding(0, prompt=10_000))
    assert known is not None and known.budget.prompt_tokens == pytest.approx(MAX_STEP_SECONDS / 0.005, rel=0.01)


def test_on_a_slow_machine_only_the_first_step_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an engine that takes 100 ms per token."""
    harness = Harness(budget=512, num_blocks=128, max_num_seqs=4, max_model_len=512)
    runner = Timed(harness.engine.block_manager)
    runner.decode, runner.eager, runner.per_token = 0.1, 0.0, 0.1
    harness.engine.runner = runner
    monkeypatch.setattr(engine_module, "time", runner)
    harness.add("long", 300, max_tokens=1)
    harness.add("short", [500] * 60, max_tokens=1)
    pacer, tokens = StepPacer(), []
    while harness.engine.has_work:
        turn = pacer.next({CODE: harness.engine.demand()})
        assert turn is not None
        _, stats = harness.engine.step(turn.budget)
        assert stats is not None
        tokens.append(stats.num_tokens)
        pacer.observe(CODE, StepWork(stats.seconds, stats.num_decodes, stats.num_tokens - stats.num_decodes))
    first, *others = tokens
    assert first == FIRST_TOKENS
    assert 0.9 * MAX_STEP_SECONDS < 0.1 * max(others) <= MAX_STEP_SECONDS + 0.01
    assert sum(tokens) == 360


def test_prompt_makes_progress_at_any_cost() -> None:
    engine = Streams(4, 0.001, per_token=0.1, prompts=[64])
    shares = simulate({CODE: engine}, 20.0)
    assert not engine.prompts
    assert max(work.prompt_tokens for _, work in shares.steps) <= 2 * MIN_TOKENS


def alone(engine: Texts | Translations) -> int:
    """Return the background work done without other engines."""
    simulate({OTHER: engine})
    return engine.done


@pytest.mark.parametrize(
    "others",
    [
        {EMBED: texts},
        {NORMALIZE: translations},
        {EMBED: texts, NORMALIZE: translations},
    ],
    ids=["texts", "translations", "both"],
)
def test_streams_and_background_models_get_their_shares(
    others: dict[EngineKey, Callable[[], Texts | Translations]],
) -> None:
    made = {key: make() for key, make in others.items()}
    shares = simulate({CODE: code(), **made})
    assert shares.between_tokens(CODE) <= 2.5 * 0.004 + 0.001
    assert len(shares.tokens[CODE]) >= 0.4 * 10.0 / 0.004
    assert sum(engine.done / alone(others[key]()) for key, engine in made.items()) >= 0.4


def test_streaming_models_share_time_at_any_step_cost() -> None:
    """Check a small model that takes many steps to one of a large model."""
    shares = simulate({CODE: Streams(4, 0.002), NORMALIZE: Streams(1, 0.05)})
    assert shares.of(CODE) == pytest.approx(0.5, abs=0.02)
    assert len(shares.tokens[CODE]) == pytest.approx(25 * len(shares.tokens[NORMALIZE]), rel=0.05)


def test_prompts_of_one_stream_do_not_slow_other_streams() -> None:
    shares = simulate({CODE: code()}, 4.0, prompts=[(0.5 * i, CODE, 900) for i in range(8)])
    assert shares.between_tokens(CODE) <= 2.5 * 0.004 + 0.001


def test_streamed_translations_share_with_other_streams() -> None:
    shares = simulate({CODE: code(), NORMALIZE: translations(streams=True)})
    assert len(shares.tokens[CODE]) >= 0.4 * 10.0 / 0.004
    assert shares.between_tokens(CODE, 0.5) <= 2.5 * 0.004 + 0.001


@pytest.mark.parametrize(("running", "least", "most"), [(1, 0.9, 0.99), (4, 0.75, 0.95), (7, 0.5, 0.8)])
def test_a_background_batch_is_filled_before_it_decodes(running: int, least: float, most: float) -> None:
    """Check the share of background work that eight clients' sources get while some of them decode."""
    pacer = StepPacer()
    pacer.observe(CODE, StepWork(0.004, 4))
    for _ in range(20):
        pacer.observe(NORMALIZE, StepWork(0.002, 4))
        pacer.observe(NORMALIZE, StepWork(0.002, 0, 0, 66))
    waiting = 8 - running
    demands = {CODE: StepDemand(4, True), NORMALIZE: StepDemand(running, False, waiting, 0, 66, 200 * waiting)}
    seconds = {"decode": 0.0, "prefill": 0.0}
    for _ in range(2000):
        turn = pacer.next(demands)
        assert turn is not None
        if turn.engine == CODE:
            work = StepWork(0.004, 4)
        elif turn.budget.decodes:
            work = StepWork(0.002, running)
            seconds["decode"] += work.seconds
        else:
            work = StepWork(3e-5 * max(turn.budget.whole_tokens or 0, 66), 0, 0, max(turn.budget.whole_tokens or 0, 66))
            seconds["prefill"] += work.seconds
        pacer.observe(turn.engine, work)
    assert least < seconds["prefill"] / sum(seconds.values()) < most


@pytest.mark.parametrize("waiting", [8, 256])
@pytest.mark.parametrize(
    ("prompts", "texts"),
    [(0, True), (2000, False)],
    ids=["the batch is full, the model encodes too", "no block is free"],
)
def test_a_background_batch_decodes_where_no_waiting_sequence_can_begin(
    waiting: int, prompts: int, texts: bool
) -> None:
    """Check that a long queue that cannot begin takes no time from the sequences that decode."""
    pacer, encode = StepPacer(), ("normalize", "encode")
    pacer.observe(CODE, StepWork(0.004, 4))
    for _ in range(20):
        pacer.observe(NORMALIZE, StepWork(0.002, 8))
        pacer.observe(NORMALIZE, StepWork(0.002, 0, 66))
        pacer.observe(encode, StepWork(0.002, 0, 0, 66))
    demands = {CODE: StepDemand(4, True), NORMALIZE: StepDemand(8, False, waiting, prompts)}
    if texts:
        demands[encode] = StepDemand(0, False, 8, 0, 66, 400)
    seconds = {CODE: 0.0, NORMALIZE: 0.0, encode: 0.0}
    for _ in range(4000):
        turn = pacer.next(demands)
        assert turn is not None
        if turn.engine == NORMALIZE and not turn.budget.decodes:
            continue  # which finds nothing to compute
        work = {CODE: StepWork(0.004, 4), NORMALIZE: StepWork(0.002, 8), encode: StepWork(0.002, 0, 0, 66)}[turn.engine]
        seconds[turn.engine] += work.seconds
        pacer.observe(turn.engine, work)
    assert seconds[NORMALIZE] > (0.2 if texts else 0.3) * sum(seconds.values())


def test_unsplittable_text_waits_until_the_credit_covers_it() -> None:
    engine = Texts([2000])  # 60 ms
    shares = simulate({CODE: code(), EMBED: engine})
    assert shares.of(EMBED) == pytest.approx(1 - 1 / SLOWDOWN, abs=0.03)
    began = [at for at, (key, _) in enumerate(shares.steps) if key == EMBED]
    assert min(after - before for before, after in pairwise(began)) >= 0.060 / 0.004 - 2


def test_a_long_text_pauses_between_its_layers() -> None:
    """Check a text of 60 ms in twelve layers, between decode steps of 4 ms."""
    engine = Texts([2000], layers=12)
    shares = simulate({CODE: code(), EMBED: engine})
    assert shares.of(EMBED) == pytest.approx(1 - 1 / SLOWDOWN, abs=0.03)
    assert shares.between_tokens(CODE) <= 2.5 * 0.004 + 0.001


def test_weights_divide_the_time_between_models() -> None:
    for weight in (1.0, 3.0):
        engines = {EMBED: texts(), OTHER: Texts([100] * 10, per_token=3e-4)}
        assert simulate(engines, 20.0, StepPacer({"embed": weight})).of(EMBED) == pytest.approx(
            weight / (weight + 1), abs=0.03
        )
        shares = simulate({CODE: code(), EMBED: texts()}, 20.0, StepPacer({"code": weight}))
        assert shares.of(CODE) == pytest.approx(weight / (weight + SLOWDOWN - 1), abs=0.06)


def test_idle_engine_saves_up_no_time() -> None:
    late = Texts([100] * 10)
    engines: dict[tuple[str, str], Simulated] = {CODE: code(), EMBED: texts()}
    pacer = StepPacer()
    simulate(engines, 5.0, pacer)
    shares = simulate({**engines, OTHER: late}, 2.0, pacer)
    assert shares.of(OTHER) == pytest.approx(shares.of(EMBED), abs=0.05)
    assert shares.between_tokens(CODE) <= 2.5 * 0.004 + 0.001


def test_an_engine_that_cannot_use_its_turns_does_not_take_those_of_others() -> None:
    """Check an engine whose waiting sequences find no free block."""
    pacer = StepPacer()
    for engine in (CODE, EMBED):
        pacer.observe(engine, StepWork(0.004, 4) if engine == CODE else StepWork(0.004, 0, 0, 100))
    pacer.observe(NORMALIZE, StepWork(0.001, 0, 8, 200))
    demands = {
        CODE: StepDemand(4, True),
        NORMALIZE: StepDemand(0, False, 8, 8, 200, 1600),
        EMBED: StepDemand(0, False, 8, 0, 50, 400),
    }
    turns = []
    for _ in range(200):
        turn = pacer.next(demands)
        assert turn is not None
        turns.append(turn.engine)
        if turn.engine == CODE:
            pacer.observe(CODE, StepWork(0.004, 4))
        elif turn.engine == EMBED:
            pacer.observe(EMBED, StepWork(0.004, 0, 0, 100))
    assert turns.count(EMBED) >= 20


class Timed(ScriptedRunner):
    """A runner with virtual time: as on a GPU, decode steps are replayed, and steps with prompts are launched."""

    now = 0.0
    decode, eager, per_token = 0.003, 0.006, 1e-5

    def launch(self, output: SchedulerOutput, before: Late | None = None) -> Late:
        only_decodes = all(step.num_tokens == 1 for step in output.scheduled)
        self.now += self.decode if only_decodes else self.eager + self.per_token * output.num_tokens
        return Late([SampledToken(7) if step.samples else None for step in output.scheduled], {})

    def monotonic(self) -> float:
        return self.now


def first_tokens(runner: Timed, harness: Harness, arrivals: list[float]) -> list[float]:
    """Return the seconds to the first token of prompts of 1,500 tokens, with 32 streams running."""
    for number in range(32):
        harness.engine.add(replace(request(f"stream-{number}", [number] * 20, max_tokens=9000), streams=True))
    pacer, asked, found = StepPacer(min_chunk_tokens=MIN_GPU_TOKENS), dict[str, float](), list[float]()
    coming = [(at, f"prompt-{number}") for number, at in enumerate(arrivals)]
    while len(found) < len(arrivals):
        while coming and coming[0][0] <= runner.now:
            at, name = coming.pop(0)
            asked[name] = at
            harness.engine.add(replace(request(name, [100 + len(coming)] * 1500, max_tokens=1), streams=True))
        turn = pacer.next({CODE: harness.engine.demand()})
        assert turn is not None
        outputs, stats = harness.engine.step(turn.budget)
        assert stats is not None
        work = StepWork(stats.seconds, stats.num_decodes, stats.num_tokens - stats.num_decodes)
        pacer.observe(CODE, work)
        found += [runner.now - asked[output.request_id] for output in outputs if output.finish_reason]
    return found


@pytest.mark.parametrize("eager", [0.003, 0.004, 0.006, 0.008, 0.010, 0.014])
def test_where_prompts_make_a_step_much_slower_first_tokens_still_come(
    eager: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check, with decode steps of 3 ms, at most twice the time of prompts that get half of it in one piece."""
    for arrivals in ([1.0 + 0.25 * number for number in range(6)], [1.0] * 6):
        harness = Harness(num_blocks=4000, block_size=64, max_num_seqs=64, budget=8192, max_model_len=10_000)
        runner = Timed(harness.engine.block_manager)
        harness.engine.runner, runner.eager = runner, eager
        monkeypatch.setattr(engine_module, "time", runner)
        together = 1 if len(set(arrivals)) > 1 else len(arrivals)
        ideal = SLOWDOWN * (eager - Timed.decode + Timed.per_token * 1500 * together)
        assert max(first_tokens(runner, harness, arrivals)) <= 2 * ideal


def test_beside_decodes_prompts_take_no_more_than_the_limit() -> None:
    harness = Harness(budget=64)
    harness.add("a", 3, max_tokens=30)
    harness.step()
    harness.limits = StepBudget(prompt_tokens=6)
    long = harness.add("long", 50, max_tokens=2)
    while harness.engine.has_work:
        harness.step()
        assert sum(s.num_tokens for s in harness.runner.steps[-1].scheduled if s.num_tokens > 1) <= 6
    assert harness.tokens("long") == expected_tokens(long)


def test_step_may_leave_decodes_out() -> None:
    harness = Harness(budget=64)
    harness.add("a", 3, max_tokens=30)
    harness.step()
    harness.add("long", 50, max_tokens=2)
    harness.engine.step(StepBudget(decodes=False))
    assert [s.sequence.request.request_id for s in harness.runner.steps[-1].scheduled] == ["long"]
    harness.engine.step(DECODES_ONLY)
    assert [s.num_tokens for s in harness.runner.steps[-1].scheduled] == [1, 1]


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    harness = Harness(budget=64)
    harness.add("long", 50, max_tokens=1)
    harness.step()
    assert harness.runner.steps[0].scheduled[0].num_tokens == 50


def test_sources_are_limited_beside_decodes_but_one_is_never_split() -> None:
    harness = Harness(budget=256, num_blocks=256)
    harness.add("stream", 1, source=10, max_tokens=50)
    harness.step()
    for name in ("first", "second"):
        harness.add(name, 1, source=100)
    scheduler = harness.engine.scheduler
    for wanted, limit in (([], 0), (["first"], 16), (["second"], 16)):
        scheduled = scheduler.schedule(StepBudget(whole_tokens=limit)).scheduled
        assert [step.sequence.request.request_id for step in scheduled if step.encode_source] == wanted


def test_demand_is_what_a_step_could_compute() -> None:
    harness = Harness(budget=64, max_num_seqs=3)
    harness.add("a", 3, max_tokens=30)
    harness.step()
    assert harness.engine.demand() == StepDemand(decodes=1)
    harness.engine.add(replace(request("b", 3, max_tokens=30), streams=True))
    harness.step()
    harness.add("c", 1, source=20)
    harness.add("d", 1, source=30)  # has no room yet
    assert harness.engine.demand() == StepDemand(2, True, 2, 1, 20, 20)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    harness = Harness(budget=64)
    harness.add("stream", 3, max_tokens=60)
    harness.step()
    harness.limits = StepBudget(prompt_tokens=8)
    harness.add("long", 60, max_tokens=1)
    harness.step()
    harness.add("short", 4, max_tokens=1)
    harness.run()
    ended = [output.request_id for output in harness.outputs if output.finish_reason]
    assert ended.index("short") < ended.index("long")


def test_long_prompt_does_not_starve_under_short_prompts() -> None:
    harness = Harness(budget=64, num_blocks=128)
    harness.limits = StepBudget(prompt_tokens=8)
    harness.add("long", 60, max_tokens=1)
    for number in range(40):
        harness.add(f"short{number}", 4, max_tokens=3)
        harness.step()
    ended = [output.request_id for output in harness.outputs if output.finish_reason]
    assert "long" in ended
