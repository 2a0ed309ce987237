"""The GPUs of replicas, without Ray: how many each requests, whether a machine has them, what it does with its own."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.model.errors import ConfigError
from triptych.service.runtimes.ray_serve.replica_gpus import check_gpus, gpus_of_replica, resources, with_own_gpus
from triptych.service.settings import sources
from triptych.service.settings.resolve import resolve_config
from triptych.service.settings.serve_config import Scaling, ServeConfig


def config(*models: tuple[str, int], **settings: Any) -> ServeConfig:
    """A configuration with a model for each device and number of ranks."""
    named = {
        f"m{place}": {"path": "/m", "device": device, "tensor_parallel_size": size}
        for place, (device, size) in enumerate(models)
    }
    return resolve_config(named, settings)


@pytest.mark.parametrize(
    ("models", "cluster_gpus", "expected"),
    [
        ([("auto", 1)], 8, 1),  # each replica on a GPU of its own
        ([("auto", 1), ("auto", 1)], 8, 1),  # which its models share
        ([("auto", 1)], 0, 0),
        ([("cuda", 1), ("cpu", 1)], 8, 1),
        ([("cuda:0", 1)], 8, 1),
        ([("auto", 2)], 8, 2),
        ([("auto", 2)], 0, 0),  # ranks on the CPU
        ([("cpu", 4)], 8, 0),
        ([("cuda", 4)], 0, 4),  # a cluster that starts GPUs when they are asked for
        ([("cuda", 2), ("cuda", 4), ("cpu", 8)], 8, 4),  # models of a replica share its GPUs
        ([("cuda:2", 2), ("cuda", 2)], 8, 4),  # counted from 0 among those of the replica
        ([("cuda:1", 1), ("cuda", 1)], 8, 2),
        ([("cuda:1", 1), ("auto", 1)], 8, 2),
    ],
)
def test_gpus_of_a_replica(models: list[tuple[str, int]], cluster_gpus: float, expected: int) -> None:
    assert gpus_of_replica(config(*models), cluster_gpus) == expected


@pytest.mark.parametrize(
    ("models", "unused"), [([("cuda:1", 1)], 0), ([("cuda", 1), ("cuda:3", 2)], 2), ([("cuda:2", 2)], 1)]
)
def test_a_replica_holds_no_gpu_that_none_of_its_models_uses(models: list[tuple[str, int]], unused: int) -> None:
    message = rf"model m\d: device cuda:{unused + 1} leaves GPU {unused} of its replica unused;.* CUDA_VISIBLE_DEVICES"
    with pytest.raises(ConfigError, match=message):
        gpus_of_replica(config(*models), 8)


def test_models_that_are_loaded_later_need_gpus_too() -> None:
    later = resolve_config({}, {"models_dir": "/models", "tensor_parallel_size": 2})
    assert (gpus_of_replica(later, 8), gpus_of_replica(later, 0)) == (2, 0)


@pytest.mark.parametrize(
    ("models", "wanted", "cluster_gpus"),
    [
        ([("cuda", 1), ("cuda", 1)], 0.5, 8),
        ([("auto", 1)], 0.25, 0),  # who asks for a share means a GPU
        ([("cuda", 2)], 4.0, 8),  # two for models that are loaded later
        ([("cuda", 2)], 2.0, 8),
    ],
)
def test_gpus_per_replica_decides(models: list[tuple[str, int]], wanted: float, cluster_gpus: float) -> None:
    assert gpus_of_replica(config(*models, gpus_per_replica=wanted), cluster_gpus) == wanted


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        ([("cuda", 2)], 0.5, "gpus_per_replica 0.5: its models need 2 GPUs"),
        ([("cuda", 2)], 1.0, "gpus_per_replica 1: its models need 2 GPUs"),
        ([("cuda", 1), ("cuda:1", 1)], 0.5, "need 2 GPUs"),
        ([("cpu", 1)], 0.5, "no model of the replica uses a GPU"),
    ],
)
def test_gpus_per_replica_that_does_not_fit_the_models_is_refused(
    models: list[tuple[str, int]], wanted: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        gpus_of_replica(config(*models, gpus_per_replica=wanted), 8)


@pytest.mark.parametrize("wanted", [0.0, -1.0, 1.5, 0.001, 1025.0, float("nan"), float("inf")])
def test_gpus_per_replica_is_a_share_or_a_whole_number(wanted: float) -> None:
    with pytest.raises(ConfigError, match=r"gpus_per_replica must be a share of a GPU .* or a whole number"):
        Scaling(gpus_per_replica=wanted)


def test_ray_takes_shares_and_whole_numbers() -> None:
    assert [resources(gpus) for gpus in (0, 0.5, 2.0)] == [{}, {"num_gpus": 0.5}, {"num_gpus": 2}]
    assert isinstance(resources(2.0)["num_gpus"], int)  # Ray refuses 2.0


def test_groups_share_gpus_by_their_own_setting() -> None:
    found = sources.from_mapping(
        {
            "gpus_per_replica": 0.5,
            "models": {"a": "/a"},
            "groups": {
                "big": {"models": {"b": {"path": "/b", "device": "cuda"}}},
                "small": {"gpus-per-replica": 0.25, "models": {"c": "/c"}},
            },
        },
        "x.yaml",
    )
    applications = resolve_config(found.models, found.settings, found.groups).applications
    assert [gpus_of_replica(one, 8) for one in applications] == [0.5, 1, 0.25]


def several(*needs: tuple[int, float]) -> list[ServeConfig]:
    """Applications, each with a number of replicas and the GPUs that each of these requests."""
    return [
        config(("cuda", max(1, int(gpus))), replicas={"min_replicas": 1, "max_replicas": count}, gpus_per_replica=gpus)
        for count, gpus in needs
    ]


@pytest.mark.parametrize(
    ("needs", "machine"),
    [
        ([(2, 1)], 2),
        ([(4, 0.5)], 2),
        ([(3, 0.33)], 1),
        ([(2, 0.5), (1, 2)], 3),
        ([(10, 0.1)], 1),  # which are not 1.0 as floats added up
        ([(2, 0.6), (2, 0.4)], 2),
    ],
)
def test_a_machine_with_enough_gpus_is_fine(needs: list[tuple[int, float]], machine: float) -> None:
    check_gpus(several(*needs), machine)


@pytest.mark.parametrize(
    ("needs", "machine"),
    [
        ([(2, 1)], 1),
        ([(3, 0.6)], 2),  # 1.8 in all, but one of them is on both GPUs
        ([(3, 0.5), (1, 1)], 2),
        ([(2, 2)], 3),
        ([(1, 4)], 2),
    ],
)
def test_too_few_gpus_are_refused(needs: list[tuple[int, float]], machine: float) -> None:
    with pytest.raises(ConfigError, match=rf"need more GPUs \(.* of triptych.*\) than the {machine} that Ray finds"):
        check_gpus(several(*needs), machine)


def test_the_most_replicas_count_because_ray_would_wait_for_them() -> None:
    scaled = config(("auto", 1), replicas={"min_replicas": 1, "max_replicas": 3})
    check_gpus([scaled], 3)
    check_gpus([scaled], 0)  # on the CPU
    with pytest.raises(ConfigError, match=r"\(3 x 1 of triptych\) than the 2 .*gpus_per_replica"):
        check_gpus([scaled], 2)


def test_a_machine_without_gpus_is_told_so() -> None:
    with pytest.raises(ConfigError, match="device cuda: Ray finds no GPU on this machine; set device to cpu"):
        check_gpus([config(("cuda", 1))], 0)


def test_a_replica_uses_its_share_of_a_gpu_also_for_models_that_come_later() -> None:
    shared = with_own_gpus(config(("cuda", 1), ("auto", 1), models_dir="/models"), ["3"], 0.5)
    assert [spec.engine.gpu_share for spec in shared.models] == [0.5, 0.5]
    assert shared.settings.models.engine.gpu_share == 0.5
    for ids, amount in ((["0", "1"], 2.0), ([], 0.0)):
        (spec,) = with_own_gpus(config(("auto", 1)), ids, amount).models
        assert spec.engine.gpu_share == 1.0


@pytest.mark.parametrize(("models", "ids"), [([("cuda", 1)], []), ([("cuda", 2)], ["0"]), ([("auto", 2)], ["0"])])
def test_a_replica_with_too_few_gpus_for_its_models_is_refused(models: list[tuple[str, int]], ids: list[str]) -> None:
    """As where a file for `serve deploy` has `ray_actor_options` of its own."""
    needed = max(size for _, size in models)
    with pytest.raises(ConfigError, match=rf"need {needed} GPUs and Ray gave it {len(ids)}; set num_gpus: {needed} in"):
        with_own_gpus(config(*models), ids, float(len(ids)))
