"""The service under the faults of `lab.faults`, and the counts of what clients saw."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lab.faults import hostile, load, outcomes, report
from lab.faults.command import WORKLOAD, play, rows_of, wanted
from lab.faults.outcomes import Ending
from lab.faults.report import Row
from lab.faults.scenarios import Scenario, all_of
from lab.faults.site import Site
from tests import checkpoints
from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.runs.run import Subject

RATE = 8.0
_LIMITS = (
    *("--receive-s", "1.2", "--stream-stall-s", "1.0", "--stream-unread-bytes", "65536"),
    *("--stall-timeout", "5"),
)


def record(outcome: Outcome = Outcome.OK, status: int = 200, error: str = "", **fields: object) -> Record:
    made = Record(0, 0, "", 0.0, 1, 1, outcome=outcome, status=status, error=error)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("engine hangs, of 2 (stall_timeout 5)", {"engine hangs, of 2 (stall_timeout 5)"}),  # a printed name
        ("replica killed", {"replica killed, of 1", "replica killed, of 2"}),
        ("controller, surge", {"Serve's controller killed", "redeployed, 1 replica, surge"}),
    ],
)
def test_faults_are_chosen_by_their_names(only: str, expected: set[str], tmp_path: Path) -> None:
    options = argparse.Namespace(only=only, runtime="ray", clock_library="")
    assert {one.name for one in wanted(options, tmp_path)} == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (record(done=True, finish_reason="length"), Ending.COMPLETE),
        (record(done=True, finish_reason="stop"), Ending.COMPLETE),
        (record(done=True, finish_reason="cancelled"), Ending.ERROR_EVENT),
        (record(Outcome.ERROR, error="engine_failed", done=True), Ending.ERROR_EVENT),
        (record(Outcome.ERROR, error="engine_failed"), Ending.CUT),  # an error event, but not the end
        (record(Outcome.ERROR, error="stream ended without [DONE]"), Ending.CUT),
        (record(Outcome.ERROR, error="RemoteProtocolError"), Ending.CUT),
        (record(Outcome.REJECTED, 503, "draining", retry_after=True), Ending.UNAVAILABLE),
        (record(Outcome.REJECTED, 429, "queue_full"), Ending.BUSY),
        (record(Outcome.ERROR, 500, "internal_error"), Ending.OTHER),
        (record(Outcome.ERROR, 0, "ConnectError"), Ending.REFUSED),
        (record(Outcome.ERROR, 0, "ReadError"), Ending.RESET),
        (record(Outcome.UNFINISHED, done=False), Ending.HUNG),
    ],
)
def test_how_a_request_ended(seen: Record, expected: Ending) -> None:
    assert outcomes.end(seen) is expected
    assert outcomes.lost([seen]) == (expected in (Ending.CUT, Ending.RESET, Ending.HUNG))


def test_refusals_say_when_to_come_again() -> None:
    seen = [record(Outcome.REJECTED, status, retry_after=told) for status in (429, 503) for told in (True, False)]
    assert outcomes.without_retry_after(seen) == 2


def test_served_again_counts_from_the_fault_to_a_token_behind_the_last_failure() -> None:
    def sent(at: float, *, good: bool = True) -> Record:
        if good:
            return record(done=True, finish_reason="stop", sent=at, token_times=[at + 0.5])
        return record(Outcome.REJECTED, 503, sent=at)

    before = sent(1.0, good=False)
    assert outcomes.served_again_s([before, sent(2.5)], 2.0) == 0.0
    assert outcomes.served_again_s([before, sent(2.5), sent(3.0, good=False), sent(4.0), sent(5.0)], 2.0) == 2.5
    assert outcomes.served_again_s([sent(1.0), sent(3.0, good=False)], 2.0) is None


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    row = Row("a", "ray", 3.0, {"complete": 5, "cut": 1, "reset": 2}, 0.0, None, (10.0, None), (1.0, 2.0), "seen", ())
    text = report.markdown([row], "about")
    assert "| a | ray | 3.0 | 5 | 0 | 3 | 0 | 0 | 0 | 3 | always | - | 10 → - | 1 → 2 | seen |" in text
    file = tmp_path / "x.md"
    file.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.write(file, text)
    assert file.read_text() == f"before\n{report.BEGIN}\n{text}{report.END}\nafter\n"
    file.write_text("no marks")
    with pytest.raises(UsageError, match="expected the lines"):
        report.write(file, text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"gen={checkpoints.llama(tmp_path_factory.mktemp('models') / 'llama')}"


@pytest.fixture(scope="module")
def site(model: str) -> Iterator[Site]:
    with Site([model, "--runtime", "local", *_LIMITS]) as started:
        yield started


@pytest.fixture(scope="module")
def subject(site: Site) -> Subject:
    return load.probe(site.url, "gen", WORKLOAD)


def all_hostile(site: Site, model: str) -> str:
    seen = [hostile.never_read(site, model), hostile.stay_idle(site, 500, 0.2), hostile.send_large_headers(site)]
    return " | ".join([*seen, hostile.never_end_headers(site), hostile.dribble_body(site)])


@pytest.mark.quiet
def test_hostile_clients_cost_the_others_nothing(site: Site, subject: Subject) -> None:
    row = play(Scenario("", all_hostile, "local", stages=((1.0, 4.0),), after_s=0.5), site, subject, RATE)
    assert row.problems == ()
    assert set(row.ends) == {"complete"}
    never_read, idle, large, head, body = row.remark.split(" | ")
    assert "cancelled after" in never_read
    assert "500 connected, 500 still so" in idle
    assert "reset" in large or "431" in large
    for answers in (head, body):
        assert re.match("(408 Request Timeout|reset|408 Request Timeout, reset): 20 of 20", answers), answers
    before, after = row.memory_mb
    assert before is not None and after is not None
    assert after - before < 60


def test_only_its_own_processes_are_hurt(site: Site) -> None:
    with pytest.raises(ServerError, match="no process pytest"):
        site.signal("pytest", signal.SIGKILL)
    assert os.getpid() not in site.processes()


def test_a_question_that_gets_no_answer_is_counted_unless_it_was_given_up(site: Site) -> None:
    answers = iter([httpx.RemoteProtocolError("gone"), httpx.ReadTimeout("given up"), False, True])

    def condition() -> bool:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    before = site.unanswered
    assert site.wait(condition, 5) >= 0.0
    assert site.unanswered == before + 1


def shortened(name: str, seconds: float) -> Scenario:
    (found,) = (one for one in all_of(Path(), "") if (one.name, one.runtime) == (name, "local"))
    return replace(found, stages=((1.0, seconds),), after_s=1.0)


@pytest.mark.slow  # tests/service/test_runtimes.py and tests/engine/test_process_transport.py have it in seconds
@pytest.mark.parametrize("name", ["engine killed", "engine hangs (stall_timeout 5)"])
def test_an_engine_that_is_gone_tells_its_clients(site: Site, subject: Subject, name: str) -> None:
    row = play(shortened(name, 20.0), site, subject, RATE)
    assert row.problems == ()
    assert row.lost == 0
    assert row.ends["503"] > 0
    assert row.ready_again_s and row.served_again_s


@pytest.mark.slow  # tests/service/test_runtimes.py has it in seconds
def test_sigterm_lets_requests_finish_under_load(site: Site, subject: Subject) -> None:
    row = play(shortened("SIGTERM", 6.0), site, subject, RATE)
    assert row.problems == ()
    assert row.lost == 0
    assert "exit code 0" in row.remark
    assert row.ends.get("503", 0) + row.ends.get("refused", 0) > 0


def test_a_service_that_does_not_start_is_a_problem_of_its_scenarios(model: str) -> None:
    scenarios = [Scenario(name, hostile.never_read, "local", ("--max-model-len", "99999")) for name in "ab"]
    rows = list(rows_of(scenarios, model, RATE))
    assert [row.name for row in rows] == ["a", "b"]
    assert all("ended with 2" in row.problems[0] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in all_of(Path(), "") if one.runtime == "ray"])
def test_faults_under_ray(model: str, name: str) -> None:
    """Only requests in a killed replica may be lost: no process is left to answer their clients."""
    scenarios = [one for one in all_of(Path(), "") if (one.name, one.runtime) == (name, "ray")]
    (row,) = rows_of(scenarios, model, RATE)
    assert row.problems == ()
    assert row.lost == 0 or name.startswith("replica killed")
