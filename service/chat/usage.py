"""How many tokens of a reply are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from model.text.tokenizer import Tokenizer
from service.chat.reply_parser import ReplyFormat

_AFTER_ANALYSIS = ("<|channel|>final", "<|channel|>commentary")  # which ends the reasoning of gpt-oss


def reasoning_tokens(format: ReplyFormat, ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens up to the end of the reasoning, with its marks; of a reply that has reasoning."""
    if format.reasoning is None:
        return 0
    marks = (format.reasoning.closing,) if format.reasoning.closing else _AFTER_ANALYSIS

    def has_ended(size: int) -> bool:
        text = tokenizer.decode(ids[:size], skip_special_tokens=False)
        return any(mark in text for mark in marks)

    low, high = 0, len(ids)
    if not has_ended(high):
        return high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if has_ended(middle) else (middle, high)
    return high
