"""Decides which pictures a step encodes, and which encodings are kept. Policy only: no tensors.

A picture is encoded before the first step that computes a row of it, and kept while there is room: for the next chunk
of its prompt, for other outputs of its request, and for equal pictures of the same salt. Blocks that are found in the
cache need no encoding. A prompt that reaches a picture that does not fit into the step ends its chunk there.

Like a source, a picture may be encoded in parts over several steps (`SourcePasses`), one picture at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from triptych.model.api.request import ImageSpan
from triptych.model.engine.scheduling.block_pool import BlockHasher
from triptych.model.engine.scheduling.scheduled_step import SchedulerOutput
from triptych.model.engine.scheduling.sequence import SequenceState
from triptych.model.engine.scheduling.source_blocks import SourcePasses


class PictureSteps:
    """The encodings of pictures of one model: those that are kept, and those that this step adds."""

    def __init__(self, hasher: BlockHasher, passes: SourcePasses, max_rows: int, *, both_ways: bool = False) -> None:
        """`max_rows` of encodings are kept, enough for the largest picture. `both_ways`: a picture's rows are computed
        in one step, because they see each other."""
        self._hasher = hasher
        self._passes = passes
        self.max_rows = max_rows
        self._both_ways = both_ways
        self.num_encoded = self.num_encoded_rows = 0
        self.kept: OrderedDict[bytes, int] = OrderedDict()  # rows by key, the least recently used first
        self._in_step: dict[bytes, int] = {}
        self._limit: int | None = None  # tokens that this step may encode, if its time is bounded
        self._left = 0  # tokens that it may still encode
        self._has_encoded = False

    def reset(self) -> None:
        """Forget all encodings."""
        self.kept.clear()

    def begin(self, limit: int | None, most: int) -> None:
        """Begin a step that encodes up to `most` tokens; `limit`: as many as its time allows, None: any number."""
        self._limit, self._left = limit, most if limit is None else min(limit, most)
        self._in_step.clear()
        self._has_encoded = False

    def missing(self, sequence: SequenceState, num_tokens: int) -> Iterator[ImageSpan]:
        """Yield the pictures in the sequence's next tokens that would have to be encoded."""
        start = sequence.num_computed_tokens
        for index, span in enumerate(sequence.request.images):
            if span.start >= start + num_tokens:
                return
            if span.stop > start and self._hasher.picture(sequence, index) not in self.kept:
                yield span

    def reach(self, output: SchedulerOutput, sequence: SequenceState, num_tokens: int, most: int) -> int:
        """Return how many of the next tokens can be computed, and let the step encode the pictures among them.

        A picture whose rows see each other is computed whole, which may raise the number up to `most`, or not at all.
        """
        start = sequence.num_computed_tokens
        for index, span in enumerate(sequence.request.images):
            if span.stop <= start:
                continue
            if span.start >= start + num_tokens:
                break
            if self._both_ways and span.stop > start + num_tokens:
                if span.start > start or span.stop - start > most:
                    return max(0, span.start - start)
                num_tokens = span.stop - start
            if not self._take(output, sequence, index):
                return max(0, span.start - start)
        return num_tokens

    def uncut(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return `num_tokens`, or fewer so that no picture whose rows see each other is cut."""
        start = sequence.num_computed_tokens
        for span in sequence.request.images if self._both_ways else ():
            if span.start < start + num_tokens < span.stop:
                return max(0, span.start - start)
        return num_tokens

    def least(self, sequence: SequenceState) -> int:
        """Return the fewest tokens that a step computes of a prompt: one, or the rest of a picture that is not cut."""
        start = sequence.num_computed_tokens
        spans = sequence.request.images if self._both_ways else ()
        return next((span.stop - start for span in spans if span.start <= start < span.stop), 1)

    def end(self) -> None:
        """Evict encodings beyond `max_rows`, the least recently used first, as the runner does."""
        rows = sum(self.kept.values())
        for key in list(self.kept):
            if rows <= self.max_rows:
                return
            if key not in self._in_step:
                rows -= self.kept.pop(key)

    def _take(self, output: SchedulerOutput, sequence: SequenceState, index: int) -> bool:
        """Let the step read a picture, and encode it if it is not kept; return False if the step has no room."""
        key, source = self._hasher.picture(sequence, index), sequence.request.images[index].source
        rows = source.num_positions
        if key in self._in_step:
            return True
        if self._in_step and sum(self._in_step.values()) + rows > self.max_rows:
            return False
        if key not in self.kept:
            left = self._passes.left(source)
            if self._left <= 0 or (self._has_encoded and left > self._left):
                return False
            if self._limit is not None and left > self._left and self._passes.may_pause(source):
                if not output.ahead:
                    output.ahead.append(self._passes.advance(sequence, source, self._left))
                    self._left = 0
                return False
            output.picture_tokens.append(left)
            self._passes.finish(source)
            self._left -= left
            self._has_encoded = True
            self.num_encoded += 1
            self.num_encoded_rows += rows
        self.kept[key] = self._in_step[key] = rows
        self.kept.move_to_end(key)
        return True
