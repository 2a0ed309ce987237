"""Matrices of cases that are too large for each run: the default suite takes some cases, `make test-slow` all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rest_is_slow(cases: Iterable[Any], by_default: Callable[..., bool]) -> list[Any]:
    """Mark as slow each case for whose values `by_default` is false. A case is a tuple of values, or one value."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    chosen = [by_default(*row) for row in rows]
    assert any(chosen), "no case is left by default"
    return [
        pytest.param(*row, marks=() if default else pytest.mark.slow) for row, default in zip(rows, chosen, strict=True)
    ]
