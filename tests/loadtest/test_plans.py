"""Lengths, arrivals, texts and items: what a seed makes."""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from triptych.loadtest.errors import UsageError
from triptych.loadtest.runs.sweep import backlog_grows
from triptych.loadtest.settings import Arrivals, Clients, Settings, Workload
from triptych.loadtest.workload import distributions, prompts
from triptych.loadtest.workload.items import Item, ItemSource, read_replay
from triptych.model.pretrained import embedded_models

SETTINGS = Settings(url="http://x", target="generate")


def source(workload: Workload, **changes: object) -> ItemSource:
    return ItemSource(dataclasses.replace(SETTINGS, workload=workload, **changes), prompts.estimated())  # type: ignore[arg-type]


def drawn(text: str, count: int = 4000) -> list[int]:
    draw, rng = distributions.parse(text, "--x"), random.Random(1)
    return [draw(rng) for _ in range(count)]


def test_lengths(tmp_path: Path) -> None:
    assert set(drawn("7", 5)) == set(drawn("fixed:7", 5)) == {7}
    assert set(drawn("uniform:3-5")) == {3, 4, 5}
    chat = drawn("lognormal:100,0.8,500")
    assert statistics.median(chat) == pytest.approx(100, rel=0.1)
    assert max(chat) == 500
    assert statistics.stdev(np.log([n for n in chat if n < 500])) == pytest.approx(0.8, rel=0.15)
    (tmp_path / "x").write_text("4\n9\n")
    assert set(drawn(f"file:{tmp_path / 'x'}")) == {4, 9}


@pytest.mark.parametrize(
    "text", ["0", "x", "uniform:5-3", "uniform:5", "lognormal:0,1", "normal:3", "fixed:-1", "file:/no"]
)
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens"):
        distributions.parse(text, "--prompt-tokens")


def offsets(kind: str, seed: int = 0, duration_s: float = 200.0, requests: int = 0, **fields: object) -> np.ndarray:
    return distributions.offsets(Arrivals(kind=kind, **fields), duration_s, requests, seed)  # type: ignore[arg-type]


def test_constant_arrivals() -> None:
    assert offsets("constant", rate=4.0, duration_s=1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert offsets("constant", rate=4.0, duration_s=0.0, requests=3).tolist() == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(("kind", "fields", "cv"), [("poisson", {}, 1.0), ("gamma", {"burstiness": 0.25}, 2.0)])
def test_random_arrivals(kind: str, fields: dict[str, float], cv: float) -> None:
    times = offsets(kind, rate=50.0, **fields)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)
    assert times.max() < 200
    assert (offsets(kind, rate=50.0, **fields) == times).all()
    assert (
        len(offsets(kind, seed=1, rate=50.0, **fields)) != len(times)
        or (offsets(kind, seed=1, rate=50.0, **fields) != times).any()
    )


def test_a_ramp_rises() -> None:
    times = offsets("ramp", rate=10.0, ramp_to=90.0)
    by_quarter = np.histogram(times, bins=4, range=(0, 200))[0]
    assert by_quarter == pytest.approx([1000, 2000, 3000, 4000], rel=0.12)


def test_stages() -> None:
    times = offsets("stages", stages=((20.0, 50.0), (0.0, 50.0), (60.0, 100.0)))
    assert np.histogram(times, bins=[0, 50, 100, 200])[0] == pytest.approx([1000, 0, 6000], rel=0.12)


def test_too_many_arrivals_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 5,000,000"):
        offsets("poisson", rate=1e6)


@pytest.mark.parametrize("model", ["code", "normalize", "embed"])
def test_prompts_have_exactly_the_wanted_tokens(model: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(embedded_models()[model] / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = prompts.from_file(embedded_models()[model])
    rng = random.Random(0)
    for wanted in (vocabulary.overhead, 17, 100, 333):
        text = vocabulary.text(rng, wanted)
        assert len(tokenizer.encode(text).ids) == wanted, text


def test_a_wrong_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tokenizer"):
        prompts.from_file(tmp_path)


@pytest.mark.parametrize("kind", ["synthetic", "chat", "conversation", "seq2seq"])
def test_an_item_is_known_by_seed_and_number(kind: str) -> None:
    items = [source(Workload(kind=kind)).item(at) for at in (3, 1, 3)]
    assert items[0] == items[2] != items[1]
    assert source(Workload(kind=kind), seed=1).item(3) != items[0]


def test_shared_beginnings_are_zipf() -> None:
    made = source(Workload(prefixes=4, prefix_tokens=16, zipf=1.0, prompt_tokens="8"))
    begun = Counter(made.item(at).turns[0].text[:40] for at in range(2000))
    assert len(begun) == 4
    counts = [count for _, count in begun.most_common()]
    assert counts == pytest.approx([960, 480, 320, 240], rel=0.15)


def test_plans_fit_the_context() -> None:
    made = source(Workload(kind="conversation", turns="9", prompt_tokens="40", output_tokens="20"), max_model_len=200)
    turns = made.item(0).turns
    assert len(turns) == 3
    single = source(Workload(prompt_tokens="500", output_tokens="500"), max_model_len=200).item(0).turns[0]
    assert single.prompt_tokens + single.output_tokens == 200


def test_seq2seq_outputs_follow_their_sources() -> None:
    made = source(Workload(kind="seq2seq", prompt_tokens="uniform:10-200", ratio=1.5))
    turns = [made.item(at).turns[0] for at in range(400)]
    pairs = np.array([[turn.prompt_tokens, turn.output_tokens] for turn in turns])
    assert np.corrcoef(pairs.T)[0, 1] > 0.9
    assert pairs[:, 1].sum() / pairs[:, 0].sum() == pytest.approx(1.5, rel=0.1)


def test_habits_come_in_their_shares() -> None:
    made = source(Workload(), clients=Clients(cancel=0.2, slow=0.1, retry=0.3))
    found = Counter(made.item(at).habit for at in range(3000))
    assert [found[h] / 3000 for h in ("cancel", "slow", "retry", "")] == pytest.approx([0.2, 0.1, 0.3, 0.4], abs=0.03)


def replay(tmp_path: Path, *lines: object, **fields: object) -> Workload:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return Workload(kind="replay", file=str(path), **fields)  # type: ignore[arg-type]


def test_replay(tmp_path: Path) -> None:
    lines = (
        {"timestamp": 12.0, "prompt": "second", "max_tokens": 5},
        {"timestamp": 10.0, "input_length": 30, "output_length": 6},
        {"timestamp_ms": 13_000, "source": "third"},
    )
    workload = replay(tmp_path, *lines, speed=2.0)
    assert [line.at for line in read_replay(workload)] == [0.0, 1.0, 1.5]
    items: list[Item] = [source(workload).item(at) for at in range(3)]
    assert [item.turns[0].output_tokens for item in items[:2]] == [6, 5]
    assert [item.turns[0].text for item in items[1:]] == ["second", "third"]
    assert items[0].turns[0].prompt_tokens == 30


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "JSON object"),
        ("[]", "found list"),
        ({}, "found no prompt"),
        ({"prompt": 3}, "prompt: found 3, expected str"),
    ],
)
def test_a_wrong_replay_is_named_by_line(tmp_path: Path, line: object, said: str) -> None:
    with pytest.raises(UsageError, match=f"trace.jsonl:2: .*{said}"):
        read_replay(replay(tmp_path, {"prompt": "x"}, line))


def swept(latency_s: float, growing: float, rate: float = 20.0) -> dict[str, object]:
    """A run of 30 s at `rate` whose latency grows by `growing` seconds each second."""
    due = np.random.default_rng(3).uniform(0, 30, int(30 * rate))
    due.sort()
    ended = due + latency_s + growing * due
    columns = {"scheduled_s": due.tolist(), "ended_s": ended.tolist()}
    return {"columns": columns, "window_s": [5.0, 30.0], "offered_per_s": rate}


@pytest.mark.parametrize("latency_s", [0.1, 4.0])
@pytest.mark.parametrize(
    ("growing", "rate", "grows"),
    [(0.0, 2.0, False), (0.0, 20.0, False), (0.0, 200.0, False), (0.5, 20.0, True), (0.5, 200.0, True)],
)
def test_saturation_is_a_growing_backlog(latency_s: float, growing: float, rate: float, grows: bool) -> None:
    assert backlog_grows(swept(latency_s, growing, rate)) is grows
