"""Tells the decoders of tokenizer.json apart by whether a token's text depends on its neighbours."""

from __future__ import annotations

import json
from typing import Any

_OF_TOKENS = frozenset({"ByteLevel", "ByteFallback", "Metaspace", "WordPiece", "Replace", "Strip"})


def has_fixed_texts(decoder: Any) -> bool:
    """Return whether every token of whole characters has one text behind others, whatever they are.

    Its text at the beginning may be another. `decoder` is the one of a `tokenizers.Tokenizer`; None joins tokens by
    spaces.
    """
    return decoder is None or _is_fixed(json.loads(decoder.__getstate__()))


def _is_fixed(decoder: dict[str, Any]) -> bool:
    """Look at each step of a decoder; a step behind `Fuse` sees the whole text at once."""
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
