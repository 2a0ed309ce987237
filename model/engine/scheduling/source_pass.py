"""Spreads the encoding of a long source over several steps, some layers in each. Policy only: no tensors.

A source is normally encoded whole in the step in which its sequence starts. If running streams leave no time for that,
earlier steps compute some layers of the encoder for the sequence that starts next. It holds no blocks meanwhile. The
hidden states between two such steps are kept outside the cache, for one source at a time. Any sequence of that source
can continue from them, and the one that finishes the encoding uses them up. Encoding a source again costs time and
changes nothing.
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
    """The layers that are computed of a source."""

    sequence: SequenceState  # that waits for them; of equal sources the latest
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
        begun = self._begun(sequence)
        failed = begun is not None and begun.whole
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

    def finish(self, sequence: SequenceState) -> int:
        """Have the source of a sequence encoded, and used up what is computed of it: the tokens that this is."""
        done = self.done(sequence)
        if self._begun(sequence) is not None:
            self.current = None
        return done

    def forget(self, sequence: SequenceState) -> None:
        """Forget a sequence that ends."""
        if self.current is not None and self.current.sequence is sequence:
            self.current = None

    def _begun(self, sequence: SequenceState) -> SourcePass | None:
        """The layers that are computed of a sequence's source, for it or for another that has an equal one."""
        if self.current is None or (source := sequence.request.source) is None:
            return None
        begun = self.current.sequence.request.source
        return self.current if begun is not None and begun.digest == source.digest else None

    def _done(self, sequence: SequenceState) -> int:
        begun = self._begun(sequence)
        return begun.layers_done if begun is not None else 0
