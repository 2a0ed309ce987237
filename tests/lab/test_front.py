"""The command `front`: its engine, its figures, and one small run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.commands.front import Usage, figures
from lab.paced_engine import PacedEngine
from triptych.loadtest.errors import UsageError
from triptych.loadtest.records import Record
from triptych.model.api.messages import Abort, Commands, ModelSpec
from triptych.model.api.request import EncodeRequest, EncodeTask, FinishReason, Request, token_source
from triptych.model.api.sampling_params import SamplingParams


def request(name: str, **params: object) -> Request:
    return Request(name, "m", (5, 6, 7), SamplingParams(**params), deadline=10.0)  # type: ignore[arg-type]


def test_every_sequence_gets_a_token_a_step_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    engine = PacedEngine(tokens_per_s=100, streams=4)
    assert engine.step_s == 0.04
    begun = engine.apply(Commands(start=[ModelSpec("m", str(tmp_path))]))
    assert begun.ready and [(info.name, info.model_type) for info in begun.loaded] == [("m", "llama")]
    asked = [
        request("a", max_tokens=4, logprobs=1),
        request("b", max_tokens=9, n=2, stop_token_ids=(7,)),
        request("c", max_tokens=9),
        request("d", max_tokens=9),
        request("e", num_beams=2),
    ]
    inputs = [EncodeRequest(name, "m", token_source((1,))) for name in "fg"]
    inputs.append(EncodeRequest("h", "m", token_source((1,)), EncodeTask.TOKENS))
    at_once = engine.apply(
        Commands(generate=asked, encode=inputs, abort=[Abort("m", "g", None, FinishReason.CANCELLED)])
    )
    assert [(one.request_id, one.finish_reason) for one in at_once.tokens] == [("e", FinishReason.ERROR)]
    assert [(one.request_id, one.finish_reason) for one in at_once.encoded] == [("g", FinishReason.CANCELLED)]
    first = engine.step(0.0)
    told = [(one.request_id, one.finish_reason, one.data.hex(), one.shape) for one in first.encoded]
    assert told == [("f", FinishReason.STOP, "0000803f", (1,)), ("h", FinishReason.ERROR, "", ())]
    steps = [first.tokens, engine.step(0.0).tokens]
    [gone] = engine.apply(Commands(abort=[Abort("m", "c", None, FinishReason.CANCELLED)])).tokens
    assert (gone.request_id, gone.finish_reason) == ("c", FinishReason.CANCELLED)
    steps += [engine.step(0.0).tokens, engine.step(11.0).tokens]
    found = [[(one.request_id, one.index, *one.token_ids) for one in step] for step in steps]
    running = [("a", 0), ("b", 0), ("b", 1), ("c", 0), ("d", 0)]
    assert found[0] == [(*one, 5) for one in running] and found[1] == [(*one, 6) for one in running]
    assert found[2] == [(*one, 7) for one in running if one != ("c", 0)]
    assert [one.finish_reason for one in steps[2]] == [None, FinishReason.STOP, FinishReason.STOP, None]
    assert [(one.request_id, one.finish_reason) for one in steps[3]] == [
        ("a", FinishReason.DEADLINE),
        ("d", FinishReason.DEADLINE),
    ]
    assert steps[0][0].logprobs is not None and not engine.has_work


def test_a_token_may_be_chosen() -> None:
    engine = PacedEngine(100, 4, 9)
    engine.apply(Commands(generate=[request("a", max_tokens=2)]))
    assert [one.token_ids for _ in range(2) for one in engine.step(0.0).tokens] == [[9], [9]]


def record(times: list[float], counts: list[int]) -> Record:
    made = Record(0, 0, "", 0.0, 1, 1)
    made.token_times, made.token_counts = times, counts
    return made


def test_figures_are_of_the_time_in_which_all_streams_run() -> None:
    records = [record([0.0, 1.0, 2.0, 3.0], [1, 2, 2, 1]), record([1.0, 2.0, 3.0, 4.0], [1, 1, 3, 1])]
    kinds = {"engine": 0.0, "haproxy": 0.0, "service": 0.0, "clients": 0.0}
    usage = Usage([0.0, 2.0, 4.0], [kinds, kinds | {"service": 4e-5}, kinds | {"service": 6e-5, "clients": 1e-5}])
    found = figures(records, usage, rate=5.0)
    tokens = 2 + 1 + 1 + 3  # after 1.0, when the second began, until 3.0, when the first ended
    assert (found.seconds, found.tokens_per_s, found.share) == (2.0, tokens / 2, tokens / 10)
    assert found.service_us == pytest.approx(30 / tokens) and found.clients_us == pytest.approx(5 / tokens)
    assert found.events == 4 / tokens
    untold = record([1.0, 2.0, 3.0], [])
    untold.has_usage, untold.completion_tokens = True, 12  # four each
    assert figures([records[0], untold], usage, rate=5.0).tokens_per_s == (2 + 1 + 4 + 4) / 2
    with pytest.raises(UsageError, match="--seconds: too short"):
        figures([record([0.0, 1.0], [1, 1]), record([1.0, 2.0], [1, 1])], usage, rate=5.0)


@pytest.mark.slow
def test_a_service_over_a_paced_engine_is_measured() -> None:
    command = [sys.executable, "-m", "loadtest", "front", "--runtime", "local", "--streams", "8", "--rate", "400"]
    command += ["--seconds", "3", "--runs", "1", "--stream-interval", "0", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    each, held = results["local"], results["local, an event each 0.2 s"]
    assert held["events"] < 0.3 < each["events"] <= 1
    assert all(found["service_us"] > 0 and found["clients_us"] > 0 for found in (each, held))
    assert all(0.5 < found["share"] < 1.2 for found in (each, held))
