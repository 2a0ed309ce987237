"""What `triptych inspect --pod` reckons, against a simulation of the same engine, and what it prints."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests import checkpoints
from triptych.model.errors import ConfigError
from triptych.service.cli import pod_fit
from triptych.service.cli.main import main
from triptych.service.cli.pod_fit import Costs, Load, Pod, fitted, forecast


def simulated(costs: Costs, load: Load, most: int) -> tuple[float, float, float]:
    """Mean sequences, seconds to a first token and seconds between tokens of an engine that prompts interrupt."""
    draw, now, at, waiting, running = random.Random(1), 0.0, 0.0, [], {}
    firsts, gaps, area, number = [], [], 0.0, 0
    while number < 1500:
        while at <= now:
            waiting.append(at)
            at += draw.expovariate(load.requests)
        began = now
        if waiting and len(running) < most:
            arrived = waiting.pop(0)
            now += costs.prompt
            firsts.append(now - arrived)
            running[number] = [load.output - 1, now]
            number += 1
        elif running:
            now += costs.step + costs.sequence * len(running)
            for key, (left, last) in list(running.items()):
                gaps.append(now - last)
                running[key] = [left - 1, now]
                if left == 1:
                    del running[key]
        else:
            now = at
        area += (now - began) * len(running)
    return area / now, sum(firsts) / len(firsts), sum(gaps) / len(gaps)


@pytest.mark.parametrize("requests", [1.0, 3.0, 5.0])
def test_the_steady_state_is_that_of_a_simulation(requests: float) -> None:
    costs, load = Costs(0.05, 0.004, 0.0008), Load(requests, 256, 100)
    found = forecast(costs, load, 64)
    sequences, first, between = simulated(costs, load, 64)
    for reckoned, seen in ((found.sequences, sequences), (found.first_token, first), (found.between_tokens, between)):
        assert reckoned == pytest.approx(seen, rel=0.2)
    assert 0 < found.busy < 1


def test_more_than_it_can_serve_does_not_fit() -> None:
    costs = Costs(0.05, 0.004, 0.0008)
    most = forecast(costs, Load(1, 256, 100), 64).most_requests
    assert forecast(costs, Load(0.99 * most, 256, 100), 64).busy < 1
    assert forecast(costs, Load(1.01 * most, 256, 100), 64).busy > 1


@pytest.mark.parametrize(
    "text",
    [
        *("memory=4Gi", "cpu=2", "memory=4Gi,cpu=0", "memory=4Gi,cpu=1.5", "memory=x,cpu=1", "", "memory=4Gi,cpu=500m"),
        *(
            "memory=4Gi,cpu=inf",
            "memory=4Gi,cpu=nan",
            "memory=4Gi,cpu=-1",
            "memory=4Gi,cpu=1,cpu=2",
            "memory=4Gi,cpu=m",
        ),
    ],
)
def test_a_bad_pod_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--pod: found .*, expected memory=4Gi,cpu=2"):
        Pod.parse(text)


def test_kubernetes_and_our_units_are_read() -> None:
    assert Pod.parse("memory=512Mi, cpu=2") == Pod(512 << 20, 2) == Pod.parse("cpu=2,memory=512MiB")
    assert Pod.parse("memory=2G,cpu=1").memory == 2 * 10**9
    assert Pod.parse("memory=4000Mi,cpu=2000m") == Pod(4000 << 20, 2) == Pod.parse("memory=4000Mi,cpu=2.0")
    for text in ("0/s", "x", "-1/s", "1/m"):
        with pytest.raises(ConfigError, match="--load: found"):
            Load.parse(text, 1, 1)


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_fit, "_RUNS", 5)
    for path, output in ((checkpoints.llama(tmp_path / "llama"), 4), (checkpoints.bert(tmp_path / "bert"), 0)):
        assert pod_fit.report("m", str(path), Pod(8 << 30, 1), Load(0.1, 8, 4), as_json=True) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["fits"] == {"memory": True, "load": True} and found["load"]["output"] == output
        assert found["bytes"]["left"] + sum(v for k, v in found["bytes"].items() if k != "left") == 8 << 30
    assert pod_fit.report("m", str(path), Pod(1 << 20, 1), Load(1e9, 8, 4), as_json=False) == 1
    text = capsys.readouterr().out
    assert "memory    DOES NOT FIT" in text and "load      DOES NOT FIT: at most" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--load", "5/s"), "--load needs --pod"),
        (("--prompt-tokens", "5"), "--prompt-tokens needs --pod"),
        (("--output-tokens", "5"), "--output-tokens needs --pod"),
        (("--pod", "memory=4Gi,cpu=1", "--memory", "1GiB"), "--memory does not go with --pod"),
        (("--pod", "memory=4Gi,cpu=1", "--context", "9"), "--context does not go with --pod"),
    ],
)
def test_an_option_that_would_not_be_read_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect", "code", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "step", "sequence"),
    [
        ({1: 5.0, 4: 8.0, 16: 20.0}, 4.0, 1.0),
        ({1: 5.0}, 5.0, 0.0),
        ({1: 5.0, 4: 1.0, 16: 3.0}, 5.0, 0.0),  # a busy machine: more sequences are not quicker
        ({1: 1.0, 4: 4.0, 16: 64.0}, 0.0, 2.0),
    ],
)
def test_steps_have_a_cost_whatever_was_measured(steps: dict[int, float], step: float, sequence: float) -> None:
    found = fitted(0.1, steps)
    assert (found.step, found.sequence) == pytest.approx((step, sequence))


@pytest.mark.parametrize("steps", [{1: 0.0}, {1: -1e-3, 4: 1e-3}, {1: 1e-3, 4: -1e-6}])
def test_a_step_that_took_no_time_was_not_measured(steps: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="steps could not be measured"):
        fitted(0.1, steps)


def test_numbers_have_no_exponent() -> None:
    assert [pod_fit._number(one) for one in (0.012, 7.25, 140.0, 12_345.6)] == ["0.012", "7.2", "140", "12346"]
