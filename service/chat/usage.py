"""Counts the reasoning tokens of a reply."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.reply_parser import ReplyFormat

_AFTER_ANALYSIS = ("<|channel|>final", "<|channel|>commentary")  # marks that end the reasoning of gpt-oss
_WINDOW = 256  # tokens that are decoded together, so that each is decoded about once


def reasoning_tokens(format: ReplyFormat, ids: Sequence[int], tokenizer: Tokenizer, *, has_calls: bool) -> int:
    """Return the number of tokens of a reply up to the end of its reasoning, including the marks.

    Reasoning that is not closed ends at a call, if there is one, or with the reply.
    """
    if format.reasoning is None:
        return 0
    marks = (format.reasoning.closing,) if format.reasoning.closing else _AFTER_ANALYSIS
    found = _up_to(marks, ids, tokenizer)
    if found is None and has_calls and format.calls is not None and format.calls.syntax.trigger:
        found = _up_to((format.calls.syntax.trigger,), ids, tokenizer)
    return len(ids) if found is None else found


def _up_to(marks: Sequence[str], ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens up to the first of the marks; None if there is none."""
    longest = max(len(mark.encode()) for mark in marks)  # in tokens: each has at least one byte

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
    return None
