"""The blocks of a sequence, as a list for those who decide and as a row of integers for those who compute. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray


class BlockTable(list[int]):
    """A list of block numbers that keeps a copy in int64 (`row`); each read converts only what was added since.

    Changed by `append`, `extend`, `clear`, `pop`, `del` and assignment to items and slices only.
    """

    __slots__ = ("_num_kept", "_row")

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self._row = np.empty(0, np.int64)
        self._num_kept = 0  # entries of the row that are the list's

    @property
    def row(self) -> NDArray[np.int64]:
        """The same numbers `[len(self)]`, not to be written to and valid until the next change."""
        size, kept = len(self), self._num_kept
        if kept < size:
            if size > len(self._row):
                grown = np.empty(max(8, 2 * size), np.int64)
                grown[:kept] = self._row[:kept]
                self._row = grown
            self._row[kept:size] = self[kept:]
            self._num_kept = size
        return self._row[:size]

    def clear(self) -> None:
        super().clear()
        self._num_kept = 0

    def pop(self, index: SupportsIndex = -1) -> int:
        popped = super().pop(index)
        self._num_kept = 0
        return popped

    def __setitem__(self, key: SupportsIndex | slice, value: int | Iterable[int]) -> None:
        super().__setitem__(key, value)  # type: ignore[index, assignment]
        begin = key.indices(len(self))[0] if isinstance(key, slice) else key.__index__() % len(self)
        self._num_kept = min(self._num_kept, begin)

    def __delitem__(self, key: SupportsIndex | slice) -> None:
        begin = key.indices(len(self))[0] if isinstance(key, slice) else key.__index__() % len(self)
        super().__delitem__(key)
        self._num_kept = min(self._num_kept, begin)
