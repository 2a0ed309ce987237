"""How many tokens of a reply are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from model.text.tokenizer import Tokenizer
from service.chat.reply_parser import ReplyFormat

_AFTER_ANALYSIS = ("<|channel|>final", "<|channel|>commentary")  # which ends the reasoning of gpt-oss
_WINDOW = 256  # tokens that are decoded at once, so that each is decoded about once


def reasoning_tokens(format: ReplyFormat, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens up to the end of the reasoning, with its marks; of a reply that has reasoning."""
    if format.reasoning is None:
        return 0
    marks = (format.reasoning.closing,) if format.reasoning.closing else _AFTER_ANALYSIS
    longest = max(len(mark.encode()) for mark in marks)  # in tokens: none is shorter than a byte

    def has_mark(start: int, end: int) -> bool:
        text = tokenizer.decode(ids[max(0, start - longest) : end], skip_special_tokens=False)
        return any(mark in text for mark in marks)

    for start in range(0, len(ids), _WINDOW):
        low, high = start, min(start + _WINDOW, len(ids))
        if has_mark(start, high):
            while low + 1 < high:
                middle = (low + high) // 2
                low, high = (low, middle) if has_mark(start, middle) else (middle, high)
            return high
    return len(ids)
