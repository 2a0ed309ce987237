"""Translates GBNF, the grammars of llama.cpp (`root ::= ...`, also called EBNF), to the rules of llguidance.

A rule that refers to itself, directly or through others, becomes a rule of the parser. All others become parts of the
lexer's expressions, and so do neighbours of them within a rule: such an expression takes as much text as it can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from model.errors import GrammarError
from model.text.patterns import literal

_MAX_RULES, _MAX_NESTING, _MAX_COUNT = 2_000, 100, 10_000
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DEFINED = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*(?:[ \t]|#[^\n]*)*::=")
_COUNT = re.compile(r"\{\s*(\d{1,9})?\s*(,)?\s*(\d{1,9})?\s*\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '"\\[]^-/'}}


@dataclass(frozen=True, slots=True)
class _Text:
    """A piece of the lexer's language: a string or a class."""

    written: str


@dataclass(frozen=True, slots=True)
class _Name:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    count: str


_Node = _Text | _Name | _Sequence | _Choice | _Repeat


def gbnf_rules(text: str) -> str:
    """Return the rules of a GBNF grammar in llguidance's language, from `start` on.

    Raises `GrammarError`, which names the line and the column.
    """
    rules = _Parser(text).rules()
    return _Writer(text, rules).written()


def place_of(text: str, at: int) -> str:
    """Return a place in a grammar as messages name it."""
    line = text.count("\n", 0, at)
    return f"line {line + 1}, column {at - (text.rfind(chr(10), 0, at) + 1) + 1}"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        found = dict[str, _Node]()
        self._skip()
        while self._at < len(self._text):
            begin, name = self._at, self._name()
            self._skip()
            if not self._takes("::="):
                raise self._error(f"'::=' is expected after the name of a rule, {name[:64]}")
            if name in found:
                raise self._error(f"the rule {name[:64]} stands twice", begin)
            if len(found) == _MAX_RULES:
                raise self._error(f"there are more than {_MAX_RULES} rules", begin)
            self._skip()
            found[name] = self._choice()
            if self._at < len(self._text) and not _DEFINED.match(self._text, self._at):
                raise self._error(f"{self._text[self._at]!r} is not expected here")
        if "root" not in found:
            raise GrammarError("the rule root is missing, with which a grammar begins")
        return found

    def _error(self, problem: str, at: int | None = None) -> GrammarError:
        return GrammarError(f"{problem} ({place_of(self._text, self._at if at is None else at)})")

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _takes(self, expected: str) -> bool:
        if self._text.startswith(expected, self._at):
            self._at += len(expected)
            return True
        return False

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error("the name of a rule is expected")
        self._at = found.end()
        return found[0]

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._takes("|"):
            self._skip()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Node:
        parts = list[_Node]()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if _DEFINED.match(self._text, self._at):
                break  # the next rule
            parts.append(self._counted(self._part()))
            self._skip()
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self) -> _Node:
        character = self._text[self._at]
        if character == '"':
            return self._string()
        if character == "[":
            return self._class()
        if self._takes("."):
            return _Text("/(?s:.)/")
        if character == "(":
            return self._group()
        if character in "<!":
            raise self._error("tokens, as in <...>, are not served in a grammar")
        return _Name(self._name_used(), self._at)

    def _name_used(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error(f"{self._text[self._at]!r} is not expected here")
        self._at = found.end()
        return found[0]

    def _group(self) -> _Node:
        begin = self._at
        self._at += 1
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error(f"groups are nested more than {_MAX_NESTING} deep")
        self._skip()
        found = self._choice()
        if not self._takes(")"):
            raise self._error("the group has no ')'", begin)
        self._depth -= 1
        return found

    def _counted(self, part: _Node) -> _Node:
        self._skip()
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            self._at += 1
            return self._counted(_Repeat(part, self._text[self._at - 1]))
        if not self._text.startswith("{", self._at):
            return part
        found = _COUNT.match(self._text, self._at)
        if found is None or (found[1] is None and found[3] is None):
            raise self._error("a count is expected, as in {2}, {2,} or {2,3}")
        least = int(found[1] or 0)
        most = least if found[2] is None else None if found[3] is None else int(found[3])
        if max(least, most or 0) > _MAX_COUNT:
            raise self._error(f"a count may be {_MAX_COUNT} at most")
        if most is not None and most < least:
            raise self._error("the count has a greater minimum than maximum")
        self._at = found.end()
        return self._counted(_Repeat(part, f"{{{least},{'' if most is None else most}}}"))

    def _string(self) -> _Node:
        begin, characters = self._at, list[str]()
        self._at += 1
        while not self._takes('"'):
            characters.append(self._character(begin, "string"))
        return _Text(json.dumps("".join(characters)))

    def _class(self) -> _Node:
        begin, pieces = self._at, list[str]()
        self._at += 1
        negated = self._takes("^")
        while not self._takes("]"):
            first = self._character(begin, "class")
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._character(begin, "class")
                if last < first:
                    raise self._error("the range of a class is out of order", begin)
                pieces.append(f"{literal(first)}-{literal(last)}")
            else:
                pieces.append(literal(first))
        if not pieces:
            raise self._error("the class is empty", begin)
        return _Text(f"/[{'^' if negated else ''}{''.join(pieces)}]/")

    def _character(self, begin: int, kind: str) -> str:
        """Take one character of a string or a class, which may be escaped."""
        if self._at >= len(self._text) or (kind == "string" and self._text[self._at] == "\n"):
            raise self._error(f"the {kind} has no end", begin)
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        if (code := _CODE.match(self._text, self._at)) is not None:
            value = int(next(group for group in code.groups() if group), 16)
            if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
                raise self._error("the escape stands for no character")
            self._at = code.end()
            return chr(value)
        escaped = _ESCAPES.get(self._text[self._at : self._at + 1])
        if escaped is None:
            raise self._error("the escape is not known")
        self._at += 1
        return escaped


@dataclass
class _Writer:
    """Writes the rules that `root` needs: `g0` and so on those of the parser, `G0` and so on those of the lexer."""

    text: str
    rules: dict[str, _Node]
    _names: dict[str, str] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)
    _regular: set[str] = field(default_factory=set)

    def written(self) -> str:
        needed = self._needed()
        self._find_regular(needed)
        for number, name in enumerate(needed):
            self._names[name] = f"{'G' if name in self._regular else 'g'}{number}"
        for name in needed:
            node = self.rules[name]
            right = self._expression(node) if name in self._regular else self._rule(node)
            self._lines.append(f"{self._names[name]}: {right}")
        return "\n".join([f"start: {self._names['root']}", *self._lines, ""])

    def _needed(self) -> list[str]:
        """Return the names of the rules that can be reached; raises `GrammarError` for one that is not defined."""
        found, waiting = dict.fromkeys(["root"]), ["root"]
        while waiting:
            for used in _names_in(self.rules[waiting.pop()]):
                if used.name not in self.rules:
                    place = place_of(self.text, used.at - len(used.name))
                    raise GrammarError(f"the rule {used.name[:64]} is not defined ({place})")
                if used.name not in found:
                    found[used.name] = None
                    waiting.append(used.name)
        return list(found)

    def _find_regular(self, needed: list[str]) -> None:
        """Find the rules that need no parser: all that they refer to are such rules."""
        users = dict[str, list[str]]()
        left = dict[str, int]()
        for name in needed:
            used = {one.name for one in _names_in(self.rules[name])}
            left[name] = len(used)
            for one in used:
                users.setdefault(one, []).append(name)
        waiting = [name for name in needed if left[name] == 0]
        while waiting:
            name = waiting.pop()
            self._regular.add(name)
            for user in users.get(name, ()):
                left[user] -= 1
                if left[user] == 0:
                    waiting.append(user)

    def _is_regular(self, node: _Node) -> bool:
        return all(one.name in self._regular for one in _names_in(node))

    def _expression(self, node: _Node) -> str:
        """Return the lexer's expression of a node."""
        match node:
            case _Text(written):
                return written
            case _Name(name):
                return self._names[name]
            case _Sequence(parts):
                return f"({' '.join(map(self._expression, parts))})" if parts else '""'
            case _Choice(options):
                return f"({' | '.join(map(self._expression, options))})"
            case _Repeat(part, count):
                return f"({self._expression(part)}){count}"

    def _rule(self, node: _Node) -> str:
        """Return the right side of a parser's rule; parts next to each other that need no parser become one lexeme."""
        if self._is_regular(node):
            return self._lexeme(node)
        match node:
            case _Sequence(parts):
                found, run = list[str](), list[_Node]()
                for part in parts:
                    if self._is_regular(part):
                        run.append(part)
                        continue
                    found += [self._lexeme(_Sequence(tuple(run)))] if run else []
                    run = []
                    found.append(self._rule(part))
                found += [self._lexeme(_Sequence(tuple(run)))] if run else []
                return f"({' '.join(found)})"
            case _Choice(options):
                plain = [one for one in options if self._is_regular(one)]
                others = [self._rule(one) for one in options if not self._is_regular(one)]
                return f"({' | '.join([*([self._lexeme(_Choice(tuple(plain)))] if plain else []), *others])})"
            case _Repeat(part, count):
                return f"({self._rule(part)}){count}"
            case _Name(name):
                return self._names[name]
            case _:
                raise AssertionError("a piece of text needs no parser")

    def _lexeme(self, node: _Node) -> str:
        if isinstance(node, _Name):
            return self._names[node.name]
        expression = self._expression(node)
        if expression == '""':
            return expression
        name = f"L{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name


def _names_in(node: _Node) -> Iterator[_Name]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        match one:
            case _Name():
                yield one
            case _Sequence(parts) | _Choice(parts):
                waiting += reversed(parts)
            case _Repeat(part):
                waiting.append(part)
