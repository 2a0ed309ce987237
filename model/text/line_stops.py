"""Ends a text at a line break: before a line that is indented too little, or once it has taken long. No torch."""

from __future__ import annotations

import re
import time

from triptych.model.api.sampling_params import LineStop


class LineWatch:
    """Looks for the end of one text that grows."""

    def __init__(self, stop: LineStop) -> None:
        self._seconds = stop.seconds
        self._began: float | None = None
        spaces = f"\n[ \t]{{0,{stop.indent - 1}}}" if stop.indent else "(?!)"
        self._short_line = re.compile(rf"({spaces})[^ \t]")
        self._possible = re.compile(rf"(?:{spaces})\Z")

    def end(self, text: str) -> int | None:
        """Return where the text ends; None if it goes on. `text` begins with what was held back before."""
        now = time.monotonic()
        began = self._began = now if self._began is None else self._began
        short = self._short_line.search(text)
        if short is not None:
            return short.end(1)
        late = self._seconds and now - began > self._seconds
        return text.find("\n") + 1 or None if late else None

    def held(self, text: str) -> int:
        """Return how many last characters may belong to a line that is indented too little."""
        found = self._possible.search(text)
        return 0 if found is None else len(found[0])
