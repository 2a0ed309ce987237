"""Static batches, as the engines want them that do not batch for themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from loadtest.bench.batches import Ask, Workload

_BATCH = 32


def batches(workload: Workload) -> Iterator[list[Ask]]:
    """Neighbours in length, so that little is padded."""
    asks = sorted(workload.asks, key=lambda ask: (ask.output_tokens, len(ask.ids)))
    for at in range(0, len(asks), _BATCH):
        yield asks[at : at + _BATCH]


def padded(batch: list[Ask], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, L]`; a decoder's rows end at the right."""
    width = max(len(ask.ids) for ask in batch)
    ids, mask = torch.zeros(len(batch), width, dtype=torch.int64), torch.zeros(len(batch), width, dtype=torch.int64)
    for row, ask in enumerate(batch):
        at = slice(width - len(ask.ids), width) if left else slice(0, len(ask.ids))
        ids[row, at], mask[row, at] = torch.tensor(ask.ids), 1
    return ids, mask
