"""Aligns a prompt with its source by the weights of cross attention (times of words in speech).

Each step keeps the queries of the alignment heads for its rows of the prompt. Once the prompt is computed, their
weights over the source's keys, which are in the cache, are computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from model.api.request import Alignment, AlignmentMethod
from model.cache.paged import KVCache
from model.config.model import StackConfig
from model.engine.scheduling.scheduled_step import ScheduledSequence
from model.engine.scheduling.sequence import SequenceState
from model.network.alignment import head_weights, mean_of_heads, warp
from model.system.transfer import device_tensor


def kept_layers(steps: Sequence[ScheduledSequence]) -> tuple[int, ...]:
    """Return the layers whose queries a step must keep, in order."""
    asked = (step.sequence.request.alignment for step in steps)
    return tuple(sorted({layer for alignment in asked if alignment is not None for layer, _ in alignment.heads}))


def keep_queries(steps: Sequence[ScheduledSequence], queries: Mapping[int, Tensor]) -> None:
    """Add the queries of its rows, `[rows, heads, D]`, to each sequence with an alignment.

    They replace those that a failed step kept for the same rows.
    """
    first = 0
    for step in steps:
        alignment, rows = step.sequence.request.alignment, slice(first, first + step.num_tokens)
        if alignment is not None:
            kept = step.sequence.cross_queries
            while sum(map(len, kept)) > step.start:
                kept.pop()
            kept.append(torch.stack([queries[layer][rows, head] for layer, head in alignment.heads], dim=1))
        first += step.num_tokens


def align(sequence: SequenceState, cache: KVCache, decoder: StackConfig) -> list[int]:
    """Return the position in the source at which each row in [first, end) of a computed prompt begins."""
    alignment = sequence.request.alignment
    assert alignment is not None
    queries = torch.cat(sequence.cross_queries)[: sequence.num_prompt_tokens]  # [T, heads, D]
    sequence.cross_queries.clear()
    rows = slice(alignment.first, alignment.end)
    weights = _weights(alignment, queries, sequence, cache, decoder)
    if alignment.method is AlignmentMethod.TRANSFORMERS:
        return warp(mean_of_heads((one[rows] for one in weights), alignment.median_filter_width))
    return warp(mean_of_heads(weights, alignment.median_filter_width)[rows])


def _weights(
    alignment: Alignment, queries: Tensor, sequence: SequenceState, cache: KVCache, decoder: StackConfig
) -> Iterator[Tensor]:
    """Yield each head's weights `[T, F]`; consecutive heads of a layer read its keys once."""
    layer, keys = -1, queries
    for place, (index, head) in enumerate(alignment.heads):
        config, pages = decoder.layers[index].cross, cache.pages[index]
        assert config is not None
        if index != layer:
            table = device_tensor(sequence.source_tables[pages.pool], cache.device, torch.int64)
            layer, keys = index, pages.read(table[None], sequence.source_length)[0][0]  # [S, K, D]
        key = keys[:, head * config.num_kv_heads // config.num_heads]
        crops_first = alignment.method is AlignmentMethod.OPENAI
        positions = alignment.num_positions
        yield head_weights(queries[:, place], key, config.scale, positions=positions, crops_first=crops_first)
