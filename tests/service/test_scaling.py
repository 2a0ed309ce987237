"""The autoscaling policy and the settings of replicas."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.stats import EngineStats
from triptych.model.client.admission import Admission
from triptych.model.errors import ConfigError
from triptych.service.runtimes.ray_serve.replica_scaling import SATURATION, SaturationPolicy
from triptych.service.settings import option_table, sources
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.serve_config import Scaling


@dataclass
class Context:
    aggregated_metrics: dict[str, dict[str, float]] | None
    target_num_replicas: int = 2


def desired(*saturations: float, target: float = 0.5) -> float:
    metrics = {SATURATION: {f"replica-{i}": value for i, value in enumerate(saturations)}}
    return SaturationPolicy(target)(Context(metrics))[0]


def test_the_policy_requests_replicas_for_the_target_saturation() -> None:
    assert desired(1.0, 0.5) == 3.0
    assert desired(0.0, 0.0) == 0.0  # Serve keeps to the least
    assert desired(4.0) == 8.0  # a long queue


@pytest.mark.parametrize("metrics", [None, {}, {"other": {"a": 1.0}}])
def test_without_reports_the_number_of_replicas_is_kept(metrics: dict[str, dict[str, float]] | None) -> None:
    assert SaturationPolicy(0.7)(Context(metrics, target_num_replicas=3))[0] == 3


def test_saturation_counts_running_and_waiting_sequences_and_tokens() -> None:
    admission = Admission(EngineConfig(max_num_seqs=4, block_size=16, max_num_batched_tokens=100))
    stats = EngineStats("m", total_blocks=10, free_blocks=10)
    assert admission.saturation(stats) == 0.0
    admission.admit({"a": 10, "b": 30})
    assert admission.saturation(stats) == 2 / 4
    admission.admit({"long": 150})
    assert admission.saturation(stats) == pytest.approx((10 + 30 + 150) / 160)  # they wait for blocks
    for name in ("a", "b", "long"):
        admission.mark_started(name)
    assert admission.saturation(stats) == 3 / 4
    stats.free_blocks = 1
    assert admission.saturation(stats) == 9 / 10
    admission.admit({f"n{i}": 1 for i in range(5)})
    assert admission.saturation(stats) == 8 / 4
    for name in ("a", "b", "long", *(f"n{i}" for i in range(5))):
        admission.release(name)
    assert admission.saturation(EngineStats("m", total_blocks=10, free_blocks=10)) == 0.0
    windowed = EngineStats("m", total_blocks=10, free_blocks=10, window_usage={512: 0.9})
    assert admission.saturation(windowed) == 0.9


def test_saturation_of_an_encoder_counts_its_queue() -> None:
    admission = Admission(EngineConfig(max_num_batched_tokens=100))
    admission.admit({"a": 200})
    assert admission.saturation(EngineStats("m")) == 200 / 800


def parse(*arguments: str) -> Scaling:
    parser = argparse.ArgumentParser()
    sources.add_arguments(parser, option_table.OPTIONS)
    settings = sources.from_arguments(parser.parse_args(arguments), option_table.OPTIONS)
    return resolve_config({"m": {"path": "/nowhere"}}, settings).scaling


def test_settings() -> None:
    assert parse() == Scaling()
    assert parse("--replicas", "3") == Scaling(3, 3)
    chosen = parse("--replicas", "1-4", "--scale-target", "0.5", "--scale-up-delay", "1", "--scale-down-delay", "2")
    assert chosen == Scaling(1, 4, 0.5, 1.0, 2.0)
    assert parse("--surge") == Scaling(surge=True)
    assert parse("--gpus-per-replica", "0.5") == Scaling(gpus_per_replica=0.5)


@pytest.mark.parametrize("text", ["x", "-1", "1-", "1-2-3", ""])
def test_bad_numbers_of_replicas_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number, a range such as 1-4, or auto"):
        parse(f"--replicas={text}")


@pytest.mark.parametrize(
    "arguments",
    [("0",), ("4-1",), ("1-2", "--scale-target", "0"), ("1", "--scale-up-delay=-1"), ("1", "--scale-down-delay=nan")],
)
def test_invalid_settings_are_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        parse("--replicas", *arguments)


def test_the_local_runtime_has_one_replica() -> None:
    with pytest.raises(ConfigError, match="replicas must be 1 with the local runtime, found 4"):
        parse("--runtime", "local", "--replicas", "1-4")
    with pytest.raises(ConfigError, match="gpus_per_replica needs --runtime ray; with the local runtime device and"):
        parse("--runtime", "local", "--gpus-per-replica", "0.5")
