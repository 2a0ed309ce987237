"""Memory on huge pages: writable zeros on any kernel."""

from __future__ import annotations

import mmap
import resource

import pytest
import torch

from triptych.model.system import huge_pages

MIB = 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_of_the_shape_and_number_format_that_were_asked_for(dtype: torch.dtype) -> None:
    first, second = (huge_pages.zeros((2, 3, 5), dtype) for _ in range(2))
    assert first.dtype is dtype and first.shape == (2, 3, 5) and first.is_contiguous()
    assert not first.any()
    first += 1
    assert first.all() and not second.any()
    assert huge_pages.zeros((0, 4), dtype).shape == (0, 4)


def test_committed_memory_is_given_back_at_the_end() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident()
    pool = huge_pages.zeros((64, MIB), torch.int8)
    huge_pages.commit(pool)
    assert resident() - before > 60 * MIB
    view = pool[3]
    del pool
    assert not view.any()
    del view
    assert resident() - before < 30 * MIB


@pytest.mark.parametrize("missing", ["the name", "the pages"])
def test_systems_without_huge_pages(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "the name":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 10_000)  # EINVAL
    pool = huge_pages.zeros((4, 5), torch.float32)
    assert pool.shape == (4, 5) and not pool.any()
