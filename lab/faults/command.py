"""The command `python -m lab faults`: runs all scenarios, and prints a table and a JSON line."""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.faults import load, outcomes, report
from lab.faults.outcomes import Ending
from lab.faults.report import Row
from lab.faults.scenarios import Scenario, all_of
from lab.faults.site import ReadinessMonitor, Site
from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.records import Record
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output
from triptych.loadtest.runs.run import Subject
from triptych.loadtest.settings import Workload

WORKLOAD = Workload(prompt_tokens="uniform:16-96", output_tokens="uniform:24-96")
_CLOCK_LIBRARIES = "/usr/lib/*/faketime/libfaketimeMT.so.1"


def add_command(commands: Any) -> None:
    text = "Start the service, put load on it, inject one fault after the other, and count what clients saw."
    parser = commands.add_parser(
        "faults", help="faults injected into a service, and what clients see of them", description=text
    )
    parser.add_argument("--model", default="code", metavar="[NAME=]PATH", help="model to serve")
    parser.add_argument("--runtime", choices=("local", "ray"), default="", help="only this runtime; none: both")
    parser.add_argument(
        "--only", default="", metavar="TEXT,...", help="faults whose names contain this, or one of these"
    )
    parser.add_argument(
        "--rate", type=flags.above_zero, default=None, help="capacity in requests a second; none: measured"
    )
    parser.add_argument(
        "--clock-library", default="", metavar="FILE", help="libfaketimeMT; none: Debian's, if installed"
    )
    parser.add_argument(
        "--write", default="", metavar="FILE", help="document with marks, between which the table is written"
    )
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    if options.write:
        report.around(Path(options.write))  # raises before twenty minutes of faults
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        scenarios = wanted(options, Path(folder))
        rows: list[Row] = []
        code = 0
        try:
            rows.extend(rows_of(scenarios, options.model, options.rate))  # keeps the rows before an interruption
        except KeyboardInterrupt:
            print("interrupted: the table has the faults that were played", file=sys.stderr)
            code = 130
    text = report.markdown(rows, _about())
    print(text)
    if options.write and not code:
        report.write(Path(options.write), text)
    results = [asdict(row) | {"lost": row.lost} for row in rows]
    about = {"kind": "faults", "commit": page.commit(), "machine": page.describe()}
    print(output.line(about | {"results": results}), flush=True)
    return code or int(any(row.problems for row in rows))


def wanted(options: argparse.Namespace, folder: Path) -> list[Scenario]:
    library = options.clock_library or next(map(str, Path("/").glob(_CLOCK_LIBRARIES[1:])), "")
    if not library:
        print("no clock jumps: libfaketime is not there (Debian's package libfaketime)", file=sys.stderr)
    known = [one for one in all_of(folder, library) if not options.runtime or one.runtime == options.runtime]
    # A printed name may have a comma itself.
    is_name = any(options.only in one.name for one in known)
    names = [options.only] if is_name else [name.strip() for name in options.only.split(",") if name.strip()]
    found = [one for one in known if any(name in one.name for name in names)]
    if not found:
        raise UsageError(f"--only: found {options.only!r}, expected parts of the names of faults")
    return found


def rows_of(scenarios: Sequence[Scenario], model: str, rate: float | None) -> Iterator[Row]:
    """Run scenarios; neighbours that need the same service share it, unless one ends it."""
    for _, group in itertools.groupby(scenarios, key=lambda one: one.site):
        todo = list(group)
        try:
            with _served(todo[0], model) as (site, subject):
                capacity = rate or load.capacity(subject)
                while todo:
                    row = play(todo[0], site, subject, capacity)
                    print(row, file=sys.stderr)
                    todo.pop(0)
                    yield row
        except ServerError as error:  # the other scenarios of the same service fail too
            for scenario in todo:
                print(f"{scenario.name}, {scenario.runtime}: {error}", file=sys.stderr)
                yield Row.failed(scenario.name, scenario.runtime, str(error).splitlines()[0])


@contextmanager
def _served(scenario: Scenario, model: str) -> Iterator[tuple[Site, Subject]]:
    runtime = ("--runtime", scenario.runtime) if scenario.program[-1] == "serve" else ()
    arguments = (model, *runtime, *scenario.arguments)
    with Site(arguments, program=scenario.program, environment=scenario.environment, stderr=scenario.stderr) as site:
        yield site, load.probe(site.url, model.partition("=")[0], WORKLOAD)


def play(scenario: Scenario, site: Site, subject: Subject, capacity: float) -> Row:
    """Run one scenario on an idle service."""
    before, unanswered = site.memory_mb(), site.unanswered
    stages = tuple((round(share * capacity, 2), seconds) for share, seconds in scenario.stages)
    with ReadinessMonitor(site) as watch:
        seen = load.during(subject, stages, scenario.after_s, lambda: scenario.inject(site, subject.settings.model))
    records, injected = seen.records, seen.start + seen.fault
    served = outcomes.served_again_s(records, seen.fault)
    lost = site.unanswered - unanswered
    unheard = f"{lost} of the tool's own questions, each on a new connection, got no answer" if lost else ""
    times = [outcomes.first_token_p95_ms(records, *span) for span in ((1.0, seen.fault), (seen.fault, 1e9))]
    return Row(
        scenario.name,
        scenario.runtime,
        max(rate for rate, _ in stages),
        {str(end): number for end, number in sorted(outcomes.count(records).items())},
        None if scenario.fatal else watch.ready_again_s(injected),
        served,
        (times[0], times[1]),
        (before, site.memory_mb() if site.running else None),
        "; ".join(filter(None, (seen.remark, unheard))),
        tuple(_problems(scenario, seen.records, served)),
    )


def _problems(scenario: Scenario, records: Sequence[Record], served: float | None) -> Iterator[str]:
    for end, number in outcomes.count(records).items():
        if end is not Ending.COMPLETE and end not in scenario.allowed:
            yield f"PROBLEM: {number} {end}"
    if silent := outcomes.without_retry_after(records):
        yield f"PROBLEM: {silent} refusals without Retry-After"
    if served is None and not scenario.fatal:
        yield "PROBLEM: never served again"


def _about() -> str:
    found = page.describe()
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"Measured {today} at {page.commit()} by `make faults`: {found['cores']} cores of {found['processor']}, "
        f"load average {found['load_average'][0]} before the last."
    )
