"""The command `served`: its table, the loads it asks for, and the environments of other servers."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

import pytest

from lab.commands import served
from lab.servers import environments
from triptych.loadtest.runs import flags


def test_the_table_has_medians_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        ("D2", "x16", "triptych"): {"tokens": [90.0, 120.0, 100.0], "between": [50.0]},
        ("D2", "x16", "vllm"): {"tokens": [50.0], "between": [75.0]},
        ("D2", "x64", "vllm"): {"tokens": []},  # no request ended
    }
    served._print_table(found, ["triptych", "vllm"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "triptych vllm",
        "D2 x16, tokens 100 tokens/s 50 tokens/s (2.00x)",
        "D2 x16, between 50 ms 75 ms (1.50x)",
        "D2 x64, tokens - -",
    ]


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
