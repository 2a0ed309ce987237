"""Finds special tokens that are spelled in a text, which a tokenizer would read as these tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby


class SpelledMarks:
    """The texts of special tokens, as a pattern whose search takes time linear in the text."""

    def __init__(self, texts: Iterable[str]) -> None:
        wanted = sorted({text for text in texts if len(text) > 1})
        self._pattern = re.compile(f"(?s:(?={_any_of(wanted)})(.))") if wanted else None
        self._whole = re.compile(f"(?=({_any_of(wanted)}))") if wanted else None

    def parted(self, text: str, separator: str) -> str:
        """Return the text with a separator after the first character of each special token that it spells."""
        return text if self._pattern is None else self._pattern.sub(lambda found: found[1] + separator, text)

    def crossed(self, texts: Sequence[str]) -> set[int]:
        """Return the places of the texts in which a special token begins that the next ones end, if they are joined."""
        if self._whole is None or len(texts) < 2:
            return set()
        ends = list(accumulate(map(len, texts)))
        spans = (found.span(1) for found in self._whole.finditer("".join(texts)))
        return {at for start, end in spans if ends[at := bisect_right(ends, start)] < end}


def _any_of(texts: list[str]) -> str:
    """Return a pattern that matches any of these sorted texts; it looks at each character of a text once."""
    first, last = texts[0], texts[-1]  # between which all others are
    shared = first[: next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
    rest = [text[len(shared) :] for text in texts]
    if "" in rest:  # a text that ends here is found whatever follows
        return re.escape(shared)
    branches = "|".join(_any_of(list(group)) for _, group in groupby(rest, key=lambda text: text[0]))
    return f"{re.escape(shared)}(?:{branches})"
