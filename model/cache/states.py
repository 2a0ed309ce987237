"""States of recurrent layers, by slots: what a sequence keeps of all its tokens in a fixed size (`GatedDeltaConfig`).

    recurrent: [slots, value heads, key_dim, value_dim]      convolution: [slots, kernel - 1, channels]      float32

A span of rows reads one slot and writes another, so a step that is run again finds what it read. Which sequence has
which slot is `model.engine.scheduling.state_slots`' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.config.cache import NO_STATE
from model.config.layer import GatedDeltaConfig
from model.system import huge_pages
from model.system.transfer import device_tensor, to_device


class StateSpan(NamedTuple):
    """Rows `[first, last)` of one sequence: they go on from the state in `source`, and leave theirs in `target`."""

    first: int
    last: int
    source: int
    target: int


def whole_segments(lengths: Sequence[int]) -> tuple[StateSpan, ...]:
    """Spans of packed segments of these lengths that begin with zeros and keep nothing."""
    spans, first = [], 0
    for length in lengths:
        spans.append(StateSpan(first, first + length, NO_STATE, NO_STATE))
        first += length
    return tuple(spans)


def independent_spans(spans: Iterable[StateSpan]) -> list[list[StateSpan]]:
    """The spans in lists that need nothing of each other; a span that goes on from another one is in a later list."""
    found: list[list[StateSpan]] = []
    written: dict[int, int] = {}  # the list behind that in which a slot is written
    for span in spans:
        at = written.get(span.source, 0) if span.source != NO_STATE else 0
        if at == len(found):
            found.append([])
        found[at].append(span)
        if span.target != NO_STATE:
            written[span.target] = at + 1
    return found


class Segment(NamedTuple):
    """Rows `[first, last)` of one sequence, which go on from the state in `source`: spans that follow each other."""

    first: int
    last: int
    source: int
    kept: dict[int, int]  # slots by the row behind which they get the state


def segments(spans: Iterable[StateSpan]) -> list[Segment]:
    """The spans joined to those that they go on from, which are in front of them."""
    found: list[Segment] = []
    before: StateSpan | None = None
    for span in spans:
        follows = before is not None and span.source != NO_STATE and span.source == before.target
        if follows and span.first == found[-1].last:
            found[-1] = found[-1]._replace(last=span.last)
        else:
            found.append(Segment(span.first, span.last, span.source, {}))
        if span.target != NO_STATE:
            found[-1].kept[span.last] = span.target
        before = span
    return found


@dataclass(frozen=True, slots=True)
class StateTables:
    """Which rows of a step go on from which states, on the device; slots are negative where there is none."""

    singles: Tensor | None  # [3, S] segments of one token: row, slot read, slot written
    segments: Tensor | None = None  # [3, B] others: chunks from, up to; slot read
    chunks: Tensor | None = None  # [5, N] their chunks: rows from, up to; first row of the segment; slots read, written

    @classmethod
    def of(cls, spans: Iterable[StateSpan], chunk: int, device: torch.device) -> StateTables:
        """Tables of a step's spans in chunks of so many tokens at most, each state that is kept behind one."""
        singles: list[tuple[int, ...]] = []
        longer: list[tuple[int, ...]] = []
        chunks: list[tuple[int, ...]] = []
        for one in segments(spans):
            if one.last - one.first == 1:
                singles.append((one.first, one.source, one.kept.get(one.last, NO_STATE)))
                continue
            begun, begin = len(chunks), one.first
            while begin < one.last:
                end = min(begin + chunk, *(row for row in (*one.kept, one.last) if row > begin))
                chunks.append((begin, end, one.first, one.source, one.kept.get(end, NO_STATE)))
                begin = end
            longer.append((begun, len(chunks), one.source))
        tables = [np.array(rows, dtype=np.int64).T for rows in (singles, longer, chunks)]
        packed = to_device(torch.from_numpy(np.concatenate([table.ravel() for table in tables])), device)
        parts = packed.split([table.size for table in tables])
        return cls(*(part.view(table.shape) if table.size else None for part, table in zip(parts, tables, strict=True)))


@dataclass(frozen=True, slots=True)
class StateCache:
    """One layer's states."""

    recurrent: Tensor  # [slots, value heads, key_dim, value_dim]
    convolution: Tensor  # [slots, kernel - 1, channels]

    @classmethod
    def zeros(cls, config: GatedDeltaConfig, num_slots: int, device: torch.device) -> StateCache:
        shapes = [(num_slots, *shape) for shape in config.state_shapes]
        if device.type == "cpu":
            return cls(*(huge_pages.zeros(shape, torch.float32) for shape in shapes))
        return cls(*(torch.zeros(shape, dtype=torch.float32, device=device) for shape in shapes))

    @property
    def nbytes(self) -> int:
        return self.recurrent.nbytes + self.convolution.nbytes

    def read(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The recurrent states `[B, H, K, V]` and the convolution's `[B, kernel - 1, C]` in these slots."""
        at = self._tensor([max(slot, 0) for slot in slots])
        found = self.recurrent[at], self.convolution[at]
        empty = [place for place, slot in enumerate(slots) if slot == NO_STATE]
        if empty:
            for states in found:
                states[self._tensor(empty)] = 0.0
        return found

    def write(self, slots: Sequence[int], recurrent: Tensor, convolution: Tensor) -> None:
        """Keep states as `read` gives them, where there is a slot."""
        kept = [place for place, slot in enumerate(slots) if slot != NO_STATE]
        if not kept:
            return
        at = self._tensor([slots[place] for place in kept])
        for there, states in ((self.recurrent, recurrent), (self.convolution, convolution)):
            there[at] = states if len(kept) == len(slots) else states[self._tensor(kept)]

    def _tensor(self, values: list[int]) -> Tensor:
        return device_tensor(values, self.recurrent.device, torch.int64)
