"""The command `overhead`, which measures what HTTP and a runtime add to the engine.

The same work runs on the engine alone and through the service, in turns. The engine runs in this process, the service
and the clients in their own, all on the same cores, as on a small machine. A single stream shows the added latency of
the first token. Many streams show the share of the engine's throughput that is left, and the CPU time by process, which
other work on the machine disturbs less than elapsed time. Prompts are new in each run, so that none is in a cache. Both
sides generate outputs of the same lengths with the same sampling. A service whose tokens have no text has less work, so
the share of tokens with text is reported, and a low one is an error.

Of an encoder the texts are counted: clients send requests of several texts each and wait for their vectors, one request
after the other; the engine alone gets as many texts of as many tokens, all at once.
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

from lab.faults.load import probe
from lab.faults.site import Site
from triptych.loadtest.errors import ServerError, UsageError
from triptych.loadtest.generator.fleet import Fleet
from triptych.loadtest.records import Outcome, Record
from triptych.loadtest.results import page
from triptych.loadtest.runs import flags, output
from triptych.loadtest.runs.run import Subject
from triptych.loadtest.settings import Arrivals, Clients, Settings, Workload
from triptych.model.errors import ConfigError
from triptych.model.system.child_process import SPIN_COUNT

RUNTIMES = ("local", "ray")
PROMPT = 64  # tokens
OUTPUT = 192  # tokens of each of many streams
SINGLE = 20  # sequential requests
MIN_TEXT_SHARE = 0.9  # of tokens that must have text
TEXTS = 4_096  # of an encoder's run, at least
ROUNDS = 4  # requests of each client to an encoder, at least
_ENGINE = "-m triptych.model.engine "  # in its command line


@dataclass(frozen=True, slots=True)
class Pair:
    """Holds one run of the engine and one of the service. `_us`: CPU microseconds per token of many streams."""

    engine_tokens_per_s: float
    service_tokens_per_s: float
    engine_first_ms: float
    service_first_ms: float
    engine_alone_us: float
    engine_us: float  # in the service
    service_us: float  # the rest of the service
    clients_us: float
    events: float  # per token of many streams
    text_share: float  # share of those tokens in events with text


@dataclass(frozen=True, slots=True)
class EncodePair:
    """Holds one run of an encoder's engine and one of the service. `_us`: CPU microseconds per text."""

    engine_texts_per_s: float
    service_texts_per_s: float
    engine_alone_us: float
    engine_us: float  # in the service
    service_us: float  # the rest of the service
    clients_us: float


def add_command(commands: Any) -> None:
    text = "Start the service, and compare it with the engine alone: first token of one stream, output of many."
    parser = commands.add_parser("overhead", help="what the service adds to the engine", description=text)
    help_text = "model to serve; a benchmark model (D1, ...) by name, built if missing"
    parser.add_argument("--model", default="code", metavar="[NAME=]PATH", help=help_text)
    parser.add_argument("--cache", type=Path, default=Path("build/bench"), help="where benchmark models are kept")
    parser.add_argument("--runtime", choices=RUNTIMES, default="", help="only this runtime; none: both")
    parser.add_argument("--streams", type=flags.positive, default=None, metavar="N", help="concurrent streams, 64")
    parser.add_argument("--output-tokens", type=flags.positive, default=OUTPUT, metavar="N", help="of each stream")
    help_text = "of sampling, on both sides; 0 is greedy"
    parser.add_argument("--temperature", type=flags.amount, default=0.0, metavar="X", help=help_text)
    parser.add_argument("--pairs", type=flags.positive, default=5, metavar="N", help="repetitions")
    help_text = "texts in a request to an encoder; --streams clients send them, 16 by default"
    parser.add_argument("--texts", type=flags.positive, default=16, metavar="N", help=help_text)
    parser.add_argument("--text-tokens", type=flags.positive, default=16, metavar="N", help="of each text")
    parser.add_argument("--encoding-format", choices=("float", "base64"), default="float", help="of vectors")
    help_text = "settings of the service, measured one after the other"
    parser.add_argument(
        "--stream-interval", type=flags.amount, nargs="+", default=[0.0], metavar="SECONDS", help=help_text
    )
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    try:
        return _measured(options)
    except ConfigError as error:
        raise UsageError(f"--model: {error}") from None


def _measured(options: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the service's engine has it
    model = _subject(options.model, options.cache)
    engine = _Engine(model, options.temperature)
    if engine.encodes:
        names = ["model", "streams", "texts", "text_tokens", "encoding_format"]
        measure, intervals, words = _encode_pairs, [0.0], _encode_words
    else:
        names = ["model", "streams", "output_tokens", "temperature"]
        measure, intervals, words = _pairs, options.stream_interval, _words
    options.streams = options.streams or (16 if engine.encodes else 64)
    results = {}
    for runtime in [options.runtime] if options.runtime else RUNTIMES:
        for interval in intervals:
            name = f"{runtime}, an event each {interval:g} s" if interval else runtime
            results[name] = measure(options, engine, model, runtime, interval)
            print(f"{name}: {words(results[name], options)}", flush=True)
    about = {"kind": "overhead", "commit": page.commit(), "machine": page.describe()}
    settings = {name: getattr(options, name) for name in names}
    print(output.line(about | settings | {"results": results}), flush=True)
    return 0


def _subject(model: str, cache: Path) -> str:
    """Return `model` as an argument of `triptych serve`."""
    from lab.bench.models import CONFIGS, built  # loads torch, once the environment is set

    return f"{model}={built(model, cache)}" if model in CONFIGS else model


def _summary(pairs: list[Pair]) -> dict[str, Any]:
    """Return medians: `share` and `added_ms` over the pairs, and each figure's own."""
    return {
        "share": statistics.median(pair.service_tokens_per_s / pair.engine_tokens_per_s for pair in pairs),
        "added_ms": statistics.median(pair.service_first_ms - pair.engine_first_ms for pair in pairs),
        **_medians(pairs),
    }


def _medians(pairs: list[Pair] | list[EncodePair]) -> dict[str, Any]:
    named = {one.name: statistics.median(getattr(pair, one.name) for pair in pairs) for one in fields(pairs[0])}
    return named | {"pairs": [asdict(pair) for pair in pairs]}


def _words(found: dict[str, Any], options: argparse.Namespace) -> str:
    return (
        f"{100 * found['share']:.1f} % of the engine's {found['engine_tokens_per_s']:,.0f} tokens/s at "
        f"{options.streams} streams; first token of a single stream {found['added_ms']:.1f} ms later; CPU time a "
        f"token: engine {found['engine_us']:.0f} us (alone {found['engine_alone_us']:.0f}), service "
        f"{found['service_us']:.0f}, clients {found['clients_us']:.0f}; {found['events']:.2f} events a token, "
        f"{100 * found['text_share']:.1f} % of the tokens have text"
    )


def _encode_words(found: dict[str, Any], options: argparse.Namespace) -> str:
    return (
        f"{100 * found['share']:.1f} % of the engine's {found['engine_texts_per_s']:,.0f} texts/s with "
        f"{options.streams} clients of {options.texts} texts each; CPU time a text: engine {found['engine_us']:.0f} us "
        f"(alone {found['engine_alone_us']:.0f}), service {found['service_us']:.0f} "
        f"({100 * found['service_us'] / found['engine_us']:.1f} %), clients {found['clients_us']:.0f}"
    )


def _pairs(options: argparse.Namespace, engine: _Engine, model: str, runtime: str, interval: float) -> dict[str, Any]:
    engine.check(options.output_tokens)
    arguments = [model, "--runtime", runtime, "--stream-interval", f"{interval:g}"]
    with Site(arguments, every_core=True) as site:
        service = _Service(site, probe(site.url, model.partition("=")[0], Workload()), options.temperature)
        found = []
        for number in range(options.pairs + 1):  # the first is not counted
            alone = engine.many(options.streams, options.output_tokens)
            served = service.many(options.streams, options.output_tokens, number)
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
                text_share=served.text_share,
            )
            found += [pair] if number else []
        return _summary(found)


def _encode_pairs(
    options: argparse.Namespace, engine: _Engine, model: str, runtime: str, interval: float
) -> dict[str, Any]:
    rounds = max(ROUNDS, -(-TEXTS // (options.streams * options.texts)))
    queued = 2 * options.streams * options.texts
    arguments = [model, "--runtime", runtime, "--max-encode-inputs", str(options.texts)]
    arguments += ["--max-encode-tokens", str(options.texts * options.text_tokens)]
    arguments += ["--max-queued-requests", str(queued), "--max-queued-tokens", str(queued * options.text_tokens)]
    with Site(arguments, every_core=True) as site:
        subject = probe(site.url, model.partition("=")[0], Workload(kind="embedding"), "encode")
        service = _Service(site, subject, 0.0)
        found = []
        for number in range(options.pairs + 1):  # the first is not counted
            alone = engine.texts(options.streams * options.texts * rounds, options.text_tokens)
            served = service.texts(options, rounds, number)
            pair = EncodePair(
                engine_texts_per_s=alone.tokens_per_s,
                service_texts_per_s=served.tokens_per_s,
                engine_alone_us=alone.engine_us,
                engine_us=served.engine_us,
                service_us=served.service_us,
                clients_us=served.clients_us,
            )
            found += [pair] if number else []
        share = statistics.median(pair.service_texts_per_s / pair.engine_texts_per_s for pair in found)
        return {"share": share, **_medians(found)}


@dataclass(frozen=True, slots=True)
class _Many:
    """Holds the result of a run of many streams, or of many texts; each text counts as a token."""

    tokens_per_s: float
    engine_us: float
    service_us: float = 0.0
    clients_us: float = 0.0
    events: float = 0.0
    text_share: float = 0.0

    @classmethod
    def of(cls, records: list[Record], tokens: int, spent: dict[str, float]) -> _Many:
        """Return the result of requests to the service that took `spent` CPU seconds for `tokens` tokens."""
        seconds = max(record.ended for record in records) - min(record.sent for record in records)
        return cls(
            tokens_per_s=tokens / seconds,
            engine_us=1e6 * spent[_ENGINE] / tokens,
            service_us=1e6 * (spent[""] - spent[_ENGINE]) / tokens,
            clients_us=1e6 * spent["clients"] / tokens,
        )


class _Engine:
    """Runs the engine in this process."""

    def __init__(self, model: str, temperature: float) -> None:
        from lab.bench.ours import Ours  # loads torch, once the environment is set
        from triptych.model.api.engine_config import EngineConfig
        from triptych.model.pretrained import embedded_models

        embedded = {name: Path(path) for name, path in embedded_models().items()}
        name, _, path = model.partition("=")
        self._engine = Ours(Path(path) if path else embedded.get(name, Path(name)), EngineConfig())
        self._rng = random.Random(0)
        self._temperature = temperature
        self.encodes = self._engine.loaded.info.form == "encoder-only"

    def check(self, wanted: int) -> None:
        """Raise `UsageError` if the model cannot generate `wanted` tokens."""
        info = self._engine.loaded.info
        if PROMPT + wanted > info.max_model_len:
            most = info.max_model_len - PROMPT
            raise UsageError(f"--output-tokens: found {wanted}, expected at most {most}: the context less the prompt")

    def many(self, streams: int, wanted: int) -> _Many:
        tokens, before = streams * wanted, time.process_time()
        seconds = self._run(streams, wanted).seconds
        return _Many(tokens / seconds, 1e6 * (time.process_time() - before) / tokens)

    def texts(self, count: int, tokens: int) -> _Many:
        """Encode `count` texts of `tokens` tokens."""
        workload = self._workload(count, tokens, 0)
        before = time.process_time()
        seconds = self._engine.run(workload).seconds
        return _Many(count / seconds, 1e6 * (time.process_time() - before) / count)

    def first_ms(self) -> float:
        return 1e3 * statistics.median(self._run(1, 2).first_token_seconds[0] for _ in range(SINGLE))

    def _run(self, streams: int, wanted: int) -> Any:
        return self._engine.run(self._workload(streams, PROMPT, wanted))

    def _workload(self, count: int, tokens: int, wanted: int) -> Any:
        from lab.bench.batches import BenchRequest, Workload

        vocabulary = int(str(self._engine.info["vocab_size"]))
        asks = [
            BenchRequest(tuple(self._rng.randrange(100, vocabulary) for _ in range(tokens)), wanted)
            for _ in range(count)
        ]
        return Workload("many", tuple(asks), temperature=self._temperature)


class _Service:
    """Runs the engine through HTTP."""

    def __init__(self, site: Site, subject: Subject, temperature: float) -> None:
        self._site = site
        self._subject = subject
        self._clients = Clients(extra={"temperature": temperature})

    def many(self, streams: int, wanted: int, seed: int) -> _Many:
        """Return the output tokens over the time from the first request to the last token. Raises `ServerError` if too
        few of them have text.
        """
        spent: dict[str, float] = {}
        records = self._generated(streams, wanted, streams, seed, spent)
        tokens = sum(record.completion_tokens for record in records)
        events = sum(len(record.token_times) for record in records) / tokens
        text_share = 1 - sum(record.silent_tokens for record in records) / tokens
        if text_share < MIN_TEXT_SHARE:
            what = f"{100 * text_share:.1f} % of the tokens made text, expected {100 * MIN_TEXT_SHARE:g} %"
            raise ServerError(f"{what}: the service had less to do than it has; --temperature 1 makes other tokens")
        return replace(_Many.of(records, tokens, spent), events=events, text_share=text_share)

    def texts(self, options: argparse.Namespace, rounds: int, seed: int) -> _Many:
        """Encode `rounds` requests of each client. Raises `ServerError` if texts have another number of tokens."""
        size, spent = options.text_tokens, dict[str, float]()
        workload = Workload(
            kind="embedding", prompt_tokens=f"fixed:{size}", texts=f"fixed:{options.texts}", output_tokens="fixed:1"
        )
        clients = Clients(extra={"encoding_format": options.encoding_format})
        records = self._answered(workload, clients, options.streams, options.streams * rounds, seed, spent)
        count = options.texts * len(records)
        tokens = sum(record.prompt_tokens for record in records)
        if tokens != count * size:
            raise ServerError(f"expected {size} tokens of each text, found {tokens / count:.1f}")
        return _Many.of(records, count, spent)

    def first_ms(self, seed: int) -> float:
        records = self._generated(1, 2, SINGLE, seed, {})
        return 1e3 * statistics.median(record.ttft for record in records if record.ttft is not None)

    def _generated(self, streams: int, wanted: int, requests: int, seed: int, spent: dict[str, float]) -> list[Record]:
        """Run `requests` requests by `streams` clients. Raises `ServerError` for one with another length."""
        workload = Workload(prompt_tokens=f"fixed:{PROMPT}", output_tokens=f"fixed:{wanted}")
        records = self._answered(workload, self._clients, streams, requests, seed, spent)
        if any(record.completion_tokens != wanted for record in records):
            raise ServerError(f"expected {wanted} tokens of each request, found other numbers")
        return records

    def _answered(
        self, workload: Workload, clients: Clients, streams: int, requests: int, seed: int, spent: dict[str, float]
    ) -> list[Record]:
        """Run requests by several clients, each one request at a time; add the CPU seconds to `spent`.

        Raises `ServerError` if one fails.
        """
        settings = replace(
            self._subject.settings,
            workload=workload,
            arrivals=Arrivals(kind="closed", concurrency=streams),
            clients=clients,
            duration_s=0.0,
            requests=requests,
            seed=seed,
        )
        records = asyncio.run(self._run(settings, spent))
        failed = [record for record in records if record.outcome is not Outcome.OK]
        if failed:
            raise ServerError(f"{len(failed)} of {len(records)} requests: {failed[0].outcome} {failed[0].error}")
        return records

    async def _run(self, settings: Settings, spent: dict[str, float]) -> list[Record]:
        fleet = Fleet(settings, self._subject.vocabulary, "")
        try:
            await fleet.start()
            before = {name: self._site.cpu_s(name) for name in ("", _ENGINE)}
            fleet.go()
            await fleet.collect(lambda: None)
            spent |= {name: self._site.cpu_s(name) - seconds for name, seconds in before.items()}
            spent["clients"] = sum(fleet.collected.cpu_s)
        finally:
            await fleet.aclose()
        return fleet.collected.records
