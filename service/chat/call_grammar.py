"""Grammars that hold a reply's tool calls to the schemas of their tools, in the form that the model's family writes.

A grammar covers the whole reply: its reasoning, which is free text up to its mark, then content or calls. A mark that
is a special token is written as its id, since no text makes one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from model.text.grammar import rules_grammar, rules_of
from service.chat.argument_grammar import ArgumentRules
from service.chat.formats import ReasoningFormat
from service.chat.reply_parser import ReplyFormat
from service.chat.tools import ToolUse
from service.core.call_syntax import VARYING, CallSyntax

SpecialId = Callable[[str], int | None]  # the id of a text that is a special token

_ANY = r"/(?s:.*)/"
_NO_CALL = r"/(\s*[^\s\[{<`](?s:.*))?/"  # text that does not begin as calls without a mark do
_TO_FUNCTIONS, _COMMENTARY = (
    " to=functions.",
    "<|channel|>commentary json<|message|>",
)  # as gpt-oss's template writes it
_MOST_VARYING = 64  # characters of an id, a number or a type
_GAP = r"/\n{0,2}/"  # between reasoning and what follows


def reply_grammar(format: ReplyFormat, use: ToolUse, answer: str, special: SpecialId) -> str:
    """Return the grammar of replies of this format, in which `use` says what is called.

    `answer` is the grammar of an answer without calls; empty: any text.
    """
    return _Writer(format, use, answer, special).grammar()


class _Writer:
    def __init__(self, format: ReplyFormat, use: ToolUse, answer: str, special: SpecialId) -> None:
        self._format = format
        self._use = use
        self._answer = answer
        marks = (*(format.calls.marks if format.calls else ()), *(format.reasoning.marks if format.reasoning else ()))
        self._special = {mark: id for mark in marks if mark and (id := special(mark)) is not None}
        self._rules = {"start": ""}

    def grammar(self) -> str:
        reasoning = self._format.reasoning
        if reasoning is not None and reasoning.name == "harmony":
            self._rules["start"] = self._harmony()
        else:
            thought = self._thought(reasoning) if reasoning is not None and not self._format.reasoning_closed else ""
            self._rules["start"] = f"{thought} {self._body()}"
        extra = rules_of(self._answer, "answer") if self._answer else ""
        return rules_grammar(self._rules) + extra

    def _thought(self, format: ReasoningFormat) -> str:
        """Return what matches the reasoning, which only one that the prompt has opened is sure to have."""
        rest = f"{self._until('thought', format.closing)} {_GAP}"
        return rest if self._format.reasoning_opened else f"({self._text(format.opening)} {rest})?"

    def _body(self) -> str:
        """Return what matches the reply behind its reasoning."""
        calls, use = self._format.calls, self._use
        if calls is None or not use.callable:
            return self._anything()
        if use.choice == "required":
            return self._calls(calls.syntax)
        if self._answer:
            return f"({self._calls(calls.syntax)} | answer)"
        trigger = calls.syntax.trigger
        if not trigger:
            self._rules["no_call"] = "NO_CALL"
            self._rules["NO_CALL"] = _framed(calls.syntax) if calls.syntax.content else _NO_CALL
            return f"({self._calls(calls.syntax)} | no_call)"
        before = self._until("before", trigger)
        block = f"{before} {self._calls(calls.syntax, without=trigger)}"
        return f"({block} | {self._anything()})" if not use.parallel else f"({block})* {self._anything()}"

    def _anything(self) -> str:
        if self._answer:
            return "answer"
        return self._free()

    def _free(self) -> str:
        """Return what matches any text, in which no mark is spelt out that is a special token."""
        spelt = "|".join(re.escape(mark).replace("/", r"\/") for mark in self._special)
        self._rules["FREE"] = f"{_ANY} & ~/(?s:.*)({spelt})(?s:.*)/" if spelt else _ANY
        return "FREE"

    def _calls(self, syntax: CallSyntax, without: str = "") -> str:
        """Return what matches one or more calls; `without` is a beginning that was matched already."""
        text = self._text
        one = " | ".join(
            self._rules_of(at).call(tool.name, syntax, tool.schema) for at, tool in enumerate(self._use.callable)
        )
        self._rules["call"] = f"({one})"
        first = (syntax.opening + syntax.before).removeprefix(without)
        again = text(syntax.separator + syntax.before)
        if syntax.separator and not syntax.separator.strip():
            again = f"({again} | {text(syntax.before)})"  # some models write no space between calls
        more = f"({again} call)*" if self._use.parallel and not syntax.one else ""
        return f"{text(first)} call {more} {text(syntax.closing)}"

    def _rules_of(self, at: int) -> ArgumentRules:
        return ArgumentRules(self._rules, f"arguments_{at}", self._text, self._until)

    def _harmony(self) -> str:
        """Return what matches a reply in channels: reasoning, then the answer, or words to the user and a call."""
        text, use, calls, free = self._text, self._use, self._format.calls, self._free()
        following = text("<|end|><|start|>assistant")
        thought = f"({text('<|channel|>analysis<|message|>')} {free} {following})?"
        final = f"{text('<|channel|>final<|message|>')} {self._anything()}"
        if calls is None or not use.callable:
            return f"{thought} {final}"
        call = self._calls(calls.syntax)
        call = f"({call} | {text(_TO_FUNCTIONS)} call_as_written)"
        self._rules["call_as_written"] = " | ".join(
            f"{text(tool.name + _COMMENTARY)} arguments_{at}" for at, tool in enumerate(use.callable)
        )
        if use.choice == "required":
            return f"{thought} {call}"
        words = f"({text('<|channel|>commentary<|message|>')} {free} {following})?"
        return f"{thought} ({final} | {words} {call})"

    def _until(self, rule: str, mark: str) -> str:
        """Return what matches any text up to the first `mark`, with it."""
        if any(special in mark for special in self._special):
            return f"{self._free()} {self._text(mark)}"
        self._rules[f"{rule}[lazy]"] = f"/(?s:.*){_escaped(mark)}/"
        return rule

    def _text(self, text: str) -> str:
        """Return what matches exactly this text, in which marks may be special tokens, and some characters vary."""
        if not text:
            return ""
        pieces = re.split(f"({'|'.join((*map(re.escape, self._special), *VARYING))})", text)
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, text: str) -> str:
        if text in self._special:
            return f"<[{self._special[text]}]>"
        if text in VARYING:
            return f"/{VARYING[text]}{{1,{_MOST_VARYING}}}/"
        return json.dumps(text, ensure_ascii=False)


def _framed(syntax: CallSyntax) -> str:
    """Return the terminal of content that has a beginning of its own, and no call after it."""
    return f"/{_escaped(syntax.content)}(?s:.*)/ & ~/(?s:.*){_escaped(syntax.separator)}(?s:.*)/"


def _escaped(text: str) -> str:
    """Return a text as a regular expression of the grammar's language."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
