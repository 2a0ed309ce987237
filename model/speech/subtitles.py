"""Subtitles: SubRip (srt) and WebVTT files of timed texts."""

from __future__ import annotations

from collections.abc import Iterable

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
