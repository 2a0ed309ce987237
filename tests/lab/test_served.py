"""The command `served`: its table, the loads it asks for, and the environments of other servers."""

from __future__ import annotations

import argparse
import itertools
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.bench.peers import environments
from lab.commands import served
from lab.servers.servers import Server
from triptych.loadtest.errors import UsageError
from triptych.loadtest.runs import flags


def test_the_table_has_medians_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        ("D2 x16", "triptych"): [{"tokens": 90.0}, {"tokens": 120.0}, {"tokens": 100.0}],
        ("D2 x16", "vllm"): [{"tokens": 50.0}],
        ("D2 x64", "vllm"): [{"tokens": 40.0}],  # no request ended
    }
    served._print_table(found, ["triptych", "vllm"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "triptych vllm",
        "D2 x16, tokens 100 tokens/s 50 tokens/s (2.00x)",
        "D2 x16, late - -",
        "D2 x64, tokens - 40 tokens/s",
        "D2 x64, between - -",
    ]


class Run:
    """Stands for servers and load generator: each measurement is a number, and one may be interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.log: list[str] = []
        self.interrupted_at = 0
        self.file = tmp_path / "served.jsonl"
        monkeypatch.setattr(served, "built", lambda model, cache: cache / model)
        monkeypatch.setattr(served, "_load", self._load)
        for name in ("triptych", "vllm"):
            monkeypatch.setitem(served.SERVERS, name, Server(partial(self._start, name), lambda: "1"))

    @contextmanager
    def _start(self, server: str, model: str, folder: Path) -> Iterator[str]:
        self.log.append(f"{server} {model}")
        yield server

    def _load(
        self, site: str, folder: Path, workload: served.Workload, extra: str, scale: float
    ) -> tuple[dict[str, float], float]:
        self.log.append(workload.name)
        if len(self.log) == self.interrupted_at:
            raise KeyboardInterrupt
        return dict.fromkeys(workload.figures, 2.0 if site == "triptych" else 1.0), 0.0

    def __call__(self, *arguments: str) -> list[str]:
        """Run the command; return what was done."""
        parser, self.log = argparse.ArgumentParser(), []
        served.add_command(parser.add_subparsers())
        options = parser.parse_args(
            ["served", "--servers", "triptych", "vllm", "--json", str(self.file), "--cache", "c", *arguments]
        )
        options.command(options)
        return self.log


def test_an_interrupted_command_goes_on_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch, tmp_path)
    rows = ("--rows", "D2 one", "N2 16", "--turns", "2")
    run.interrupted_at = 8
    with pytest.raises(KeyboardInterrupt):
        run(*rows)
    assert "D2 one stream, tokens 2 tokens/s 1 tokens/s (2.00x)" in " ".join(capsys.readouterr().out.split())
    run.interrupted_at = 0
    assert run(*rows) == [
        *("vllm N2", "16 clients x 1 text", "vllm D2", "one stream", "triptych D2", "one stream"),
        *("vllm N2", "16 clients x 1 text", "triptych N2", "16 clients x 1 text"),
    ]
    assert run(*rows) == []
    assert len(run(*rows, "--scale", "0.5")) == 16  # figures of another scale do not count
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["rows"]) == 8 and result["scale"] == 0.5


def test_after_its_minutes_no_server_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path)
    clock = itertools.count(0, 60)
    monkeypatch.setattr(served, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert run("--rows", "D2 one", "--minutes", "2") == ["triptych D2", "one stream", "vllm D2", "one stream"]


@pytest.mark.parametrize("content", ["{", "[1]", '{"turn": 1}'])
def test_a_file_of_something_else_is_not_overwritten(
    content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path)
    run.file.write_text(content)
    with pytest.raises(UsageError, match="expected a file that this command wrote"):
        run()
    assert run.file.read_text() == content


def test_a_row_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--rows: found 'D9', expected parts of D2 one stream, D2 x16"):
        Run(monkeypatch, tmp_path)("--rows", "D9")


@pytest.mark.parametrize("workload", served.WORKLOADS, ids=lambda one: f"{one.model} {one.name}")
def test_the_load_generator_takes_every_workload(workload: served.Workload) -> None:
    parser = argparse.ArgumentParser()
    flags.add(parser)
    load = flags.settings(parser.parse_args([*workload.load, "--duration", "1.2", "--warmup", "0.2"]))
    assert load.arrivals.kind == "closed" and set(workload.figures) <= set(served._UNITS)


def test_torch_and_extras_are_not_among_the_requirements(tmp_path: Path) -> None:
    wheel = tmp_path / "one.whl"
    lines = ("Name: one", "Requires-Dist: regex", "Requires-Dist: torch==2.13.0+cpu", "Requires-Dist: torchvision")
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("one.dist-info/METADATA", "\n".join([*lines, 'Requires-Dist: scipy; extra == "bench"', "", "x"]))
    assert environments._requirements(wheel) == ["regex"]
