"""The command line `python -m lab`: usage errors are one line."""

from __future__ import annotations

import pytest

from lab.commands.main import main


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that is a usage error, and return what it says."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("lab: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs"], "invalid choice: 'runs'"),
        (["offline", "--runs", "0"], "--runs: found '0', expected a whole number above 0"),
        (["offline", "--dtype", "fp9"], "--dtype: invalid choice: 'fp9'"),
        (["offline", "--models", "N1", "--json", "not/there.json"], "--json: not/there.json: No such file"),
        (["quality", "--pairs", "0"], "--pairs: found '0', expected a whole number above 0"),
        (["overhead", "--model", "nope"], "--model: bench: nope: no such folder"),
        (["overhead", "--streams", "0"], "--streams: found '0', expected a whole number above 0"),
        (["requests", "--rounds", "0"], "--rounds: found '0', expected a whole number above 0"),
        (["faults", "--write", "not/there.md"], "--write: not/there.md: No such file"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, *arguments)


def test_a_bench_of_nothing_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lab.commands import offline  # imports torch

    monkeypatch.setattr(offline.Bench, "measure", lambda *_: None)
    monkeypatch.setattr(offline, "step_milliseconds", lambda _: 0.0)
    with pytest.raises(SystemExit):
        main(["offline", "--only", "nothing"])
    assert "--only: found 'nothing', expected part of a workload's name" in capsys.readouterr().err
