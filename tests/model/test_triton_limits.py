"""What is not the kernels' to compute goes to torch, and how Triton's backend cuts the rest; on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from model.attention.base import AttentionMetadata, SegmentGroup
from model.attention.reference import ReferenceBackend
from model.attention.triton import TritonBackend
from model.config.layer import AttentionConfig, BucketBiasConfig
from model.network.score_bias import BucketBias, StepBias
from tests.model.attention_cases import Case, assert_finite_and_close, problem
from tests.model.triton_cases import CPU, run

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (8, 20), (16, 64), (32, 1000)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_table_by_distance_is_the_bias(buckets: int, far: int, bidirectional: bool) -> None:
    config = BucketBiasConfig(buckets, far)
    bias = BucketBias(config, 3, bidirectional=bidirectional).requires_grad_(False)
    bias.weight.normal_()
    table = StepBias(bias).by_distance()
    assert table is not None
    assert table.shape == (3, 2 * far + 1)
    distance = torch.arange(-3 * far, 3 * far + 1)
    expected = bias.weight[bias.bucket(distance)].T
    assert torch.equal(table[:, distance.clamp(-far, far) + far], expected)


def of_the_query(query: Tensor, group: SegmentGroup) -> Tensor:
    """A bias as XLNet's: of the query and the key's position, `[B, Q, H, D]` to `[B, H, Q, S]`."""
    return query[..., 0].transpose(1, 2)[..., None] * group.k_positions


class Refusing(TritonBackend):
    """Whose kernels must not be reached."""

    def _attend(self, *arguments: Any) -> Tensor:
        raise AssertionError("this was for torch")


@pytest.mark.parametrize("wrap", [lambda bias: bias, StepBias])
def test_a_bias_of_more_than_the_distance_goes_to_torch(wrap: Any) -> None:
    torch.manual_seed(0)
    config = AttentionConfig(2, 2, 8, 8**-0.5)
    query, key, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    metadata = AttentionMetadata((4, 5), (4, 5), causal=True)
    arguments: tuple[Any, ...] = (query, key, value, None, metadata, config, wrap(of_the_query))
    expected = ReferenceBackend().forward(*arguments)
    torch.testing.assert_close(Refusing().forward(*arguments), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case(((2, 4), (3, 3)), dim=264),
        Case(((2, 4), (3, 3)), heads=33, kv_heads=1),
        Case(((2, 4), (3, 3)), dtype=torch.float64),
    ],
    ids=str,
)
def test_shapes_beyond_the_tiles_go_to_torch(case: Case) -> None:
    given = problem(case, CPU)
    assert given.cache is not None
    given.cache.keys.nan_to_num_()  # torch's masks let a page's unused slots through
    given.cache.values.nan_to_num_()
    assert_finite_and_close(run(Refusing(), given), given.expected, 3e-6)


def test_gradients_flow() -> None:
    config = AttentionConfig(2, 1, 8, 8**-0.5)
    query = torch.randn(6, 2, 8, requires_grad=True)
    key, value = torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    metadata = AttentionMetadata((2, 4), (2, 4), causal=True)
    Refusing().forward(query, key, value, None, metadata, config).sum().backward()
    assert query.grad is not None


def test_parts_follow_bounds_alone_and_are_powers_of_two() -> None:
    backend = TritonBackend()
    parts = {
        (programs, longest): backend.parts(programs, longest, CPU)
        for programs in (1, 2, 8, 40, 132, 264, 4000)
        for longest in (1, 255, 256, 600, 5000, 131_072)
    }
    assert all(count & (count - 1) == 0 and 1 <= count <= 64 for count in parts.values())
    assert parts[1, 131_072] == 64
    assert parts[8, 5000] == 16  # 19 times 256 keys
    assert parts[40, 131_072] == 4  # 6 programs for each of two a processor
    assert parts[8, 256] == parts[8, 1] == 1
    assert parts[8, 600] == 2
    assert parts[264, 131_072] == 1
