"""Finds the syntax of calls in rendered text: the texts around known names and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.service.chat.chat_template import ID, KIND, VARYING, ArgumentSyntax, CallSyntax

_JSON_START = re.compile(r"""[\[{]\s*[\[{"]|["'\[{(]|$""")
_WORD = re.compile(r"[\w.:\-]*")
_KIND = re.compile(r"([a-z]+)")
_LAST_TAG = re.compile(r"\s*(<[^<>\s]+>)\s*$")
_TAG = re.compile(r"<[^<>\s]+>")
_LEAST_TRIGGER = 3


@dataclass(frozen=True, slots=True, eq=False)
class WrittenCalls:
    """A reply with calls as the template renders it, and the names, arguments and ids of these calls.

    `ending` is the text that the template writes after a reply's content.
    """

    text: str
    calls: tuple[tuple[str, Mapping[str, Any]], ...]
    ids: tuple[str, ...]
    ending: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The position of a call in a text: start and end of its name, and end of its arguments."""

    name: int
    name_end: int
    end: int
    pieces: tuple[tuple[int, int], ...] = ()  # the JSON object, or else keys and values in turn


def derived(one: WrittenCalls, two: WrittenCalls | None) -> tuple[CallSyntax, tuple[str, ...]] | None:
    """Return the syntax of calls and the tags that end such a reply instead of the usual ending; None: no syntax fits.

    `one` has one call of two arguments; `two` has the same call and a second one.
    """
    source = one if two is None else two
    text = source.text
    for id in source.ids:
        text = text.replace(id, ID)
    places = _places(text, source.calls)
    if places is None:
        return None
    tail, ends = _without_ending(text[places[-1].end :], source.ending)
    first = places[0]
    found = _arguments(text, first)
    if found is None:
        return None
    arguments, between = found
    head = text[: first.name].lstrip()
    if len(places) == 1:
        opening, before, after, separator, closing = "", head, tail, "", ""
    else:
        middle = text[first.end : places[1].name]
        before = _common_suffix(head, middle)
        middle = middle[: len(middle) - len(before)]
        after = _common_prefix(middle, tail)
        opening, separator, closing = head[: len(head) - len(before)], middle[len(after) :], tail[len(after) :]
    if arguments is not None and not arguments.separator:
        if not after.startswith(arguments.after):
            return None
        after = after[len(arguments.after) :]
    syntax = CallSyntax(
        before,
        between,
        after,
        opening,
        separator,
        closing,
        _trigger(opening + before),
        one=len(places) == 1,
        arguments=arguments,
    )
    return syntax, ends


def _places(text: str, calls: tuple[tuple[str, Mapping[str, Any]], ...]) -> list[_Place] | None:
    """Return the positions of the calls in their order; None if one is missing."""
    found, at = [], 0
    for name, arguments in calls:
        begin = text.find(name, at)
        if begin < 0:
            return None
        end = begin + len(name)
        whole = _object(text, end, arguments)
        if whole is not None:
            found.append(_Place(begin, end, whole[1], (whole,)))
        else:
            pieces: list[tuple[int, int]] = []
            at = end
            for piece in (piece for key, value in arguments.items() for piece in (key, str(value))):
                where = text.find(piece, at)
                if where < 0:
                    return None
                at = where + len(piece)
                pieces.append((where, at))
            found.append(_Place(begin, end, at, tuple(pieces)))
        at = found[-1].end
    return found


def _object(text: str, at: int, value: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return start and end of the first JSON object after `at` if it equals `value`, else None."""
    begin = text.find("{", at)
    try:
        found, end = json.JSONDecoder().raw_decode(text, begin) if begin >= 0 else (None, 0)
    except (ValueError, RecursionError):
        return None
    return (begin, end) if found == value else None


def _arguments(text: str, place: _Place) -> tuple[ArgumentSyntax | None, str] | None:
    """Return the syntax of arguments and the text between name and arguments; None if the kind is unknown."""
    (begin, end), *others = place.pieces
    gap = text[place.name_end : begin]
    if not others:
        return None, gap
    (first, first_end), (key, key_end), (second, _) = others
    between, other, middle = text[end:first], text[key_end:second], text[first_end:key]
    if gap.endswith("(") and between.strip("'\"") == "=" and other == "=":
        return ArgumentSyntax("", "=", "", separator=middle.lstrip("'\""), quotes=None), gap
    before = _common_suffix(gap, middle)
    text_kind, other_kinds = "", tuple[str, ...]()
    if other != between:
        kinds = _kinds(between, other)
        if kinds is None:
            return None
        text_kind, other_kind, between = kinds
        other_kinds = (other_kind,)
    if not before.strip() or not between.partition(KIND)[0].strip():
        return None  # no mark begins an argument, or ends its name
    after = middle[: len(middle) - len(before)]
    arguments = ArgumentSyntax(before, between, after, text_kind=text_kind, other_kinds=other_kinds)
    return arguments, gap[: len(gap) - len(before)]


def _kinds(one: str, other: str) -> tuple[str, str, str] | None:
    """Return the only word that differs, of each text, and the text with `KIND` in its place; None if not one does."""
    words, others = _KIND.split(one), _KIND.split(other)
    found = [at for at, pair in enumerate(zip(words, others, strict=False)) if pair[0] != pair[1]]
    if len(words) != len(others) or len(found) != 1 or found[0] % 2 == 0:
        return None
    [at] = found
    return words[at], others[at], "".join((*words[:at], KIND, *words[at + 1 :]))


def _without_ending(tail: str, ending: str) -> tuple[str, tuple[str, ...]]:
    """Return the text after the last arguments without the reply's ending, and the tag that replaces this ending."""
    if ending.strip() and tail.rstrip().endswith(ending.strip()):
        return tail.rstrip()[: -len(ending.strip())], ()
    found = _LAST_TAG.search(tail)
    if ending.strip() and found is not None:
        return tail[: found.start()], (found[1],)
    return tail, ()


def _trigger(head: str) -> str:
    """Return the beginning of a text that distinguishes calls from content; empty if there is none."""
    first = re.match(rf"[^\s{''.join(VARYING)}]*", head)
    assert first is not None
    text = first[0]
    if (tag := _TAG.match(text)) is not None:
        return tag[0]
    if not text.startswith("["):
        found = _JSON_START.search(text)
        text = text[: found.start()] if found is not None else text
    elif (found := re.match(r"\[/?[A-Z_]+\]", text)) is not None:
        text = found[0]
    else:
        return ""
    word = _WORD.fullmatch(text)
    return text if len(text) >= _LEAST_TRIGGER and (word is None or text.endswith(":")) else ""


def _common_suffix(one: str, other: str) -> str:
    """Return the longest common suffix that does not begin within a tag."""
    found = shared_beginning(one[::-1], other[::-1])[::-1]
    end, begin = found.find(">"), found.find("<")
    return found[end + 1 :] if end >= 0 and (begin < 0 or end < begin) else found


def _common_prefix(one: str, other: str) -> str:
    """Return the longest common prefix that does not end within a tag."""
    found = shared_beginning(one, other)
    begin = found.rfind("<")
    return found[:begin] if begin > found.rfind(">") else found


def shared_beginning(one: str, other: str) -> str:
    """Return the longest common prefix."""
    size = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if size is None else size]
