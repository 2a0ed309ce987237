"""Find where in its source each token lies: dynamic time warping over the weights of cross attention.

Whisper's alignment heads follow the audio while the decoder reads a text. The weights of each head are normalised over
the tokens, smoothed along the audio by a median, and averaged; the cheapest way through them that goes forward in both
gives each token a place. These are OpenAI's `find_alignment` and `_extract_token_timestamps` of `transformers`.

Shapes: T tokens, F positions of the source, H heads of a layer, K of its keys, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.model.native.library import loaded


def head_weights(query: Tensor, key: Tensor, scale: float, *, positions: int, crops_first: bool) -> Tensor:
    """Return how much each token `[T, D]` takes of the first `positions` of one head's keys `[F, D]`, in float32.

    `crops_first`: the tokens see no other positions (OpenAI); else they see all (`transformers`).
    """
    scores = query.float() @ key.float().T * scale  # [T, F]
    if crops_first:
        return scores[:, :positions].softmax(dim=-1)
    return scores.softmax(dim=-1)[:, :positions]


def mean_of_heads(heads: Iterable[Tensor], width: int) -> Tensor:
    """Return the mean `[T, F]` of heads' weights, each normalised over the tokens and smoothed over `width` positions.

    A position that all tokens take equally much of says nothing: it counts 0.
    """
    total, count = torch.zeros(()), 0
    for weights in heads:
        std, mean = torch.std_mean(weights, dim=0, keepdim=True, unbiased=False)
        total = total + median_filter(((weights - mean) / std).nan_to_num(0.0, 0.0, 0.0), width)
        count += 1
    return total / count


def median_filter(rows: Tensor, width: int) -> Tensor:
    """Return the medians of `width` neighbours, an odd number, along rows `[T, F]`; edges are reflected.

    Rows that are not longer than half the width stay as they are.
    """
    margin, length = width // 2, rows.shape[1]
    if length <= margin:
        return rows
    padded = torch.nn.functional.pad(rows[None], (margin, margin), mode="reflect")[0]
    shifted = [padded[:, at : at + length] for at in range(width)]
    for place in range(margin + 1):  # selection sort up to the middle: vectors, which a sort of each window is not
        for other in range(place + 1, width):
            low, high = shifted[place], shifted[other]
            shifted[place], shifted[other] = torch.minimum(low, high), torch.maximum(low, high)
    return shifted[margin]


def warp(gains: Tensor) -> list[int]:
    """Return the position at which each token begins, on the way through gains `[T, F]` that gains most."""
    costs = -gains.float().cpu()
    library = loaded()
    if library is not None:
        found: list[int] = library.run_time_warping(costs.contiguous()).tolist()
        return found
    return _warp(costs.numpy())


def _warp(costs: NDArray[np.float32]) -> list[int]:
    """Do the same as the C kernel, a diagonal of the matrix at a time."""
    rows, columns = costs.shape
    flipped = costs.astype(np.float64)
    sums = np.full((rows + 1, columns + 1), np.inf, np.float32)
    moves = np.full((rows, columns), 2, np.int8)
    sums[0, 0] = 0
    for diagonal in range(rows + columns - 1):
        row = np.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1))
        column = diagonal - row
        before, above, left = sums[row, column], sums[row, column + 1], sums[row + 1, column]
        move = np.where((before < above) & (before < left), 0, np.where((above < before) & (above < left), 1, 2))
        least = np.choose(move, (before, above, left))
        sums[row + 1, column + 1] = flipped[row, column] + least
        moves[row, column] = move
    starts, at = [0] * rows, columns - 1
    for place in range(rows - 1, -1, -1):
        while at and moves[place, at] == 2:
            at -= 1
        starts[place] = at
        at -= int(at > 0 and moves[place, at] == 0)
    return starts
