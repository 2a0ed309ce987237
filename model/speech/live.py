"""Which tokens of an output that is being generated will be part of the transcription, whatever follows."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class LiveText:
    """Finds the text tokens of a window's output that are certain: those of its first segment at once, of a later one
    when its end is there, since the next window begins with a segment that has none."""

    def __init__(self, timestamp_begin: int, hidden_ids: Collection[int]) -> None:
        """`hidden_ids`: special tokens, which are no text."""
        self._timestamp_begin = timestamp_begin
        self._hidden = hidden_ids
        self._held: list[int] = []  # places
        self._num_tokens = 0
        self._last_was_stamp = False
        self._is_first = True  # no segment has ended yet
        self.num_certain = 0  # text tokens that were returned

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Take the next tokens; return the places in the output of the text tokens that have become certain."""
        certain: list[int] = []
        for place, token in enumerate(token_ids, self._num_tokens):
            is_stamp = token >= self._timestamp_begin
            if is_stamp and self._last_was_stamp:
                self._is_first = False
            elif is_stamp:
                certain += self._held
                self._held.clear()
            elif token not in self._hidden:
                (certain if self._is_first else self._held).append(place)
            self._last_was_stamp = is_stamp
        self._num_tokens += len(token_ids)
        self.num_certain += len(certain)
        return certain
