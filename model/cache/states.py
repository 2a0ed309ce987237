"""States of recurrent layers, by slots: what a sequence keeps of all its tokens in a fixed size (`GatedDeltaConfig`).

    recurrent: [slots, value heads, key_dim, value_dim]      convolution: [slots, kernel - 1, channels]      float32

A span of rows reads one slot and writes another, so a step that is run again finds what it read. Which sequence has
which slot is `model.engine.scheduling.state_slots`' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.config.cache import NO_STATE
from model.config.layer import GatedDeltaConfig
from model.system import huge_pages
from model.system.transfer import device_tensor


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


def waves(spans: Iterable[StateSpan]) -> list[list[StateSpan]]:
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
