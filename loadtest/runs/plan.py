"""Plan files, which describe several workloads of one run in TOML.

A table `[work.NAME]` is one workload. Its keys are the flags of `run` without leading dashes (`prompt-tokens` or
`prompt_tokens`), with the flags' defaults. `[together]` names combinations of workloads, and `[bounds]` what each must
keep in a combination; both are for `interference`. Flags that all workloads of a run share (`SHARED`) come from the
command line.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from triptych.loadtest.errors import UsageError
from triptych.loadtest.generator.worker import due
from triptych.loadtest.records import Record
from triptych.loadtest.results import slo, summary
from triptych.loadtest.results.slo import Limit
from triptych.loadtest.runs import flags, run
from triptych.loadtest.runs.progress import Progress
from triptych.loadtest.runs.run import SCHEMA, Load, Measured
from triptych.loadtest.server.target_server import Server
from triptych.loadtest.settings import Settings

SHARED: Final = ("url", "api_key", "duration", "warmup", "drain", "workers", "max_lag", "seed", "out", "quiet")
"""Flags that the command line may have in addition to a plan; of these a workload may set its own `OWN`."""
OWN: Final = ("workers", "seed")
SEED_STEP: Final = 1000  # between workloads, so that equal ones do not share prompts in a cache

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # also used as file names
_TABLES = ("work", "together", "bounds")


@dataclass(frozen=True, slots=True)
class Work:
    """Holds one workload of a plan."""

    name: str
    settings: Settings
    limits: tuple[Limit, ...]
    tokenizer: Path | None


@dataclass(frozen=True, slots=True)
class Bound:
    """Limits how much a workload may lose together with others, relative to running alone."""

    kept: float | None = None  # share of its output tokens a second, or of its input tokens if it has no output
    itl_ratio: float | None = None  # its p99 inter-token latency is at most `itl_ratio` times that of running alone
    itl_slack_ms: float = 0.0  # plus this


@dataclass(frozen=True, slots=True)
class Plan:
    works: Mapping[str, Work]
    together: Mapping[str, tuple[str, ...]]
    bounds: Mapping[str, Bound]

    def chosen(self, names: str) -> list[Work]:
        """Return the workloads of a comma-separated list, or all for an empty one. Raises `UsageError`."""
        found = [name.strip() for name in names.split(",") if name.strip()]
        _check_names(found, self.works, "--only")
        return [work for name, work in self.works.items() if not found or name in found]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def read(path: Path, shared: argparse.Namespace) -> Plan:
    """Read a plan file. Raises `UsageError` naming file, table, key, what was found and what is expected."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--plan: {path}: {error.strerror}") from None
    except ValueError as error:  # of TOML or of UTF-8
        raise UsageError(f"--plan: {path}: expected TOML ({error})") from None
    try:
        return _plan(found, shared)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def check_beside(options: argparse.Namespace) -> None:
    """Raise `UsageError` for a flag that `--plan` sets too."""
    for name, value in vars(_flags().parse_args([])).items():
        if name not in SHARED and (found := getattr(options, name)) != value:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: found {found} with --plan, expected it in the plan's workloads")


def _plan(found: dict[str, Any], shared: argparse.Namespace) -> Plan:
    _check_names(found, _TABLES, "tables")
    tables = {name: _table(found.get(name, {}), f"[{name}]") for name in _TABLES}
    if not tables["work"]:
        raise UsageError("found no [work.NAME], expected at least one")
    works = {
        name: _work(name, _table(table, f"[work.{name}]"), shared, place)
        for place, (name, table) in enumerate(tables["work"].items())
    }
    for name in (*works, *tables["together"]):
        if not _NAME.fullmatch(name):
            raise UsageError(f"found the name {name!r}, expected letters, digits, dots, dashes and underscores")
    together = {name: _names(value, works, f"[together] {name}") for name, value in tables["together"].items()}
    _check_names(tables["bounds"], works, "[bounds]")
    bounds = {name: _bound(value, f"[bounds] {name}") for name, value in tables["bounds"].items()}
    return Plan(works, together, bounds)


def _work(name: str, table: dict[str, Any], shared: argparse.Namespace, place: int) -> Work:
    where = f"[work.{name}]"
    parser = _flags()
    given = {key.replace("-", "_"): value for key, value in table.items()}
    if everyones := [flag for flag in given if flag in SHARED and flag not in OWN]:
        raise UsageError(f"{where}: found {everyones[0]!r}, expected it on the command line: all workloads share it")
    _check_names(given, vars(parser.parse_args([])), where)
    try:
        options = parser.parse_args([part for key, value in given.items() for part in _typed(parser, key, value)])
        for flag in SHARED:
            if flag not in given:
                setattr(options, flag, getattr(shared, flag))
        if "seed" not in given:
            options.seed += SEED_STEP * place
        settings = flags.settings(options)
        due(settings)  # raises for an invalid schedule before anything is sent
        limits = tuple(slo.parse(options.slo))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    return Work(name, settings, limits, Path(options.tokenizer) if options.tokenizer else None)


def _flags() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    flags.add(parser)
    return parser


def _typed(parser: argparse.ArgumentParser, name: str, value: object) -> list[str]:
    """Return a key and its value as command line arguments."""
    flag = "--" + name.replace("_", "-")
    switch = isinstance(parser.get_default(name), bool)
    if switch != isinstance(value, bool) or not isinstance(value, bool | str | int | float | dict):
        raise UsageError(f"{flag}: found {value!r}, expected {'true or false' if switch else 'a text or a number'}")
    if switch:
        return [flag] if value else []
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]


def _bound(value: object, where: str) -> Bound:
    table = _table(value, where)
    _check_names(table, ("kept", "itl_ratio", "itl_slack_ms"), where)
    for key, number in table.items():
        if not isinstance(number, int | float) or isinstance(number, bool) or number < 0:
            raise UsageError(f"{where}: {key}: found {number!r}, expected a number, 0 or more")
    return Bound(**table)


def _names(value: object, works: Mapping[str, Work], where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(one, str) for one in value):
        raise UsageError(f"{where}: found {value!r}, expected a list of two or more names of workloads")
    _check_names(value, works, where)
    return tuple(value)


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where}: found {value!r}, expected a table")
    return value


def _check_names(found: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(known)}"
            raise UsageError(f"{where}: found {name!r}, {meant}")


# -- A mix: several workloads of a plan on one server at the same time, as one run with a result for each and their sum.
# Each workload's part is the document of a run. Only counts, rates and amounts in each second are summed; latencies of
# different workloads are kept apart.

Json = dict[str, Any]

_SUMS = ("window_s", "counts", "shares", "throughput", "offered_per_s", "errors", "tokens", "series")
_ABOUT = ("commit", "machine", "server")  # equal for all workloads of a run
_BULKY = ("columns", "series", "gauges", "crosscheck")


@dataclass(frozen=True, slots=True)
class Mixed:
    """Holds the result of a run of several workloads."""

    document: Json
    works: dict[str, Measured]

    @property
    def interrupted(self) -> bool:
        return bool(self.document["interrupted"])


def probe(server: Server, works: Sequence[Work], progress: Progress) -> list[Load]:
    """Probe the server for each workload. Raises `UsageError`, `ServerError`."""
    loads = []
    for work in works:
        subject = run.probe(server, work.settings, work.tokenizer, progress)
        loads.append(Load(subject, subject.settings, work.limits, work.name))
    return loads


def measure(loads: Sequence[Load], api_key: str, progress: Progress) -> Mixed:
    """Run the loads at the same time and summarise them. Ctrl-C ends them early."""
    measured = run.measure_together(loads, api_key, progress)
    works = {load.name: one for load, one in zip(loads, measured, strict=True)}
    return Mixed(_document(loads, works), works)


def seeded(loads: Sequence[Load], add: int) -> list[Load]:
    """Return the loads with other seeds, whose prompts are in no cache."""
    return [replace(load, settings=replace(load.settings, seed=load.settings.seed + add)) for load in loads]


def _document(loads: Sequence[Load], works: dict[str, Measured]) -> Json:
    documents = {name: one.document for name, one in works.items()}
    first = next(iter(documents.values()))
    doubts = [f"{name}: {doubt}" for name, document in documents.items() for doubt in document["doubts"]]
    return {
        "schema": SCHEMA,
        "kind": "mix",
        "started": first["started"],
        **{name: first[name] for name in _ABOUT},
        "interrupted": first["interrupted"],
        "valid": not doubts,
        "doubts": doubts,
        "slo": [{"work": name, **one} for name, document in documents.items() for one in document["slo"]],
        "together": _sums(loads, [record for one in works.values() for record in one.records], first),
        "works": [{"name": name, "run": document} for name, document in documents.items()],
    }


def _sums(loads: Sequence[Load], records: Sequence[Record], first: Json) -> Json:
    """Return the figures of all records, over the window that all workloads share."""
    stopped_s = first["window_s"][1] if first["interrupted"] else None
    found = summary.summarise(records, loads[0].settings, (), stopped_s)
    return {name: found[name] for name in _SUMS}


def without_columns(document: Json) -> Json:
    """Remove the requests' columns, for the JSON line."""
    left_out = (*_BULKY, *_ABOUT)
    works = [
        {**one, "run": {name: value for name, value in one["run"].items() if name not in left_out}}
        for one in document["works"]
    ]
    together = {name: value for name, value in document["together"].items() if name not in _BULKY}
    return {**document, "together": together, "works": works}
