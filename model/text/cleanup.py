"""Takes out the spaces that word tokenizers put before punctuation (`clean_up_tokenization_spaces`). No torch."""

from __future__ import annotations

_PAIRS = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


def clean_up(text: str) -> str:
    """Return the text without those spaces, as `transformers` does it."""
    for found, shown in _PAIRS:
        text = text.replace(found, shown)
    return text


class StreamCleaner:
    """Cleans a text that comes in parts; the parts join to the whole text, cleaned."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str, *, final: bool) -> str:
        """Add `text` and return what later text cannot change: all before a space that no pattern goes over."""
        text = self._held + text
        end = len(text) if final else text.rfind(" ")
        while not final and end > 0 and (text[end - 1] in " '" or text.endswith(" n", 0, end)):
            end = text.rfind(" ", 0, end)
        end = max(end, 0)
        self._held = text[end:]
        return clean_up(text[:end])
