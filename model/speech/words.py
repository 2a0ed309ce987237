"""Words of an output's text tokens, with the times of their first and last token, as transformers groups them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages whose words stand without spaces
_OPENING = "\"'“¡¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Word:
    """A word with the punctuation at it; `places` are those of its tokens."""

    text: str
    places: list[int]


def words_of(ids: Sequence[int], language: str | None, decode: Decode) -> list[Word]:
    """Group text tokens (no special ones) to words; `language` is a code, None: one with spaces."""
    found = _characters(ids, decode)
    if language not in _WITHOUT_SPACES:
        found = _joined_to_words(found)
    _join_opening(found)
    _join_closing(found)
    return [word for word in found if word.text and word.places]


def _characters(ids: Sequence[int], decode: Decode) -> list[Word]:
    """Part tokens wherever the text before is made of whole characters."""
    whole = decode(ids)
    found: list[Word] = []
    places: list[int] = []
    offset = 0
    for place in range(len(ids)):
        places.append(place)
        text = decode([ids[at] for at in places])
        broken = offset + text.find(_REPLACEMENT) if _REPLACEMENT in text else None
        if broken is None or broken >= len(whole) or whole[broken] == _REPLACEMENT:
            found.append(Word(text, places))
            places = []
            offset += len(text)
    return found


def _joined_to_words(parts: Sequence[Word]) -> list[Word]:
    found: list[Word] = []
    for part in parts:
        if part.text.startswith(" ") or part.text.strip() in _PUNCTUATION or not found:
            found.append(part)
        else:
            found[-1].text += part.text
            found[-1].places += part.places
    return found


def _join_opening(words: list[Word]) -> None:
    """Join opening punctuation to the next word."""
    following = len(words) - 1
    for at in range(len(words) - 2, -1, -1):
        word = words[at]
        if word.text.startswith(" ") and word.text.strip() in _OPENING:
            words[following] = Word(word.text + words[following].text, word.places + words[following].places)
            words[at] = Word("", [])
        else:
            following = at


def _join_closing(words: list[Word]) -> None:
    """Join closing punctuation to the previous word."""
    before = 0
    for at in range(1, len(words)):
        if not words[before].text.endswith(" ") and words[at].text in _CLOSING:
            words[before] = Word(words[before].text + words[at].text, words[before].places + words[at].places)
            words[at] = Word("", [])
        else:
            before = at
