"""What the service adds to the engine, once, in small."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


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
            assert pair["service_first_ms"] > pair["engine_first_ms"] > 0
            assert 0 < pair["service_tokens_per_s"] < 2 * pair["engine_tokens_per_s"]
            assert min(pair["engine_us"], pair["engine_alone_us"], pair["service_us"], pair["clients_us"]) > 0
        assert 0.05 < found["share"] < 1.5
    each, held = results.values()
    assert held["service_us"] + held["clients_us"] < each["service_us"] + each["clients_us"]
