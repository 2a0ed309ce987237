"""The commands `overhead`, `requests` and `speculation`, run once on small models."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench import models
from lab.commands import overhead, requests
from lab.commands.main import main
from tests.lab.bench_models import small_models
from triptych.loadtest.errors import UsageError
from triptych.model.pretrained import embedded_models


@pytest.mark.slow
def test_engine_and_service_do_the_same_work_in_turns() -> None:
    command = [sys.executable, "-m", "loadtest", "overhead", "--runtime", "local", "--streams", "4", "--pairs", "2"]
    command += ["--output-tokens", "100", "--stream-interval", "0", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    *texts, line = done.stdout.strip().splitlines()
    results = json.loads(line)["results"]
    assert list(results) == ["local", "local, an event each 0.2 s"]
    assert [text.partition(":")[0] for text in texts] == list(results)
    for found in results.values():
        assert len(found["pairs"]) == 2
        for pair in found["pairs"]:
            assert 0 < pair["events"] <= 1 and 0.9 <= pair["text_share"] <= 1
            assert all(value > 0 for value in pair.values())
        for name, figure in (
            ("share", lambda pair: pair["service_tokens_per_s"] / pair["engine_tokens_per_s"]),
            ("added_ms", lambda pair: pair["service_first_ms"] - pair["engine_first_ms"]),
        ):
            assert found[name] == pytest.approx(statistics.median(map(figure, found["pairs"])))
    each, held = results.values()
    assert held["events"] < each["events"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["D1", "E1"])
def test_a_benchmark_model_is_taken_by_its_name(name: str, tmp_path: Path) -> None:
    with small_models():
        models.built(name, tmp_path)
    command = [sys.executable, "-m", "loadtest", "overhead", "--runtime", "local", "--model", name, "--pairs", "1"]
    command += ["--cache", str(tmp_path), "--streams", "4", "--output-tokens", "32", "--temperature", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == name and found["output_tokens"] == 32 and found["temperature"] == 1
    assert found["results"]["local"]["text_share"] > 0.9
    assert "Unknown child" not in done.stderr


@pytest.mark.slow
def test_texts_of_an_encoder_are_counted_on_both_sides() -> None:
    command = [sys.executable, "-m", "loadtest", "overhead", "--runtime", "local", "--model", "embed", "--pairs", "1"]
    command += ["--streams", "2", "--texts", "300", "--text-tokens", "12", "--encoding-format", "base64"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    text, line = done.stdout.strip().splitlines()
    assert "of the engine's" in text and "2 clients of 300 texts each" in text
    told = json.loads(line)
    assert (told["texts"], told["text_tokens"], told["encoding_format"]) == (300, 12, "base64")
    [pair] = told["results"]["local"].pop("pairs")
    assert all(value > 0 for value in pair.values())
    share = pair["service_texts_per_s"] / pair["engine_texts_per_s"]
    assert told["results"]["local"]["share"] == pytest.approx(share, rel=1e-3)


@pytest.mark.slow
def test_requests_and_refusals_have_a_cost_each() -> None:
    command = [sys.executable, "-m", "loadtest", "requests", "--rounds", "1", "--requests", "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    *texts, line = done.stdout.strip().splitlines()
    found = json.loads(line)["service_us"]
    assert list(found) == [*requests.KINDS, *requests.FULL] == [text.rpartition(": ")[0] for text in texts]
    assert all(len(costs) == 1 for costs in found.values())
    assert found["/generate, 1 token"][0] > 0


@pytest.mark.parametrize(
    ("name", "tokens", "said"),
    [("D1", 961, "--output-tokens: found 961, expected at most 960")],
)
def test_impossible_output_lengths_are_refused(name: str, tokens: int, said: str, tmp_path: Path) -> None:
    with small_models():
        engine = overhead._Engine(overhead._subject(name, tmp_path), 0.0)
    with pytest.raises(UsageError, match=said):
        engine.check(tokens)


def test_drafts_are_right_where_outputs_copy(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["speculation", "--model", str(embedded_models()["code"]), "--output-tokens", "80", "--pairs", "1"]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--prompt-tokens", "100000"])
    assert "--prompt-tokens and --output-tokens are more than the model's context" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--prompt-tokens", "60"])
    copies, fresh = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert copies["tokens_per_step"] > 2.5 and copies["accepted"] > 0.5
    assert fresh["tokens_per_step"] < 1.1 and fresh["accepted"] < 0.3
    drafting = ["--prompt-tokens", "60", "--draft-model", str(embedded_models()["code"]), "--right", "0", "1"]
    with pytest.raises(SystemExit, match="0"):
        main([*command, *drafting])
    wrong, right = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
    assert wrong["accepted"] < 0.3 and wrong["tokens_per_step"] < 1.1
    assert right["accepted"] > 0.7 and right["tokens_per_step"] > 1.3  # of a draft or two, as it is no smaller
