"""The number of GPUs that a replica requests, without Ray."""

from __future__ import annotations

import pytest

from model.api.engine_config import EngineConfig
from model.errors import ConfigError
from service.runtimes.ray_serve.replica_scaling import check_gpus, gpus_of_replica


@pytest.mark.parametrize(
    ("engines", "cluster_gpus", "expected"),
    [
        ([("auto", 1)], 8, 0),  # replicas of single ranks share what they see
        ([("cuda:3", 1), ("cpu", 1)], 8, 0),
        ([("auto", 2)], 8, 2),
        ([("auto", 2)], 0, 0),  # ranks on the CPU
        ([("cpu", 4)], 8, 0),
        ([("cuda", 4)], 0, 4),  # a cluster that starts GPUs when they are asked for
        ([("cuda", 2), ("cuda", 4), ("cpu", 8)], 8, 4),  # models of a replica share its GPUs
        ([("cuda:2", 2)], 8, 4),  # counted from 0 among those of the replica
        ([("cuda:1", 1), ("cuda", 1)], 8, 0),
        ([("cuda:5", 1), ("cuda", 2)], 8, 6),  # once Ray hands them out, only what it hands out is seen
    ],
)
def test_gpus_of_a_replica(engines: list[tuple[str, int]], cluster_gpus: float, expected: int) -> None:
    configs = [EngineConfig(device=device, tensor_parallel_size=size) for device, size in engines]
    assert gpus_of_replica(configs, cluster_gpus) == expected


def test_too_few_gpus_are_refused() -> None:
    check_gpus(4, 4.0)
    check_gpus(0, 0.0)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: all replicas together need 8 GPUs, .* has 4;"):
        check_gpus(8, 4.0)
