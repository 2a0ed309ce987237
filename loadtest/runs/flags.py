"""The flags of `run` and `sweep`, and the settings that they make."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from typing import Any

from loadtest.errors import UsageError
from loadtest.settings import ARRIVALS, EMBEDDING_TARGETS, PATHS, WORKLOADS, Arrivals, Clients, Settings, Workload
from loadtest.workload import lengths

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
    """All flags that say what, how and against what; not what a command adds of its own."""
    server, run = parser.add_argument_group("server"), parser.add_argument_group("run")
    _add_address(server)
    _add_server(server)
    _add_workload(
        parser.add_argument_group("workload (lengths: N, uniform:A-B, lognormal:MEDIAN,SIGMA[,MAX], file:PATH)")
    )
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_clients(parser.add_argument_group("clients"))
    run.add_argument("--requests", type=whole, default=0, metavar="N", help="at most; 0: by the duration")
    run.add_argument("--slo", default="", metavar="LIMITS", help="ttft_p99<500ms,itl_p99<60ms,error_rate<0.1%%")
    _add_run(run)


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Those of them that several workloads of one run have in common."""
    _add_address(parser.add_argument_group("server"))
    _add_run(parser.add_argument_group("run"))


def settings(asked: argparse.Namespace) -> Settings:
    """Raises `UsageError` naming flag, found and expected."""
    arrivals = _arrivals(asked)
    duration_s = asked.duration if asked.duration is not None else 0.0 if asked.requests else 30.0
    if arrivals.kind == "stages":
        if asked.duration is not None:
            raise UsageError(
                f"--duration: found {asked.duration:g}, expected none with stages: they have their seconds"
            )
        duration_s = sum(seconds for _, seconds in arrivals.stages)
    if arrivals.kind == "replay" and asked.duration is None:
        duration_s = 0.0
    if arrivals.kind == "ramp" and not duration_s:
        raise UsageError("--arrivals ramp: found no --duration, expected the seconds that the ramp takes")
    if asked.warmup >= duration_s > 0:
        raise UsageError(f"--warmup: found {asked.warmup:g}, expected less than the duration of {duration_s:g} s")
    workload = _workload(asked)
    found = Settings(
        url=asked.url.rstrip("/"),
        target=asked.target,
        model=asked.model,
        workload=workload,
        arrivals=arrivals,
        clients=_clients(asked),
        duration_s=duration_s,
        requests=asked.requests,
        warmup_s=asked.warmup,
        drain_s=asked.drain,
        workers=asked.workers,
        max_lag_ms=asked.max_lag,
        seed=asked.seed,
    )
    for flag in ("prompt_tokens", "output_tokens", "turns", "texts"):
        lengths.parse(getattr(workload, flag), "--" + flag.replace("_", "-"))
    _check_used(found)
    return found


def _check_used(found: Settings) -> None:
    """Raises `UsageError` where a flag says more about something that is not asked for."""
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


def _workload(asked: argparse.Namespace) -> Workload:
    embeds = asked.target in EMBEDDING_TARGETS
    kind = asked.workload or ("embedding" if embeds else "synthetic")
    if embeds and kind not in ("embedding", "replay"):
        raise UsageError(f"--workload: found {kind}, expected embedding or replay with --target {asked.target}")
    if not embeds and kind == "embedding":
        raise UsageError(f"--workload: found embedding, expected another one with --target {asked.target}")
    if (kind == "replay") != bool(asked.file):
        raise UsageError(
            f"--file: found {asked.file or 'none'}, expected a file with --workload replay and only with it"
        )
    if asked.output_tokens and kind in ("seq2seq", "embedding"):
        raise UsageError(
            f"--output-tokens: found some with --workload {kind}, expected none: they follow from its inputs"
        )
    preset = _PRESETS[kind]
    return Workload(
        kind=kind,
        prompt_tokens=asked.prompt_tokens or preset["prompt_tokens"],
        output_tokens=asked.output_tokens or preset["output_tokens"],
        prefixes=asked.prefixes,
        prefix_tokens=asked.prefix_tokens,
        zipf=asked.zipf,
        turns=asked.turns,
        think_s=asked.think,
        texts=asked.texts,
        ratio=asked.ratio,
        ratio_sigma=asked.ratio_sigma,
        file=asked.file or "",
        speed=asked.speed,
    )


def _arrivals(asked: argparse.Namespace) -> Arrivals:
    timed = asked.workload == "replay" and not asked.rate and asked.concurrency is None
    kind = asked.arrivals or (
        "stages" if asked.stages else "replay" if timed else "poisson" if asked.rate else "closed"
    )
    if kind in ("constant", "poisson", "gamma", "ramp") and not asked.rate:
        raise UsageError(f"--rate: found none, expected requests a second with --arrivals {kind}")
    if kind == "closed" and asked.rate:
        raise UsageError("--rate: found one with --arrivals closed, expected --concurrency, or other arrivals")
    if kind in ("stages", "replay") and asked.rate:
        raise UsageError(f"--rate: found one with --arrivals {kind}, which has its own; expected other arrivals")
    if kind != "closed" and asked.concurrency is not None:
        raise UsageError(
            f"--concurrency: found one with --arrivals {kind}, expected closed; --max-concurrency bounds open ones"
        )
    if (kind == "ramp") != (asked.ramp_to is not None):
        raise UsageError(f"--ramp-to: found {asked.ramp_to}, expected a rate with --arrivals ramp and only with it")
    if (kind == "stages") != bool(asked.stages):
        raise UsageError("--stages: expected RATE@SECONDS,... with --arrivals stages and only with it")
    if kind == "replay" and asked.workload != "replay":
        raise UsageError("--arrivals replay: expected --workload replay")
    return Arrivals(
        kind=kind,
        rate=asked.rate or 0.0,
        concurrency=asked.concurrency or 8,
        burstiness=asked.burstiness,
        ramp_to=asked.ramp_to or 0.0,
        stages=_stages(asked.stages) if asked.stages else (),
    )


def _stages(text: str) -> tuple[tuple[float, float], ...]:
    """`5@10,20@10`: 5 a second for 10 s, then 20 a second for 10 s."""
    try:
        pairs = [tuple(float(part) for part in stage.split("@")) for stage in text.split(",")]
        if not all(len(pair) == 2 and pair[0] >= 0 and pair[1] > 0 for pair in pairs) or not any(r for r, _ in pairs):
            raise ValueError
    except ValueError:
        raise UsageError(f"--stages: found {text!r}, expected RATE@SECONDS,RATE@SECONDS,...") from None
    return tuple((rate, seconds) for rate, seconds in pairs)


def _clients(asked: argparse.Namespace) -> Clients:
    if asked.cancel + asked.slow + asked.retry > 1:
        total = asked.cancel + asked.slow + asked.retry
        raise UsageError(f"--cancel, --slow and --retry: found {total:g} together, expected at most 1")
    try:
        extra = json.loads(asked.extra)
        if not isinstance(extra, dict):
            raise ValueError
    except ValueError:
        raise UsageError(f"--extra: found {asked.extra!r}, expected a JSON object") from None
    return Clients(
        cancel=asked.cancel,
        slow=asked.slow,
        slow_rate=asked.slow_rate,
        retry=asked.retry,
        max_retries=asked.max_retries,
        stream=not asked.no_stream,
        ignore_eos=not asked.no_ignore_eos,
        timeout_s=asked.timeout,
        max_concurrency=asked.max_concurrency,
        extra=extra,
    )


def _add_address(group: Any) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", type=_url, help="of the server, without a route")
    group.add_argument("--api-key", default=None, metavar="KEY", help="sent as bearer token; TRIPTYCH_API_KEY")


def _add_server(group: Any) -> None:
    group.add_argument("--target", default="generate", choices=tuple(PATHS), help="which API is spoken")
    group.add_argument("--model", default="", help="its name; empty: the server chooses")
    group.add_argument("--tokenizer", default=None, metavar="PATH", help="tokenizer.json; none: the server's /tokenize")


def _add_workload(group: Any) -> None:
    group.add_argument(
        "--workload", choices=WORKLOADS, default=None, help="none: embedding or synthetic, by the target"
    )
    group.add_argument("--prompt-tokens", metavar="LENGTHS", help="of a prompt, a turn, a text; none: the workload's")
    group.add_argument("--output-tokens", metavar="LENGTHS", help="max_tokens; none: the workload's")
    group.add_argument("--prefixes", type=whole, default=0, metavar="K", help="shared beginnings of prompts")
    group.add_argument("--prefix-tokens", type=positive, default=128, metavar="N", help="of each, before the rest")
    group.add_argument("--zipf", type=amount, default=1.0, metavar="A", help="popularity of beginning k is 1/k^A")
    group.add_argument("--turns", default="uniform:2-5", metavar="LENGTHS", help="of a conversation")
    group.add_argument("--think", type=amount, default=1.0, metavar="SECONDS", help="mean pause before a next turn")
    group.add_argument("--texts", default="fixed:8", metavar="LENGTHS", help="of an embedding request")
    group.add_argument("--ratio", type=above_zero, default=1.0, help="seq2seq: output tokens for a source token")
    group.add_argument("--ratio-sigma", type=amount, default=0.2, metavar="S", help="seq2seq: log-normal noise on it")
    group.add_argument("--file", default=None, metavar="JSONL", help="replay: one request a line")
    group.add_argument("--speed", type=above_zero, default=1.0, metavar="X", help="replay: times as fast as recorded")


def _add_arrivals(group: Any) -> None:
    group.add_argument("--arrivals", choices=ARRIVALS, default=None, help="none: poisson with --rate, else closed")
    group.add_argument(
        "--rate", type=above_zero, default=None, metavar="R", help="requests a second; where a ramp begins"
    )
    group.add_argument("--concurrency", type=positive, default=None, metavar="N", help="closed: clients; none: 8")
    group.add_argument("--burstiness", type=above_zero, default=1.0, metavar="K", help="gamma: shape; below 1: bursts")
    group.add_argument("--ramp-to", type=above_zero, default=None, metavar="R", help="ramp: where it ends")
    group.add_argument("--stages", default=None, metavar="R@S,...", help="stages: rate @ seconds, one after another")


def _add_clients(group: Any) -> None:
    group.add_argument("--cancel", type=fraction, default=0.0, metavar="F", help="fraction that leaves in the middle")
    group.add_argument("--slow", type=fraction, default=0.0, metavar="F", help="fraction that reads slowly")
    group.add_argument("--slow-rate", type=above_zero, default=10.0, metavar="R", help="events a second that they read")
    group.add_argument("--retry", type=fraction, default=0.0, metavar="F", help="fraction that honours Retry-After")
    group.add_argument("--max-retries", type=whole, default=3, metavar="N", help="of those")
    group.add_argument("--no-stream", action="store_true", help="ask for unstreamed replies")
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="let the model end; else outputs have planned lengths"
    )
    group.add_argument(
        "--timeout", type=above_zero, default=120.0, metavar="SECONDS", help="without a byte until given up"
    )
    group.add_argument("--max-concurrency", type=whole, default=0, metavar="N", help="of open arrivals; 0: no bound")
    group.add_argument("--extra", default="{}", metavar="JSON", help="fields for every body")


def _add_run(group: Any) -> None:
    group.add_argument(
        "--duration", type=above_zero, default=None, metavar="SECONDS", help="none: 30, or by --requests"
    )
    group.add_argument("--warmup", type=amount, default=0.0, metavar="SECONDS", help="at the start, not counted")
    group.add_argument(
        "--drain",
        type=amount,
        default=60.0,
        metavar="SECONDS",
        help="after the last arrival; what is not answered then has failed",
    )
    group.add_argument("--workers", type=positive, default=1, metavar="N", help="processes that make the load")
    group.add_argument(
        "--max-lag", type=above_zero, default=10.0, metavar="MS", help="of the generator, p99; more: invalid"
    )
    group.add_argument("--seed", type=whole, default=0, metavar="N", help="the same seed makes the same load")
    group.add_argument("--out", default=None, metavar="FOLDER", help="for the files; none: out/loadtest/ and the time")
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
