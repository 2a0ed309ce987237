"""What HTTP and a runtime add to the engine: the same work on the bare engine and through the service, in turns.

The engine runs in this process, the service and the clients in their own, all on the same cores, which is how a small
machine is used. One stream tells how much later the first token comes, many streams tell what share of the engine's
output is left, and where the processors' time went, which other work on the machine blurs less than seconds. Prompts
are new in each run: none finds another's blocks. Both sides make outputs of exactly the asked length, sampled alike; a
service whose tokens make no text has less to do, so how many made one is told, and too few are an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from loadtest.errors import ServerError, UsageError
from loadtest.faults.load import meet
from loadtest.faults.site import Site
from loadtest.generator.fleet import Fleet
from loadtest.records import Outcome, Record
from loadtest.results import machine
from loadtest.runs import flags, output
from loadtest.runs.run import Subject
from loadtest.settings import Arrivals, Clients, Settings, Workload
from model.errors import ConfigError
from model.system.child_process import SPIN_COUNT

RUNTIMES = ("local", "ray")
PROMPT = 64  # tokens
OUTPUT = 192  # tokens of each of many streams
SINGLE = 20  # requests one after the other
SPOKEN = 0.9  # of the tokens: so many have to make text
_ENGINE = "-m model.engine "  # in its command line


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of the engine and one of the service. `_us`: processor microseconds for each token of many streams."""

    engine_tokens_per_s: float
    service_tokens_per_s: float
    engine_first_ms: float
    service_first_ms: float
    engine_alone_us: float
    engine_us: float  # in the service
    service_us: float  # the rest of the service
    clients_us: float
    events: float  # for each token of many streams
    spoken: float  # share of those tokens that came in an event with text


def add_command(commands: Any) -> None:
    text = "Start the service, and compare it with the engine alone: first token of one stream, output of many."
    parser = commands.add_parser("overhead", help="what the service adds to the engine", description=text)
    help_text = "what is served; a benchmark model (D1, ...) by its name, built if it is not there"
    parser.add_argument("--model", default="code", metavar="[NAME=]PATH", help=help_text)
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="where benchmark models are kept")
    parser.add_argument("--runtime", choices=RUNTIMES, default="", help="only this one; none: both")
    parser.add_argument("--streams", type=flags.positive, default=64, metavar="N", help="of many")
    parser.add_argument("--output-tokens", type=flags.positive, default=OUTPUT, metavar="N", help="of each of many")
    help_text = "of the sampling, on both sides; 0 is greedy"
    parser.add_argument("--temperature", type=flags.amount, default=0.0, metavar="X", help=help_text)
    parser.add_argument("--pairs", type=flags.positive, default=5, metavar="N", help="turns of each")
    help_text = "the service's setting; several: one after the other"
    parser.add_argument(
        "--stream-interval", type=flags.amount, nargs="+", default=[0.0], metavar="SECONDS", help=help_text
    )
    parser.set_defaults(command=_command)


def _command(asked: argparse.Namespace) -> int:
    try:
        return _measured(asked)
    except ConfigError as error:
        raise UsageError(f"--model: {error}") from None


def _measured(asked: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the service's engine has it
    model = _subject(asked.model, asked.cache)
    results = {}
    for runtime in [asked.runtime] if asked.runtime else RUNTIMES:
        for interval in asked.stream_interval:
            name = f"{runtime}, an event each {interval:g} s" if interval else runtime
            pairs = _pairs(asked, model, runtime, interval)
            results[name] = _summary(pairs) | {"pairs": [asdict(pair) for pair in pairs]}
            print(f"{name}: {_words(results[name], asked.streams)}", flush=True)
    about = {"kind": "overhead", "commit": machine.commit(), "machine": machine.describe()}
    names = ("model", "streams", "output_tokens", "temperature")
    settings = {name: getattr(asked, name) for name in names}
    print(output.line(about | settings | {"results": results}), flush=True)
    return 0


def _subject(model: str, cache: Path) -> str:
    """`model` as `triptych serve` takes it."""
    from loadtest.bench.models import CONFIGS, built  # loads torch, once the environment is set

    return f"{model}={built(model, cache)}" if model in CONFIGS else model


def _summary(pairs: list[Pair]) -> dict[str, Any]:
    """Medians: `share` and `added_ms` of the pairs', and each figure's own."""
    return {
        "share": statistics.median(pair.service_tokens_per_s / pair.engine_tokens_per_s for pair in pairs),
        "added_ms": statistics.median(pair.service_first_ms - pair.engine_first_ms for pair in pairs),
        **{one.name: statistics.median(getattr(pair, one.name) for pair in pairs) for one in fields(Pair)},
    }


def _words(found: dict[str, Any], streams: int) -> str:
    return (
        f"{100 * found['share']:.1f} % of the engine's {found['engine_tokens_per_s']:,.0f} tokens/s at {streams} "
        f"streams; the first token of one comes {found['added_ms']:.1f} ms later; processor time a token: engine "
        f"{found['engine_us']:.0f} us (alone {found['engine_alone_us']:.0f}), service {found['service_us']:.0f}, "
        f"clients {found['clients_us']:.0f}; {found['events']:.2f} events a token, {100 * found['spoken']:.1f} % of "
        "the tokens made text"
    )


def _pairs(asked: argparse.Namespace, model: str, runtime: str, interval: float) -> list[Pair]:
    engine = _Engine(model, asked.temperature)
    engine.check(asked.output_tokens)
    arguments = [model, "--runtime", runtime, "--stream-interval", f"{interval:g}"]
    with Site(arguments, every_core=True) as site:
        service = _Service(site, meet(site.url, model.partition("=")[0], Workload()), asked.temperature)
        found = []
        for number in range(asked.pairs + 1):  # the first is not counted
            alone = engine.many(asked.streams, asked.output_tokens)
            served = service.many(asked.streams, asked.output_tokens, number)
            pair = Pair(
                engine_tokens_per_s=alone.tokens_per_s,
                service_tokens_per_s=served.tokens_per_s,
                engine_first_ms=engine.first_ms(),
                service_first_ms=service.first_ms(number + 1000),
                engine_alone_us=alone.engine_us,
                engine_us=served.engine_us,
                service_us=served.service_us,
                clients_us=served.clients_us,
                events=served.events,
                spoken=served.spoken,
            )
            found += [pair] if number else []
        return found


@dataclass(frozen=True, slots=True)
class _Many:
    """A run of many streams."""

    tokens_per_s: float
    engine_us: float
    service_us: float = 0.0
    clients_us: float = 0.0
    events: float = 0.0
    spoken: float = 0.0


class _Engine:
    """The bare engine, in this process."""

    def __init__(self, model: str, temperature: float) -> None:
        from loadtest.bench.ours import Ours  # loads torch, once the environment is set
        from model.api.engine_config import EngineConfig
        from model.pretrained import embedded_models

        embedded = {name: Path(path) for name, path in embedded_models().items()}
        name, _, path = model.partition("=")
        self._engine = Ours(Path(path) if path else embedded.get(name, Path(name)), EngineConfig())
        self._rng = random.Random(0)
        self._temperature = temperature

    def check(self, wanted: int) -> None:
        """Raises `UsageError` where the model cannot make so many tokens."""
        info = self._engine.loaded.info
        if info.form == "encoder-only":
            raise UsageError("--model: found an encoder, expected a model that makes tokens")
        if PROMPT + wanted > info.max_model_len:
            most = info.max_model_len - PROMPT
            raise UsageError(f"--output-tokens: found {wanted}, expected at most {most}: the context less the prompt")

    def many(self, streams: int, wanted: int) -> _Many:
        tokens, before = streams * wanted, time.process_time()
        seconds = self._run(streams, wanted).seconds
        return _Many(tokens / seconds, 1e6 * (time.process_time() - before) / tokens)

    def first_ms(self) -> float:
        return 1e3 * statistics.median(self._run(1, 2).first_token_seconds[0] for _ in range(SINGLE))

    def _run(self, streams: int, wanted: int) -> Any:
        from loadtest.bench.batches import Ask, Workload

        vocabulary = int(str(self._engine.info["vocab_size"]))
        asks = [Ask(tuple(self._rng.randrange(100, vocabulary) for _ in range(PROMPT)), wanted) for _ in range(streams)]
        return self._engine.run(Workload("streams", tuple(asks), temperature=self._temperature))


class _Service:
    """The engine through HTTP."""

    def __init__(self, site: Site, subject: Subject, temperature: float) -> None:
        self._site = site
        self._subject = subject
        self._clients = Clients(extra={"temperature": temperature})

    def many(self, streams: int, wanted: int, seed: int) -> _Many:
        """Output tokens over the time from the first request to the last token. Raises `ServerError` where too few
        of them made text.
        """
        spent: dict[str, float] = {}
        records = self._answered(streams, wanted, streams, seed, spent)
        seconds = max(record.ended for record in records) - min(record.sent for record in records)
        tokens = sum(record.completion_tokens for record in records)
        events = sum(len(record.token_times) for record in records) / tokens
        spoken = 1 - sum(record.silent_tokens for record in records) / tokens
        if spoken < SPOKEN:
            what = f"{100 * spoken:.1f} % of the tokens made text, expected {100 * SPOKEN:g} %"
            raise ServerError(f"{what}: the service had less to do than it has; --temperature 1 makes other tokens")
        return _Many(
            tokens_per_s=tokens / seconds,
            engine_us=1e6 * spent[_ENGINE] / tokens,
            service_us=1e6 * (spent[""] - spent[_ENGINE]) / tokens,
            clients_us=1e6 * spent["clients"] / tokens,
            events=events,
            spoken=spoken,
        )

    def first_ms(self, seed: int) -> float:
        records = self._answered(1, 2, SINGLE, seed, {})
        return 1e3 * statistics.median(record.ttft for record in records if record.ttft is not None)

    def _answered(self, streams: int, wanted: int, requests: int, seed: int, spent: dict[str, float]) -> list[Record]:
        """So many requests by so many clients; `spent` gets processor seconds. Raises `ServerError` where one is not
        answered, or in another length.
        """
        settings = replace(
            self._subject.settings,
            workload=Workload(prompt_tokens=f"fixed:{PROMPT}", output_tokens=f"fixed:{wanted}"),
            arrivals=Arrivals(kind="closed", concurrency=streams),
            clients=self._clients,
            duration_s=0.0,
            requests=requests,
            seed=seed,
        )
        records = asyncio.run(self._run(settings, spent))
        failed = [record for record in records if record.outcome is not Outcome.OK]
        if failed:
            raise ServerError(f"{len(failed)} of {len(records)} requests: {failed[0].outcome} {failed[0].error}")
        if any(record.completion_tokens != wanted for record in records):
            raise ServerError(f"expected {wanted} tokens of each request, found other numbers")
        return records

    async def _run(self, settings: Settings, spent: dict[str, float]) -> list[Record]:
        fleet = Fleet(settings, self._subject.vocabulary, "")
        try:
            await fleet.start()
            before = {name: self._site.cpu_s(name) for name in ("", _ENGINE)}
            fleet.go()
            await fleet.gather(lambda: None)
            spent |= {name: self._site.cpu_s(name) - seconds for name, seconds in before.items()}
            spent["clients"] = sum(fleet.gathered.cpu_s)
        finally:
            await fleet.aclose()
        return fleet.gathered.records
