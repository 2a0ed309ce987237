"""Static batches, for engines without continuous batching."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from lab.bench.batches import BenchRequest, Workload, picture

_BATCH = 32


def batches(workload: Workload, size: int = _BATCH) -> Iterator[list[BenchRequest]]:
    """Divide requests into batches of similar lengths, for little padding."""
    asks = sorted(workload.asks, key=lambda ask: (ask.output_tokens, len(ask.ids)))
    for at in range(0, len(asks), size):
        yield asks[at : at + size]


def padded(batch: list[BenchRequest], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask `[B, L]`; a decoder's rows are padded on the left."""
    width = max(len(ask.ids) for ask in batch)
    ids, mask = torch.zeros(len(batch), width, dtype=torch.int64), torch.zeros(len(batch), width, dtype=torch.int64)
    for row, ask in enumerate(batch):
        at = slice(width - len(ask.ids), width) if left else slice(0, len(ask.ids))
        ids[row, at], mask[row, at] = torch.tensor(ask.ids), 1
    return ids, mask


def pixel_values(batch: list[BenchRequest], size: int) -> torch.Tensor:
    """Return the pictures `[B, 3, size, size]` of a batch, between -1 and 1."""
    pixels = np.stack([picture(ask.ids, size) for ask in batch])
    return torch.from_numpy(pixels).float() / 127.5 - 1
