"""Rewrites a client's Lark grammar for llguidance: names are its own, and expressions and schemas mean what they do
elsewhere in this service.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from triptych.model.errors import GrammarError
from triptych.model.text.endless_rules import Parts, endless_rule, lark_rule
from triptych.model.text.gbnf_syntax import place_of
from triptych.model.text.patterns import whole_pattern

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<directive>%[a-z_]+)
    |(?P<name>[?!]?[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<count>\{\s*(?:\d+\s*)?(?:,\s*(?:\d+\s*)?)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<other>->|[:|()*+?&~,.\[\]]|\d+)""",
    re.VERBOSE,
)
_IMPORT = re.compile(r"%import[^\n]*")
_COMMON = re.compile(r"%import\s+common\b")
_IMPORTED = re.compile(r"(?:\.|->\s*|\(|,\s*)([A-Z_][A-Z0-9_]*)(?=\s*(?:,|\)|$))")
_IS_LARK = re.compile(r"(?m)^[^\S\n]*(?:%[a-z]|[?!]?[A-Za-z_][A-Za-z0-9_-]*(?:\[[^\]\n]*\])?[ \t]*:(?!:))")
_OPTIONS = re.compile(r"\[([^\]\n]{0,200})\]")
_PRIORITY = re.compile(r"\.-?\d+[ \t]*:")
_MAX_TOKENS = 50_000
_UNKNOWN = {
    "<": "tokens, as in <...>, are not served",
    "@": "other grammars, as in @name, are not served",
    "{": "templates, as in name{...}, are not served",
    '"': "the string has no end",
    "'": "strings are written in double quotes",
    "/": "the expression has no end",
}

JsonRule = Callable[[Any], str]


def is_lark(text: str) -> bool:
    """Return whether a grammar is Lark's, whose rules have `:`, and not GBNF, whose rules have `::=`."""
    return "::=" not in text and _IS_LARK.search(text) is not None


def lark_rules(text: str, json_rule: JsonRule) -> str:
    """Return the rules in llguidance's language, from `start` on; raises `GrammarError` with the line and column."""
    return _Rewriter(text, json_rule).rewritten()


class _Rewriter:
    def __init__(self, text: str, json_rule: JsonRule) -> None:
        self._text = text
        self._json_rule = json_rule
        self._at = 0
        self._imported = set[str]()
        self._defined = dict[str, int]()
        self._used = dict[str, int]()
        self._before = ""  # the token before
        self._is_terminal = False  # what is being defined
        self._parts: Parts = []  # of it
        self._rules = dict[str, Parts]()

    def rewritten(self) -> str:
        found = list[str]()
        for line in _IMPORT.findall(self._text):
            self._imported.update(_IMPORTED.findall(line))
        while self._at < len(self._text):
            if len(found) > _MAX_TOKENS:
                raise self._error(f"the grammar has more than {_MAX_TOKENS} parts")
            found.append(self._next())
        if "start" not in self._defined:
            raise GrammarError("the rule start is missing, with which a Lark grammar begins")
        for name, at in self._used.items():
            self._at = at
            if name not in self._defined:
                raise self._error(f"the rule {name[:64]} is not defined")
        if (
            endless := endless_rule({name: lark_rule(parts) for name, parts in self._rules.items()}, "start")
        ) is not None:
            self._at = self._defined[endless]
            raise self._error(f"a text of the rule {endless[:64]} never ends: it holds another one")
        return f"start: g_start\n{''.join(found)}\n"

    def _error(self, problem: str) -> GrammarError:
        return GrammarError(f"{problem} ({place_of(self._text, self._at)})")

    def _next(self) -> str:
        """Take the next token, and return what it becomes."""
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            character = self._text[self._at]
            raise self._error(_UNKNOWN.get(character, f"{character!r} is not expected here"))
        written = token[0]
        match token.lastgroup:
            case "space":
                result = "".join(character for character in written if character == "\n") or " "
            case "regex":
                result = self._regex(written)
            case "directive":
                return self._directive(written)
            case "name":
                return self._name(token)
            case "count":
                result = re.sub(r"\s", "", written)
                result = "~0" if result in ("{0}", "{0,0}") else result  # llguidance refuses the other form
            case "string":
                result = self._string(written)
            case _:
                result = written
        self._at = token.end()
        if token.lastgroup != "space" and written not in (":", "->"):
            self._parts.append((str(token.lastgroup), written))
        self._before = written if token.lastgroup != "space" else self._before
        return result

    def _regex(self, written: str) -> str:
        end = written.rindex("/")
        flags = written[end + 1 :]
        try:
            return f"/{whole_pattern((f'(?{flags})' if flags else '') + written[1:end])}/"
        except GrammarError as error:
            raise self._error(f"an expression cannot be followed: {error}") from None

    def _string(self, written: str) -> str:
        text = written.removesuffix("i")
        try:
            json.loads(text)
        except ValueError:
            raise self._error("the string has an escape that JSON does not know") from None
        return written

    def _name(self, token: re.Match[str]) -> str:
        name = token[0].lstrip("?!")
        options = _OPTIONS.match(self._text, token.end())
        after = options.end() if options is not None else token.end()
        if options is not None and options[1].strip() not in ("lazy", "capture", ""):
            raise self._error("of the options of a rule only lazy is served")
        if _PRIORITY.match(self._text, after):
            raise self._error("priorities, as in NAME.2, are not served: each terminal that fits is tried")
        if options is not None and name.isupper() and options[1].strip():
            raise self._error("lazy is served for rules, whose names have small letters, and not for terminals")
        is_defined = re.compile(r"[ \t]*:").match(self._text, after) is not None
        if is_defined and name in self._defined:
            raise self._error(f"the rule {name[:64]} stands twice")
        if is_defined:
            self._defined[name] = self._at
            self._parts = self._rules[name] = []
            self._is_terminal = name.isupper()
        elif self._is_terminal and not name.isupper():
            raise self._error(f"a terminal cannot use the rule {name[:64]}, only terminals")
        elif name not in self._imported and self._before != "->":
            self._used.setdefault(name, self._at)
        if not is_defined and self._before != "->":
            self._parts.append(("name", name))
        self._before = name
        if options is not None and not is_defined:  # a part that may be left out, in square brackets
            options, after = None, token.end()
        self._at = after
        if name in self._imported:
            return name
        own = f"{'G' if name.isupper() else 'g'}_{name.replace('-', '__')}"
        return f"{own}[lazy]" if options is not None and options[1].strip() == "lazy" else own

    def _directive(self, written: str) -> str:
        begin = self._at
        if written in ("%import", "%ignore"):
            self._parts = []  # of no rule
        if written == "%import":
            line = _IMPORT.match(self._text, begin)
            assert line is not None
            if not _COMMON.match(line[0]):
                raise self._error("%import is served for common alone, as in %import common.INT")
            self._at = line.end()
            return line[0].partition("//")[0]
        if written == "%ignore":
            self._at += len(written)
            return written
        if written not in ("%json", "%llguidance"):
            raise self._error(f"{written} is not served")
        space = re.compile(r"\s*").match(self._text, begin + len(written))
        assert space is not None
        try:
            value, end = json.JSONDecoder().raw_decode(self._text, space.end())
        except (ValueError, RecursionError):
            raise self._error(f"{written} needs an object of JSON") from None
        breaks = "\n" * self._text.count("\n", begin, end)
        if not isinstance(value, dict):
            raise self._error(f"{written} needs an object of JSON")
        if written == "%llguidance":
            if value.keys() - {"no_forcing"}:
                raise self._error("the options of %llguidance are not served")
            self._at = end
            return breaks
        try:
            rule = self._json_rule(value)
        except GrammarError as error:
            raise self._error(f"%json cannot be followed: {error}") from None
        self._parts.append(("json", written))
        self._at = end
        return f"{rule}{breaks}"
