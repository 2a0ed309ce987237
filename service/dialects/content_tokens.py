"""Finds the tokens that a piece of an answer is made of, so that their log-probabilities can be shown with it."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.service.http.json_replies import Json

_MOST_BYTES = 64


def token_texts(text: str, entries: Sequence[Json]) -> list[tuple[str, Json]]:
    """Divide the text of an output among its tokens; a token that is not shown, or only later, has none of it."""
    texts, at = [""] * len(entries), 0
    parts = list[int]()  # tokens since the last text that are parts of characters
    known = b""  # their bytes
    for place, entry in enumerate(entries):
        word = entry["text"]
        if "\ufffd" in word:
            parts.append(place)
            known += bytes(entry.get("bytes") or ())
            if (whole := _text_of(known)) and text.startswith(whole, at):
                texts[place], at, parts, known = whole, at + len(whole), [], b""
        elif word and (begin := text.find(word, at, at + len(parts) + len(word))) >= 0:
            if parts:
                texts[parts[-1]] = text[at:begin]
            texts[place], at, parts, known = word, begin + len(word), [], b""
    if entries:
        texts[parts[-1] if parts else -1] += text[at:]
    return list(zip(texts, entries, strict=True))


def _text_of(known: bytes) -> str:
    """Return the text of bytes; empty if they are not whole characters, or more than a few tokens have."""
    try:
        return known.decode() if len(known) <= _MOST_BYTES else ""
    except UnicodeDecodeError:
        return ""


class ContentTokens:
    """The tokens of a reply after the last piece of content.

    A token belongs to the first piece that has a part of its text. Tokens of reasoning, of calls, and of the marks and
    the white space between these and the content belong to no piece.
    """

    def __init__(self) -> None:
        self._text = ""
        self._tokens: list[tuple[int, int, Json]] = []  # begin and end in the text, and the token

    def add(self, text: str, token: Json | None) -> None:
        """Add text that was generated, and its token if there is one."""
        begin = len(self._text)
        self._text += text
        if token is not None:
            self._tokens.append((begin, len(self._text), token))

    def take(self, piece: str, held: int) -> list[Json]:
        """Return the tokens of the next piece of content, which `held` characters follow."""
        end = len(self._text) - held
        begin = end - len(piece)
        if begin < 0 or self._text[begin:end] != piece:
            begin = self._text.rfind(piece)
            end = begin + len(piece)
            if begin < 0:
                return []
        found = [one for start, stop, one in self._tokens if start < end and max(stop, start + 1) > begin]
        self._text = self._text[end:]
        self._tokens = [(start - end, stop - end, one) for start, stop, one in self._tokens if start >= end]
        return found
