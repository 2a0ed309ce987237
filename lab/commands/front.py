"""The command `front`, which measures what the service costs a token, over an engine of any rate.

The engine is `lab.paced_engine`, which computes nothing: it sends TOKENS_PER_S tokens over STREAMS streams. The
load generator's clients read them on the same cores. The figures are of the time in which all streams run, without the
requests themselves: the share of the engine's rate that reached the clients, and the CPU time per token by process,
which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lab.faults.load import probe
from lab.faults.site import Site
from lab.paced_engine import MODULE, PACE
from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.generator.fleet import Fleet
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output
from triptych.loadtest.runs.run import Subject
from triptych.loadtest.settings import Arrivals, Clients, Workload
from triptych.model.system.child_process import ENGINE_VARIABLE

RUNTIMES = ("local", "ray")
TARGETS = ("generate", "openai-completions", "openai-chat")
PROMPT = 64  # tokens
_PROCESSES = {"engine": MODULE, "haproxy": "haproxy"}  # by what their command lines contain; others are the service


@dataclass(frozen=True, slots=True)
class Run:
    """Holds the figures of one run, while all streams ran. `_us`: CPU microseconds per token."""

    tokens_per_s: float
    share: float  # of the engine's rate
    service_us: float  # the front; with Ray all of its processes, without HAProxy
    haproxy_us: float
    clients_us: float
    engine_us: float
    events: float  # per token
    seconds: float


def add_command(commands: Any) -> None:
    text = "Serve an engine that sends tokens at a set rate, and measure what the service and the clients cost a token."
    parser = commands.add_parser("front", help="what the service costs a token, at any rate", description=text)
    help_text = "model to serve: only its tokenizer and its configuration are read"
    parser.add_argument("--model", default="code", metavar="[NAME=]PATH", help=help_text)
    parser.add_argument("--rate", type=flags.above_zero, default=20_000.0, metavar="TOKENS/S", help="of the engine")
    parser.add_argument("--streams", type=flags.positive, default=256, metavar="N", help="concurrent streams")
    parser.add_argument("--seconds", type=flags.above_zero, default=10.0, metavar="S", help="of each stream")
    parser.add_argument("--target", choices=TARGETS, default="generate", help="API of the clients")
    parser.add_argument("--workers", type=flags.positive, default=1, metavar="N", help="processes of the clients")
    parser.add_argument("--runtime", choices=RUNTIMES, default="", help="only this runtime; none: both")
    parser.add_argument("--runs", type=flags.positive, default=3, metavar="N", help="repetitions")
    help_text = "settings of the service, measured one after the other"
    parser.add_argument(
        "--stream-interval", type=flags.amount, nargs="+", default=[0.0, 0.05], metavar="SECONDS", help=help_text
    )
    parser.add_argument(
        "--serve", default="", metavar="'--FLAG VALUE ...'", help="more arguments of `triptych serve`, in one word"
    )
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    results = {}
    for runtime in [options.runtime] if options.runtime else RUNTIMES:
        for interval in options.stream_interval:
            name = f"{runtime}, an event each {interval:g} s" if interval else runtime
            results[name] = _summary(_measured(options, runtime, interval))
            print(f"{name}: {_words(results[name], options)}", flush=True)
    about = {"kind": "front", "commit": page.commit(), "machine": page.describe()}
    names = ("model", "rate", "streams", "seconds", "target", "workers", "serve")
    print(output.line(about | {name: getattr(options, name) for name in names} | {"results": results}), flush=True)
    return 0


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    medians = {one.name: statistics.median(getattr(run, one.name) for run in runs) for one in fields(Run)}
    return medians | {"runs": [asdict(run) for run in runs]}


def _words(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    haproxy = f" and HAProxy {found['haproxy_us']:.1f}" if found["haproxy_us"] else ""
    return (
        f"{100 * found['share']:.1f} % of {options.rate:,.0f} tokens/s over {options.streams} streams; CPU time a "
        f"token: service {found['service_us']:.1f} us{haproxy}, clients {found['clients_us']:.1f}, paced engine "
        f"{found['engine_us']:.1f}; {found['events']:.2f} events a token"
    )


def _measured(options: argparse.Namespace, runtime: str, interval: float) -> list[Run]:
    """Return the runs on one service; a first, short one is not counted."""
    arguments = [options.model, "--runtime", runtime, "--stream-interval", f"{interval:g}", *options.serve.split()]
    environment = {ENGINE_VARIABLE: MODULE, PACE: f"{options.rate} {options.streams}"}
    with Site(arguments, environment=environment, every_core=True) as site:
        subject = probe(site.url, options.model.partition("=")[0], Workload(), options.target)
        _run(site, subject, options, max(1.0, options.seconds / 5), 0)
        return [_run(site, subject, options, options.seconds, number + 1) for number in range(options.runs)]


def _run(site: Site, subject: Subject, options: argparse.Namespace, seconds: float, seed: int) -> Run:
    """Run `options.streams` streams once. Raises `ServerError` for a failed one."""
    wanted = max(2, round(seconds * options.rate / options.streams))
    settings = replace(
        subject.settings,
        workload=Workload(prompt_tokens=f"fixed:{PROMPT}", output_tokens=f"fixed:{wanted}"),
        arrivals=Arrivals(kind="closed", concurrency=options.streams),
        clients=Clients(),
        duration_s=0.0,
        requests=options.streams,
        workers=options.workers,
        seed=seed,
    )
    records, usage = asyncio.run(_observed(site, Fleet(settings, subject.vocabulary, "")))
    failed = [record for record in records if record.outcome is not Outcome.OK or record.completion_tokens != wanted]
    if failed:
        raise ServerError(f"{len(failed)} of {len(records)} streams: {failed[0].outcome} {failed[0].error}")
    return figures(records, usage, options.rate)


@dataclass(slots=True)
class Usage:
    """Holds the CPU seconds of each kind of process at some times of the run."""

    times: list[float]
    seconds: list[dict[str, float]]

    def at(self, time_s: float) -> dict[str, float]:
        """Return the CPU seconds at a time, by linear interpolation."""
        after = min(max(bisect.bisect_left(self.times, time_s), 1), len(self.times) - 1)
        low, high = self.times[after - 1], self.times[after]
        part = (time_s - low) / (high - low)
        before, later = self.seconds[after - 1], self.seconds[after]
        return {name: before[name] + part * (later[name] - before[name]) for name in later}


async def _observed(site: Site, fleet: Fleet) -> tuple[list[Record], Usage]:
    """Run a fleet; observe the processes' CPU time at each report of a worker."""
    usage = Usage([], [])
    start = 0.0

    def observe() -> None:
        found = {name: site.cpu_s(contained) for name, contained in _PROCESSES.items()}
        found["service"] = site.cpu_s() - sum(found.values())
        found["clients"] = sum(fleet.collected.cpu_s)
        usage.times.append(time.monotonic() - start)
        usage.seconds.append(found)

    try:
        await fleet.start()
        start = fleet.go()
        await fleet.collect(observe)
    finally:
        await fleet.aclose()
    return fleet.collected.records, usage


def figures(records: Sequence[Record], usage: Usage, rate: float) -> Run:
    """Return the figures of the time in which all streams ran. Raises `UsageError` if there is no such time."""
    begin = max(record.token_times[0] for record in records)
    end = min(record.token_times[-1] for record in records)
    if end <= begin or len(usage.times) < 2:
        raise UsageError("--seconds: too short, since the first streams ended before the last ones began")
    events = [
        tokens
        for record in records
        for at, tokens in zip(record.token_times, _counts(record), strict=True)
        if begin < at <= end
    ]
    tokens = sum(events)
    before, after = usage.at(begin), usage.at(end)
    spent = {name: 1e6 * (after[name] - before[name]) / tokens for name in after}
    return Run(
        tokens_per_s=tokens / (end - begin),
        share=tokens / (end - begin) / rate,
        service_us=spent["service"],
        haproxy_us=spent["haproxy"],
        clients_us=spent["clients"],
        engine_us=spent["engine"],
        events=len(events) / tokens,
        seconds=end - begin,
    )


def _counts(record: Record) -> Sequence[float]:
    """Return the tokens of each event; the mean, where the API does not tell them."""
    events = len(record.token_times)
    return record.token_counts or [record.output_tokens / events] * events
