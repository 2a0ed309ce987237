"""What HTTP and a runtime add to the engine: the same work on the bare engine and through the service, in turns.

The engine runs in this process, the service and the clients in their own, all on the same cores, which is how a small
machine is used. One stream tells how much later the first token comes, many streams tell what share of the engine's
output is left. Prompts are new in each run: none finds another's blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loadtest import machine, options, output
from loadtest.errors import ServerError
from loadtest.faults.load import meet, run_to_the_end
from loadtest.faults.site import Site
from loadtest.records import Outcome, Record
from loadtest.run import Subject
from loadtest.settings import Arrivals, Workload
from model.engine.sockets import SPIN_COUNT

RUNTIMES = ("local", "ray")
PROMPT = 64  # tokens
OUTPUT = 192  # tokens of each of many streams
SINGLE = 20  # requests one after the other


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of the engine and one of the service."""

    engine_tokens_per_s: float
    service_tokens_per_s: float
    engine_first_ms: float
    service_first_ms: float


def add_command(commands: Any) -> None:
    text = "Start the service, and compare it with the engine alone: first token of one stream, output of many."
    parser = commands.add_parser("overhead", help="what the service adds to the engine", description=text)
    parser.add_argument("--model", default="code", metavar="[NAME=]PATH", help="what is served")
    parser.add_argument("--runtime", choices=RUNTIMES, default="", help="only this one; none: both")
    parser.add_argument("--streams", type=options.whole, default=64, metavar="N", help="of many")
    parser.add_argument("--pairs", type=options.whole, default=5, metavar="N", help="turns of each")
    parser.set_defaults(command=_command)


def _command(asked: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the service's engine has it
    results = {}
    for runtime in [asked.runtime] if asked.runtime else RUNTIMES:
        pairs = _pairs(asked.model, runtime, asked.streams, asked.pairs)
        share = statistics.median(pair.service_tokens_per_s / pair.engine_tokens_per_s for pair in pairs)
        added = statistics.median(pair.service_first_ms - pair.engine_first_ms for pair in pairs)
        engine = statistics.median(pair.engine_tokens_per_s for pair in pairs)
        print(
            f"{runtime}: {100 * share:.1f} % of the engine's {engine:,.0f} tokens/s at {asked.streams} streams; "
            f"the first token of one comes {added:.1f} ms later",
            flush=True,
        )
        results[runtime] = {"share": share, "added_ms": added, "pairs": [asdict(pair) for pair in pairs]}
    about = {"kind": "overhead", "commit": machine.commit(), "machine": machine.describe()}
    print(output.line(about | {"model": asked.model, "streams": asked.streams, "results": results}), flush=True)
    return 0


def _pairs(model: str, runtime: str, streams: int, count: int) -> list[Pair]:
    engine = _Engine(model)
    with Site([model, "--runtime", runtime], every_core=True) as site:
        subject = meet(site.url, model.partition("=")[0], Workload())
        found = []
        for number in range(count + 1):  # the first is not counted
            pair = Pair(
                engine.tokens_per_s(streams),
                _tokens_per_s(_through(subject, streams, OUTPUT, streams, number)),
                engine.first_ms(),
                _first_ms(_through(subject, 1, 2, SINGLE, number + 1000)),
            )
            found += [pair] if number else []
        return found


class _Engine:
    """The bare engine, in this process."""

    def __init__(self, model: str) -> None:
        from loadtest.bench.ours import Ours  # loads torch, once the environment is set
        from model.engine.config import EngineConfig
        from model.pretrained import embedded_models

        embedded = {name: Path(path) for name, path in embedded_models().items()}
        name, _, path = model.partition("=")
        self._engine = Ours(Path(path) if path else embedded.get(name, Path(name)), EngineConfig())
        self._rng = random.Random(0)

    def tokens_per_s(self, streams: int) -> float:
        return streams * OUTPUT / self._run(streams, OUTPUT).seconds

    def first_ms(self) -> float:
        return 1e3 * statistics.median(self._run(1, 2).first_token_seconds[0] for _ in range(SINGLE))

    def _run(self, streams: int, wanted: int) -> Any:
        from loadtest.bench.workloads import Ask, Workload

        vocabulary = int(str(self._engine.info["vocab_size"]))
        asks = [Ask(tuple(self._rng.randrange(100, vocabulary) for _ in range(PROMPT)), wanted) for _ in range(streams)]
        return self._engine.run(Workload("streams", tuple(asks)))


def _through(subject: Subject, streams: int, wanted: int, requests: int, seed: int) -> list[Record]:
    """So many requests by so many clients over HTTP. Raises `ServerError` where one is not answered."""
    settings = replace(
        subject.settings,
        workload=Workload(prompt_tokens=f"fixed:{PROMPT}", output_tokens=f"fixed:{wanted}"),
        arrivals=Arrivals(kind="closed", concurrency=streams),
        duration_s=0.0,
        requests=requests,
        seed=seed,
    )
    records = asyncio.run(run_to_the_end(subject, settings))
    failed = [record for record in records if record.outcome is not Outcome.OK]
    if failed:
        raise ServerError(f"{len(failed)} of {len(records)} requests: {failed[0].outcome} {failed[0].error}")
    return records


def _tokens_per_s(records: list[Record]) -> float:
    """Output tokens over the time from the first request to the last token."""
    seconds = max(record.ended for record in records) - min(record.sent for record in records)
    return sum(record.completion_tokens for record in records) / seconds


def _first_ms(records: list[Record]) -> float:
    return 1e3 * statistics.median(record.ttft for record in records if record.ttft is not None)
