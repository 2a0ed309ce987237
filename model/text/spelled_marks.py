"""Finds special tokens that are spelled in a text, which a tokenizer would read as these tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable


class SpelledMarks:
    """The texts of special tokens, as something that is searched in time linear in the text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts})
        firsts = "".join(sorted({text[0] for text in self._texts}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def parted(self, text: str, separator: str) -> str:
        """Return the text with a separator after the first character of each special token that it spells."""
        if self._first is None:
            return text
        pieces, begin = [], 0
        for found in self._first.finditer(text):
            at = found.start()
            if any(text[at : at + length] in self._texts for length in self._lengths):
                pieces.append(text[begin : at + 1])
                begin = at + 1
        return separator.join((*pieces, text[begin:])) if pieces else text
