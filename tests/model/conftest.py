"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from triptych.model.native import library


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill every `torch.empty` with NaN, so that reads of unwritten elements show."""
    torch.set_deterministic_debug_mode("warn")
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(autouse=True)
def all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split even small work over all threads, because tests are small."""
    monkeypatch.setattr(library, "LARGE", 0)
