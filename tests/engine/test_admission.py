"""Admission control: bounds by estimated time and by memory, requests admitted all or none, an exact Retry-After."""

from __future__ import annotations

import pytest

from tests.service.support import info
from triptych.model.api.engine_config import BatchLimits, EngineConfig
from triptych.model.api.stats import EngineStats, StepStats
from triptych.model.client.admission import Admission
from triptych.model.errors import ConfigError, QueueFullError


def admission(*, seqs: int = 2, requests: int = 3, tokens: int = 100) -> Admission:
    return Admission(EngineConfig(max_num_seqs=seqs, max_queued_requests=requests, max_queued_tokens=tokens))


def refused(bound: Admission, tokens: dict[str, int], **sequences: dict[str, int]) -> QueueFullError:
    with pytest.raises(QueueFullError) as error:
        bound.admit(tokens, **sequences)
    return error.value


def test_running_and_queued_sequences_are_admitted_and_not_one_more() -> None:
    bound = admission()
    for i in range(5):
        bound.admit({f"r{i}": 1})
    assert refused(bound, {"r5": 1}).reason == "queue_requests"
    bound.release("r0")
    bound.admit({"r5": 1})


def test_all_n_sequences_of_a_request_count() -> None:
    bound = admission()
    bound.admit({"a": 1}, sequences={"a": 4})
    assert refused(bound, {"b": 1}, sequences={"b": 2}).reason == "queue_requests"
    bound.admit({"b": 1}, sequences={"b": 1})


def test_waiting_tokens_are_bounded_until_the_first_output() -> None:
    bound = admission(requests=50)
    bound.admit({"a": 60, "b": 40})
    assert bound.waiting_tokens == 100
    assert refused(bound, {"c": 1}).reason == "queue_tokens"
    bound.mark_started("a")
    assert bound.waiting_tokens == 40
    bound.admit({"c": 60})
    assert refused(bound, {"d": 1}).reason == "queue_tokens"


def test_long_prompt_is_admitted_where_a_short_one_is() -> None:
    bound = admission(requests=50)
    bound.admit({"a": 99})
    bound.admit({"long": 500})
    assert bound.waiting_tokens == 599
    assert refused(bound, {"b": 1}).reason == "queue_tokens"
    bound.mark_started("long")
    bound.admit({"b": 1})


def test_check_room_agrees_with_admit_before_tokenisation() -> None:
    bound = admission()
    bound.admit({"a": 99}, sequences={"a": 4})
    bound.check_room()
    with pytest.raises(QueueFullError, match="queue_requests"):
        bound.check_room(2)
    assert refused(bound, {"b": 1}, sequences={"b": 2}).reason == "queue_requests"
    bound.admit({"b": 1})
    with pytest.raises(QueueFullError, match="queue_requests"):
        bound.check_room()
    bound.release("b")
    bound.admit({"c": 1})
    bound.release("a")
    bound.admit({"d": 99})
    with pytest.raises(QueueFullError, match="queue_tokens"):
        bound.check_room()
    bound.mark_started("d")
    bound.check_room()


def test_requests_are_admitted_all_or_none() -> None:
    bound = admission()
    bound.admit({"a": 1})
    refused(bound, {f"r{i}": 1 for i in range(5)})
    bound.admit({f"r{i}": 1 for i in range(4)})


def test_empty_queue_admits_any_number_of_sequences() -> None:
    admission().admit({"huge": 10_000}, sequences={"huge": 99})
    none_waits = admission(requests=0, tokens=0)
    none_waits.admit({"one": 1, "two": 1})
    assert refused(none_waits, {"three": 1}).reason == "queue_requests"
    none_waits.release("one")
    none_waits.admit({"three": 1})


def test_release_ignores_unknown_requests() -> None:
    bound = admission()
    for i in range(5):
        bound.admit({f"r{i}": 1})
    for _ in range(3):
        bound.release("r0")
        bound.release("stranger")
        bound.mark_started("stranger")
    bound.admit({"r5": 1})
    refused(bound, {"r6": 1})


class Clocked:
    """Admission control with default settings for a CPU, whose model computes at stated rates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
        self.now = 100.0
        monkeypatch.setattr("triptych.model.client.admission.time.monotonic", lambda: self.now)
        self.bound = Admission(EngineConfig(**settings))  # type: ignore[arg-type]

    def step(self, seconds: float, *, decodes: int = 0, prompt: int = 0) -> None:
        self.now += seconds
        self.bound.observe(StepStats("m", "generate", seconds, decodes + prompt, decodes + bool(prompt), decodes))

    def compute(self, requests: int, *, tokens_per_s: float, step_s: float, output: int = 100) -> None:
        """Prefill and decode 64 requests of 200 tokens at a time, at these rates."""
        for turn in range(requests // 64):
            names = [f"earlier{turn}-{at}" for at in range(64)]
            self.bound.admit(dict.fromkeys(names, 200))
            for name in names:
                self.step(200 / tokens_per_s, prompt=200)
                self.bound.mark_started(name)
            for _ in range(output):
                self.step(step_s, decodes=64)
            for name in names:
                self.bound.release(name)

    def arrive(self, requests: int, tokens: int = 200) -> int:
        """Return how many of the requests that come at once are admitted."""
        for at in range(requests):
            try:
                self.bound.admit({f"new{at}": tokens})
            except QueueFullError:
                return at
        return requests


@pytest.mark.parametrize("measured", [False, True])
def test_an_ordinary_burst_is_admitted_by_default(monkeypatch: pytest.MonkeyPatch, measured: bool) -> None:
    clocked = Clocked(monkeypatch)
    clocked.bound.loaded(
        info(
            *("m", "decoder-only"),
            parameters=600_000_000,
            weight_bytes=1_200_000_000,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            max_queued_requests=8192,
            max_queued_tokens=1 << 21,
        )
    )
    if measured:
        clocked.compute(128, tokens_per_s=2500, step_s=0.16, output=136)
    assert clocked.arrive(128, 272) == 128


def test_a_queue_is_bounded_by_the_time_that_it_takes_and_retry_after_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    clocked.compute(256, tokens_per_s=1000, step_s=0.1)
    # A request takes 200 / 1000 + 100 * 0.1 / 64 = 0.356 s of a full batch.
    assert clocked.arrive(1000) == pytest.approx((60 + 64 * 10 / 64) / 0.356, rel=0.05)
    error = refused(clocked.bound, {"late": 200})
    assert error.reason == "queue_seconds" and 0 < error.retry_after_s < 1
    before = clocked.bound.wait_seconds()
    assert error.retry_after_s == pytest.approx(before - 60, rel=1e-9)
    for at in range(40):
        clocked.step(0.2, prompt=200)
        clocked.bound.mark_started(f"new{at}")
    assert clocked.bound.wait_seconds() == pytest.approx(before - 8, abs=0.5)
    clocked.bound.admit({"late": 200})
    with pytest.raises(QueueFullError) as found:
        clocked.bound.check_room(64)  # sequences, or beams, count
    assert found.value.retry_after_s == pytest.approx(clocked.bound.wait_seconds(64) - 60)


@pytest.mark.parametrize(
    "settings", [{}, {"max_queue_seconds": 0.0}, {"max_queued_tokens": 0, "max_queued_requests": 0}]
)
def test_what_can_run_at_once_is_never_refused(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]) -> None:
    clocked = Clocked(monkeypatch, **settings)
    clocked.compute(64, tokens_per_s=10, step_s=1.0)
    assert clocked.arrive(1000, 30_000) == 64
    clocked.bound.check_room(0)  # inputs to encode have places of their own
    for at in range(64):
        clocked.bound.hold([10])
        clocked.bound.take_held(f"text{at}", 10)
    with pytest.raises(QueueFullError):
        clocked.bound.hold([10])


def test_a_stall_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    clocked.compute(64, tokens_per_s=2500, step_s=0.1)
    clocked.bound.admit({"stalled": 10})
    clocked.now += 600.0  # the engine was paused, or lost and started again
    clocked.step(0.1, decodes=64)
    clocked.bound.release("stalled")
    assert clocked.arrive(128) == 128
    for at in range(128):
        clocked.bound.release(f"new{at}")
    before = clocked.bound.wait_seconds(1000)
    clocked.compute(64, tokens_per_s=2500, step_s=0.1)
    assert clocked.bound.wait_seconds(1000) == pytest.approx(936 * 100 * 0.1 / 64, rel=0.1)
    assert clocked.bound.wait_seconds(1000) < before


def test_texts_to_encode_wait_for_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    clocked.compute(128, tokens_per_s=1000, step_s=10.0)
    for at in range(600):
        clocked.bound.take_held(f"text{at}", 100)
    assert clocked.bound.wait_seconds(0) == pytest.approx(60, rel=0.02)
    clocked.bound.take_held("last", 2000)
    with pytest.raises(QueueFullError, match="queue_seconds") as error:
        clocked.bound.check_room(0)
    assert error.value.retry_after_s == pytest.approx(clocked.bound.wait_seconds(0) - 60)
    clocked.bound.check_room(1)  # a sequence has its place


def test_a_full_kv_cache_bounds_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    clocked.compute(64, tokens_per_s=1000, step_s=0.1)
    assert clocked.arrive(100, 0) == 100
    many = clocked.bound.wait_seconds()
    clocked.bound.set_stats(EngineStats("m", running=4, waiting=96, total_blocks=100))
    assert clocked.bound.wait_seconds() > 2 * many
    clocked.bound.set_stats(EngineStats("m", running=4, waiting=0, total_blocks=100, free_blocks=90))
    assert clocked.bound.wait_seconds() == many


def test_tokens_found_in_the_prefix_cache_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for cached in (0, 1800):
        clocked = Clocked(monkeypatch)
        for at in range(100):
            clocked.bound.admit({f"r{at}": 2000})
            clocked.step(0.2, prompt=2000 - cached)
            clocked.bound.mark_started(f"r{at}", cached)
            clocked.bound.release(f"r{at}")
        clocked.arrive(100, 2000)
        found.append(clocked.bound.wait_seconds())
    assert found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"max_model_len": 0}, "max_model_len must be positive"),
        ({"max_queued_tokens": -1}, "max_queued_tokens must not be negative"),
        ({"max_queue_seconds": -1.0}, "max_queue_seconds must be a number from 0"),
        ({"max_queue_seconds": float("inf")}, "max_queue_seconds"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "at least max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_share": 0.0}, "gpu_share"),
        *(({"device": name}, "device must be auto, cpu or cuda") for name in ("mps", "meta", "cuda:x", "cpu:1", "")),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)  # type: ignore[arg-type]


def test_queue_limits_follow_from_the_batch_limits() -> None:
    limits = EngineConfig(max_num_seqs=8, max_num_batched_tokens=100).limits()
    assert (limits.max_queued_requests, limits.max_queued_tokens) == (1024, 102_400)
    set_too = EngineConfig(max_num_seqs=8, max_queued_requests=0, max_queued_tokens=5).limits()
    assert (set_too.max_queued_requests, set_too.max_queued_tokens) == (0, 5)


@pytest.mark.parametrize(
    ("memory", "batch"),
    [
        (None, (64, 2048)),  # a CPU
        (6 << 30, (128, 2048)),
        (16 << 30, (128, 2048)),
        (22 << 30, (256, 4096)),  # cards of 24 GB report this much
        (39 << 30, (256, 8192)),  # cards of 40 GB
        (141 << 30, (256, 8192)),
    ],
)
def test_batch_limits_follow_from_the_gpu_memory(memory: int | None, batch: tuple[int, int]) -> None:
    limits = EngineConfig().limits(memory)
    assert limits == BatchLimits(*batch, 128 * batch[0], 1024 * batch[1])
    assert EngineConfig(max_num_seqs=7).limits(memory).max_num_batched_tokens == batch[1]
    # The unset limit follows the one that is set: every running sequence gets a token a step.
    assert EngineConfig(max_num_batched_tokens=20).limits(memory) == BatchLimits(20, 20, 2560, 20_480)
    assert EngineConfig(max_num_seqs=9000).limits(memory) == BatchLimits(9000, 9000, 1_152_000, 9_216_000)


def test_largest_limits_bound_those_of_every_device() -> None:
    assert EngineConfig(device="cpu").largest_limits() == EngineConfig().limits()
    for device in ("auto", "cuda"):
        assert EngineConfig(device=device).largest_limits() == BatchLimits(256, 8192, 32_768, 8_388_608)


def test_limits_are_replaced_when_the_model_is_loaded() -> None:
    bound = Admission(EngineConfig())
    bound.loaded(info("m", "decoder-only", max_num_seqs=1, max_queued_requests=1))
    bound.admit({"a": 1})
    bound.admit({"b": 1})
    assert refused(bound, {"c": 1}).reason == "queue_requests"
    bound.loaded(info("m", "decoder-only", max_num_seqs=256, max_queued_requests=1024))
    bound.admit({str(i): 0 for i in range(256 + 1024 - 2)})
    assert refused(bound, {"c": 1}).reason == "queue_requests"


def test_a_tenant_within_its_share_is_not_refused_because_of_anothers_queue() -> None:
    bound = admission(seqs=4, requests=4)
    bound.admit({f"heavy{at}": 1 for at in range(8)}, tenant="heavy")
    for tenant, sequences, fits in (("heavy", 1, False), ("light", 2, True), ("light", 3, False)):
        assert admits(bound, tenant, sequences) is fits
    bound.admit({"light": 1}, sequences={"light": 2}, tenant="light")
    assert not admits(bound, "light", 1) and not admits(bound, "heavy", 1) and admits(bound, "third", 1)
    for at in range(8):
        bound.release(f"heavy{at}")
    bound.release("light")
    assert not bound._tenants and not bound._owners


def admits(bound: Admission, tenant: str, sequences: int) -> bool:
    try:
        bound.check_room(sequences, tenant)
    except QueueFullError:
        return False
    return True
