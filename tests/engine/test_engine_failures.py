"""Engine failures: one request, one model or the whole loop fails, and recovers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engine.front import Brake, async_test, collect, ends_of, idle, ids_of, served, until
from tests.engine.support import mixed, request
from tests.engine.test_async_engine import LLAMA, encodings, endless
from tests.engine.thread_transport import ThreadTransport
from tests.model.checkpoints import prompt
from triptych.model.api.messages import Events
from triptych.model.api.request import EncodeRequest, FinishReason, token_source
from triptych.model.api.stats import Health
from triptych.model.client import async_engine
from triptych.model.engine.builder import MAX_FAULTS
from triptych.model.engine.scheduling.scheduled_step import SchedulerOutput
from triptych.model.engine.scheduling.scheduler import Scheduler
from triptych.model.errors import ConfigError, EngineDeadError, EngineGoneError, ModelNotLoadedError
from triptych.model.system import fault_limit


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    return Brake(monkeypatch)


@async_test
async def test_broken_engine_fails_all_requests_at_once_and_is_restarted(
    brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.2,))
    async with served(LLAMA, "gpt2", max_num_seqs=2) as engine:
        begun = brake.passes
        brake.ready = lambda: brake.failing or brake.passes - begun < 3  # so that no request ends first
        streams = [engine.submit([endless(f"r{i}")]) for i in range(5)]
        await anext(streams[0])
        encode = asyncio.create_task(engine.encode(encodings(3, 3, "e")))
        await asyncio.sleep(0)
        brake.failing = True
        began = time.monotonic()
        waiters = [*(collect(stream) for stream in streams), encode]
        failures = await asyncio.gather(*waiters, return_exceptions=True)
        assert time.monotonic() - began < 20  # well before it would count as hanging
        assert [type(failure) for failure in failures] == [EngineDeadError] * 6
        assert all("secret" not in str(failure) for failure in failures)
        health = engine.health()
        assert (health.ready, health.reason != "") == (False, True)
        with pytest.raises(EngineGoneError):
            engine.submit([endless("refused")])
        with pytest.raises(EngineGoneError):
            await engine.encode([EncodeRequest("refused", LLAMA, token_source(prompt(3)))])
        assert idle(engine)
        brake.failing, brake.ready = False, lambda: True
        await until(lambda: engine.health().ready)
        assert len(ids_of(await collect(engine.submit([request(LLAMA, "again", 5)])), "again")) == 12
        await until(lambda: idle(engine))


POISON = (96, 1, 96)


def poisoned(token_ids: list[int]) -> bool:
    return POISON in zip(token_ids, token_ids[1:], token_ids[2:], strict=False)


@pytest.mark.parametrize("kind", [LLAMA, "marian"])
@async_test
async def test_a_request_that_breaks_the_step_fails_alone(kind: str, brake: Brake) -> None:
    requests = mixed(kind, 6)
    beams = replace(requests[0], request_id="beams", params=replace(requests[0].params, num_beams=3, n=2))
    async with served(kind) as engine:
        expected = await collect(engine.submit([*requests, beams]))
    brake.fails = poisoned
    bad = replace(request(kind, "bad", 3, n=2), prompt_token_ids=POISON)
    async with served(kind) as engine:
        good = asyncio.create_task(collect(engine.submit([*requests, beams])))
        for _ in range(5):
            failed = await collect(engine.submit([bad]))
            assert set(ends_of(failed).values()) == {FinishReason.ERROR}
        outputs = await good
        for one in (*requests, beams):
            for index in range(one.params.n):
                assert ids_of(outputs, one.request_id, index) == ids_of(expected, one.request_id, index)
        await until(lambda: idle(engine))
        assert engine.health().ready


@async_test
async def test_batch_that_is_too_large_is_computed_in_parts(brake: Brake) -> None:
    requests = mixed(LLAMA, 8)
    async with served(LLAMA) as engine:
        expected = await collect(engine.submit(requests))
    brake.fails = lambda token_ids: len(token_ids) > 45  # one prompt of at most 40 tokens passes
    async with served(LLAMA) as engine:
        outputs = await collect(engine.submit(requests))
        vectors = await engine.encode(encodings(3, 30, "e"))
        assert [ids_of(outputs, r.request_id) for r in requests] == [ids_of(expected, r.request_id) for r in requests]
        assert {vector.finish_reason for vector in vectors} == {FinishReason.STOP}
        brake.fails = poisoned
        bad = EncodeRequest("bad", LLAMA, token_source(POISON))
        found = await engine.encode([EncodeRequest("good", LLAMA, token_source(prompt(30))), bad])
        assert [one.finish_reason for one in found] == [FinishReason.STOP, FinishReason.ERROR]
        assert found[0].data == vectors[0].data


def broken_schedule(monkeypatch: pytest.MonkeyPatch, model: str) -> list[int]:
    """Make the scheduler of `model` raise at the steps in the returned list, which counts down."""
    at: list[int] = []
    schedule = Scheduler.schedule

    def schedules(self: Scheduler, *arguments: object, **named: object) -> SchedulerOutput:
        if at and any(sequence.request.model == model for sequence in self):
            at[0] -= 1
            if not at[0]:
                del at[0]
                raise AssertionError("secret detail of the fault")
        return schedule(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "schedule", schedules)
    return at


@async_test
async def test_fault_in_one_model_ends_only_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    at = broken_schedule(monkeypatch, LLAMA)
    async with served(LLAMA, "marian") as engine:
        other = asyncio.create_task(collect(engine.submit([request("marian", "other", 5, max_tokens=60)])))
        for number in range(2):
            at.append(4)
            broken = await collect(engine.submit([endless(f"a{number}", n=2), endless(f"b{number}", num_beams=3)]))
            assert set(ends_of(broken)) == {(f"a{number}", 0), (f"a{number}", 1), (f"b{number}", 0)}
            assert set(ends_of(broken).values()) == {FinishReason.ERROR}
        assert len(ids_of(await collect(engine.submit([request(LLAMA, "again", 5)])), "again")) == 12
        assert ends_of(await other) == {("other", 0): FinishReason.LENGTH}
        assert (engine.health().ready, engine.restarts) == (True, 0)
        await until(lambda: idle(engine))


@async_test
async def test_model_with_too_many_faults_ends_the_loop_which_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.01,))
    at = broken_schedule(monkeypatch, LLAMA)
    async with served(LLAMA) as engine:
        for number in range(MAX_FAULTS):
            at.append(2)
            await collect(engine.submit([endless(f"r{number}")]))
        at.append(2)
        with pytest.raises(EngineDeadError, match="AssertionError in the engine"):
            await collect(engine.submit([endless("last")]))
        await until(lambda: engine.health().ready)
        assert engine.restarts == 1


@async_test
async def test_model_that_no_longer_computes_is_lost_alone_and_can_be_loaded_again(brake: Brake) -> None:
    async with served(LLAMA, "bert") as engine:
        good = [EncodeRequest(f"good{i}", "bert", token_source(prompt(9))) for i in range(4)]
        before = await engine.encode(good[:2])
        spec = engine._table[LLAMA].spec
        brake.failing = True
        lost = await collect(engine.submit([endless("a", n=2), endless("b", num_beams=3)]))
        assert set(ends_of(lost).values()) == {FinishReason.ERROR}
        after = await engine.encode(good[2:])
        assert [one.data for one in after] == [one.data for one in before]
        await until(lambda: list(engine.models) == ["bert"])
        with pytest.raises(ModelNotLoadedError):
            engine.submit([endless("refused")])
        with pytest.raises(ConfigError, match="its first token cannot be computed"):
            await engine.load(spec, None)
        assert (engine.health().ready, engine.restarts) == (True, 0)
        brake.failing = False
        await engine.load(spec, None)
        assert len(ids_of(await collect(engine.submit([request(LLAMA, "again", 5)])), "again")) == 12
        await until(lambda: idle(engine))


@async_test
async def test_model_with_too_many_faults_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    at = broken_schedule(monkeypatch, LLAMA)
    async with served(LLAMA, "marian") as engine:
        other = asyncio.create_task(collect(engine.submit([request("marian", "other", 5, max_tokens=60)])))
        for number in range(MAX_FAULTS + 1):
            at.append(2)
            broken = await collect(engine.submit([endless(f"r{number}")]))
            assert set(ends_of(broken).values()) == {FinishReason.ERROR}
        assert ends_of(await other) == {("other", 0): FinishReason.LENGTH}
        await until(lambda: list(engine.models) == ["marian"])
        assert (engine.health().ready, engine.restarts) == (True, 0)


@async_test
async def test_request_that_cannot_be_added_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(LLAMA, "bert") as engine:
        good = asyncio.create_task(collect(engine.submit([endless("good")])))
        bad = replace(endless("bad", n=2), params=replace(endless("bad").params, n=2, max_tokens="many"))
        assert set(ends_of(await collect(engine.submit([bad]))).values()) == {FinishReason.ERROR}
        assert ends_of(await good) == {("good", 0): FinishReason.LENGTH}
        assert engine.restarts == 0


class Lost(ThreadTransport):
    """A transport whose loop is lost right after its start."""

    async def start(self, on_events: Callable[[Events], None], on_lost: Callable[[str], None]) -> None:
        def loses(events: Events) -> None:
            on_events(events)
            if events.ready:
                on_lost("an accident")

        await super().start(loses, on_lost)


@async_test
async def test_restarts_pause_and_health_is_not_live_after_too_many_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "_RESTART_SECONDS", (0.001,))
    monkeypatch.setattr(async_engine, "_MAX_RESTARTS", 3)
    monkeypatch.setattr(async_engine, "_RESTART_WINDOW", 1.0)
    monkeypatch.setattr(fault_limit, "time", SimpleNamespace(monotonic=lambda: 0.0))  # all losses in one window
    async with served("bert", transport=Lost) as engine:
        await until(lambda: not engine.health().live)
        assert engine.restarts == 3
        reason = "an accident; it was started again 3 times within 1 s and is left alone for as long"
        assert engine.health() == Health(live=False, ready=False, reason=reason)
        with pytest.raises(EngineGoneError, match="left alone"):
            engine.submit([endless("late")])
        await asyncio.sleep(0.1)
        assert engine.restarts == 3
        await until(lambda: engine.restarts > 3)  # without a supervisor it restarts later
