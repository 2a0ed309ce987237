"""Reads GBNF, the grammars of llama.cpp, into a tree of rules. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.model.errors import GrammarError
from triptych.model.text.patterns import literal

_MAX_RULES, _MAX_NESTING, _MAX_COUNT = 2_000, 100, 10_000
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DEFINED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*[ \t]*::=")
_COUNT = re.compile(r"\{\s*(?:(\d{1,9})\s*)?(?:(,)\s*(?:(\d{1,9})\s*)?)?\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '"\\[]^-/'}}
_OTHERS = 1 << 128  # the bit of all characters beyond ASCII
ALL = (1 << 129) - 1


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the lexer's language: a string or a class, the characters in it, and those that it begins with."""

    written: str
    characters: int  # a bit for each of ASCII, and one for all others
    first: int
    is_single: bool = True  # one character


@dataclass(frozen=True, slots=True)
class Name:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    count: str


EMPTY = Text('""', 0, 0, is_single=False)
Node = Text | Name | Sequence | Choice | Repeat


def parsed(text: str) -> dict[str, Node]:
    """Return the rules of a grammar by their names; raises `GrammarError`, which names the line and the column."""
    return _Parser(text).rules()


def _bits(first: int, last: int) -> int:
    """Return the bits of a range of characters."""
    ascii_part = ((1 << (min(last, 127) + 1)) - 1) & ~((1 << first) - 1) if first < 128 else 0
    return ascii_part | (_OTHERS if last > 127 else 0)


def place_of(text: str, at: int) -> str:
    """Return a place in a grammar as messages name it."""
    line = text.count("\n", 0, at)
    return f"line {line + 1}, column {at - (text.rfind(chr(10), 0, at) + 1) + 1}"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        found = dict[str, Node]()
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

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._takes("|"):
            self._skip()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = list[Node]()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if _DEFINED.match(self._text, self._at):
                break  # the next rule
            parts.append(self._counted(self._part()))
            self._skip()
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node:
        character = self._text[self._at]
        if character == '"':
            return self._string()
        if character == "[":
            return self._class()
        if self._takes("."):
            return Text("/(?s:.)/", ALL, ALL)
        if character == "(":
            return self._group()
        if character == "/":
            raise self._error("expressions, as in /.../, are not served in GBNF; write characters in [...]")
        if character in "<!":
            raise self._error("tokens, as in <...>, are not served in a grammar")
        return Name(self._name_used(), self._at)

    def _name_used(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error(f"{self._text[self._at]!r} is not expected here")
        self._at = found.end()
        return found[0]

    def _group(self) -> Node:
        begin = self._at
        self._at += 1
        if self._text.startswith("?", self._at):
            raise self._error("lookaheads and their like, as in (?...), are not served", begin)
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error(f"groups are nested more than {_MAX_NESTING} deep")
        self._skip()
        found = self._choice()
        if not self._takes(")"):
            raise self._error("the group has no ')'", begin)
        self._depth -= 1
        return found

    def _counted(self, part: Node) -> Node:
        self._skip()
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            self._at += 1
            return self._counted(Repeat(part, self._text[self._at - 1]))
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
        if most == 0:  # llguidance refuses it
            return self._counted(EMPTY)
        return self._counted(Repeat(part, f"{{{least},{'' if most is None else most}}}"))

    def _string(self) -> Node:
        begin, characters = self._at, list[str]()
        self._at += 1
        while not self._takes('"'):
            characters.append(self._character(begin, "string"))
        bits = [_bits(ord(one), ord(one)) for one in characters]
        found = 0
        for one in bits:
            found |= one
        return Text(json.dumps("".join(characters)), found, bits[0] if bits else 0, len(bits) == 1)

    def _class(self) -> Node:
        begin, pieces, bits = self._at, list[str](), 0
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
                bits |= _bits(ord(first), ord(last))
            else:
                pieces.append(literal(first))
                bits |= _bits(ord(first), ord(first))
        if not pieces:
            raise self._error("the class is empty", begin)
        bits = ALL & ~bits | _OTHERS if negated else bits
        return Text(f"/[{'^' if negated else ''}{''.join(pieces)}]/", bits, bits)

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


def names_in(node: Node) -> Iterator[Name]:
    waiting = [node]
    while waiting:
        one = waiting.pop()
        match one:
            case Name():
                yield one
            case Sequence(parts) | Choice(parts):
                waiting += reversed(parts)
            case Repeat(part):
                waiting.append(part)
