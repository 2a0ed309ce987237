"""What is admitted and not yet ended, of one model: counted in one process, or in memory that several fronts share.

Shared counts are a table in a file without a name (`memfd_create`): a row for each model, and one for audio, in it a
cell for each process, which alone writes it. Totals are sums over a row. A process that dies leaves its numbers behind;
`SharedTable.clear` takes them back. Checking for room and taking it are one operation under a lock of the row, a POSIX
record lock, which the system releases when its holder dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from model.errors import LoadFailedError

_RATE_WINDOW = 64  # ends from which the rate of a process is computed
_MAX_ROWS = 4_096  # names of models, over the whole time of a service; rows that are not used take no memory
_CELL_BYTES = 32  # int64 sequences, int64 waiting tokens, int64 ends in the window, float64 time of the oldest of them


class Counts(Protocol):
    """The totals of one model; `add` and `record_end` change this process's part of them.

    Those of audio are files in place of sequences, and their bytes in place of waiting tokens.
    """

    def locked(self) -> AbstractContextManager[None]:
        """Keep other processes from admitting inside the block, which must not wait for anything."""

    @property
    def sequences(self) -> int: ...

    @property
    def waiting_tokens(self) -> int: ...

    def add(self, sequences: int, waiting_tokens: int) -> None:
        """Add to both totals; negative numbers take away."""

    def record_end(self) -> None:
        """Note that a request ended now."""

    def end_rate(self) -> float:
        """Return how many requests ended a second lately; 0 where too few did."""


class LocalCounts:
    """The totals of a service with a single front process."""

    def __init__(self) -> None:
        self.sequences = 0
        self.waiting_tokens = 0
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, sequences: int, waiting_tokens: int) -> None:
        self.sequences += sequences
        self.waiting_tokens += waiting_tokens

    def record_end(self) -> None:
        self._ends.append(time.monotonic())

    def end_rate(self) -> float:
        return _rate(len(self._ends), self._ends[0]) if len(self._ends) > 1 else 0.0


class SharedTable:
    """Counts of all models in memory that the hub and its workers share; each process has a column."""

    def __init__(self, columns: int, column: int, descriptor: int | None = None) -> None:
        """`descriptor`: of the table that the hub has made; None makes it."""
        self._columns = columns
        self._column = column
        size = (_MAX_ROWS + 1) * columns * _CELL_BYTES
        if descriptor is None:
            descriptor = os.memfd_create("triptych-counts")
            os.truncate(descriptor, size)
        self.descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, size))
        self._numbers, self._times = memory.cast("q"), memory.cast("d")
        self._rows: dict[str, int] = {}  # by name of a model, as the hub gives them out

    def row_of(self, model: str) -> int:
        """Return the row of a model, which it keeps; raises `LoadFailedError` for too many names."""
        if model not in self._rows:
            if len(self._rows) == _MAX_ROWS:
                raise LoadFailedError(f"{_MAX_ROWS} names of models have been used since the start")
            self._rows[model] = len(self._rows)
        return self._rows[model]

    def counts(self, row: int) -> SharedCounts:
        """Return the counts of a row, of which this process writes its column."""
        return SharedCounts(self.descriptor, self._numbers, self._times, row, self._columns, self._column)

    @property
    def audio(self) -> SharedCounts:
        """The counts of audio files and their bytes; they have the row behind those of models."""
        return self.counts(_MAX_ROWS)

    def clear(self, column: int) -> None:
        """Take back what a process counted that has ended."""
        for row in (*range(len(self._rows)), _MAX_ROWS):
            at = (row * self._columns + column) * _CELL_BYTES // 8
            self._numbers[at : at + 4] = memoryview(bytes(_CELL_BYTES)).cast("q")


class SharedCounts:
    """The totals of one model over all processes of a `SharedTable`."""

    def __init__(
        self,
        descriptor: int,
        numbers: memoryview[int],
        times: memoryview[float],
        row: int,
        columns: int,
        column: int,
    ) -> None:
        self._descriptor = descriptor
        self._numbers = numbers
        self._times = times
        self._row = row
        words = _CELL_BYTES // 8
        self._cells = range(row * columns * words, (row + 1) * columns * words, words)
        self._own = self._cells[column]
        self._ends: deque[float] = deque(maxlen=_RATE_WINDOW)  # of this process

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, self._row)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._row)

    @property
    def sequences(self) -> int:
        return sum(self._numbers[at] for at in self._cells)

    @property
    def waiting_tokens(self) -> int:
        return sum(self._numbers[at + 1] for at in self._cells)

    def add(self, sequences: int, waiting_tokens: int) -> None:
        self._numbers[self._own] += sequences
        self._numbers[self._own + 1] += waiting_tokens

    def record_end(self) -> None:
        self._ends.append(time.monotonic())
        self._numbers[self._own + 2] = len(self._ends)
        self._times[self._own + 3] = self._ends[0]

    def end_rate(self) -> float:
        parts = ((self._numbers[at + 2], self._times[at + 3]) for at in self._cells)
        return sum(_rate(ends, oldest) for ends, oldest in parts if ends > 1)


def _rate(ends: int, oldest: float) -> float:
    return ends / max(time.monotonic() - oldest, 1e-3)
