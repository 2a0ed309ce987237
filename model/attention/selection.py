"""Which backend a model runs on here, and why; the reason is shown at start-up and in /info."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.attention.base import AttentionBackend
from model.attention.sdpa import SdpaBackend


@dataclass(frozen=True, slots=True)
class Selection:
    backend: AttentionBackend
    reason: str


def select_backend(device: torch.device) -> Selection:
    """The fastest backend that this device has; the reference backend is never selected, it is the tests' oracle."""
    return Selection(SdpaBackend(), f"torch scaled_dot_product_attention is what there is for {device.type}")
