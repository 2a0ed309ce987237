"""Sums in symmetric memory: which sums take it, that ranks agree, and that a rank that ends does not hold the others.

torch's kernels need GPUs: on a CPU, Gloo plays them. `test_two_processes_on_one_gpu` runs the real ones.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.checkpoints import CPU
from tests.parallel import one_gpu
from tests.parallel.ranks import on_ranks
from triptych.model.config.sharding import Shard
from triptych.model.parallel import symmetric_sums
from triptych.model.parallel.group import Group
from triptych.model.parallel.symmetric_sums import (
    BUFFER_BYTES,
    FALLBACK,
    SymmetricSums,
    prepare,
    pretend_signals,
)
from triptych.model.system import fallbacks


class GlooKernels:
    """torch's kernels, with their conditions, played by Gloo."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.calls: list[str] = []

    def one_shot_all_reduce_copy(self, shared: Tensor, tensor: Tensor, operation: str, name: str) -> Tensor:
        self._check(shared, "one shot")
        assert tensor.is_contiguous() and tensor.shape == shared.shape
        assert tensor.storage_offset() * tensor.itemsize % 16 == 0
        return self._group.sum(shared.copy_(tensor)).clone()

    def multimem_all_reduce_(self, shared: Tensor, operation: str, name: str) -> Tensor:
        self._check(shared, "multimem")
        return self._group.sum(shared)

    def _check(self, shared: Tensor, kind: str) -> None:
        assert shared.dtype in (torch.float32, torch.bfloat16)
        assert shared.is_contiguous() and shared.storage_offset() == 0 and shared.nbytes % 16 == 0
        self.calls.append(kind)


class GlooSums(SymmetricSums):
    """The sums of one rank by `GlooKernels`."""

    def __init__(self, group: Group, *, has_multimem: bool = True) -> None:
        self._name, self._shard, self._device = "test", group.shard, CPU
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)
        self.has_multimem = has_multimem
        self._ops = self.kernels = GlooKernels(group)

    def _wait(self) -> None:
        pass

    def _recorded_sum(self, tensor: Tensor) -> Tensor | None:
        return self.sum(tensor)

    def close(self) -> None:
        pass


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).remainder(17).add(rank).to(dtype)


# Shapes and dtypes, and which kernel two ranks take with multimem; without it only "one shot" ones.
SUMS: list[tuple[tuple[int, ...], torch.dtype, str]] = [
    ((1, 8), torch.bfloat16, "one shot"),
    ((3, 4096), torch.bfloat16, "one shot"),
    ((4, 1), torch.float32, "one shot"),
    ((256 << 10,), torch.bfloat16, "one shot"),
    (((256 << 10) + 8,), torch.bfloat16, "multimem"),
    ((128, 4096), torch.bfloat16, "multimem"),
    ((1024, 4096), torch.bfloat16, "multimem"),
    ((1025, 4096), torch.bfloat16, ""),  # larger than the buffer
    ((3, 1), torch.float32, ""),  # 12 bytes
    ((1, 8), torch.float16, ""),
    ((0, 8), torch.bfloat16, ""),
]


@pytest.mark.parametrize("has_multimem", [True, False])
def test_a_sum_is_computed_by_the_kernel_for_its_size(has_multimem: bool) -> None:
    def work(group: Group) -> None:
        sums = GlooSums(group, has_multimem=has_multimem)
        for shape, dtype, kind in SUMS:
            taken = kind if has_multimem or kind != "multimem" else ""
            found = sums.sum(numbers(shape, dtype, group.shard.rank))
            assert sums.kernels.calls == [taken] * bool(taken), (shape, dtype)
            assert (found is not None) == bool(taken)
            if found is not None:
                assert torch.equal(found, numbers(shape, dtype, 0) + numbers(shape, dtype, 1))
            sums.kernels.calls.clear()

    on_ranks(2, work)


def test_parts_of_tensors_are_summed_too() -> None:
    """Check columns, which are not contiguous, and rows that begin between two places of 16 bytes."""

    def work(group: Group) -> None:
        sums = GlooSums(group)
        whole = numbers((9, 24), torch.bfloat16, group.shard.rank)
        for part in (whole[:, :16], whole.flatten()[1:17], whole[1:]):
            before = part.clone()
            found = sums.sum(part)
            assert found is not None
            other = part + (1 if group.shard.rank == 0 else -1)
            assert torch.equal(found, before + other)

    on_ranks(2, work)


def test_a_group_takes_symmetric_memory_where_it_computes_the_sum() -> None:
    def work(group: Group) -> list[str]:
        sums = GlooSums(Group(group.shard, CPU))
        sums.kernels._group = group
        plain = Group(group.shard, CPU)
        plain._backend, plain._symmetric = group._backend, sums
        small, odd = numbers((2, 8), torch.float32, group.shard.rank), numbers((3,), torch.float32, group.shard.rank)
        assert torch.equal(plain.sum(small), 2 * numbers((2, 8), torch.float32, 0) + 1)
        assert torch.equal(plain.sum(odd), 2 * numbers((3,), torch.float32, 0) + 1)
        return sums.kernels.calls

    assert on_ranks(2, work) == [["one shot"]] * 2


def prepared(monkeypatch: pytest.MonkeyPatch, make: Any, unavailable: Any = lambda shard, device: "") -> list[Any]:
    """Return what each of two ranks gets of `prepare` with sums that `make` makes of its group."""
    fallbacks.forget()
    made = threading.local()
    monkeypatch.setattr(symmetric_sums, "_unavailable", unavailable)
    monkeypatch.setattr(symmetric_sums, "SymmetricSums", lambda *_: make(made.group))

    def work(group: Group) -> Any:
        made.group = group
        return prepare("test", None, None, group.shard, CPU, group.agree)

    return on_ranks(2, work)


def test_ranks_that_can_all_sum_so(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = prepared(monkeypatch, GlooSums)
    assert first.has_multimem and second.has_multimem
    assert len(first.kernels.calls) == 2 * 2 * 3  # dtypes; launched and recorded; sizes
    assert not fallbacks.found()


def test_multimem_is_used_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = prepared(monkeypatch, lambda group: GlooSums(group, has_multimem=group.shard.rank == 0))
    assert [sums.has_multimem for sums in found] == [False, False]


def test_gpus_that_cannot_are_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the GPUs cannot read each other's memory"
    assert prepared(monkeypatch, GlooSums, lambda shard, _: reason if shard.rank else "") == [None, None]
    assert not fallbacks.found()


def fails_on_rank_1(group: Group) -> GlooSums:
    if group.shard.rank:
        raise RuntimeError("CUDA driver error: not supported")
    return GlooSums(group)


class WrongSums(GlooSums):
    """Sums whose last number is wrong on rank 0."""

    def sum(self, tensor: Tensor) -> Tensor | None:
        found = super().sum(tensor)
        if found is not None and self._shard.rank == 0:
            found[-1] += 1
        return found


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (fails_on_rank_1, {"CUDA driver error: not supported", "another rank could not set symmetric memory up"}),
        (WrongSums, {"a sum of 16 bytes of torch.bfloat16 in symmetric memory is wrong"}),
    ],
)
def test_a_rank_that_fails_leaves_all_to_nccl_with_its_reason(
    make: Any, reasons: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(fallbacks, "note", lambda what, error: seen.add(f"{what}: {fallbacks.summary(error)}"))
    try:
        assert prepared(monkeypatch, make) == [None, None]
        assert {f"{FALLBACK}: {reason}" for reason in reasons} <= seen
    finally:
        fallbacks.forget()


def test_what_keeps_gpus_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    able, first = [True], torch.device("cuda", 1)
    monkeypatch.delenv(symmetric_sums.VARIABLE, raising=False)
    assert symmetric_sums._unavailable(Shard(0, 2), first) == "TRIPTYCH_SYMMETRIC_SUMS is not 1"
    monkeypatch.setenv(symmetric_sums.VARIABLE, "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: able[0] and (own, peer) == (2, 1))
    assert not symmetric_sums._unavailable(Shard(1, 2), torch.device("cuda", 2))
    assert "2, 4 or 8 ranks, not by 3" in symmetric_sums._unavailable(Shard(0, 3), first)
    able[0] = False
    assert "each other's memory" in symmetric_sums._unavailable(Shard(1, 2), torch.device("cuda", 2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "bfloat16" in symmetric_sums._unavailable(Shard(0, 2), first)


def test_the_group_of_the_kernels_is_known_by_its_name_until_it_is_closed() -> None:
    """Check with torch's own registry, which its kernels ask for the rank, the size and the store."""
    native: Any = torch._C._distributed_c10d

    def work(group: Group) -> None:
        name = f"test-{group.shard.rank}"  # ranks are processes, which have a registry each
        store = torch.distributed.HashStore()
        kept = symmetric_sums._registered(native, name, store, group._backend, group.shard, CPU)
        found = native._resolve_process_group(name)
        assert (found.rank(), found.size()) == (kept.rank(), kept.size()) == (group.shard.rank, 2)
        sums = object.__new__(SymmetricSums)
        sums._native, sums._name = native, name
        sums.close()
        with pytest.raises(RuntimeError, match="Could not resolve the process group"):
            native._resolve_process_group(name)

    on_ranks(2, work)


@pytest.mark.parametrize("own", [0, 2])
def test_a_kernel_that_waits_for_a_rank_that_ended_goes_on(own: int) -> None:
    """Play torch's barrier of 3 blocks, 50 times, while the other three ranks have ended at once."""
    pads = [torch.zeros(4 * 5 + 1, dtype=torch.int32) for _ in range(4)]

    def barrier(block: int) -> None:
        for rank in range(4):
            sent, awaited = 4 * block + own, 4 * block + rank
            while pads[rank][sent] != 0:
                pass
            pads[rank][sent] = 1
            while pads[own][awaited] != 1:
                pass
            pads[own][awaited] = 0

    kernel = threading.Thread(target=lambda: [barrier(block) for _ in range(50) for block in range(3)], daemon=True)
    kernel.start()
    kernel.join(0.2)
    assert kernel.is_alive()  # it waits
    for _ in range(20_000):
        pretend_signals(pads, own)
        if not kernel.is_alive():
            break
    kernel.join(10.0)
    assert not kernel.is_alive()


def test_kernels_are_launched_on_the_groups_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for a process whose current GPU is another one, as rank 0's is with several models."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    for device in (torch.device("cuda", 0), torch.device("cuda", 2), torch.device("cpu")):
        with symmetric_sums._current(device):
            pass
    assert entered == [torch.device("cuda", 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
def test_two_processes_on_one_gpu(alone: bool) -> None:
    """Check the real kernels, launched and recorded, and that one ends which waits for a rank that makes no call."""
    assert one_gpu.check(alone=alone) in ("one shot", "multimem")
