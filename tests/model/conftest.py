"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every `torch.empty` is NaN: what a kernel leaves out or reads too much of shows."""
    torch.set_deterministic_debug_mode("warn")
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_deterministic_debug_mode("default")
