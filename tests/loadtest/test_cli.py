"""The commands as people type them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.scripted import Script, serving
from tests.loadtest.support import in_several_tries
from tests.service.processes import eventually
from triptych.loadtest.commands import main

ROOT = Path(__file__).parents[2]
FAST = Script(first_s=0.05, gap_s=0.005)


def started(*arguments: str, key: str = "") -> subprocess.Popen[str]:
    environment = os.environ | {"TRIPTYCH_API_KEY": key}
    command = [sys.executable, "-m", "loadtest", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def command(*arguments: str, key: str = "") -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error of a command."""
    process = started(*arguments, key=key)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def here(*arguments: str) -> tuple[int, str, str]:
    """Run the command in this process and return the same."""
    with (
        chdir(ROOT),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.raises(SystemExit) as end,
    ):
        main.main(arguments)
    return int(end.value.code or 0), out.getvalue(), err.getvalue()


def last(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def run(url: str, out: Path, *more: str, key: str = "") -> tuple[int, str, str]:
    return command(*run_of(url, out), *more, key=key)


def run_of(url: str, out: Path) -> tuple[str, ...]:
    return ("run", "--url", url, "--out", str(out), "--max-lag", "20000", "--output-tokens", "8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--target", "x"], "argument --target: invalid choice"),
        (["run", "--url", "localhost:1"], "--url: found 'localhost:1', expected http://HOST:PORT"),
        (["run", "--url", "http://"], "--url: found 'http://', expected http://HOST:PORT"),
        (["run", "--url", "http://[::1"], "--url: found 'http://[::1', expected http://HOST:PORT"),
        (["run", "--rate", "-1"], "--rate: found '-1', expected a number above 0"),
        (["run", "--rate", "nan"], "--rate: found 'nan', expected a number above 0"),
        (["run", "--prompt-tokens", "uniform:9-1"], "--prompt-tokens: found 'uniform:9-1'"),
        (["run", "--arrivals", "poisson"], "--rate: found none"),
        (["run", "--arrivals", "closed", "--rate", "3"], "expected --concurrency"),
        (["run", "--stages", "3"], "--stages: found '3', expected RATE@SECONDS"),
        (["run", "--cancel", "0.7", "--retry", "0.7"], "found 1.4 together"),
        (["run", "--extra", "3"], "--extra: found '3', expected a JSON object"),
        (["run", "--slo", "fast"], "--slo: found 'fast'"),
        (["run", "--workload", "replay", "--file", "none.jsonl"], "none.jsonl"),
        (["run", "--workload", "embedding"], "--workload: found embedding"),
        (["run", "--warmup", "60"], "--warmup: found 60, expected less"),
        (["run", "--rate", "5", "--concurrency", "3"], "--concurrency: found one with --arrivals poisson"),
        (["run", "--stages", "9@1", "--rate", "5"], "--rate: found one with --arrivals stages"),
        (["run", "--stages", "9@1", "--duration", "5"], "--duration: found 5, expected none with stages"),
        (["run", "--rate", "5", "--burstiness", "0.5"], "--burstiness: found 0.5, expected --arrivals gamma"),
        (["run", "--rate", "5", "--speed", "2"], "--speed: found 2.0, expected --arrivals replay"),
        (["run", "--turns", "3"], "--turns: found 3, expected --workload conversation"),
        (["run", "--target", "encode", "--ratio", "2"], "--ratio: found 2.0, expected --workload seq2seq"),
        (["run", "--texts", "3"], "--texts: found 3, expected --workload embedding"),
        (["run", "--zipf", "2"], "--zipf: found 2.0, expected --prefixes"),
        (["run", "--target", "encode", "--prefixes", "2"], "--prefixes: found 2, expected prompts that are made"),
        (
            ["run", "--workload", "seq2seq", "--output-tokens", "8"],
            "--output-tokens: found some with --workload seq2seq",
        ),
        (["run", "--slow-rate", "2"], "--slow-rate: found 2.0, expected --slow with it"),
        (["run", "--max-retries", "1"], "--max-retries: found 1, expected --retry with it"),
        (
            ["run", "--rate", "5", "--max-concurrency", "1", "--workers", "2"],
            "--workers: found 2, expected at most --max-concurrency, 1",
        ),
        (["sweep", "--stages", "5@1"], "--stages: found 5@1, expected --points or --from"),
        (["sweep", "--arrivals", "ramp"], "--arrivals: found ramp, expected constant, poisson, gamma with --over rate"),
        (["sweep", "--arrivals", "closed"], "--arrivals: found closed, expected constant"),
        (
            ["sweep", "--workload", "replay", "--file", "f", "--arrivals", "replay"],
            "--arrivals: found replay, expected",
        ),
        (["sweep", "--rate", "3"], "--rate: found 3.0, expected --points or --from"),
        (["sweep", "--over", "concurrency", "--concurrency", "3"], "--concurrency: found 3, expected --points"),
        (["sweep", "--over", "concurrency", "--arrivals", "poisson"], "--arrivals: found poisson, expected closed"),
        (["sweep", "--points", "1,x"], "--points: found '1,x', expected numbers"),
        (["compare", "a.json", "b.json"], "a.json: expected a run, sweep or mix.json"),
        (["report", "README.md"], "README.md: expected a run, sweep or mix.json"),
        (["runs"], "invalid choice: 'runs'"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], said: str) -> None:
    code, out, err = here(*arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.startswith("loadtest: ")
    assert err.count("\n") == 1


def test_no_server_is_no_usage_error(tmp_path: Path) -> None:
    code, out, err = run("http://127.0.0.1:9", tmp_path, "--requests", "1")
    assert (code, out) == (1, "")
    assert err == "loadtest: http://127.0.0.1:9 does not answer (ConnectError); is it running?\n"


def foreign(kind: str, body: str, *, ends: bool = True) -> Script:
    """Return a script of another program's server, which gives every request this reply."""
    length = f"Content-Length: {len(body)}\r\n" if ends else ""
    return Script(foreign=f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{length}\r\n{body}".encode())


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (foreign("text/html", "<!doctype html>\n<p>hello"), "found text/html: '<!doctype html> <p>hello'"),
        (foreign("application/json", ""), "found application/json: ''"),
        (foreign("application/json", "[1, 2]"), "found application/json: '[1, 2]'"),
        (foreign("application/json", '{"choices": "x"}'), 'found application/json: \'{"choices": "x"}\''),
        (foreign("application/json", '{"ok": true}'), "found '{\"ok\": true}'; does it speak --target generate?"),
        (foreign("application/json", '{"error": "not you"}'), "an error with status 200: not you"),
        (foreign("text/event-stream", "data: {}\n\n", ends=False), "found an unrequested stream"),
    ],
)
def test_a_server_that_is_not_ours_is_one_line(script: Script, said: str) -> None:
    with serving(script) as server:
        code, out, err = here("run", "--url", server.url, "--requests", "1", "--quiet")
    assert (code, out) == (2, "")
    assert err.startswith("loadtest: POST /generate: expected ") and said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "described", ['{"data": "x"}', '{"data": [3]}', '{"data": [{"id": "m", "max_model_len": "?"}]}']
)
def test_a_server_that_describes_itself_strangely_is_measured(described: str, tmp_path: Path) -> None:
    with serving(Script(described=described, metrics="<html>\nno metrics")) as server:
        code, out, err = here(*run_of(server.url, tmp_path), "--requests", "2")
    assert code == 0, err
    assert last(out)["counts"]["ok"] == 2, (last(out)["counts"], last(out)["errors"])


def test_output_files_of_a_run(tmp_path: Path) -> None:
    with serving(FAST) as server:
        code, out, err = run(server.url, tmp_path, "--rate", "20", "--requests", "20", "--seed", "5", key="secret-key")
    assert code == 0, err
    document = last(out)
    assert (document["schema"], document["kind"], document["counts"]["ok"]) == (1, "run", 20)
    assert document["settings"]["seed"] == 5
    assert "first token" in out and "output tokens/s" in out
    assert "\x1b" not in out + err
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "requests.csv", "report.html"}
    [shown] = re.findall("(?m)^report: (.+)$", out)
    assert Path(shown) == tmp_path / "report.html"
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 21
    stored = json.loads((tmp_path / "run.json").read_text())
    assert len(stored["columns"]["gaps_ms"]) == 20
    assert {name: stored[name] for name in document} == document
    assert [one.headers["authorization"] for one in server.seen] == ["Bearer secret-key"] * 21
    assert "secret-key" not in out + err + "".join(path.read_text() for path in tmp_path.iterdir())


def test_an_slo_decides_the_exit_code(tmp_path: Path) -> None:
    with serving(FAST) as server:
        asked = (*run_of(server.url, tmp_path), "--requests", "8", "--slo")
        kept, missed = here(*asked, "e2e_p50<5s,error_rate<0.1%"), here(*asked, "ttft_p50<40ms")
    assert kept[0] == 0, kept
    assert "met    e2e_p50<5s" in kept[1]
    assert missed[0] == 1
    assert "missed ttft_p50<40ms" in missed[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    with serving(FAST) as server:
        process = started("run", "--url", server.url, "--out", str(tmp_path), "--rate", "60", "--duration", "120")
        eventually(lambda: sum(one.ended > 0.0 for one in server.seen) >= 30)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    document = last(out)
    assert document["interrupted"]
    assert document["counts"]["ok"] >= 5
    assert document["window_s"][1] < 60
    assert (tmp_path / "report.html").exists()
    assert "Traceback" not in err


@in_several_tries
def test_comparison_finds_a_regression_and_nothing_else(tmp_path: Path) -> None:
    results = []
    for name, script in (("quick", Script(0.1, 0.01)), ("slow", Script(0.4, 0.01))):
        with serving(script) as server:
            code, _, err = here(*run_of(server.url, tmp_path / name), "--requests", "24")
            assert code == 0, err
        results.append(str(tmp_path / name / "run.json"))
    quick, slow = results
    pairs = ((quick, quick), (quick, slow), (slow, quick))
    same, worse, better = (here("compare", *pair, "--tolerance", "0.5") for pair in pairs)
    assert [code for code, _, _ in (same, worse, better)] == [0, 1, 0]
    assert {row["verdict"] for row in last(same[1])["rows"]} == {"same"}
    first = {row["name"]: row for row in last(worse[1])["rows"]}["ttft_p50 ms"]
    assert 2 < first["ci95"][0] <= first["ratio"] <= first["ci95"][1] < 4.5
    assert first["verdict"] == "worse"
    assert "e2e_p50 ms" in last(worse[1])["regressions"]
    code, _, err = here("compare", quick, str(tmp_path / "quick" / "report.html"))
    assert code == 2 and "expected a run, sweep or mix.json" in err


@in_several_tries
def test_a_sweep_finds_the_knee_and_the_slo(tmp_path: Path) -> None:
    """Four places of 0.1 s each are 40 requests a second; waiting for a place comes on top of the 0.1 s."""
    script = Script(first_s=0.1, capacity=4)
    flags = ["--max-lag", "20000", "--output-tokens", "1", "--duration", "1", "--arrivals", "constant"]
    with serving(script) as server:
        slo = ("--slo", "ttft_p90<400ms,error_rate<1%", "--bisect", "1")
        code, out, err = command(
            "sweep", "--url", server.url, "--out", str(tmp_path), *flags, "--points", "20,80", *slo
        )
    assert code == 0, err
    document = last(out)
    assert document["saturation_seen"]
    assert 20 <= document["knee"] <= 42
    assert 20 <= document["slo_load"] <= 45
    assert document["capacity_per_s"] == pytest.approx(40, rel=0.15)
    assert len(document["points"]) == 3
    assert "columns" not in document["points"][0]["run"]
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.json", "requests.csv", "report.html"}
    with (tmp_path / "requests.csv").open(newline="") as file:
        requests = list(csv.DictReader(file))
    kept = json.loads((tmp_path / "sweep.json").read_text())["points"]
    counted = Counter((float(one["rate"]), one["outcome"]) for one in requests)
    assert counted == Counter((point["load"], one) for point in kept for one in point["run"]["columns"]["outcome"])
    again = here("report", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "again.html"))
    assert again[0] == 0
    assert (tmp_path / "again.html").read_text() == (tmp_path / "report.html").read_text()


def sweep_of(run: Path, to: Path, over: str, *loads: float) -> str:
    """Write a sweep in which each of `loads` measured the same."""
    document = json.loads(run.read_text())
    points = [{"load": load, "run": document, "saturated": False, "met": True} for load in loads]
    to.write_text(json.dumps({"schema": 1, "kind": "sweep", "over": over, "points": points}))
    return str(to)


def test_sweeps_are_compared_load_by_load(tmp_path: Path) -> None:
    for name, script in (("quick", Script(0.05, 0.005)), ("slow", Script(0.4, 0.005))):
        with serving(script) as server:
            assert here(*run_of(server.url, tmp_path / name), "--requests", "12")[0] == 0
    quick, slow = (tmp_path / name / "run.json" for name in ("quick", "slow"))
    a = sweep_of(quick, tmp_path / "a.json", "rate", 2.0, 4.0, 8.0)
    code, out, err = here("compare", a, sweep_of(slow, tmp_path / "b.json", "rate", 4.0, 8.0, 9.5))
    assert code == 1, err
    found = last(out)
    assert {row["name"].partition(":")[0] for row in found["rows"]} == {"rate 4", "rate 8"}
    assert {"rate 4: ttft_p50 ms", "rate 8: ttft_p50 ms"} <= set(found["regressions"])
    assert found["warnings"] == []
    for other, said in (
        (
            sweep_of(slow, tmp_path / "c.json", "rate", 3.0),
            "no load in common: found 2, 4, 8 and 3; give both",
        ),
        (sweep_of(slow, tmp_path / "d.json", "concurrency", 2.0), "A is a sweep over rate and B over concurrency"),
        (str(slow), "A is a sweep and B a run: expected two of the same kind"),
    ):
        code, _, err = here("compare", a, other)
        assert code == 2 and said in err


def test_help_shows_defaults() -> None:
    code, out, _ = command("run", "--help")
    assert code == 0
    assert "(default: http://127.0.0.1:8000)" in " ".join(out.split())
    assert "--burstiness" in out


def test_the_page_takes_no_text_for_markup(tmp_path: Path) -> None:
    with serving(FAST) as server:
        here(*run_of(server.url, tmp_path), "--requests", "1", "--model", "</script><b>x")
    page = (tmp_path / "report.html").read_text()
    assert "</script><b>" not in page
    assert "\\u003c/script>\\u003cb>x" in page or '"model":"m"' in page
    assert "http://" not in page.replace(server.url, "").replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


def test_the_generator_needs_neither_torch_nor_the_service() -> None:
    modules = ("commands.main", "runs.run", "runs.sweep", "runs.output", "generator.worker", "results.compare")
    code = "import sys, " + ", ".join(f"triptych.loadtest.{name}" for name in modules) + "; "
    code += "print(*sorted({'torch', 'ray', 'triptych.model', 'triptych.service', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
