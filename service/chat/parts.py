"""The parts of a streamed reply: pieces of reasoning, of content and of tool calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

from triptych.service.chat.json_text import JsonText

_ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a tool call, before its arguments."""

    index: int  # of the call in the reply
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Part: TypeAlias = Reasoning | Content | Call | Arguments


@dataclass(slots=True)
class WholeCall:
    """A tool call with all its arguments."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeReply:
    """All parts of a reply, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def add(self, parts: list[Part]) -> None:
        """Add the next parts."""
        for part in parts:
            match part:
                case Reasoning(text):
                    self.reasoning += text
                case Content(text):
                    self.content += text
                case Call(_, id, name):
                    self.calls.append(WholeCall(id, name))
                case Arguments(index, text):
                    self.calls[index].arguments += text


def call_id() -> str:
    """Return a new id for a tool call."""
    return f"call_{secrets.token_hex(_ID_BYTES)}"


class PartSink:
    """A collector of the parts that a parser finds.

    White space between blocks (reasoning, a call), and between a block and content, is dropped. Templates write their
    own there; with both, a conversation that is sent back would not have the tokens that were generated.
    """

    def __init__(self, *, holds_spaces: bool, one_call: bool, new_id: Callable[[], str]) -> None:
        """Start with no parts; `holds_spaces`: calls may follow content; `one_call`: only the first call is kept."""
        self._holds_spaces = holds_spaces
        self._one_call = one_call
        self._new_id = new_id
        self._parts: list[Part] = []
        self._spaces: list[str] = []  # held-back white space after content or reasoning
        self._after_block = False  # no content has come since reasoning or a call
        self._reasoning_began = False
        self._drops = False  # the current call is dropped
        self._arguments: list[str] = []  # of the last call
        self._json = JsonText()  # rewriter of these arguments
        self.calls = 0

    @property
    def call_is_whole(self) -> bool:
        """Whether the last call has all its arguments."""
        try:
            json.loads("".join(self._arguments))
        except (ValueError, RecursionError):
            return False
        return True

    @property
    def held(self) -> int:
        """The number of characters of white space that are held back."""
        return sum(map(len, self._spaces))

    def take(self) -> list[Part]:
        """Return the parts since the last call of `take`, with adjacent pieces of one kind joined."""
        parts, self._parts = self._parts, []
        return [_joined([*same]) for _, same in groupby(parts, key=_kind)] if len(parts) > 1 else parts

    def content(self, text: str) -> None:
        self._end_arguments()
        if self._after_block:
            text = text.lstrip()
        if not text:
            return
        self._after_block = False
        if kept := self._shown(text) if self._holds_spaces else text:
            self._parts.append(Content(kept))

    def reasoning(self, text: str) -> None:
        if not self._reasoning_began:
            text = text.lstrip()
        if not text:
            return
        self._reasoning_began = True
        if kept := self._shown(text):
            self._parts.append(Reasoning(kept))

    def _shown(self, text: str) -> str:
        """Hold back the white space that ends a text; return what was held back with the rest, if there is any."""
        rest = text.rstrip()
        spaces = text[len(rest) :]
        if not rest:
            self._spaces.append(spaces)
            return ""
        shown, self._spaces = "".join([*self._spaces, rest]), [spaces]
        return shown

    def end_reasoning(self) -> None:
        """Drop the white space after the reasoning."""
        self._spaces, self._after_block, self._reasoning_began = [], True, False

    def call(self, name: str) -> None:
        """Begin a call."""
        self._end_arguments()
        self._spaces, self._after_block = [], True
        self._drops = self._one_call and self.calls > 0
        if not self._drops:
            self._parts.append(Call(self.calls, self._new_id(), name))
            self._arguments, self._json = [], JsonText()
            self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if not self._drops:
            self._add_arguments(self._json.push(text))

    def _end_arguments(self) -> None:
        self._add_arguments(self._json.end())

    def _add_arguments(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._parts.append(Arguments(self.calls - 1, text))

    def end(self) -> None:
        """Add the held-back end of arguments and the white space at the end of content."""
        self._end_arguments()
        if (spaces := "".join(self._spaces)) and not self._after_block and not self._reasoning_began:
            self._parts.append(Content(spaces))
        self._spaces = []


def _kind(part: Part) -> tuple[type[Part], int]:
    """Return what tells whether pieces belong together."""
    return type(part), part.index if isinstance(part, Call | Arguments) else 0


def _joined(parts: list[Part]) -> Part:
    """Return pieces of one kind as one."""
    first = parts[0]
    if isinstance(first, Call) or len(parts) == 1:
        return first
    return replace(first, text="".join([part.text for part in parts if not isinstance(part, Call)]))
