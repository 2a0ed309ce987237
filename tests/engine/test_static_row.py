"""The kernel that fills a recorded step's row writes what torch's copies write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.model.engine.execution.batch import BatchLayout
from triptych.model.engine.execution.static_row import fill_row

pytest.importorskip("triton", reason="triton is not installed")

COUNTS = st.integers(1, 9)


@settings(max_examples=25, deadline=None)
@given(
    tokens=COUNTS, segments=COUNTS, blocks=COUNTS, sources=st.integers(0, 4), pools=st.integers(1, 3),
    wider=st.integers(0, 700), states=st.booleans(), overlapped=st.booleans(),
)  # fmt: skip
def test_the_kernel_fills_as_torch_does(
    tokens: int, segments: int, blocks: int, sources: int, pools: int, wider: int, states: bool, overlapped: bool
) -> None:
    from triptych.model.engine.execution import triton_static_row

    used = BatchLayout(tokens, segments, blocks, sources, pools, 3 if states else 0)
    layout = replace(used, blocks=blocks + wider, source_blocks=sources + wider if sources else 0)
    packed = torch.arange(1, sum(used.sizes) + 1)
    placeholders = used.split(packed).placeholders
    placeholders.copy_(torch.arange(tokens) % 4 - 1)
    sampled = torch.tensor([901, 902, 903]) if overlapped else None
    expected, found = torch.zeros(2, sum(layout.sizes) + 50, dtype=torch.int64)
    fill_row(expected, layout, packed, used, sampled)
    triton_static_row.fill(found, layout, packed, used, sampled)
    assert torch.equal(found, expected)
    assert (layout.split(found[: sum(layout.sizes)]).ids > 900).any() == (overlapped and tokens > 1)
