"""How far the encoder is with a source of which it computes some layers a step. Policy only: no tensors.

A source is encoded whole in the step in which its sequence begins, unless the step has no time for it, because streams
wait for their next tokens. Then steps before that one compute some of the encoder's layers, for the sequence that is
next to begin. It holds no blocks meanwhile: what these layers give is kept beside the cache, and only the newest such
source's. A source that has to be encoded from the start again costs time and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from model.api.source import Source
from model.engine.scheduling.sequence import SequenceState


class LayersAhead(NamedTuple):
    """Layers of the encoder that a step computes of a source whose sequence does not begin yet."""

    source: Source
    layers: int
    tokens: int  # what they count as: one of L layers is 1/L of the source's tokens


@dataclass(slots=True)
class SourcePass:
    """The layers that are computed of the source of a sequence that waits."""

    sequence: SequenceState
    layers_done: int = 0
    whole: bool = False  # it failed in parts: it is left to the step in which the sequence begins


class SourcePasses:
    """The source, if any, that the encoder has begun, of one model."""

    def __init__(self, encoder_layers: int) -> None:
        """`encoder_layers`: 1 where an encoder's pass cannot be interrupted."""
        self._layers = encoder_layers
        self.current: SourcePass | None = None

    def left(self, sequence: SequenceState) -> int:
        """The tokens of a sequence's source that are not computed; of a source that is begun a share of its tokens."""
        length = sequence.source_length
        return length - length * self._done(sequence) // self._layers

    def done(self, sequence: SequenceState) -> int:
        """The tokens of a sequence's source that steps before have computed."""
        return sequence.source_length - self.left(sequence)

    def least(self, sequence: SequenceState) -> int:
        """The least that a step can compute of a sequence's source: a layer, or all that is left of it."""
        if not self.may_pause(sequence):
            return self.left(sequence)
        return -(-sequence.source_length // self._layers)

    def may_pause(self, sequence: SequenceState) -> bool:
        """Whether more than one layer is left of a sequence's source, and it may be encoded in parts."""
        failed = self.current is not None and self.current.sequence is sequence and self.current.whole
        return not failed and self._layers - self._done(sequence) > 1

    def advance(self, sequence: SequenceState, tokens: int) -> LayersAhead:
        """Compute as many layers as `tokens` pay for, at least one, but not the last."""
        before, source = self._done(sequence), sequence.request.source
        assert source is not None
        layers = min(max(1, tokens * self._layers // source.num_positions), self._layers - before - 1)
        computed = self.done(sequence)
        self.current = SourcePass(sequence, before + layers)
        return LayersAhead(source, layers, self.done(sequence) - computed)

    def fail(self) -> None:
        """Leave the current source to the step in which its sequence begins."""
        if self.current is not None:
            self.current = SourcePass(self.current.sequence, whole=True)

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence that begins or ends."""
        if self.current is not None and self.current.sequence is sequence:
            self.current = None

    def _done(self, sequence: SequenceState) -> int:
        current = self.current
        return current.layers_done if current is not None and current.sequence is sequence else 0
