"""Admission control: exact limits, requests admitted all or none, and Retry-After from the completion rate."""

from __future__ import annotations

import pytest

from triptych.model.api.engine_config import BatchLimits, EngineConfig
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
    none_waits.admit({"one": 1})
    assert refused(none_waits, {"two": 1}).reason == "queue_tokens"
    none_waits.mark_started("one")
    none_waits.admit({"two": 1})


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


def test_retry_after_follows_the_rate_at_which_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("triptych.model.client.admission.time.monotonic", lambda: now[0])
    bound = admission(seqs=1, requests=9)
    for i in range(10):
        bound.admit({f"r{i}": 1})
    assert refused(bound, {"x": 1}).retry_after_s == 1.0  # no request has ended yet
    for i in range(5):
        now[0] += 4.0
        bound.release(f"r{i}")
        bound.admit({f"s{i}": 1})
    assert refused(bound, {"x": 1}).retry_after_s == pytest.approx(4.0, rel=0.3)
    now[0] += 10_000
    assert refused(bound, {"x": 1}).retry_after_s == 60.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"max_model_len": 0}, "max_model_len must be positive"),
        ({"max_queued_tokens": -1}, "max_queued_tokens must not be negative"),
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
    assert (limits.max_queued_requests, limits.max_queued_tokens) == (32, 800)
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
    assert limits == BatchLimits(*batch, 4 * batch[0], 8 * batch[1])
    assert EngineConfig(max_num_seqs=7).limits(memory).max_num_batched_tokens == batch[1]
    # The unset limit follows the one that is set: every running sequence gets a token a step.
    assert EngineConfig(max_num_batched_tokens=20).limits(memory) == BatchLimits(20, 20, 80, 160)
    assert EngineConfig(max_num_seqs=9000).limits(memory) == BatchLimits(9000, 9000, 36_000, 72_000)


def test_largest_limits_bound_those_of_every_device() -> None:
    assert EngineConfig(device="cpu").largest_limits() == EngineConfig().limits()
    for device in ("auto", "cuda"):
        assert EngineConfig(device=device).largest_limits() == BatchLimits(256, 8192, 1024, 65_536)


def test_limits_are_replaced_when_the_model_is_loaded() -> None:
    bound = Admission(EngineConfig())
    bound.set_limits(BatchLimits(1, 64, 1, 512))
    bound.admit({"a": 1})
    bound.admit({"b": 1})
    assert refused(bound, {"c": 1}).reason == "queue_requests"
    bound.set_limits(EngineConfig().limits(80 << 30))
    bound.admit({str(i): 0 for i in range(256 + 1024 - 2)})
    assert refused(bound, {"c": 1}).reason == "queue_requests"
