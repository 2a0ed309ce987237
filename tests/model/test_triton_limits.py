"""The limits that Triton's backend declares, and how it splits work; on a CPU."""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.lock")

from tests.model.triton_cases import CPU
from triptych.model.attention.base import AttentionMetadata, DeviceLengths, Preparation, SegmentGroup, are_uneven
from triptych.model.attention.triton import TritonBackend
from triptych.model.cache.kv_cache import LayerCache
from triptych.model.config.attention import (
    AttentionConfig,
    BucketBiasConfig,
    DisentangledConfig,
    RotaryConfig,
    XLNetRelativeConfig,
)
from triptych.model.config.cache import PagedSpec
from triptych.model.network.positions import BucketBias, StepBias

pytestmark = pytest.mark.usefixtures("poisoned")
_MAP_NORESERVE = 0x4000  # a constant of Linux; Python has it since 3.13


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


def of_the_query(query: Tensor, key: Tensor, group: SegmentGroup) -> Tensor:
    """A bias like XLNet's: of the query and the key's position, `[B, Q, H, D]` to `[B, H, Q, S]`."""
    return query[..., 0].transpose(1, 2)[..., None] * group.k_positions


@pytest.mark.parametrize("wrap", [lambda bias: bias, StepBias])
def test_a_bias_of_more_than_the_distance_is_refused(wrap: Any) -> None:
    config = AttentionConfig(2, 2, 8, 8**-0.5)
    query, key, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    metadata = AttentionMetadata((4, 5), (4, 5), causal=True)
    with pytest.raises(ValueError, match="no bias that depends on more than the distance"):
        TritonBackend().forward(query, key, value, None, metadata, config, wrap(of_the_query))


def paged(config: AttentionConfig, dtype: str) -> PagedSpec:
    return PagedSpec(config.num_kv_heads, config.head_dim, config.head_dim, dtype, config.window)


@pytest.mark.parametrize(
    ("config", "dtype", "pages", "reason"),
    [
        (AttentionConfig(4, 2, 264, 1.0), torch.float32, None, "heads of 264 are wider than the Triton kernels' 256"),
        (AttentionConfig(33, 1, 16, 1.0), torch.float32, None, "33 heads of a key head are more than"),
        (AttentionConfig(66, 1, 16, 1.0), torch.bfloat16, None, "66 heads of a key head are more than"),
        (AttentionConfig(4, 2, 16, 1.0), torch.float64, None, "do not compute in float64"),
        (AttentionConfig(4, 2, 16, 1.0, position=XLNetRelativeConfig()), torch.float32, None, "depends on the query"),
        (AttentionConfig(4, 4, 16, 1.0, position=DisentangledConfig(8)), torch.float32, None, "depends on the query"),
        (AttentionConfig(4, 2, 16, 1.0), torch.bfloat16, "float32", "read no float32 pages for bfloat16 queries"),
    ],
)
def test_what_the_kernels_do_not_know_is_said(
    config: AttentionConfig, dtype: torch.dtype, pages: str | None, reason: str
) -> None:
    found = TritonBackend().unsupported(config, dtype, None if pages is None else paged(config, pages))
    assert found is not None and reason in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_they_know_is_not(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    for config in (
        AttentionConfig(32, 1, 256, 1.0),
        AttentionConfig(4, 2, 24, 1.0, window=7, softcap=50.0, position=RotaryConfig(8)),
        AttentionConfig(4, 4, 64, 1.0, position=BucketBiasConfig()),
    ):
        for cache in (None, paged(config, name), paged(config, "int8")):
            assert TritonBackend().unsupported(config, dtype, cache) is None


def test_gradients_are_refused() -> None:
    config = AttentionConfig(2, 1, 8, 8**-0.5)
    query = torch.randn(6, 2, 8, requires_grad=True)
    key, value = torch.randn(6, 1, 8), torch.randn(6, 1, 8)
    metadata = AttentionMetadata((2, 4), (2, 4), causal=True)
    with pytest.raises(RuntimeError, match="the triton backend computes no gradients"):
        TritonBackend().forward(query, key, value, None, metadata, config)


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


def test_uneven_keys_are_parted_as_those_of_one_sequence_within_a_bound_of_memory() -> None:
    backend, config = TritonBackend(), AttentionConfig(32, 8, 128, 128**-0.5)

    def parts(segments: int, longest: int, *, uneven: bool) -> int:
        lens = torch.zeros(segments + 1, dtype=torch.int64)
        lengths = DeviceLengths(lens, lens[1:], 1, longest, uneven=uneven)
        return backend._parts_of(lengths, segments, config, CPU)

    assert [parts(count, 32_768, uneven=False) for count in (1, 33, 256)] == [32, 1, 1]
    assert [parts(count, 32_768, uneven=True) for count in (1, 33, 256)] == [32, 32, 8]
    assert are_uneven([32_768, *[500] * 32])
    assert not are_uneven([1500, *[5] * 32])  # too few to matter
    assert not are_uneven([4096] * 32)
    assert not are_uneven([32_768])
    assert not are_uneven([])


def test_pages_beyond_what_32_bits_count() -> None:
    """A pool of an H200 has ten times as many elements. Memory that a wrapped offset would reach is mapped too."""
    heads, dim, size, pages = 2, 16, 16, (1 << 22) + 3
    config, tables = AttentionConfig(4, heads, dim, 0.25), torch.tensor([[pages - 1]])
    query, key, value = (torch.randn(3, count, dim).bfloat16() for count in (4, heads, heads))
    found = []
    for blocks, far in ((tables, True), (tables - (pages - 3), False)):
        shape = (pages if far else 3, size, heads, dim)
        cache = LayerCache(_pages(*shape), _pages(*shape))
        slots = blocks[0] * size + torch.arange(3)
        step = AttentionMetadata((3,), (3,), causal=True, block_tables=blocks, slot_mapping=slots)
        turned = Preparation(rotary=(torch.ones(3, 1, dim), torch.ones(3, 1, dim)))
        found.append(TritonBackend().forward(query, key, value, cache, step, config))
        found.append(TritonBackend().forward_unprepared(query, key, value, turned, cache, step, config))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert found[0].any() and found[1].any()


def _pages(*shape: int) -> Tensor:
    """Return pages of zeros that take no memory until they are written, with as much mapped memory before them."""
    count = math.prod(shape)
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.bfloat16)[count:].view(shape)
