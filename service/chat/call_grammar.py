"""Grammars that make a reply's tool calls match the schemas of their tools, in the model family's own form.

A grammar covers the whole reply: reasoning, which is free text up to its mark, then content or calls. A mark that is a
special token is written as its id, because no text gives a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.model.text.grammar import json_rule, rules_grammar, rules_of
from triptych.service.chat.argument_values import is_text, known_texts
from triptych.service.chat.chat_template import ID, INDEX, KIND, VARYING, ArgumentSyntax, CallSyntax
from triptych.service.chat.formats import ReasoningFormat
from triptych.service.chat.reply_parser import ReplyFormat
from triptych.service.chat.tools import ToolUse

# -- Grammar rules for the arguments of calls: one JSON object, or each argument between the marks of the family.
# Unconstrained strings are written unquoted; every other value is JSON that matches its schema. If a schema constrains
# the object beyond its properties, the arguments are one JSON object, which the parsers of all families accept.

_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
_DEFINITIONS = ("$defs", "definitions")
_KEY = re.compile(r"[^\s<>:,\"'(){}\[\]=]+")
_PYTHON_KEY = re.compile(r"\w+")
_PYTHON_TEXT = r"/'([^'\\\n]|\\.)*'/"
_MOST_APART = 100  # arguments between marks; more are written as one JSON object


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument between marks: its name, the schema of its value, and whether it is required."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def arguments_of(schema: Mapping[str, Any], syntax: ArgumentSyntax) -> list[Argument] | None:
    """Return the arguments of an object schema; None if they cannot be constrained one by one."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= {*_OBJECT_KEYS, *_DEFINITIONS} or not isinstance(properties, dict):
        return None
    if schema.get("type", "object") != "object" or not isinstance(required, list):
        return None
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    if '"#"' in (shown := json.dumps(schema)) or '"#/properties' in shown:
        return None
    extra = schema.get("additionalProperties", True)
    schemas = properties | {name: extra for name in required if name not in properties}
    is_key = _PYTHON_KEY if syntax.between == "=" else _KEY
    if len(schemas) > _MOST_APART or not all(is_key.fullmatch(name) for name in schemas):
        return None
    found = []
    for name, one in schemas.items():
        own: dict[str, Any] | None = {} if one is True else one if isinstance(one, dict) else None
        if own is None:
            return None
        found.append(Argument(name, own if is_text(own) else {**shared, **own}, name in required))
    return found


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """A writer of the rules of one tool's arguments into `rules`, under names that begin with `name`.

    `text` returns what matches exactly a text; `until` returns what matches any text up to and including a mark.
    """

    rules: dict[str, str]
    name: str
    text: Callable[[str], str]
    until: Callable[[str, str], str]

    def call(self, function: str, syntax: CallSyntax, schema: Mapping[str, Any]) -> str:
        """Return what matches a call from the function's name to its end."""
        apart = None if syntax.arguments is None else arguments_of(schema, syntax.arguments)
        between, after = syntax.between, syntax.after
        if syntax.arguments is None or apart is None:
            if between.endswith("{") and after.startswith("}"):
                between, after = between[:-1], after[1:]
            self.rules[self.name] = json_rule(schema)
            return f"{self.text(function + between)} {self.name} {self.text(after)}"
        return f"{self.text(function + between)} {self._all(apart, syntax.arguments)} {self.text(after)}"

    def _all(self, arguments: list[Argument], syntax: ArgumentSyntax) -> str:
        if not syntax.separator:
            return " ".join(
                self._one(at, one, syntax) if one.is_required else f"({self._one(at, one, syntax)})?"
                for at, one in enumerate(arguments)
            )
        # `first` matches the rest before any argument was written, `more` after one.
        first = more = ""
        for at, one in reversed(list(enumerate(arguments))):
            self.rules[f"{self.name}_is_{at}"] = self._one(at, one, syntax)
            written = f"{self.name}_is_{at}"
            begun = f"{written} {more}".strip()
            follows = f"{self.text(syntax.separator)} {begun}"
            if not one.is_required:
                begun = f"({begun} | {first})" if first else f"({begun})?"
                follows = f"({follows} | {more})" if more else f"({follows})?"
            first, more = self._rule(f"first_{at}", begun), self._rule(f"more_{at}", follows)
        return first

    def _rule(self, name: str, right: str) -> str:
        self.rules[f"{self.name}_{name}"] = right
        return f"{self.name}_{name}"

    def _one(self, at: int, one: Argument, syntax: ArgumentSyntax) -> str:
        before, between = syntax.before + one.name, syntax.between
        if is_text(one.schema) and syntax.quotes is not None:
            opening, closing = syntax.quotes
            begin = self.text(before + between.replace(KIND, syntax.text_kind) + opening)
            end = closing + syntax.after
            texts = known_texts(one.schema)
            if texts is None:
                return f"{begin} {self.until(f'{self.name}_text_{at}', end)}"
            if all(isinstance(text, str) and (not end or end not in text) for text in texts):
                allowed = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
                return f"{begin} ({allowed}) {self.text(end)}"
        value = f"{self.name}_value_{at}"
        self.rules[value] = json_rule(one.schema)
        if also := _python_values(one.schema, with_text=syntax.quotes is None):
            value = f"({value} | {also})"
        kinds = " | ".join(self.text(kind) for kind in syntax.other_kinds)
        head, kind, tail = between.partition(KIND)
        begin = self.text(before + head) + (f" ({kinds}) {self.text(tail)}" if kind else "")
        return f"{begin} {value} {self.text(syntax.after)}"


def _python_values(schema: Mapping[str, Any], *, with_text: bool) -> str:
    """Return what matches a value as Python writes it, which some templates do; empty if only JSON does."""
    if schema.get("type") == "boolean" and "const" not in schema and "enum" not in schema:
        return '"True" | "False"'
    return _PYTHON_TEXT if with_text and is_text(schema) and known_texts(schema) is None else ""


SpecialId = Callable[[str], int | None]  # the id of a text that is a special token

_ANY = r"/(?s:.*)/"
_NO_CALL = r"/(\s*[^\s\[{<`](?s:.*))?/"  # text that does not begin like a call without a mark
_TO_FUNCTIONS, _COMMENTARY = (
    " to=functions.",
    "<|channel|>commentary json<|message|>",
)  # as gpt-oss's template writes it
_MOST_VARYING = 64  # characters of an id, a number or a type
_GAP = r"/\n{0,2}/"  # before reasoning, and between it and what follows


def reply_grammar(format: ReplyFormat, use: ToolUse, answer: str, special: SpecialId) -> str:
    """Return the grammar of replies of this format that may call the tools of `use`.

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
        """Return what matches the reasoning, which is optional unless the prompt has opened it."""
        rest = f"{self._until('thought', format.closing)} {_GAP}"
        return rest if self._format.reasoning_opened else f"({_GAP} {self._text(format.opening)} {rest})?"

    def _body(self) -> str:
        """Return what matches the reply after its reasoning."""
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
        """Return what matches any text that does not spell out a mark that is a special token."""
        spelt = "|".join(re.escape(mark).replace("/", r"\/") for mark in self._special)
        self._rules["FREE"] = f"{_ANY} & ~/(?s:.*)({spelt})(?s:.*)/" if spelt else _ANY
        return "FREE"

    def _calls(self, syntax: CallSyntax, without: str = "") -> str:
        """Return what matches one or more calls; `without` is a beginning that is already matched."""
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
        # Brackets stand alone where JSON may begin with them too: the lexer takes the longest text that may follow.
        brackets = first[: len(first) - len(first.lstrip("[{"))] if self._answer else ""
        begin = " ".join(text(one) for one in (*brackets, first.removeprefix(brackets)))
        return f"{begin} call {more} {text(syntax.closing)}"

    def _rules_of(self, at: int) -> ArgumentRules:
        return ArgumentRules(self._rules, f"arguments_{at}", self._text, self._until)

    def _harmony(self) -> str:
        """Return what matches a reply in channels: reasoning, then an answer, or commentary and a call."""
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
        """Return what matches any text up to and including the first `mark`."""
        if any(special in mark for special in self._special):
            return f"{self._free()} {self._text(mark)}"
        self._rules[f"{rule}[lazy]"] = f"/(?s:.*){_escaped(mark)}/"
        return rule

    def _text(self, text: str) -> str:
        """Return what matches exactly this text: its special tokens by id, its `VARYING` characters by their class."""
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
    """Return the terminal of content that has a beginning of its own and is followed by no call."""
    return f"/{_escaped(syntax.content)}(?s:.*)/ & ~/(?s:.*){_escaped(syntax.separator)}(?s:.*)/"


def _escaped(text: str) -> str:
    """Return a text escaped for a regular expression of the grammar's language."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


# -- Calls written as text, in the way a model of a format writes them.

Calls = Sequence[tuple[str, Mapping[str, Any]]]  # names and arguments


def written_calls(syntax: CallSyntax, calls: Calls) -> str:
    """Return the text of calls, without content before it."""
    texts = (
        _numbered(syntax.before, at)
        + name
        + _numbered(syntax.between, at)
        + _arguments(syntax.arguments, arguments)
        + _numbered(syntax.after, at)
        for at, (name, arguments) in enumerate(calls)
    )
    return _numbered(syntax.opening, 0) + syntax.separator.join(texts) + syntax.closing


def is_written(syntax: CallSyntax, calls: Calls, text: str, *, whole: bool) -> bool:
    """Return whether a text has these calls in this syntax; not `whole`: one call without the marks around all."""
    calls = calls if whole else calls[:1]
    joined = syntax.separator.join(
        syntax.before + name + syntax.between + _arguments(syntax.arguments, arguments) + syntax.after
        for name, arguments in calls
    )
    pattern = re.escape(syntax.opening + joined + syntax.closing if whole else joined)
    for mark, characters in VARYING.items():
        pattern = pattern.replace(mark, f"{characters}+")
    return re.search(pattern, text) is not None


def _numbered(text: str, at: int) -> str:
    return text.replace(INDEX, str(at)).replace(ID, f"call_{at}")


def _arguments(syntax: ArgumentSyntax | None, arguments: Mapping[str, Any]) -> str:
    if syntax is None:
        return json.dumps(arguments, ensure_ascii=False)
    return syntax.separator.join(_argument(syntax, name, value) for name, value in arguments.items())


def _argument(syntax: ArgumentSyntax, name: str, value: Any) -> str:
    if isinstance(value, str) and syntax.quotes is not None:
        kind, text = syntax.text_kind, value.join(syntax.quotes)
    else:
        kind, text = next(iter(syntax.other_kinds), ""), json.dumps(value, ensure_ascii=False)
    return syntax.before + name + syntax.between.replace(KIND, kind) + text + syntax.after
