"""Splits a reply's text into reasoning, content and tool calls while it is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.service.chat.call_parsers import harmony
from triptych.service.chat.chat_template import CallIds
from triptych.service.chat.formats import ReasoningFormat, ToolFormat, id_maker
from triptych.service.chat.parts import Call, Content, Part, PartSink, WholeReply
from triptych.service.chat.reader import Reader, Steps
from triptych.service.chat.tools import Tool

_PROBED, _MOST_PROBED = 64, 1024  # characters after a mark: read together, and enough to tell whether it begins a call
_MOST_MENTIONS = 64  # of such marks in a reasoning, that are looked at
_PIECE = 4096  # characters that are parsed at a time


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
        for at in range(0, len(text), _PIECE):  # what is taken from a text moves the rest of it
            if self.passes:
                self._sink.content(text[at:])
                break
            self._reader.text += text[at : at + _PIECE]
            self._advance()
        if end:
            self._reader.ended = True
            self._advance()
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
        sink.content(reader.take(len(reader.text)))
        self.passes = True

    def _reasoning(self, format: ReasoningFormat) -> Steps[None]:
        """Take the reasoning if the reply begins with it, and marks of its end that are written twice."""
        reader = self._reader
        reader.record()
        yield from reader.skip_spaces()
        begun = yield from reader.accept(format.opening, format.closing)
        if begun is None and not self._format.reasoning_opened:
            reader.give_back()
            return
        reader.drop_record()
        if begun != format.closing:
            yield from self._thought(format.closing)
        self._sink.end_reasoning()
        yield from reader.skip_spaces()
        while (yield from reader.accept(format.closing)) is not None:
            yield from reader.skip_spaces()

    def _thought(self, closing: str) -> Steps[None]:
        """Take the reasoning up to the mark of its end, or up to a call that the model writes within it."""
        reader, calls = self._reader, self._format.calls
        trigger = "" if calls is None or self._format.is_held else calls.syntax.trigger
        mentions = 0
        marks = (closing, trigger) if trigger else (closing,)
        while (mark := (yield from reader.until(*marks, emit=self._sink.reasoning))) is not None and mark != closing:
            reader.record(mark)
            mentions += 1
            if mentions <= _MOST_MENTIONS and (yield from self._is_call(mark)):
                reader.give_back()
                return
            self._sink.reasoning(reader.recorded())

    def _is_call(self, mark: str) -> Steps[bool]:
        """Return whether a call of one of the tools follows a mark that begins calls. Nothing is taken."""
        reader, tools = self._reader, self._format.tools
        probe = ReplyParser(ReplyFormat(calls=self._format.calls, tools=tools))
        probe.push(mark)
        size = 0
        while size < _MOST_PROBED:
            piece = reader.text[size : min(size + _PROBED, _MOST_PROBED)]
            size += len(piece)
            is_all = size == len(reader.text)
            for part in probe.push(piece, end=is_all and reader.ended):
                if isinstance(part, Call):
                    return part.name in tools
                if isinstance(part, Content) and part.text.strip():
                    return False
            if is_all and reader.ended:
                return False
            if is_all:
                yield
        return False
