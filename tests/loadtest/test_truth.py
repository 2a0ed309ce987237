"""Measured figures compared with what a scripted server did, by its own clock."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from tests.loadtest.scripted import Script, ScriptedServer, Seen, serving
from tests.loadtest.support import CLOSED, Arrivals, Clients, Workload, constant, in_several_tries, measured
from triptych.loadtest.records import Outcome
from triptych.loadtest.runs.run import Measured

EXACT = 0.02
STALLED = Script(stall=(0.4, 1.9))


def close(found: float, truth: float) -> bool:
    return abs(found - truth) <= EXACT * truth


def gaps(seen: Seen) -> list[float]:
    return [after - before for before, after in pairwise(seen.sends)]


def check_times(run: Measured, server: ScriptedServer) -> None:
    latency = run.document["latency_ms"]
    load = server.load
    assert len(run.records) == len(load) == run.document["counts"]["ok"]
    first = statistics.median(one.sends[0] - one.received for one in load)
    assert close(latency["ttft"]["p50"] - latency["lag"]["p50"], 1e3 * first)
    between = [gap for one in load for gap in gaps(one)]
    assert latency["itl"]["n"] == len(between)
    assert close(latency["itl"]["mean"], 1e3 * statistics.fmean(between))
    assert close(latency["tpot"]["p50"], 1e3 * statistics.median(statistics.fmean(gaps(one)) for one in load))
    whole = statistics.fmean(one.ended - one.received for one in load)
    assert close(latency["e2e"]["mean"] - latency["lag"]["mean"], 1e3 * whole)


@pytest.mark.parametrize("workers", [1, 2])
@in_several_tries
def test_latencies_are_those_of_the_server(workers: int) -> None:
    with serving(Script(first_s=0.4, gap_s=0.05)) as server:
        run = measured(server.url, requests=16, arrivals=constant(24), workers=workers)
    check_times(run, server)
    assert run.document["tokens"]["output"] == 16 * 10
    assert run.document["tokens"]["prompt"] == 16 * 7
    assert run.document["generator"]["workers"] == workers


def test_tokens_without_text_are_counted() -> None:
    with serving(Script(silent=4)) as server:
        run = measured(server.url, requests=3, arrivals=CLOSED)
    assert [record.silent_tokens for record in run.records] == [3, 3, 3]  # of ten: the first, fifth and ninth
    assert [record.token_counts for record in run.records] == [[1] * 10] * 3


@in_several_tries
def test_throughput_is_that_of_the_server() -> None:
    with serving(Script(first_s=0.3, gap_s=0.03)) as server:
        run = measured(server.url, requests=12, arrivals=CLOSED)
    spent = max(one.sends[-1] for one in server.load) - min(one.received for one in server.load)
    assert close(run.document["throughput"]["output_throughput"]["value"], 120 / spent)
    assert close(run.document["throughput"]["request_throughput"]["value"], 12 / spent)


@pytest.mark.parametrize("clients", [Clients(), Clients(max_concurrency=1)], ids=["sent in time", "could not be sent"])
@in_several_tries
def test_a_stall_shows_in_every_request_that_was_due_in_it(clients: Clients) -> None:
    """Coordinated omission: with one connection only one request sees the stall, but twenty were due in it."""
    with serving(STALLED) as server:
        work = Workload(output_tokens="fixed:1")
        run = measured(server.url, duration_s=2.5, arrivals=constant(20), workload=work, clients=clients)
    first = min(record.sent for record in run.records)  # the server had it then or later
    stalled = [record for record in run.records if first + 0.7 <= record.scheduled <= 1.8]
    assert len(stalled) >= 15
    for record in stalled:
        assert record.e2e >= first + 1.9 - record.scheduled - 0.01  # when the stall ended at the soonest
    latencies = sorted(record.e2e for record in run.records)
    assert latencies[int(0.9 * len(latencies))] > 0.5


def test_control_a_closed_loop_hides_the_stall() -> None:
    """Why arrivals must be open: the same server looks fine to clients that wait."""
    with serving(STALLED) as server:
        work = Workload(output_tokens="fixed:1")
        one = Arrivals(kind="closed", concurrency=1)
        run = measured(server.url, duration_s=2.0, arrivals=one, workload=work)
    assert run.document["latency_ms"]["e2e"]["p90"] < 100
    assert run.document["latency_ms"]["e2e"]["max"] > 800


def test_refusals_are_counted_with_their_times() -> None:
    with serving(Script(first_s=1.0, capacity=1, queue=1)) as server:
        work = Workload(output_tokens="fixed:1")
        run = measured(server.url, requests=20, arrivals=constant(40), workload=work)
    counts = run.document["counts"]
    assert counts["rejected"] + counts["ok"] == 20
    assert counts["rejected"] >= 10
    (refused,) = run.document["rejections"]
    assert (refused["status"], refused["count"]) == (429, counts["rejected"])
    assert refused["after_ms"]["p50"] < 500  # and not when there is a place
    assert run.document["errors"] == [{"status": 429, "code": "scripted", "count": counts["rejected"]}]
    assert run.document["shares"]["error_rate"] == counts["rejected"] / 20


def test_a_client_that_honours_retry_after_comes_again() -> None:
    with serving(Script(status=429)) as server:
        run = measured(server.url, requests=2, arrivals=CLOSED, clients=Clients(retry=1.0, max_retries=1))
    assert len(server.seen) == 1 + 2 * 2
    for record in run.records:
        assert record.attempts == 2
        assert record.outcome is Outcome.REJECTED
        assert record.e2e > 1.0  # the wait is its client's latency


def test_clients_that_leave_waste_tokens() -> None:
    with serving(Script(gap_s=0.02)) as server:
        work = Workload(output_tokens="fixed:40")
        run = measured(server.url, requests=12, arrivals=CLOSED, clients=Clients(cancel=1.0), workload=work)
        cancelled = [record for record in run.records if record.outcome is Outcome.CANCELLED]
        assert len(cancelled) >= 10  # one may draw the very end
        seen = [len(record.token_times) for record in cancelled]
        assert run.document["tokens"]["wasted"] == sum(seen)
    assert all(len(one.sends) < 40 for one in server.load if one.broken)
    assert any(one.broken for one in server.load)


def test_slow_readers_do_not_count_in_latencies() -> None:
    with serving(Script()) as server:
        run = measured(server.url, requests=4, arrivals=CLOSED, clients=Clients(slow=1.0, slow_rate=50))
    assert run.document["counts"]["ok"] == 4
    assert all(record.e2e >= 0.2 for record in run.records)
    assert "e2e" not in run.document["latency_ms"]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script(error_after=3), "broken"),
        (Script(cut_after=3, gap_s=0.01), "RemoteProtocolError"),
        (Script(status=500), "scripted"),
    ],
)
def test_failures_are_errors_by_name(script: Script, code: str) -> None:
    with serving(script) as server:
        run = measured(server.url, requests=3, arrivals=CLOSED)
    assert run.document["counts"]["error"] == 3
    assert [one["code"] for one in run.document["errors"]] == [code]
    assert not run.document["valid"]


def test_a_stream_that_was_not_asked_for_is_an_error() -> None:
    with serving(Script(unasked=True)) as server:
        run = measured(server.url, requests=3, arrivals=CLOSED, clients=Clients(stream=False))
    assert run.document["errors"] == [{"status": 200, "code": "an unrequested stream", "count": 3}]


HUNG = Script(stall=(0.25, 60.0))  # from then on it begins answers and ends none


def test_a_server_that_hangs_misses_objectives_of_shares() -> None:
    with serving(HUNG) as server:
        run = measured(
            server.url,
            limits="ttft_p99<20s,error_rate<0.1%,good_rate>99%,rejection_rate<1%",
            arrivals=constant(20),
            duration_s=1.0,
            drain_s=0.2,
        )
    counts, shares = run.document["counts"], run.document["shares"]
    assert counts["ok"] + counts["unfinished"] == 20
    assert counts["ok"] >= 1 and counts["unfinished"] >= 10
    assert (shares["error_rate"], shares["good_rate"]) == (counts["unfinished"] / 20, counts["ok"] / 20)
    errors = run.document["errors"]  # by status: 200 where the head has come, else 0
    assert {one["code"] for one in errors} == {"unfinished"}
    assert sum(one["count"] for one in errors) == counts["unfinished"]
    assert [one["met"] for one in run.document["slo"]] == [True, False, False, True]


def test_a_slow_reader_at_the_end_of_the_drain_has_not_failed() -> None:
    with serving(Script()) as server:
        slow = Clients(slow=1.0, slow_rate=2)
        run = measured(server.url, arrivals=constant(10), duration_s=0.5, drain_s=1.0, clients=slow)
    assert run.document["counts"]["unfinished"] > 0
    assert (run.document["shares"]["error_rate"], run.document["errors"]) == (None, [])


@in_several_tries
def test_unstreamed_replies_have_no_first_token() -> None:
    with serving(Script(first_s=0.6)) as server:
        run = measured(server.url, requests=8, arrivals=CLOSED, clients=Clients(stream=False))
    assert "ttft" not in run.document["latency_ms"]
    truth = statistics.median(one.ended - one.received for one in server.seen[1:])
    assert close(run.document["latency_ms"]["e2e"]["p50"] - run.document["latency_ms"]["lag"]["p50"], 1e3 * truth)


def test_request_bodies_of_the_targets() -> None:
    with serving(Script()) as server:
        for target in ("openai-chat", "openai-completions"):
            measured(server.url, requests=1, arrivals=CLOSED, target=target)
        measured(server.url, requests=1, arrivals=CLOSED, target="openai-embeddings", workload=Workload(texts="3"))
    chat, text, vectors = (server.seen[at] for at in (1, 3, 5))
    assert chat.path == "/v1/chat/completions"
    assert chat.body["messages"][0]["role"] == "user"
    assert chat.body["stream_options"] == {"include_usage": True}
    assert text.path == "/v1/completions"
    assert text.body["prompt"].startswith("The ")
    assert vectors.path == "/v1/embeddings"
    assert len(vectors.body["input"]) == 3


def test_a_conversation_carries_what_was_said() -> None:
    with serving(Script()) as server:
        work = Workload(kind="conversation", turns="fixed:3", think_s=0.01, output_tokens="2", prompt_tokens="4")
        run = measured(server.url, requests=1, arrivals=CLOSED, target="openai-chat", workload=work)
    turns = [one.body["messages"] for one in server.seen[1:]]
    assert [len(messages) for messages in turns] == [1, 3, 5]
    assert turns[2][:3] == turns[1]
    assert turns[1][1] == {"role": "assistant", "content": "é0 é1 "}
    assert [record.turn for record in run.records] == [0, 1, 2]


@in_several_tries
def test_no_turn_of_a_conversation_begins_after_the_duration() -> None:
    """The server has little to do by then: figures of such requests would be those of another load."""
    with serving(Script()) as server:
        work = Workload(kind="conversation", turns="fixed:40", think_s=0.1, output_tokens="2", prompt_tokens="4")
        run = measured(server.url, duration_s=1.0, arrivals=CLOSED, target="openai-chat", workload=work)
    assert 0 < max(record.scheduled for record in run.records) < 1.0
    assert run.document["counts"]["ok"] == len(run.records)
