"""Quantiles, intervals, SLOs, metrics text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from triptych.loadtest.errors import UsageError
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.results import compare, slo, statistics
from triptych.loadtest.results.statistics import Sample
from triptych.loadtest.server import prometheus
from triptych.loadtest.server.prometheus import Scrape


def test_statistics_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).lognormal(size=1357)
    found = statistics.describe(Sample.of([[value] for value in values]))
    for name, q in statistics.QUANTILES.items():
        assert found[name] == np.quantile(values, q, method="inverted_cdf")
    assert found["mean"] == pytest.approx(values.mean())
    assert found["max"] == values.max()
    assert statistics.describe(Sample.of([])) == {}


def test_intervals_have_their_stated_coverage() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(200):
        low, high = statistics.intervals(Sample.of(rng.exponential(size=(60, 1)).tolist()), seed)["mean"]
        held += low <= 1.0 <= high
    assert 0.87 <= held / 200 <= 0.985


def test_gaps_of_a_request_are_not_independent() -> None:
    """Fifty requests of 40 equal gaps know as much as fifty gaps; by gaps they would claim far more."""
    means = np.random.default_rng(2).exponential(size=50)
    together = statistics.intervals(Sample.of([[mean] * 40 for mean in means]))["mean"]
    apart = statistics.intervals(Sample.of([[mean] for mean in means for _ in range(40)]))["mean"]
    single = statistics.intervals(Sample.of([[mean] for mean in means]))["mean"]
    assert together[1] - together[0] == pytest.approx(single[1] - single[0], rel=0.25)
    assert apart[1] - apart[0] < 0.3 * (together[1] - together[0])


def record(outcome: Outcome = Outcome.OK, times: tuple[float, ...] = (1.1, 1.2, 1.4), **fields: object) -> Record:
    made = Record(0, 0, "", 1.0, 5, 3, begun=1.001, sent=1.002, ended=1.5, outcome=outcome, token_times=list(times))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_request_counts_from_its_schedule() -> None:
    one = record()
    assert (one.ttft, one.e2e, one.lag) == pytest.approx((0.1, 0.5, 0.001))
    assert one.gaps == pytest.approx([0.1, 0.2])
    assert one.tpot == pytest.approx(0.15)


def test_an_event_of_several_tokens_shares_its_gap() -> None:
    one = record(token_counts=[1, 1, 2], has_usage=True, completion_tokens=4)
    assert one.gaps == pytest.approx([0.1, 0.1, 0.1])
    assert one.tpot == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ("ttft_p99<101ms", True),
        ("ttft_p99<99ms", False),
        ("itl_p50<=0.1001s", True),
        ("itl_p99<150ms", False),
        ("e2e_p50<501ms,error_rate<0.1%", True),
        ("tpot_p99<140ms", False),
        ("queue_p99<1ms", True),  # it has no such figure
    ],
)
def test_good_requests(limits: str, good: bool) -> None:
    assert slo.is_good(slo.parse(limits), record()) is good
    assert not slo.is_good(slo.parse(limits), record(Outcome.REJECTED))


def test_judging() -> None:
    summary = {
        "latency_ms": {"ttft": {"p99": 480.0}},
        "shares": {"error_rate": 0.002, "rejection_rate": None},
        "throughput": {"goodput": {"value": 9.0}},
    }
    limits = slo.parse("ttft_p99<500ms, itl_p99<60ms,error_rate<0.1%,goodput>=8.5,rejection_rate<1%")
    assert [one["met"] for one in slo.judge(limits, summary)] == [True, False, False, True, False]


@pytest.mark.parametrize(("reject", "met"), [({}, True), ({"p99": 80.0}, True), ({"p99": 120.0}, False)])
def test_a_limit_of_refusals_is_met_where_nothing_is_refused(reject: dict[str, float], met: bool) -> None:
    (one,) = slo.judge(slo.parse("reject_p99<100ms"), {"latency_ms": {"reject": reject} if reject else {}})
    assert (one["found"], one["met"]) == (reject.get("p99"), met)


@pytest.mark.parametrize(
    "text", ["ttft<500ms", "ttft_p99<500", "ttft_p98<5ms", "error_rate<5ms", "x", "goodput>2s", "a_p99<.ms"]
)
def test_wrong_limits_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"--slo: found .*, expected METRIC<VALUE"):
        slo.parse(text)


METRICS = """# HELP x y
triptych_time_to_first_token_seconds_bucket{le="0.1",model="m"} %d
triptych_time_to_first_token_seconds_bucket{le="0.5",model="m"} %d
triptych_time_to_first_token_seconds_bucket{le="+Inf",model="m"} %d
triptych_time_to_first_token_seconds_count{model="m"} %d
triptych_time_to_first_token_seconds_sum{model="m"} %f
triptych_time_to_first_token_seconds_count{model="other"} 99
triptych_requests_total{model="m",outcome="stop, \\"x\\""} 4
triptych_requests_total{model="m",outcome="length"} 5
vllm:num_requests_waiting{model_name="m"} 3
"""


def test_metrics_are_read_by_model_and_since() -> None:
    before, after = (Scrape(METRICS % values, 0.0, "m") for values in ((2, 3, 3, 3, 0.3), (4, 13, 13, 13, 4.3)))
    found = after.histogram("ttft", before)
    assert found is not None
    assert (found.count, found.mean) == (10, pytest.approx(0.4))
    assert found.quantile_bounds(0.5) == (0.1, 0.5)
    assert found.quantile_bounds(0.1) == (0.0, 0.1)
    assert after.value("ended") == 9
    assert after.value("ended", outcome="length") == 5
    assert after.value("waiting") == 3
    assert after.value("running") is None
    assert before.histogram("ttft", before) is None


def run_document(per_second: list[float], error_rate: float, **settings: object) -> dict[str, Any]:
    """As much of a run as a comparison reads; nothing was answered with a latency."""
    names = ("ttft_ms", "gaps_ms", "tpot_ms", "e2e_ms", "outcome", "slow", "scheduled_s")
    seconds = float(len(per_second))
    asked = dict.fromkeys(("target", "model", "workload", "arrivals", "clients", "seed"), 0)
    return {
        "kind": "run",
        "commit": "c",
        "columns": {name: [] for name in names},
        "settings": {**asked, "warmup_s": 0.0, **settings},
        "machine": {"processor": "p"},
        "window_s": [0.0, seconds],
        "series": dict.fromkeys(("requests", "output_tokens", "good"), per_second),
        "throughput": {
            name: {"value": sum(per_second) / seconds}
            for name in ("request_throughput", "output_throughput", "goodput")
        },
        "shares": {"error_rate": error_rate},
        "counts": {"counted": 1000},
        "doubts": [],
    }


def test_a_comparison_of_rates_and_errors() -> None:
    steady, halved = [10.0, 11.0, 9.0, 10.0] * 5, [5.0, 5.5, 4.5, 5.0] * 5
    found = compare.compare(run_document(steady, 0.0), run_document(halved, 0.2, seed=1), 0.05)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["request_throughput /s"]["ratio"] == 0.5
    assert 0.45 < rows["request_throughput /s"]["ci95"][0] < 0.5 < rows["request_throughput /s"]["ci95"][1] < 0.55
    assert rows["answered share"]["ratio"] == pytest.approx(0.8)
    assert len(found["regressions"]) == 4
    assert found["warnings"] == ["the runs differ in seed: 0 and 1"]
    back = compare.compare(run_document(halved, 0.2), run_document(steady, 0.0), 0.05)
    assert back["regressions"] == []
    assert {row["verdict"] for row in back["rows"]} == {"better"}


@pytest.mark.parametrize(("server_sum", "tokens", "agree"), [(1.0, 30, True), (2.0, 30, False), (1.0, 31, False)])
def test_a_cross_check_sees_what_differs(server_sum: float, tokens: int, agree: bool) -> None:
    text = """# TYPE triptych_rejections_total counter
triptych_generation_tokens_total{model="m"} %d
triptych_e2e_request_latency_seconds_count{model="m"} %d
triptych_e2e_request_latency_seconds_sum{model="m"} %f
triptych_e2e_request_latency_seconds_bucket{model="m",le="0.25"} 0
triptych_e2e_request_latency_seconds_bucket{model="m",le="+Inf"} %d
"""
    before, after = Scrape(text % (0, 0, 0, 0), 0, "m"), Scrape(text % (tokens, 2, server_sum, 2), 1, "m")
    records = [record(has_usage=True, completion_tokens=15) for _ in range(2)]
    rows = prometheus.compare(records, before, after)
    assert {row["name"] for row in rows} == {
        *("refusals", "output tokens", "end to end, mean", "end to end, p50", "end to end, p99")
    }
    assert all(row["agrees"] for row in rows) is agree
