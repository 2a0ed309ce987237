"""Every GPU bench command in small, on a CPU, with only the packages of a bare GPU machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.bench.gpu import check, engines, experts, machine, parity, profile, report
from lab.bench.gpu.cases import COMMANDS, Case, cases_of
from lab.bench.gpu.child import selected
from lab.bench.gpu.cli import main
from lab.bench.gpu.compiling import in_parallel
from lab.bench.gpu.figures import NotRecorded, Skip, Stop
from lab.bench.gpu.machine import Bench
from lab.bench.gpu.supervisor import STOPPED, TIMED_OUT, Supervisor, Task, read
from lab.bench.gpu.targets import TARGETS, datasheet_ceilings
from lab.bench.gpu.timers import Timers
from triptych.model.attention.sdpa import SdpaBackend
from triptych.model.linear.base import linears
from triptych.model.linear.float import ExpertsLinear

ROOT = Path(__file__).parents[2]
ABSENT = (
    *("msgspec", "llguidance", "fastapi", "starlette", "uvicorn", "pydantic", "ray", "rich", "httpx", "PIL"),
    *("orjson", "hypothesis"),
)
DECODERS = ("encoder-decoder, BART", "encoder-decoder, T5")  # scenarios that a case of `engine, encoder` names too
Row = dict[str, Any]
# Each is like a case that runs by default: another format, model or shape, or one more way to run it.
LIKE_OTHERS = frozenset(
    {
        *("kernel, mixed, float32", "kernel, fp8 pages, decode, float32"),
        *("recurrent layer, prompts with decoding, float32", "experts' product, 3 of 40 x 70, bias, float32"),
        *("integer product, 32 x 528, int4, groups of 32, zero points", "fp8 product, 96 x 64, rows"),
        *(f"engine, {name}" for name in ("chunked prompts", "int8 KV", "fp8 KV", "fp8 weights", "int4 weights")),
        *("engine, head 128, q and k normalised", "engine, windows in some layers, softcaps"),
        *("engine, windows in some layers, two rotary bases", "engine, experts with biases, clamps, sinks"),
        *("engine, recurrent layers", "engine, encoder-decoder, BART"),
        *("llama-8b, prefill 2k, fp8", "llama-8b, one stream, int4"),
        *("qwen3.5-9b x128 1k/1k", "qwen3.5-9b, prefill 2k"),
        *("decode, toy, 2 x 130", "prompts, toy, 2 x 12", "fp8 product, toy, blocks", "engine, beams"),
        *("qwen3-0.6b, 256 clients, prompts launched", "whisper-small x128", "bert-base, recorded or not"),
    }
)


@pytest.fixture(scope="module", params=["by default", pytest.param("all", marks=pytest.mark.slow)])
def left_out(request: pytest.FixtureRequest) -> frozenset[str]:
    return LIKE_OTHERS if request.param == "by default" else frozenset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, left_out: frozenset[str]) -> Path:
    """Run four small commands in a process that cannot import those packages; return their folder."""
    path = tmp_path_factory.mktemp("gpu")
    (path / "before").mkdir()  # the results of an earlier run, which are not measured again
    (path / "before" / "results.jsonl").write_text("".join(json.dumps({"case": name}) + "\n" for name in left_out))
    absent = path / "absent"
    absent.mkdir()
    for name in ABSENT:
        (absent / f"{name}.py").write_text(f"raise ImportError('a bare GPU machine has no {name}')\n")
    environment = os.environ | {"PYTHONPATH": str(absent), "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of packages that are not there
    command = [sys.executable, "-m", "lab.bench.gpu", "check", "sweep", "workloads", "--tiny"]
    command += [] if left_out else ["tests"]  # which collects a third of the suite
    command += ["--resume", "--before", str(path / "before")]
    subprocess.run([*command, "--out", str(path / "out")], cwd=ROOT, env=environment, check=True, timeout=300)
    return path / "out"


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Row]:
    return {row["case"]: row for row in read([folder])}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # toys: threads only wait for each other
    yield Bench.here(tmp_path, tiny=True, ends=time.monotonic() + 600)
    torch.set_num_threads(threads)


def test_nothing_fails_in_small(rows: dict[str, Row]) -> None:
    assert {name: row["failed"] for name, row in rows.items() if "failed" in row} == {}
    pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")
    assert {name for name, row in rows.items() if "skipped" in row} == {"memcheck"}


def test_what_is_checked_is_right(rows: dict[str, Row], left_out: frozenset[str]) -> None:
    checked = {name: row["ok"] for name, row in rows.items() if "ok" in row}
    assert all(checked.values()), checked
    about = {name for name in checked if name.startswith("engine, ")}
    scenarios = {f"engine, {name}" for name in parity.SCENARIOS if "bfloat16" not in name}
    assert about == scenarios - left_out | {"engine, encoder", "engine, pictures"}
    assert left_out.isdisjoint(rows)
    assert {name.split(",")[0] for name in checked if "experts" in name} == {"experts' product", "engine"}
    assert rows["engine, experts"]["unrecorded_equal"] and rows["engine, experts"]["distinct"] > 10
    assert rows["engine, preemption"]["preemptions"] > 0
    assert rows["engine, prefix hits"]["prefix_hits"] > 0
    assert rows["engine, sampling with seeds"]["distinct"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["all"], indirect=True)
def test_the_kernels_tests_can_be_imported(rows: dict[str, Row]) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")
    assert rows["pytest -m gpu"]["collected"] > 150, rows["pytest -m gpu"]


def test_every_target_has_a_case_with_its_figure(rows: dict[str, Row]) -> None:
    assert LIKE_OTHERS.isdisjoint(target.case for target in TARGETS)
    for target in TARGETS:
        if "transformers" not in target.case:
            assert rows[target.case][target.figure] >= 0, target


def test_workloads_say_what_took_the_time(rows: dict[str, Row], folder: Path) -> None:
    verbs = {"schedule", "pack", "launch", "collect", "wait", "update", "rest"}
    decoding = [row for name, row in rows.items() if "decode_step_ms" in row or name.endswith("one stream")]
    assert len(decoding) >= 9
    for row in decoding:
        assert set(row["host_ms"]) == verbs
        assert sum(row["host_ms"].values()) == pytest.approx(row["step_ms"])
        assert min(row["host_ms"].values()) >= 0
        assert 0 < row["busy"] <= 1 and row["kernels_a_step"] > 0 and row["top"]
        assert {"pool_memory_s", "recorded_s", "warm_up_s"} <= row["start"].keys()
        assert row["start"]["weights_s"] > 0 and row["weights_gb"] > 0 and row["pool_gb"] > 0
    assert (folder / "profiles.txt").read_text().count(" steps, ") == len([r for r in rows.values() if "busy" in r])


def test_the_page_has_all_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["report", str(folder)])
    assert capsys.readouterr().out.split() == [str(folder / name) for name in ("report.md", "report.html")]
    text, page = ((folder / name).read_text() for name in ("report.md", "report.html"))
    for title in ("Against the targets", "What took the time", "Start and memory", "Checks", "Products", "Machine"):
        assert f"## {title}" in text and title in page
    assert text.count("llama-8b, one stream") >= 3
    assert "http" not in page  # no outside asset


@pytest.mark.slow
def test_headline_checks_in_parallel_processes_and_then_measures(tmp_path: Path) -> None:
    only = "engine, encoder|bert-base, texts"
    (tmp_path / "results.jsonl").write_text(
        "".join(json.dumps({"case": f"engine, {name}"}) + "\n" for name in DECODERS)
    )
    command = [sys.executable, "-m", "lab.bench.gpu", "headline", "--tiny", "--only", only, "--out", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--resume"], cwd=ROOT, env=environment, check=True, timeout=120)
    rows = read([tmp_path])[len(DECODERS) :]
    assert [(row["case"], row.get("ok", "failed" not in row)) for row in rows] == [
        ("engine, encoder", True),
        ("machine", True),
        ("bert-base, texts of 512", True),
    ]
    assert not (tmp_path / "parts").exists()


def test_parts_have_every_case_once() -> None:
    given = [Case(str(at), lambda bench: {}, at % 7) for at in range(20)]
    parts = [selected(given, "", (which, 6)) for which in range(6)]
    assert sorted(case.name for part in parts for case in part) == sorted(case.name for case in given)
    spent = [sum(case.seconds for case in part) for part in parts]
    assert max(spent) - min(spent) <= 7


@pytest.mark.slow
def test_it_compares_with_the_reference_library(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main(["peer", "--tiny", "--out", str(tmp_path)])
    assert left.value.code == 0
    assert read([tmp_path])[-1]["times"] > 0


@pytest.mark.parametrize(("name", "wrong", "seen"), [("chunked prompts", 0, "logprobs"), ("experts", 2, "unrecorded")])
def test_a_wrong_token_is_seen(name: str, wrong: int, seen: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "random_model", perturbed := Perturbed(wrong))
    found = parity._compare(bench, scenario=parity.SCENARIOS[name])
    assert perturbed.made == max(wrong + 1, 2) and not found["ok"]
    assert [name for name in found if "within" in name and found[name] > 1e-3] == [f"{seen}_within"]


class Perturbed:
    """Models that differ in one matrix, an expert's where there are experts."""

    def __init__(self, wrong: int) -> None:
        self.made, self.wrong = 0, wrong

    def __call__(self, *arguments: Any) -> Any:
        model = engines.random_model(*arguments)
        if self.made == self.wrong:
            model.decoder.layers[0].mlp.up.weight.flatten()[: 96 * 32].mul_(1.5)
        self.made += 1
        return model


def test_a_wrong_kernel_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triptych.model.attention.triton", reason="triton is not installed")
    monkeypatch.setattr(triton.TritonBackend, "forward", lambda self, query, *rest: torch.zeros_like(query))
    problem = next(iter(check._TINY.values()))
    assert not check._kernel(bench, problem=problem, dtype=torch.float32)["ok"]


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, captured: Callable[..., object]) -> None:
    monkeypatch.setattr(Bench, "cuda", True)
    monkeypatch.setattr(Bench, "device_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(Bench, "captured", captured)


def test_experts_that_stay_as_they_were_recorded_are_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    case = {"shape": experts.ExpertsShape(2, 20, 32), "dtype": torch.float32}
    as_on_a_gpu(monkeypatch, lambda _, work: work)
    assert experts._check(bench, **case)["ok"]
    as_on_a_gpu(monkeypatch, lambda _, work: Once(work))
    found = experts._check(bench, **case)
    assert not found["ok"] and found["captured_error_129"] > 0.1 > 1e-5 > found["error_129"]


def test_triton_multiplies_the_experts_of_a_model_for_a_gpu(bench: Bench) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    cpu, gpu, raw = torch.device("cpu"), torch.device("cuda"), parity.shape(bench, "gpt-oss-20b")
    model = engines.random_model(raw, SdpaBackend(), torch.float32, cpu, gpu)
    made = [linear for linear in linears(model) if isinstance(linear, ExpertsLinear)]
    assert len(made) == 4 and all(linear.kernels and linear.device is gpu for linear in made)


@pytest.mark.parametrize("name", ["decode, keys in parts", "mixed", "int8 pages, decode"])
def test_a_replayed_launch_is_compared_over_other_lengths(
    name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that kept its first lengths would be seen."""
    pytest.importorskip("triton", reason="triton is not installed")
    case = {"problem": check._TINY[name], "dtype": torch.float32}
    as_on_a_gpu(monkeypatch, lambda _, work: work)
    found = check._kernel(bench, **case)
    assert found["ok"] and 0 < found["captured_error"] < 1e-5
    assert found["tb_per_s"] == pytest.approx(case["problem"].kv_bytes / 1e-3 / 1e12)
    as_on_a_gpu(monkeypatch, lambda _, work: Once(work))
    assert check._kernel(bench, **case)["ok"] == (name == "mixed")  # whose lengths no replay changes


class Once:
    """A recording that computed once what it replays."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self.out = work()
        self.first = self.out.clone()

    def __call__(self) -> None:
        self.out.copy_(self.first)


def test_kernels_are_skipped_where_the_interpreter_is_too_old(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"triton": "3.6.0", "numpy": "2.5.2"}
    monkeypatch.setattr(machine.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(machine, "find_spec", lambda name: True)
    cases = [case for case in cases_of(["check", "sweep"], bench) if not case.name.startswith("engine")]
    cases = [case for case in cases if case.name != "memcheck" and not case.name.startswith("product,")]
    assert {"fp8 product", "integer product", "kernel", "launch"} < {case.name.split(",")[0] for case in cases}
    for case in cases:
        with pytest.raises(Skip, match="the interpreter of Triton"):
            case.run(bench)


def test_steps_that_are_not_recorded_fail(bench: Bench) -> None:
    """On a GPU; here the engine is one of a CPU."""
    ready = engines.load(bench, parity.shape(bench, "llama-1b"), seqs=2, context=64)
    with pytest.raises(NotRecorded, match="attention is not Triton's: "):
        engines.require_graphs(ready)
    ready.loaded.info.attention_backend = "triton"
    ready.loaded.info.fallbacks = ("batches to encode are launched kernel by kernel: no memory",)
    with pytest.raises(NotRecorded, match="batches to encode are launched kernel by kernel: no memory"):
        engines.require_graphs(ready)
    ready.loaded.info.fallbacks = ()
    ready.runner.unrecorded = {"decode steps": "out of luck"}
    with pytest.raises(NotRecorded, match="were not recorded as CUDA graphs: out of luck"):
        engines.require_graphs(ready)


def test_attention_that_is_not_tritons_stops_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.require_gpu(bench)  # in small anything will do
    with pytest.raises(Stop, match="there is no CUDA device here; --tiny"):
        machine.require_gpu(replace(bench, tiny=False))
    found = SimpleNamespace(backend=SimpleNamespace(name="sdpa"), reason="no C compiler")
    monkeypatch.setattr(machine, "select_backend", lambda *_: found)
    with pytest.raises(Stop, match="not Triton's but sdpa: no C compiler"):
        machine.require_gpu(replace(bench, device=torch.device("cuda")))


def test_without_a_gpu_it_stops_at_once_and_names_what_it_did_not_do(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "lab.bench.gpu", "workloads", "--only", "bert-base, texts", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == STOPPED
    assert "STOPPED: there is no CUDA device here" in done.stdout
    assert [row["case"] for row in read([tmp_path])] == ["machine", "bert-base, texts of 512"]
    assert all("no CUDA device" in row["skipped"] for row in read([tmp_path]))


def supervised(path: Path, *commands: str, **settings: Any) -> tuple[int, dict[str, Row]]:
    settings = {"minutes": 1.0, "tiny": True, "child": "tests.lab.gpu_child", **settings}
    code = Supervisor(Task(list(commands), path, **settings)).run()
    return code, {row["case"]: row for row in read([path])}


@pytest.mark.parametrize("how", ["dies of a crash", "loses its context"])
def test_a_process_that_ends_costs_one_case(how: str, tmp_path: Path) -> None:
    code, found = supervised(tmp_path, "first", how, "last")
    assert code == 0
    assert found["first"]["process"] == found["machine"]["process"] != found["last"]["process"]
    assert ("failed" in found[how]) == how.startswith("dies")


def test_the_deadline_ends_what_runs_and_names_the_rest(tmp_path: Path) -> None:
    began = time.monotonic()
    code, found = supervised(tmp_path, "first", "hangs", "last", minutes=1.5 / 60)
    assert time.monotonic() - began < 10
    assert code == TIMED_OUT
    assert found["hangs"]["failed"] == "still ran at the deadline"
    assert found["last"]["skipped"] == "out of time"


def test_a_reason_to_stop_is_told_for_all_that_follows(tmp_path: Path) -> None:
    code, found = supervised(tmp_path, "first", "stops", "last")
    assert code == STOPPED
    assert found["stops"]["skipped"] == found["last"]["skipped"] == "attention is not Triton's"
    assert "skipped" not in found["first"]


def test_what_ends_it_ends_its_child(tmp_path: Path) -> None:
    code = (
        "import sys; from dataclasses import replace; from lab.bench.gpu import cli, supervisor;"
        "cli.Supervisor = lambda task: supervisor.Supervisor(replace(task, child='tests.lab.gpu_child'));"
        "cli.COMMANDS = {'first': '', 'hangs': ''}; cli.main(sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "first", "hangs", "--tiny", "--out", str(tmp_path)], cwd=ROOT
    )
    while not (rows := [row for row in read([tmp_path]) if row["case"] == "first"]):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    assert process.wait(10) == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(rows[0]["process"], 0)


def test_a_bench_that_breaks_says_so(tmp_path: Path) -> None:
    assert supervised(tmp_path, "ends badly")[0] == STOPPED


def test_it_goes_on_where_another_run_ended(tmp_path: Path) -> None:
    supervised(tmp_path / "a", "first", "stops", "last")
    _, found = supervised(tmp_path / "b", "first", "second", "last", resume=True, before=[tmp_path / "a"])
    assert list(found) == ["machine", "second", "last"]


def test_unknown_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "chekc"])
    assert "no such command: chekc; there are " in capsys.readouterr().err


def test_time_is_counted_once_and_methods_are_put_back() -> None:
    class Work:
        def outer(self) -> None:
            time.sleep(0.02)
            self.inner()

        def inner(self) -> None:
            time.sleep(0.03)

    work, timers, before = Work(), Timers(), Work.inner
    with timers.on((work, "outer", "outer"), (Work, "inner", "inner")):
        work.outer()
    assert 0.02 <= timers.seconds["outer"] < timers.seconds["inner"] + 0.02
    assert timers.calls == {"outer": 1, "inner": 1}
    assert vars(work) == {} and Work.inner is before
    with pytest.raises(AttributeError, match="gone"), timers.on((work, "outer", "outer"), (work, "gone", "gone")):
        raise AssertionError
    assert vars(work) == {}


def test_variants_are_compiled_beside_each_other(bench: Bench) -> None:
    found = in_parallel(bench, math.sqrt, [4.0, -1.0, 9.0])
    assert found["variants"] == 3 and found["processes"] >= 1
    assert found["problems"] == ["ValueError: math domain error"]


def test_what_is_not_compiled_in_time_is_ended(bench: Bench) -> None:
    began = time.monotonic()
    assert in_parallel(bench, time.sleep, [60.0], seconds=0.1)["problems"] == ["1 were not ready in time"]
    assert time.monotonic() - began < 30


def test_all_that_is_checked_is_compiled_before(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    given = list[Any]()
    monkeypatch.setattr(check, "in_parallel", lambda bench, compile_one, jobs, seconds: given.extend(jobs) or {})
    monkeypatch.setattr(Bench, "cuda", True)
    cases = check.cases(bench)
    next(case for case in cases if case.name == "compile checks").run(bench)
    named = {name for name, _ in given}
    others = {case.name for case in cases if case.name.split(",")[0] not in ("launch", "compile checks", "memcheck")}
    assert {name for name in others if not name.startswith("engine, ")} < named <= others
    kinds = {
        name: (one.model, one.dtype, *map(one.settings.get, ("kv_cache_dtype", "quantization")))
        for name, one in parity.SCENARIOS.items()
    }
    assert {kinds[name] for name in kinds if f"engine, {name}" in named} == set(kinds.values())
    assert "engine, encoder" in named


@pytest.mark.parametrize("name", ["engine, int8 KV", "engine, encoder", "experts' product, 3 of 40 x 128, bfloat16"])
def test_compiling_compares_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    made = list[str]()
    monkeypatch.setattr(
        parity, "build_engines", lambda name, *rest: made.append(name) or engines.build_engines(name, *rest)
    )
    threads = torch.get_num_threads()
    check.compile_one((name, True))
    torch.set_num_threads(threads)
    assert len(made) == name.startswith("engine")


def test_busy_is_the_union_of_spans() -> None:
    assert profile.covered([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7
    assert profile.covered([]) == 0


def test_a_prompts_tokens_do_not_meet_the_head(bench: Bench) -> None:
    ready = engines.load(bench, parity.shape(bench, "llama-8b"), seqs=2, context=64, backend="sdpa")
    costs = ready.roofline(bench).costs
    matrices = sum(p.numel() for name, p in ready.model.named_parameters() if p.dim() == 2)
    assert ready.model.tokens is not None
    assert costs.decoder == matrices - ready.model.tokens.weight.numel() - costs.head
    alone = engines.decode_roofline(ready, bench, [(20, 1)])
    assert alone == pytest.approx(
        2 * 20 * costs.decoder / bench.ceilings.flops_per_second + ready.roofline(bench).step(1, [20])
    )


def test_the_page_quotes_shares_of_the_stated_ceiling_too(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"case": "machine", "device": "NVIDIA H200", "copy_tb_per_s": 4.32, "tflops": 790.0, "torch": "2.11.0"},
        {"case": "llama-8b, one stream", "of_bandwidth": 0.75, "warnings": ["slow <b>"]},
        {"case": "llama-8b, one stream", "failed": "later and worse"},
        {"case": "bart-large x128", "of_roofline": 0.155},
        {"case": "kernel, mixed", "ok": False, "eager_error": 0.5},
        {"case": "memcheck", "skipped": "not here"},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text, page = (path.read_text() for path in report.write([tmp_path]))
    lines = text.splitlines()
    assert next(line for line in lines if "one stream" in line).split(" | ")[2:5] == ["0.75", "reached", "0.68"]
    assert "| 0.50 of it |" in next(line for line in lines if "bart" in line)
    assert "| kernel, mixed | WRONG |" in text and "skipped: not here" in text
    assert "slow &lt;b&gt;" in page and "<b>" not in page
    assert datasheet_ceilings("NVIDIA H200") == (4.8e12, 989e12) and datasheet_ceilings("another") is None


def test_a_page_needs_rows(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no results\.jsonl"):
        report.write([tmp_path])


def test_cases_have_names_of_their_own(bench: Bench) -> None:
    assert {case.name for case in cases_of(list(COMMANDS), bench)} > LIKE_OTHERS
    real = replace(bench, tiny=False, device=torch.device("cuda"))
    names = [case.name for case in cases_of([name for name in COMMANDS if name != "headline"], real)]
    assert len(names) > 90 and len(set(names)) == len(names)


def test_small_steps_are_timed_and_their_launches_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")
    from lab.bench.gpu import steps
    from triptych.model.network import fused_ops

    monkeypatch.setattr(fused_ops, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(steps, "_LAUNCHES", 5)
    problem = next(one for one in steps.step_problems(2, 16, torch.float32, bench.device) if one.name == "rms")
    found = steps.timed(bench, problem, 2, 1e9)
    assert (found["step"], found["rows"]) == ("rms", 2)
    assert found["us"] > 0
    assert steps.without_holding(lambda: steps.host_cost(problem.by_kernel)) > 0
    assert steps.launches(bench.device)["rms"]()
