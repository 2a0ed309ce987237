"""Splits a reply's text into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.service.chat.call_parsers import harmony
from triptych.service.chat.chat_template import CallIds
from triptych.service.chat.formats import ReasoningFormat, ToolFormat, id_maker
from triptych.service.chat.parts import Content, Part, PartSink, WholeReply
from triptych.service.chat.reader import Reader, Steps
from triptych.service.chat.tools import Tool


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """The parts that a reply may have, and how they are marked."""

    reasoning: ReasoningFormat | None = None
    reasoning_opened: bool = False  # the prompt ends within the reasoning
    reasoning_closed: bool = False  # the prompt ends after the reasoning: a grammar allows no more
    calls: ToolFormat | None = None  # None: no tool may be called
    tools: Mapping[str, Tool] = field(default_factory=dict)
    ids: CallIds = CallIds.ANY
    one_call: bool = False
    is_held: bool = False  # a grammar constrains the calls

    @property
    def is_plain(self) -> bool:
        """Whether the whole reply is content."""
        return self.reasoning is None and self.calls is None


class ReplyParser:
    """A parser of one reply, whose joined parts do not depend on how the text is cut."""

    def __init__(self, format: ReplyFormat) -> None:
        self._format = format
        self._reader = Reader()
        new_id = id_maker(format.ids)
        self._sink = PartSink(holds_spaces=format.calls is not None, one_call=format.one_call, new_id=new_id)
        self._steps = self._parse()
        self.is_reasoning = False
        self.passes = False  # all further text is content
        self._advance()

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has begun."""
        return self._sink.calls > 0

    @property
    def is_within_call(self) -> bool:
        """Whether the arguments of the last call are incomplete."""
        return self.has_calls and not self._sink.call_is_whole

    @property
    def held(self) -> int:
        """The number of characters at the end of the text that no part has had yet."""
        return self._reader.held + self._sink.held

    def push(self, text: str, *, end: bool = False) -> list[Part]:
        """Add text and return the parts that are certain so far; with `end`, all that are left."""
        if self.passes:
            return [Content(text)] if text else []
        self._reader.text += text
        self._reader.ended = end
        self._advance()
        if end:
            self._sink.end()
        return self._sink.take()

    def whole(self, text: str) -> WholeReply:
        """Return the parts of a complete reply; no text was pushed before."""
        found = WholeReply()
        found.add(self.push(text, end=True))
        return found

    def _advance(self) -> None:
        next(self._steps, None)

    def _parse(self) -> Steps[None]:
        reader, sink, format = self._reader, self._sink, self._format
        if format.reasoning is not None and format.reasoning.name == "harmony":
            yield from harmony(reader, sink, format.tools)
            return
        if format.reasoning is not None:
            yield from self._reasoning(format.reasoning)
        if format.calls is not None:
            parse = format.calls.held_parse if format.is_held else format.calls.parse
            yield from parse(reader, sink, format.tools)
            return
        while not (reader.text.strip() or reader.ended):
            yield  # white space after the reasoning
        sink.content(reader.take(len(reader.text)))
        self.passes = True

    def _reasoning(self, format: ReasoningFormat) -> Steps[None]:
        """Take the reasoning if the reply begins with it."""
        reader = self._reader
        if not self._format.reasoning_opened:
            reader.record()
            yield from reader.skip_spaces()
            if (yield from reader.accept(format.opening)) is None:
                reader.give_back()
                return
            reader.drop_record()
        self.is_reasoning = True
        yield from reader.until(format.closing, emit=self._sink.reasoning)
        self._sink.end_reasoning()
        self.is_reasoning = False
