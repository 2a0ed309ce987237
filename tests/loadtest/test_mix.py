"""Several workloads in one run: plan files, the result of each and of all, and what they cost each other."""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest import support
from tests.loadtest.scripted import Script, ScriptedServer, serving
from tests.loadtest.support import CLOSED
from tests.loadtest.test_cli import here, last
from triptych.loadtest.commands import interference
from triptych.loadtest.commands.interference import Figures
from triptych.loadtest.records import Record
from triptych.loadtest.runs import flags, output, plan
from triptych.loadtest.runs.plan import Bound, Plan
from triptych.loadtest.settings import Settings

STREAMS = '[work.streams]\nconcurrency = 2\noutput-tokens = 6\nslo = "ttft_p99<20s"\n'
ENCODE = '[work.encode]\ntarget = "encode"\nrate = 20\ntexts = 3\nprompt_tokens = 5\n'
SCRIPT = Script(first_s=0.02, gap_s=0.005)


def written(folder: Path, text: str) -> str:
    path = folder / "plan.toml"
    path.write_text(text)
    return str(path)


def run(server: ScriptedServer, folder: Path, text: str, *more: str) -> tuple[int, str, str]:
    given = ("--plan", written(folder, text), "--url", server.url, "--max-lag", "20000", "--duration", "0.8", "--quiet")
    return here("run", *given, "--out", str(folder / "out"), *more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("work = 3", "[work]: found 3, expected a table"),
        ("[work.a", "expected TOML"),
        ("", "found no [work.NAME], expected at least one"),
        ("[works.a]", "tables: found 'works', did you mean work?"),
        ("[work.a]\nconcurency = 3", "[work.a]: found 'concurency', did you mean concurrency?"),
        ("[work.a]\nduration = 3", "[work.a]: found 'duration', expected it on the command line"),
        ("[work.a]\nrate = -1", "[work.a]: argument --rate: found '-1', expected a number above 0"),
        ("[work.a]\nrate = false", "[work.a]: --rate: found False, expected a text or a number"),
        ("[work.a]\nno-stream = 1", "[work.a]: --no-stream: found 1, expected true or false"),
        ("[work.a]\nrate = [1]", "[work.a]: --rate: found [1], expected a text or a number"),
        ("[work.a]\ntexts = 3", "[work.a]: --texts: found 3, expected --workload embedding"),
        ("[work.a]\nslo = 'fast'", "[work.a]: --slo: found 'fast'"),
        ('[work."a/b"]', "found the name 'a/b', expected letters"),
        ("[work.a]\n[together]\nx = ['a']", "[together] x: found ['a'], expected a list of two or more"),
        ("[work.alpha]\n[together]\nx = ['alpha', 'alpa']", "[together] x: found 'alpa', did you mean alpha?"),
        ("[work.a]\n[bounds]\na = { keep = 1 }", "[bounds] a: found 'keep', did you mean kept?"),
        ("[work.a]\n[bounds]\na = { kept = true }", "[bounds] a: kept: found True, expected a number"),
        ("[work.alpha]\n[bounds]\nalfa = { kept = 1 }", "[bounds]: found 'alfa', did you mean alpha?"),
    ],
)
@pytest.mark.parametrize("name", ["run", "interference"])
def test_a_wrong_plan_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    code, out, err = here(name, "--plan", written(tmp_path, text))
    assert (code, out) == (2, "")
    assert "plan.toml: " in err and said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "code"], "--model: found code with --plan, expected it in the plan's workloads"),
        (["--slo", "ttft_p99<1s"], "--slo: found ttft_p99<1s with --plan"),
        (["--only", "streems"], "--only: found 'streems', did you mean streams?"),
        (["--plan", "not/there.toml"], "--plan: not/there.toml: No such file"),
    ],
)
def test_flags_that_a_plan_sets_are_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    code, _, err = here("run", "--plan", written(tmp_path, STREAMS), *arguments)
    assert code == 2 and said in err
    assert "--only: found 'a' without --plan" in here("run", "--only", "a")[2]


def test_the_workloads_run_at_the_same_time_and_each_is_told(tmp_path: Path) -> None:
    with serving(SCRIPT) as server:
        code, out, err = run(server, tmp_path, STREAMS + ENCODE)
        seen = server.seen[2:]
    assert code == 0, err
    document = last(out)
    works = {work["name"]: work["run"] for work in document["works"]}
    sent = Counter(one.path for one in seen)
    assert sent["/generate"] == works["streams"]["counts"]["all"] > 4
    assert sent["/encode"] == works["encode"]["counts"]["all"] == pytest.approx(16, abs=14)
    times = {path: [one.received for one in seen if one.path == path] for path in sent}
    assert min(times["/encode"]) < max(times["/generate"]) and min(times["/generate"]) < max(times["/encode"])
    assert {len(one.body["input"]) for one in seen if one.path == "/encode"} == {3}
    assert works["streams"]["latency_ms"]["itl"]["p50"] >= 5 and "itl" not in works["encode"]["latency_ms"]
    together = document["together"]
    assert together["counts"]["ok"] == sum(work["counts"]["ok"] for work in works.values())
    for rate in ("request_throughput", "output_throughput"):
        total = sum(work["throughput"][rate]["value"] for work in works.values())
        assert together["throughput"][rate]["value"] == pytest.approx(total)
    assert document["slo"] == [{"work": "streams", **works["streams"]["slo"][0]}]
    assert {"streams: generate on m", "encode: encode on m"} <= {
        line.strip() for line in out.splitlines()
    } and "together" in out
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {"mix.json", "requests.csv", "report.html"}
    with (folder / "requests.csv").open(newline="") as file:
        rows = Counter(row["work"] for row in csv.DictReader(file))
    assert rows == {name: work["counts"]["all"] for name, work in works.items()}
    same = here("compare", *2 * (str(folder / "mix.json"),))
    assert same[0] == 0 and {row["name"].partition(":")[0] for row in last(same[1])["rows"]} == set(works)


def test_a_missed_objective_of_any_workload_is_exit_1(tmp_path: Path) -> None:
    with serving(SCRIPT) as server:
        code, out, err = run(server, tmp_path, STREAMS + ENCODE + 'slo = "e2e_p50<1us"\n')
        assert code == 1, err
        assert [one["met"] for one in last(out)["slo"]] == [True, False]
        assert "missed encode: e2e_p50<1us" in " ".join(out.split())
        code, out, _ = run(server, tmp_path, STREAMS + ENCODE + 'slo = "e2e_p50<1us"\n', "--only", "streams")
        assert code == 0 and [work["name"] for work in last(out)["works"]] == ["streams"]


def mix_of(run: dict[str, Any], to: Path, *names: str) -> str:
    works = [{"name": name, "run": run} for name in names]
    to.write_text(json.dumps({"schema": 1, "kind": "mix", "works": works}))
    return str(to)


def test_mixes_are_compared_work_by_work(tmp_path: Path) -> None:
    with serving(SCRIPT) as server:
        made = support.measured(server.url, requests=12, arrivals=CLOSED)
    measured = output.with_columns(made)
    slow = measured | {"columns": {**measured["columns"]}}
    slow["columns"]["e2e_ms"] = [5 * value for value in slow["columns"]["e2e_ms"]]
    a = mix_of(measured, tmp_path / "a.json", "x", "y")
    code, out, _ = here("compare", a, mix_of(slow, tmp_path / "b.json", "y", "z"))
    assert code == 1
    found = last(out)
    assert {row["name"].partition(":")[0] for row in found["rows"]} == {"y"}
    assert "y: e2e_p50 ms" in found["regressions"]
    code, _, err = here("compare", a, mix_of(slow, tmp_path / "c.json", "z"))
    assert code == 2 and "no workload in common: found x, y and z" in err


def shared(**changes: object) -> Any:
    parser = argparse.ArgumentParser()
    flags.add_shared(parser)
    parser.set_defaults(**changes)
    return parser.parse_args([])


def test_a_workload_has_the_command_lines_settings_and_its_own(tmp_path: Path) -> None:
    text = STREAMS + ENCODE + "seed = 5\nworkers = 2\nextra = { truncate = 'right' }\n[work.third]\nmodel = 'x'\n"
    found = plan.read(Path(written(tmp_path, text)), shared(duration=7.0, seed=3, workers=4, url="http://h:1/"))
    settings: dict[str, Settings] = {name: work.settings for name, work in found.works.items()}
    assert {one.url for one in settings.values()} == {"http://h:1"}
    assert {one.duration_s for one in settings.values()} == {7.0}
    assert [one.seed for one in settings.values()] == [3, 5, 2003]
    assert [one.workers for one in settings.values()] == [4, 2, 4]
    assert settings["encode"].clients.extra == {"truncate": "right"}
    assert (settings["encode"].arrivals.kind, settings["streams"].arrivals.concurrency) == ("poisson", 2)


def test_the_shipped_plan_is_right_and_its_work_fits_the_models() -> None:
    found = plan.read(interference.PLAN, shared())
    assert set(found.bounds) == set(found.works)
    assert all(works[0] == "streams" for works in found.together.values())
    assert found.works["encode"].settings.embeds


def figures(itl_p99_ms: float | None, output: float, inputs: float = 0.0) -> Figures:
    return Figures(itl_p99_ms, itl_p99_ms, None, output, inputs, 1.0, 0.0, ())


def test_shares_and_bounds_are_against_alone_in_the_same_turns() -> None:
    bounds = {"s": Bound(kept=0.4, itl_ratio=2.5, itl_slack_ms=1.0), "e": Bound(kept=0.4)}
    found = {
        ("s alone", "s"): [figures(10.0, 1000.0), figures(20.0, 500.0)],
        ("e alone", "e"): [figures(None, 0.0, 800.0), figures(None, 0.0, 400.0)],
        ("x", "s"): [figures(40.0, 400.0), figures(50.0, 200.0)],
        ("x", "e"): [figures(None, 0.0, 200.0), figures(None, 0.0, 100.0)],
    }
    alone, _, streams, encode = interference._rows(found, Plan({}, {}, bounds))
    assert (alone["kept"], alone["missed"], alone["itl_p99_ms"]) == (None, [], 15.0)
    assert (streams["kept"], streams["itl_ratio"]) == (0.4, pytest.approx(3.25))
    assert streams["missed"] == ["p99 > 38.5 ms"]
    assert (encode["kept"], encode["missed"]) == (0.25, ["share < 0.4"])
    lines = interference.markdown([alone, streams, encode]).splitlines()
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1


def test_gaps_count_by_when_they_began() -> None:
    record = Record(0, 0, "", 0.0, 1, 6, token_times=[1.0, 2.0, 3.5, 9.0])
    assert record.gaps_from(2.0, 3.5) == [1.5]
    assert record.gaps_from(2.0, 4.0) == [1.5, 5.5]
    assert record.gaps == [1.0, 1.5, 5.5]
    record.token_counts = [1, 2, 0, 1]
    assert record.gaps == [0.5, 0.5, 5.5]


def test_interference_measures_alone_and_beside(tmp_path: Path) -> None:
    text = STREAMS + ENCODE + '[together]\nboth = ["streams", "encode"]\n[bounds]\nstreams = { kept = 0.01 }\n'
    with serving(SCRIPT) as server:
        flags = ("--url", server.url, "--duration", "0.6", "--warmup", "0", "--max-lag", "20000", "--quiet")
        out_flags = ("--plan", written(tmp_path, text), "--out", str(tmp_path / "out"))
        code, out, err = here("interference", *flags, *out_flags)
        prompts = [one.body["prompt"] for one in server.seen if one.path == "/generate"]
    assert code == 0, err
    rows = {(row["run"], row["work"]): row for row in last(out)["rows"]}
    assert list(rows) == [
        *(("streams alone", "streams"), ("encode alone", "encode"), ("both", "streams"), ("both", "encode"))
    ]
    assert rows["both", "streams"]["kept"] > 0.01 and rows["both", "streams"]["missed"] == []
    assert len(set(prompts[1:])) == len(prompts) - 1  # no run finds another's in a cache
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {
        *("interference.json", "interference.md", "streams alone", "encode alone", "both")
    }
    assert (folder / "both" / "report.html").exists()
    assert (folder / "interference.md").read_text().startswith("| run | work | ITL p50 ms |")
