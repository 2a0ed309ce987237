"""How ids become text: the kinds of decoders of tokenizer.json, and spaces before punctuation. No torch."""

from __future__ import annotations

import json
from typing import Any

# -- Tells the decoders of tokenizer.json apart by whether a token's text depends on its neighbours.

_OF_TOKENS = frozenset({"ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Replace", "Strip"})


def has_fixed_texts(decoder: Any) -> bool:
    """Whether the text of each token of whole characters is the same after any other tokens.

    At the beginning of a text it may be another. `decoder` is that of a `tokenizers.Tokenizer`; None joins tokens by
    spaces.
    """
    return decoder is None or _is_fixed(json.loads(decoder.__getstate__()))


def _is_fixed(decoder: dict[str, Any]) -> bool:
    """Look at each step of a decoder; a step after `Fuse` sees the whole text at once."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif fused:
            if kind != "Strip" or step["stop"]:  # at the beginning it sees the first token alone
                return False
        elif kind not in _OF_TOKENS:  # BPEDecoder and CTC look at the next or the previous token
            return False
        fused = fused or kind == "ByteLevel"  # joins its tokens
    return True


# -- Takes out the spaces that word tokenizers put before punctuation (`clean_up_tokenization_spaces`). No torch.

_PAIRS = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")),
    *((" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


def clean_up(text: str) -> str:
    """Return the text without spaces before punctuation, as `transformers` does."""
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
