"""What a command leaves: a table, files in one folder, and one JSON line that is the last of standard output."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest import records
from loadtest.errors import UsageError
from loadtest.records import Record
from loadtest.results import columns, report
from loadtest.runs.mix import Mixed
from loadtest.runs.run import SCHEMA, Measured

Json = dict[str, Any]


def folder(asked: str | None, kind: str) -> Path:
    """The folder for results, made; by the time where none was asked for. Raises `UsageError`."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = Path(asked) if asked else Path("out") / "loadtest" / f"{now}-{kind}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {path}: {error.strerror}") from None
    return path


def with_columns(measured: Measured) -> Any:
    """The document with what it was made of, as it is written."""
    return plain(measured.document | {"columns": columns.of(measured.records)})


def write_run(measured: Measured, to: Path) -> None:
    """`run.json` (the document with its columns), `requests.csv`, `report.html`."""
    full = with_columns(measured)
    (to / "run.json").write_text(line(full), encoding="utf-8")
    records.write_csv(measured.records, to / "requests.csv")
    (to / "report.html").write_text(report.page(full), encoding="utf-8")


def write_sweep(document: Json, requests: Iterable[tuple[float, Iterable[Record]]], to: Path) -> None:
    """`sweep.json` (every point holds its run's columns), `requests.csv` (of all points), `report.html`."""
    (to / "sweep.json").write_text(line(document), encoding="utf-8")
    parts = ((f"{load:g}", made) for load, made in requests)
    records.write_parts_csv(document["over"], parts, to / "requests.csv")
    (to / "report.html").write_text(report.page(plain(document)), encoding="utf-8")


def write_mix(mixed: Mixed, to: Path) -> None:
    """`mix.json` (every workload holds its run's columns), `requests.csv` (of all), `report.html`."""
    works = [{"name": name, "run": with_columns(one)} for name, one in mixed.works.items()]
    full = plain(mixed.document | {"works": works})
    (to / "mix.json").write_text(line(full), encoding="utf-8")
    records.write_parts_csv("work", ((name, one.records) for name, one in mixed.works.items()), to / "requests.csv")
    (to / "report.html").write_text(report.page(full), encoding="utf-8")


def read(path: str, *kinds: str) -> Json:
    """A result that was written before; raises `UsageError` where it is none of `kinds`, two or more."""
    expected = f"{', '.join(kinds[:-1])} or {kinds[-1]}.json of this tool"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected a {expected} ({error})") from None
    if not isinstance(found, dict) or found.get("kind") not in kinds:
        raise UsageError(f"{path}: expected a {expected}, found another JSON document")
    if found.get("schema") != SCHEMA:
        raise UsageError(f"{path}: expected schema {SCHEMA}, found {found.get('schema')!r}")
    return found


def print_end(document: Json, to: Path | None, console: Console) -> None:
    """Where the files are, then the JSON line."""
    if to is not None:
        console.print(f"report: {to / 'report.html'}")
    console.file.flush()
    print(line(document), flush=True)


def line(document: Json) -> str:
    """JSON of one line."""
    return json.dumps(plain(document), separators=(",", ":"), ensure_ascii=False)


def plain(value: Any) -> Any:
    """Numbers cut to what they can mean, nan and infinity as null."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
