"""The table of `make clients` in docs/api.md names the clients, versions and programs that are run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.clients.results import BEGIN, DOCS, END, Result, cells, markdown, read_known, surprises, write_docs
from tests.clients.table import CLIENTS, COLUMNS, PROGRAMS

NAMES = {one.name for one in CLIENTS}


def test_docs_have_a_row_for_each_client() -> None:
    table = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert head == f"| client | {' | '.join(COLUMNS)} |"
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [one.title for one in CLIENTS]


def test_programs_are_those_of_the_table_and_versions_are_pinned() -> None:
    shared = {"features.py"}
    assert {one.program for one in CLIENTS} | shared == {one.name for one in PROGRAMS.iterdir() if one.is_file()}
    assert len(NAMES) == len(CLIENTS)
    for client in CLIENTS:
        assert all(re.fullmatch(r"[\w.\[\],-]+==[\w.]+", one) for one in client.requirements), client.name
        assert all(re.fullmatch(r"(@[\w-]+/)?[\w-]+@[\d.]+", one) for one in client.npm), client.name


def test_features_are_of_a_column() -> None:
    for client in CLIENTS:
        text = (PROGRAMS / client.program).read_text(encoding="utf-8")
        found = re.findall(r'"feature": "(\w+)|feature\(f?"(\w+)', text)
        assert found and {one or other for one, other in found} <= set(COLUMNS), client.program


def test_known_failures_are_of_clients_and_give_reasons() -> None:
    for client, entries in read_known().items():
        assert client in NAMES and all(len(reason) > 20 for reason in entries.values())


def test_surprises_and_the_row(tmp_path: Path) -> None:
    client = CLIENTS[0]
    results = [Result("chat", True), Result("chat: n", False, "400"), Result("audio", True)]
    assert surprises(client, results, {"chat: n": "a reason"}) == []
    assert surprises(client, results, {"tools": "mended"}) == [
        f"{client.name}: chat: n: 400",
        f"{client.name}: known.toml lists 'tools', which fails no longer",
    ]
    assert dict(zip(COLUMNS, cells(results), strict=True)) == dict.fromkeys(COLUMNS, "") | {
        "chat": "no",
        "audio": "yes",
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_docs(markdown({client.title: results}, {client.title: {"chat: n": "a reason"}}), page)
    assert page.read_text().startswith("before\n<!--") and page.read_text().endswith("-->\nafter\n")
    assert f"| {client.title} | no |" in page.read_text() and "old" not in page.read_text()
