"""The flags of `run` and `sweep`, and the settings made of them."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from typing import Any

from triptych.loadtest.errors import UsageError
from triptych.loadtest.settings import (
    ARRIVALS,
    EMBEDDING_TARGETS,
    PATHS,
    WORKLOADS,
    Arrivals,
    Clients,
    Settings,
    Workload,
)
from triptych.loadtest.workload import distributions

_CHAT = {"prompt_tokens": "lognormal:120,0.9,2048", "output_tokens": "lognormal:80,0.7,512"}
_PRESETS: dict[str, dict[str, str]] = {
    "synthetic": {"prompt_tokens": "uniform:32-256", "output_tokens": "uniform:16-64"},
    "chat": _CHAT,
    "conversation": {"prompt_tokens": "lognormal:40,0.8,512", "output_tokens": "lognormal:60,0.6,256"},
    "seq2seq": {"prompt_tokens": "uniform:8-64", "output_tokens": "uniform:8-64"},
    "embedding": {"prompt_tokens": "uniform:8-128", "output_tokens": "fixed:1"},
    "replay": _CHAT,
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add all flags that `run` and `sweep` share."""
    server, run = parser.add_argument_group("server"), parser.add_argument_group("run")
    _add_address(server)
    _add_server(server)
    _add_workload(
        parser.add_argument_group("workload (lengths: N, uniform:A-B, lognormal:MEDIAN,SIGMA[,MAX], file:PATH)")
    )
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_clients(parser.add_argument_group("clients"))
    run.add_argument("--requests", type=whole, default=0, metavar="N", help="maximum number; 0: by duration")
    run.add_argument("--slo", default="", metavar="LIMITS", help="ttft_p99<500ms,itl_p99<60ms,error_rate<0.1%%")
    _add_run(run)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all workloads of a run share."""
    _add_address(parser.add_argument_group("server"))
    _add_run(parser.add_argument_group("run"))


def settings(options: argparse.Namespace) -> Settings:
    """Make settings of the flags; raises `UsageError` naming the flag, what was found and what is expected."""
    arrivals = _arrivals(options)
    duration_s = options.duration if options.duration is not None else 0.0 if options.requests else 30.0
    if arrivals.kind == "stages":
        if options.duration is not None:
            raise UsageError(
                f"--duration: found {options.duration:g}, expected none with stages: they have their seconds"
            )
        duration_s = sum(seconds for _, seconds in arrivals.stages)
    if arrivals.kind == "replay" and options.duration is None:
        duration_s = 0.0
    if arrivals.kind == "ramp" and not duration_s:
        raise UsageError("--arrivals ramp: found no --duration, expected the seconds that the ramp takes")
    if options.warmup >= duration_s > 0:
        raise UsageError(f"--warmup: found {options.warmup:g}, expected less than the duration of {duration_s:g} s")
    workload = _workload(options)
    found = Settings(
        url=options.url.rstrip("/"),
        target=options.target,
        model=options.model,
        workload=workload,
        arrivals=arrivals,
        clients=_clients(options),
        duration_s=duration_s,
        requests=options.requests,
        warmup_s=options.warmup,
        drain_s=options.drain,
        workers=options.workers,
        max_lag_ms=options.max_lag,
        seed=options.seed,
    )
    for flag in ("prompt_tokens", "output_tokens", "turns", "texts"):
        distributions.parse(getattr(workload, flag), "--" + flag.replace("_", "-"))
    if 0 < found.clients.max_concurrency < found.workers:
        most = f"at most --max-concurrency, {found.clients.max_concurrency}: the workers divide its places"
        raise UsageError(f"--workers: found {found.workers}, expected {most}")
    _check_used(found)
    return found


def _check_used(found: Settings) -> None:
    """Raise `UsageError` for a flag that has no effect with the others."""
    workload, clients = found.workload, found.clients
    for part, name, flag, used, needs in (
        (workload, "turns", "--turns", workload.kind == "conversation", "--workload conversation"),
        (workload, "think_s", "--think", workload.kind == "conversation", "--workload conversation"),
        (workload, "ratio", "--ratio", workload.kind == "seq2seq", "--workload seq2seq"),
        (workload, "ratio_sigma", "--ratio-sigma", workload.kind == "seq2seq", "--workload seq2seq"),
        (workload, "texts", "--texts", workload.kind == "embedding", "--workload embedding"),
        (workload, "speed", "--speed", found.arrivals.kind == "replay", "--arrivals replay"),
        (workload, "prefixes", "--prefixes", workload.kind not in ("embedding", "replay"), "prompts that are made"),
        (workload, "prefix_tokens", "--prefix-tokens", workload.prefixes, "--prefixes"),
        (workload, "zipf", "--zipf", workload.prefixes, "--prefixes"),
        (clients, "slow_rate", "--slow-rate", clients.slow, "--slow"),
        (clients, "max_retries", "--max-retries", clients.retry, "--retry"),
        (found.arrivals, "burstiness", "--burstiness", found.arrivals.kind == "gamma", "--arrivals gamma"),
    ):
        if not used and getattr(part, name) != getattr(type(part)(), name):
            raise UsageError(f"{flag}: found {getattr(part, name)}, expected {needs} with it")


def _workload(options: argparse.Namespace) -> Workload:
    embeds = options.target in EMBEDDING_TARGETS
    kind = options.workload or ("embedding" if embeds else "synthetic")
    if embeds and kind not in ("embedding", "replay"):
        raise UsageError(f"--workload: found {kind}, expected embedding or replay with --target {options.target}")
    if not embeds and kind == "embedding":
        raise UsageError(f"--workload: found embedding, expected another one with --target {options.target}")
    if (kind == "replay") != bool(options.file):
        raise UsageError(
            f"--file: found {options.file or 'none'}, expected a file with --workload replay and only with it"
        )
    if options.output_tokens and kind in ("seq2seq", "embedding"):
        raise UsageError(
            f"--output-tokens: found some with --workload {kind}, expected none: they follow from its inputs"
        )
    preset = _PRESETS[kind]
    return Workload(
        kind=kind,
        prompt_tokens=options.prompt_tokens or preset["prompt_tokens"],
        output_tokens=options.output_tokens or preset["output_tokens"],
        prefixes=options.prefixes,
        prefix_tokens=options.prefix_tokens,
        zipf=options.zipf,
        turns=options.turns,
        think_s=options.think,
        texts=options.texts,
        ratio=options.ratio,
        ratio_sigma=options.ratio_sigma,
        file=options.file or "",
        speed=options.speed,
    )


def _arrivals(options: argparse.Namespace) -> Arrivals:
    timed = options.workload == "replay" and not options.rate and options.concurrency is None
    kind = options.arrivals or (
        "stages" if options.stages else "replay" if timed else "poisson" if options.rate else "closed"
    )
    if kind in ("constant", "poisson", "gamma", "ramp") and not options.rate:
        raise UsageError(f"--rate: found none, expected requests a second with --arrivals {kind}")
    if kind == "closed" and options.rate:
        raise UsageError("--rate: found one with --arrivals closed, expected --concurrency, or other arrivals")
    if kind in ("stages", "replay") and options.rate:
        raise UsageError(f"--rate: found one with --arrivals {kind}, which has its own; expected other arrivals")
    if kind != "closed" and options.concurrency is not None:
        raise UsageError(
            f"--concurrency: found one with --arrivals {kind}, expected closed; --max-concurrency bounds open ones"
        )
    if (kind == "ramp") != (options.ramp_to is not None):
        raise UsageError(f"--ramp-to: found {options.ramp_to}, expected a rate with --arrivals ramp and only with it")
    if (kind == "stages") != bool(options.stages):
        raise UsageError("--stages: expected RATE@SECONDS,... with --arrivals stages and only with it")
    if kind == "replay" and options.workload != "replay":
        raise UsageError("--arrivals replay: expected --workload replay")
    return Arrivals(
        kind=kind,
        rate=options.rate or 0.0,
        concurrency=options.concurrency or 8,
        burstiness=options.burstiness,
        ramp_to=options.ramp_to or 0.0,
        stages=_stages(options.stages) if options.stages else (),
    )


def _stages(text: str) -> tuple[tuple[float, float], ...]:
    """Parse stages such as `5@10,20@10`: 5 a second for 10 s, then 20 a second for 10 s."""
    try:
        pairs = [tuple(float(part) for part in stage.split("@")) for stage in text.split(",")]
        if not all(len(pair) == 2 and pair[0] >= 0 and pair[1] > 0 for pair in pairs) or not any(r for r, _ in pairs):
            raise ValueError
    except ValueError:
        raise UsageError(f"--stages: found {text!r}, expected RATE@SECONDS,RATE@SECONDS,...") from None
    return tuple((rate, seconds) for rate, seconds in pairs)


def _clients(options: argparse.Namespace) -> Clients:
    if options.cancel + options.slow + options.retry > 1:
        total = options.cancel + options.slow + options.retry
        raise UsageError(f"--cancel, --slow and --retry: found {total:g} together, expected at most 1")
    try:
        extra = json.loads(options.extra)
        if not isinstance(extra, dict):
            raise ValueError
    except ValueError:
        raise UsageError(f"--extra: found {options.extra!r}, expected a JSON object") from None
    return Clients(
        cancel=options.cancel,
        slow=options.slow,
        slow_rate=options.slow_rate,
        retry=options.retry,
        max_retries=options.max_retries,
        stream=not options.no_stream,
        ignore_eos=not options.no_ignore_eos,
        timeout_s=options.timeout,
        max_concurrency=options.max_concurrency,
        extra=extra,
    )


def _add_address(group: Any) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", type=_url, help="server, without a route")
    group.add_argument("--api-key", default=None, metavar="KEY", help="bearer token; TRIPTYCH_API_KEY")


def _add_server(group: Any) -> None:
    group.add_argument("--target", default="generate", choices=tuple(PATHS), help="API to use")
    group.add_argument("--model", default="", help="its name; empty: the server's choice")
    group.add_argument("--tokenizer", default=None, metavar="PATH", help="tokenizer.json; none: the server's /tokenize")


def _add_workload(group: Any) -> None:
    group.add_argument("--workload", choices=WORKLOADS, default=None, help="none: embedding or synthetic, by target")
    group.add_argument("--prompt-tokens", metavar="LENGTHS", help="length of a prompt, turn or text; none: by workload")
    group.add_argument("--output-tokens", metavar="LENGTHS", help="max_tokens; none: by workload")
    group.add_argument("--prefixes", type=whole, default=0, metavar="K", help="number of shared prefixes")
    group.add_argument("--prefix-tokens", type=positive, default=128, metavar="N", help="length of each shared prefix")
    group.add_argument("--zipf", type=amount, default=1.0, metavar="A", help="popularity of prefix k is 1/k^A")
    group.add_argument("--turns", default="uniform:2-5", metavar="LENGTHS", help="turns of a conversation")
    group.add_argument("--think", type=amount, default=1.0, metavar="SECONDS", help="mean pause before the next turn")
    group.add_argument("--texts", default="fixed:8", metavar="LENGTHS", help="texts of an embedding request")
    group.add_argument("--ratio", type=above_zero, default=1.0, help="seq2seq: output tokens per source token")
    group.add_argument("--ratio-sigma", type=amount, default=0.2, metavar="S", help="seq2seq: log-normal noise on it")
    group.add_argument("--file", default=None, metavar="JSONL", help="replay: one request a line")
    group.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="replay: speed-up over the recording")


def _add_arrivals(group: Any) -> None:
    group.add_argument("--arrivals", choices=ARRIVALS, default=None, help="none: poisson with --rate, else closed")
    group.add_argument("--rate", type=above_zero, default=None, metavar="R", help="requests a second; start of a ramp")
    group.add_argument("--concurrency", type=positive, default=None, metavar="N", help="closed: clients; none: 8")
    group.add_argument("--burstiness", type=above_zero, default=1.0, metavar="K", help="gamma: shape; below 1: bursts")
    group.add_argument("--ramp-to", type=above_zero, default=None, metavar="R", help="ramp: final rate")
    group.add_argument("--stages", default=None, metavar="R@S,...", help="stages: rate @ seconds, in sequence")


def _add_clients(group: Any) -> None:
    group.add_argument("--cancel", type=fraction, default=0.0, metavar="F", help="fraction that disconnects early")
    group.add_argument("--slow", type=fraction, default=0.0, metavar="F", help="fraction that reads slowly")
    group.add_argument(
        "--slow-rate", type=above_zero, default=10.0, metavar="R", help="events a second that slow clients read"
    )
    group.add_argument(
        "--retry", type=fraction, default=0.0, metavar="F", help="fraction that retries after Retry-After"
    )
    group.add_argument("--max-retries", type=whole, default=3, metavar="N", help="retries of each request")
    group.add_argument("--no-stream", action="store_true", help="request unstreamed replies")
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let the model end outputs; else they have planned lengths"
    )
    group.add_argument(
        "--timeout", type=above_zero, default=120.0, metavar="SECONDS", help="longest time without receiving a byte"
    )
    group.add_argument("--max-concurrency", type=whole, default=0, metavar="N", help="limit for open arrivals; 0: none")
    group.add_argument("--extra", default="{}", metavar="JSON", help="fields for every body")


def _add_run(group: Any) -> None:
    group.add_argument(
        "--duration", type=above_zero, default=None, metavar="SECONDS", help="of arrivals; none: 30, or by --requests"
    )
    group.add_argument(
        "--warmup", type=amount, default=0.0, metavar="SECONDS", help="at the start, not counted in results"
    )
    group.add_argument(
        "--drain",
        type=amount,
        default=60.0,
        metavar="SECONDS",
        help="wait after the last arrival; requests without a reply then have failed",
    )
    group.add_argument("--workers", type=positive, default=1, metavar="N", help="load generator processes")
    group.add_argument(
        "--max-lag",
        type=above_zero,
        default=10.0,
        metavar="MS",
        help="p99 lag of the generator that makes a run invalid",
    )
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="the same seed makes the same load")
    group.add_argument("--out", default=None, metavar="FOLDER", help="output folder; none: out/loadtest/TIME")
    group.add_argument("--quiet", action="store_true", help="no progress")


def _url(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of a port or an address in brackets
        right = False
    if not right:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected http://HOST:PORT")
    return text


def _number(text: str, kind: Any, low: float, high: float, expected: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
    return value


def whole(text: str) -> int:
    return int(_number(text, int, 0, 1e12, "a whole number"))


def positive(text: str) -> int:
    return int(_number(text, int, 1, 1e9, "a whole number above 0"))


def above_zero(text: str) -> float:
    return float(_number(text, float, 1e-6, 1e9, "a number above 0"))


def amount(text: str) -> float:
    return float(_number(text, float, 0, 1e9, "a number, 0 or more"))


def fraction(text: str) -> float:
    return float(_number(text, float, 0, 1, "a fraction from 0 to 1"))
