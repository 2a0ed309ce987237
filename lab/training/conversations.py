"""Generates the conversations of `assistant`: tools, a request, and a call of the tool that fits, or words.

A conversation has up to four tools of the catalogue, by names that vary, so the model must read them. The request wants
one of them (sometimes two calls of it), none of them, or no tool at all. Where a call was answered already, the reply
tells the result in words.

Invariants
- Names of places and people, titles and texts are copied from the request. A third of them is made up, so that copying
  is learned and no list.
- One of them is held out by its CRC. Training conversations contain no held-out one, held-out conversations no other.
- Random choices use `random.Random.random` alone, the only method whose sequence Python guarantees.

No torch, no files.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from lab.training.tool_catalogue import (
    CATALOGUE,
    FIXED_VALUES,
    NO_TOOL,
    PEOPLE,
    PLACES,
    REPEAT,
    SMALL_TALK,
    WORDS,
    CatalogueTool,
)

T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools in OpenAI's form; the last message is the reply that is learned."""

    messages: list[Json]
    tools: list[Json]


class Kind(Enum):
    """What conversations are drawn of: bounds of the shares of small talk, texts to repeat, requests without a tool
    that fits, and calls (the rest are answers), and whether made-up words have letters of several languages."""

    COPYING = (0.08, 0.25, 0.4, 0.75), False
    CALLING = (0.04, 0.09, 0.2, 0.85), False
    FOREIGN = (0.04, 0.12, 0.22, 0.85), True

    @property
    def shares(self) -> tuple[float, ...]:
        return self.value[0]

    @property
    def foreign(self) -> bool:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class _Draw:
    """Where the random values of a conversation come from."""

    rng: random.Random
    held_out: bool
    foreign: bool


@dataclass(frozen=True, slots=True)
class _Offered:
    """A tool under the names that it has in one conversation."""

    tool: CatalogueTool
    name: str
    description: str
    parameters: dict[str, str]  # what the requests call a value, and the parameter's name

    @property
    def schema(self) -> Json:
        types = {
            name: {"type": "integer" if self.tool.parameters[value][0] in _NUMBERS else "string"}
            for value, name in self.parameters.items()
        }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": types, "required": list(types)},
        }
        return {"type": "function", "function": function}

    def call(self, values: Json) -> Json:
        arguments = {name: values[value] for value, name in self.parameters.items()}
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def draw(rng: random.Random, *, held_out: bool, kind: Kind = Kind.FOREIGN) -> Conversation:
    """Return a random conversation."""
    draw, shares, share = _Draw(rng, held_out, kind.foreign), kind.shares, rng.random()
    if share < shares[0] and not held_out:
        said, answer = _pick(rng, SMALL_TALK)
        offered = _offer(rng, _below(rng, 4))
        return _conversation(offered, [_user(said), _assistant(answer)])
    if share < shares[1] and not held_out:
        return _repeated(draw)
    offered = _offer(rng, 1 + _below(rng, 4))
    if share < shares[2] and not held_out:
        absent = [tool for tool in CATALOGUE if tool not in [one.tool for one in offered]]
        tool = _pick(rng, absent)
        wanted = _offered(rng, tool)
        request = _pick(rng, tool.requests).format(**_values(draw, wanted))
        return _conversation([] if rng.random() < 0.2 else offered, [_user(request), _assistant(NO_TOOL)])
    return _calling(draw, offered, answered=share > shares[3])


def held_out_conversations(count: int, seed: int = 0) -> list[Conversation]:
    """Return `count` held-out conversations, the same on every machine."""
    rng = random.Random(seed)
    return [draw(rng, held_out=True) for _ in range(count)]


def _repeated(draw: _Draw) -> Conversation:
    """Return a request to repeat a text: copying in its purest form, which calls need for their arguments."""
    rng = draw.rng
    kinds = [_pick(rng, _REPEATED) for _ in range(1 + _below(rng, 5))]
    text = " ".join(str(_value(draw, kind)) for kind in kinds)
    return _conversation(_offer(rng, _below(rng, 2)), [_user(_pick(rng, REPEAT).format(text=text)), _assistant(text)])


def _calling(draw: _Draw, offered: list[_Offered], *, answered: bool) -> Conversation:
    """Return a request that one of the tools fits, and its call or, where it was called already, the answer."""
    rng = draw.rng
    one = _pick(rng, offered)
    values = _values(draw, one)
    request = _pick(rng, one.tool.requests)
    if not answered and "place" in values and rng.random() < 0.25:
        other = _values(draw, one)
        both = {**values, "place": f"{values['place']} and {other['place']}"}
        calls = [one.call(values), one.call(other)]
        return _conversation(offered, [_user(request.format(**both)), _called(calls)])
    messages = [_user(request.format(**values)), _called([one.call(values)])]
    if answered:
        result = {key: _value(draw, kind) for key, kind in one.tool.results.items()}
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result, ensure_ascii=False)})
        messages.append(_assistant(_pick(rng, one.tool.answers).format(**values, **result)))
    return _conversation(offered, messages)


def _conversation(offered: list[_Offered], messages: list[Json]) -> Conversation:
    return Conversation(messages, [one.schema for one in offered])


def _user(text: str) -> Json:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Json:
    return {"role": "assistant", "content": text}


def _called(calls: list[Json]) -> Json:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _offer(rng: random.Random, count: int) -> list[_Offered]:
    """Return tools with different names."""
    offered: list[_Offered] = []
    while len(offered) < count:
        one = _offered(rng, _pick(rng, CATALOGUE))
        if all(one.tool is not other.tool and one.name != other.name for other in offered):
            offered.append(one)
    return offered


def _offered(rng: random.Random, tool: CatalogueTool) -> _Offered:
    names: dict[str, str] = {}
    for value, (_, options) in tool.parameters.items():
        names[value] = _pick(rng, [option for option in options if option not in names.values()])
    return _Offered(tool, _pick(rng, tool.names), _pick(rng, tool.descriptions), names)


def _values(draw: _Draw, one: _Offered) -> Json:
    return {name: _value(draw, kind) for name, (kind, _) in one.tool.parameters.items()}


def _value(draw: _Draw, kind: str) -> str | int:
    rng = draw.rng
    if kind in FIXED_VALUES:
        return _pick(rng, FIXED_VALUES[kind])
    if kind == "clock":
        return f"{_below(rng, 24):02}:{_below(rng, 60):02}"
    if kind in _NUMBERS:
        least, most = _NUMBERS[kind]
        return least + _below(rng, most - least)
    while True:
        value = _text(draw, kind)
        if (zlib.crc32(value.encode()) % 20 == 0) == draw.held_out:
            return value


def _text(draw: _Draw, kind: str) -> str:
    """Return a value that is copied from the request."""
    rng = draw.rng
    if kind in ("place", "person"):
        known = PLACES if kind == "place" else PEOPLE
        return _made_up(draw).capitalize() if rng.random() < 0.4 else _pick(rng, known)
    if kind == "word":
        return _made_up(draw)
    words = [_made_up(draw) if rng.random() < 0.15 else _pick(rng, WORDS) for _ in range(1 + _below(rng, 4))]
    return " ".join(words) if kind == "phrase" else " ".join(word.capitalize() for word in words[:2])


def _made_up(draw: _Draw) -> str:
    """Return a random word, so that copying by letters is learned too."""
    rng = draw.rng
    if draw.foreign and rng.random() < 0.7:
        syllables = [_pick(rng, _FOREIGN_STARTS) + _pick(rng, _FOREIGN_VOWELS) for _ in range(1 + _below(rng, 3))]
        return "".join(syllables) + _pick(rng, _FOREIGN_ENDS)
    syllables = [_pick(rng, "bcdfghjklmnprstvwz") + _pick(rng, "aeiou") for _ in range(2 + _below(rng, 2))]
    return "".join(syllables) + _pick(rng, ("", "", "n", "r", "s", "t", "l", "x"))


def _below(rng: random.Random, n: int) -> int:
    return int(rng.random() * n)


def _pick(rng: random.Random, options: Sequence[T]) -> T:
    return options[_below(rng, len(options))]


_REPEATED = ("phrase", "word", "word", "person", "place", "clock", "number", "title")
_FOREIGN_STARTS = (
    *"bcdfghjklmnpqrstvwxyz",
    "",
    "ch",
    "sh",
    "th",
    "st",
    "tr",
    "kr",
    "br",
    "gr",
    "hm",
    "rd",
    "nd",
    "sk",
    "ll",
    "ñ",
)
_FOREIGN_VOWELS = (*"aeiouy", *"äöüåøáéíóúèêç", "ae", "ea", "ie", "oo", "ou", "ay", "ey")
_FOREIGN_ENDS = ("", *"bdgklmnprstxz", "ng", "ck", "rg", "ld", "nd", "st", "ss", "ght", "ford", "burg", "med", "son")
_NUMBERS = {"number": (1, 1000), "minutes": (1, 91), "degrees": (5, 31), "few": (2, 10)}
