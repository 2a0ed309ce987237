"""Segments of a transcription, their live output, and subtitles."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

# -- Segments of a window: its output tokens parted at the timestamps among them. A timestamp token is `timestamp_begin
# + n` and means `n` positions of the encoder from the window's start, each of two frames. Two of them in a row end one
# segment and begin the next (Radford et al. 2022). Positions of audio are counted in frames, as in transformers'
# `_retrieve_segment`, which gives the same segments.

FRAMES_PER_POSITION = 2  # the stride of the encoder's second convolution


@dataclass(frozen=True, slots=True)
class Window:
    """Frames of an audio that one request decodes: the first `num_frames` of a window of fixed size are audio."""

    seek: int  # the first frame
    num_frames: int


@dataclass(frozen=True, slots=True)
class Span:
    """A segment of a window: tokens `first` to `last` (exclusive) of its output, and frames of the whole audio."""

    first: int
    last: int
    start: float
    end: float


def cut_segments(tokens: Sequence[int], timestamp_begin: int, window: Window) -> tuple[list[Span], int]:
    """Part a window's output tokens, without the end id; return the segments and by how many frames to go on.

    What follows the last complete segment is left out, since the next window begins there, unless the output ends
    with a single timestamp: then no speech follows it.
    """
    stamped = [token >= timestamp_begin for token in tokens]
    ends = [at + 1 for at in range(len(stamped) - 1) if stamped[at] and stamped[at + 1]]
    if not ends:
        return [_whole(tokens, stamped, timestamp_begin, window)], window.num_frames
    single = stamped[-2:] == [False, True]
    if single:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # the second of the last two timestamps shows that this was no single ending
    spans, first = [], 0
    for at, last in enumerate(ends):
        closing = last - 1 if single or at < len(ends) - 1 else last - 2
        times = (tokens[place] - timestamp_begin for place in (first, closing))
        start, end = (float(window.seek + FRAMES_PER_POSITION * time) for time in times)
        spans.append(Span(first, last, start, end))
        first = last
    if single:
        return spans, window.num_frames
    return spans, (tokens[first - 2] - timestamp_begin) * FRAMES_PER_POSITION


def _whole(tokens: Sequence[int], stamped: Sequence[bool], timestamp_begin: int, window: Window) -> Span:
    """Return the segment of an output without an end of one: it lasts to its last timestamp, or the window's end."""
    length = window.num_frames // FRAMES_PER_POSITION
    last = max((at for at, is_stamp in enumerate(stamped) if is_stamp), default=None)
    if last is not None and tokens[last] != timestamp_begin:
        length = tokens[last] - timestamp_begin
    return Span(0, len(tokens), float(window.seek), float(window.seek + FRAMES_PER_POSITION * length))


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return how often an output repeats itself: the bytes of its ids over those of them compressed by zlib."""
    size = int(math.log2(vocab_size) / 8) + 1
    data = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


# -- Subtitles: SubRip (srt) and WebVTT files of timed texts.

Line = tuple[float, float, str]  # start and end in seconds, text


def srt(lines: Iterable[Line]) -> str:
    """Return a SubRip file."""
    blocks = (
        f"{number}\n{_time(start, ',')} --> {_time(end, ',')}\n{_safe(text)}\n"
        for number, (start, end, text) in enumerate(lines, 1)
    )
    return "".join(f"{block}\n" for block in blocks)


def vtt(lines: Iterable[Line]) -> str:
    """Return a WebVTT file."""
    blocks = (f"{_time(start, '.')} --> {_time(end, '.')}\n{_safe(text)}\n" for start, end, text in lines)
    return "WEBVTT\n\n" + "".join(f"{block}\n" for block in blocks)


def _time(seconds: float, point: str) -> str:
    """Return HH:MM:SS and milliseconds."""
    milliseconds = round(max(0.0, seconds) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _safe(text: str) -> str:
    """Return a text on one line that ends no cue: no arrow between times."""
    return " ".join(text.split()).replace("-->", "->")


# -- Which tokens of an output that is being generated will be part of the transcription, whatever follows.


class LiveText:
    """Finds the text tokens of a window's output that are certain: those of its first segment at once, of a later one
    when its end is there, since the next window begins with a segment that has none."""

    def __init__(self, timestamp_begin: int, hidden_ids: Collection[int]) -> None:
        """`hidden_ids`: special tokens, which are no text."""
        self._timestamp_begin = timestamp_begin
        self._hidden = hidden_ids
        self._held: list[int] = []  # places
        self._num_tokens = 0
        self._last_was_stamp = False
        self._is_first = True  # no segment has ended yet
        self.num_certain = 0  # text tokens that were returned

    def add(self, token_ids: Sequence[int]) -> list[int]:
        """Take the next tokens; return the places in the output of the text tokens that have become certain."""
        certain: list[int] = []
        for place, token in enumerate(token_ids, self._num_tokens):
            is_stamp = token >= self._timestamp_begin
            if is_stamp and self._last_was_stamp:
                self._is_first = False
            elif is_stamp:
                certain += self._held
                self._held.clear()
            elif token not in self._hidden:
                (certain if self._is_first else self._held).append(place)
            self._last_was_stamp = is_stamp
        self._num_tokens += len(token_ids)
        self.num_certain += len(certain)
        return certain


# -- Words of an output's text tokens, with the times of their first and last token, as transformers groups them.

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})  # languages whose words stand without spaces
_OPENING = "\"'“¡¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_REPLACEMENT = "\ufffd"
_REACH = 0.5  # seconds by which a word may begin before its segment, or end after it

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class Word:
    """A word with the punctuation at it; `places` are those of its tokens."""

    text: str
    places: list[int]


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word and its time, in seconds of the whole audio."""

    text: str
    start: float
    end: float


def without_pauses(words: Sequence[TimedWord], start: float, end: float) -> tuple[TimedWord, ...]:
    """Return the words of a segment from `start` to `end`; the first and the last do not reach far out of it.

    An alignment gives each token the time until the next one, and the pause between two segments with it. OpenAI's
    `add_word_timestamps` cuts it off too.
    """
    found = list(words)
    if found and start < found[0].end and found[0].start < start - _REACH:
        found[0] = replace(found[0], start=start)
    if found and found[-1].start < end and end + _REACH < found[-1].end:
        found[-1] = replace(found[-1], end=end)
    return tuple(found)


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
