"""What the clients' programs printed, as a table for the terminal and one for docs/api.md."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.clients.table import COLUMNS, Client

KNOWN = Path(__file__).parent / "known.toml"
DOCS = Path(__file__).parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- clients: written by `make clients` -->", "<!-- end of clients -->"


@dataclass(frozen=True)
class Result:
    """The outcome of a feature: a column, or "column: what"."""

    feature: str
    ok: bool
    detail: str = ""

    @property
    def column(self) -> str:
        return self.feature.partition(":")[0]


def read_known(path: Path = KNOWN) -> dict[str, dict[str, str]]:
    """Return the known failures: for each client, a feature and the reason."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def surprises(client: Client, results: Sequence[Result], known: Mapping[str, str]) -> list[str]:
    """Return lines for failures that are not known, and for known ones that fail no longer."""
    failed = {one.feature: one.detail for one in results if not one.ok}
    unknown = [
        f"{client.name}: {feature}: {' '.join(detail.split())}"
        for feature, detail in failed.items()
        if feature not in known
    ]
    stale = [f"{client.name}: known.toml lists {one!r}, which fails no longer" for one in known if one not in failed]
    return unknown + stale


def cells(results: Sequence[Result]) -> list[str]:
    """Return "yes", "no" or nothing for each column."""
    outcomes = {name: [one.ok for one in results if one.column == name] for name in COLUMNS}
    return ["" if not found else "yes" if all(found) else "no" for found in outcomes.values()]


def markdown(rows: Mapping[str, Sequence[Result]], known: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table of docs/api.md; `rows` are by the clients' titles, `known` too."""
    head = [f"| client | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    body = [f"| {title} | {' | '.join(cells(results))} |" for title, results in rows.items()]
    notes = [f"- {title}, {what}: {why}" for title, whys in known.items() for what, why in whys.items()]
    return "\n".join([BEGIN, *head, *body, *([""] if notes else []), *notes, END])


def write_docs(table: str, path: Path = DOCS) -> None:
    """Replace what stands between the marks."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{table}{after}", encoding="utf-8")
