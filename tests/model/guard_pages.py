"""A pytest plugin for runs under guard_pages.c: the native library's scratch gets exactly the size that was computed.

    python -m pytest -p tests.model.guard_pages tests/model/test_native.py

With LD_PRELOAD a read or write outside a buffer ends the process.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from triptych.model.native.library import Library


def _exact(library: Library, needed: int) -> ctypes.c_void_p:
    """Return scratch of `needed` bytes for one call; the next call frees it."""
    library._scratch.tensor = torch.empty(needed, dtype=torch.uint8)
    return ctypes.c_void_p(library._scratch.tensor.data_ptr())


@pytest.fixture(autouse=True)
def exact_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "_scratch_of", _exact)
