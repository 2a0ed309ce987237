"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill every `torch.empty` with NaN, so that unwritten elements and reads beyond the data show."""
    torch.set_deterministic_debug_mode("warn")
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_deterministic_debug_mode("default")
