"""The bench's rows: which runs count, what is shown for an unsupported task, and what remains when a run ends."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.bench.batches import BenchRequest, Scale, Workload, workloads
from lab.bench.busy import QUIET_CORES, CpuClock, busy_ticks
from lab.bench.ours import Run
from lab.bench.peers import PEERS, Unsupported, environments
from lab.bench.peers.engine_process import EngineProcess, serve
from lab.bench.tables import Row, brief, lowest_cosine, row, table
from lab.commands.main import main

WORK = Workload("2 at once", (BenchRequest((7,) * 10, 4), BenchRequest((7,) * 20, 6)))


def answer(seconds: float, foreign: float | None = 0.0, first: tuple[float, ...] = ()) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "foreign_cores": foreign,
        "first_token_seconds": list(first),
        "peak_bytes": int(seconds * 1e6),
    }


class TestRows:
    def test_quiet_runs_count_alone_when_there_are_any(self) -> None:
        found = row(
            "D1", "triptych", WORK, [answer(9.0, 1.2), answer(2.0, 0.1, (0.5, 0.7)), answer(4.0, 0.0)], 1.0, None
        )
        assert found.seconds == 3.0 and not found.busy
        assert found.rate == pytest.approx(10 / 3) and found.total_rate == pytest.approx(40 / 3)
        assert found.of_roofline == pytest.approx(1 / 3) and found.first_token_ms == pytest.approx(600)
        assert found.peak_bytes == 9_000_000
        assert [run["foreign_cores"] for run in found.runs] == [1.2, 0.1, 0.0]

    def test_without_a_quiet_run_all_count_and_the_row_says_busy(self) -> None:
        found = row("D1", "triptych", WORK, [answer(9.0, 1.2), answer(2.0, QUIET_CORES), answer(4.0, 0.2)], 1.0, None)
        assert found.seconds == 4.0 and found.busy
        assert "busy" in brief(found)

    def test_a_machine_that_does_not_tell_is_not_called_busy(self) -> None:
        found = row("D1", "triptych", WORK, [answer(2.0, None)], 1.0, None)
        assert not found.busy and brief(found).endswith("?")

    def test_ratios_are_of_pairs_that_were_quiet_on_both_sides(self) -> None:
        theirs = [answer(8.0), answer(6.0, 0.9), answer(9.0), answer(50.0)]
        ours = [answer(2.0), answer(1.0), answer(3.0, 0.9), answer(10.0)]
        found = row("D1", "peer", WORK, theirs, 1.0, ours)
        assert found.ratio == pytest.approx((4.0 + 5.0) / 2)
        assert not found.busy

    def test_a_ratio_without_a_quiet_pair_is_busy_though_runs_were_quiet(self) -> None:
        found = row("D1", "peer", WORK, [answer(8.0), answer(6.0, 0.9)], 1.0, [answer(2.0, 0.9), answer(2.0)])
        assert found.ratio == pytest.approx(3.5) and found.busy

    def test_the_cosine_is_that_of_the_worst_vector_whatever_their_lengths(self) -> None:
        found = lowest_cosine([[2.0, 0.0], [3.0, 4.0]], [[1.0, 0.0], [4.0, 3.0]])
        assert found == pytest.approx(24 / 25)
        assert "cosine 0.96000" in brief(row("N1", "peer", WORK, [answer(2.0)], 1.0, None, found))

    def test_what_cannot_be_done_stands_in_the_table_with_its_reason(self) -> None:
        rows = [row("D1", "triptych", WORK, [answer(2.0)], 1.0, None), Row("D1", "peer", "4 beams", unable="no beams")]
        console = Console(file=io.StringIO(), width=180)
        console.print(table(rows))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "-: no beams" in shown and "5.0 tokens/s" in shown


class TestBusy:
    def test_ticks_are_those_in_which_a_processor_worked(self) -> None:
        assert busy_ticks("cpu  10 20 30 4000 500 6 7 8 900 1000") == 10 + 20 + 30 + 6 + 7 + 8

    def test_others_are_all_less_oneself(self) -> None:
        assert CpuClock(12.0, 107.0, 5.0).foreign_cores(CpuClock(10.0, 103.0, 2.0)) == pytest.approx(0.5)
        assert CpuClock(12.0, 103.0, 5.0).foreign_cores(CpuClock(10.0, 103.0, 2.0)) == 0.0
        assert CpuClock(12.0, None, 5.0).foreign_cores(CpuClock(10.0, None, 2.0)) is None

    @pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc/stat")
    def test_own_work_is_not_others(self) -> None:
        began, used = CpuClock.now(), time.process_time()
        while time.process_time() < used + 0.3:
            pass
        ended = CpuClock.now()
        assert ended.own - began.own >= 0.28  # ticks of 10 ms
        assert ended.busy is not None and began.busy is not None
        assert ended.busy - began.busy >= 0.25
        found = ended.foreign_cores(began)
        assert found is not None and found <= (os.cpu_count() or 1)


class Fickle:
    """An engine that supports only some tasks."""

    def run(self, workload: Workload) -> Run:
        if workload.beams > 1:
            raise Unsupported("no beam search")
        if len(workload.asks) == 1:
            raise ValueError("broken\nin two lines")
        return Run(1.5, [0.25])

    def embed(self, texts: list[tuple[int, ...]]) -> list[list[float]]:
        return [[float(sum(ids))] for ids in texts]


class TestWorkers:
    def test_what_an_engine_raises_is_an_answer_and_the_next_task_goes_on(self) -> None:
        answers: list[dict[str, Any]] = []
        task = {"form": "E", "scale": {"requests": 0.05}}
        serve(Fickle(), 1000, [json.dumps({**task, "workload": number}) for number in (0, 2, 1)], answers.append)
        assert answers[0] == {"unable": "ValueError: broken"}
        assert answers[1] == {"unable": "no beam search"}
        assert answers[2]["seconds"] == 1.5 and answers[2]["first_token_seconds"] == [0.25]
        assert answers[2]["peak_bytes"] > 0 and "foreign_cores" in answers[2]

    def test_vectors_of_texts_are_a_task_too(self) -> None:
        answers: list[dict[str, Any]] = []
        serve(Fickle(), 1000, [json.dumps({"embed": [[3, 4], [5]]})], answers.append)
        assert answers[0]["vectors"] == [[7.0], [5.0]]

    def test_an_engine_that_does_not_load_says_why(self, tmp_path: Path) -> None:
        worker = EngineProcess("triptych", tmp_path / "nothing", {})
        try:
            assert worker.info["unable"] and worker.ask(form="D") == worker.info
        finally:
            worker.close()

    def test_a_process_that_takes_too_long_is_ended_and_says_so(self, tmp_path: Path) -> None:
        worker = EngineProcess("triptych", tmp_path / "nothing", {}, patience=0.05)
        try:
            assert worker.info == {"unable": "no answer in 0.05 s"}
            assert worker.ask(form="D") == worker.info
        finally:
            worker.close()


@pytest.mark.parametrize("form", "DENS")
def test_fewer_requests_are_the_first_of_the_whole(form: str) -> None:
    whole, few = workloads(form, 1000, Scale(seed=3)), workloads(form, 1000, Scale(seed=3, at_most=2))
    for all_of_it, part in zip(whole, few, strict=True):
        assert part.asks == all_of_it.asks[:2]


def test_a_peer_that_is_not_installed_is_named_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PEERS, "openvino-genai", replace(PEERS["openvino-genai"], packages=("an-engine", "a-library")))
    with pytest.raises(SystemExit) as ended:
        main(["offline", "--models", "D1", "--peer", "openvino-genai"])
    assert ended.value.code == 2
    assert "pip install a-library an-engine" in capsys.readouterr().err


def test_a_peer_with_its_own_environment_is_run_by_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = environments.folder("vllm")
    (own / "bin").mkdir(parents=True)
    for name in ("made", "libtcmalloc_minimal.so.4", "libiomp5.so"):
        (own / name).touch()
    said = 'printf \'{"module": "%s", "within": "%s"}\\n\' $2 $VLLM_ENABLE_V1_MULTIPROCESSING'
    (own / "bin" / "python").write_text(f"#!/bin/sh\n{said}\nread task\necho $task\n")
    (own / "bin" / "python").chmod(0o755)
    worker = EngineProcess("vllm", tmp_path, {"form": "D"})
    try:
        assert worker.info == {"module": "lab.bench.peers.engine_process", "within": "0"}
        assert worker.ask(workload=3) == {"workload": 3}
    finally:
        worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [(name, model) for name in PEERS for model in ("D1", "N1", "E1")])
def test_an_installed_peer_does_the_work(name: str, model: str, tmp_path: Path) -> None:
    """Lengths are checked by the peers themselves, where they can be other than what was asked."""
    from lab.bench.models import built

    own = PEERS[name].environment
    if PEERS[name].missing or (own and not (environments.folder(own) / "made").exists()):
        pytest.skip(f"not installed: {', '.join(PEERS[name].missing) or own}")
    if model[0] not in PEERS[name].forms:
        pytest.skip("not of its forms")
    model = "D2" if name == "llama.cpp" else model
    worker = EngineProcess(name, built(model, tmp_path), {"dtype": "float32", "form": model[0]})
    try:
        assert worker.info["version"]
        scale = {"lengths": 0.05, "at_most": 3}
        found = [
            worker.ask(form=model[0], workload=number, scale=scale)
            for number in range({"D": 2, "E": 3, "N": 1}[model[0]])
        ]
        assert all(answer["seconds"] > 0 for answer in found)
        if model[0] == "N":
            [vector, _] = worker.ask(embed=[[101, 7, 8], [9]])["vectors"]
            assert len(vector) == 384
    finally:
        worker.close()
