"""Translates GBNF, the grammars of llama.cpp (`root ::= ...`, also called EBNF), to the rules of llguidance.

A rule that refers to itself, directly or through others, becomes a rule of the parser. All others become expressions of
the lexer, and so do neighbours of them within a rule. The lexer takes as much text as an expression matches, so what
could go on with a character that may also follow is left to the parser, piece by piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from model.errors import GrammarError
from model.text.patterns import literal

_MAX_RULES, _MAX_NESTING, _MAX_COUNT = 2_000, 100, 10_000
_MAX_PASSES = 30  # over all rules, to find what may follow each
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DEFINED = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*(?:[ \t]|#[^\n]*)*::=")
_COUNT = re.compile(r"\{\s*(\d{1,9})?\s*(,)?\s*(\d{1,9})?\s*\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")
_OTHERS = 1 << 128  # the bit of all characters beyond ASCII
_ALL = (1 << 129) - 1
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '"\\[]^-/'}}


@dataclass(frozen=True, slots=True)
class _Text:
    """A piece of the lexer's language: a string or a class, the characters in it, and those that it begins with."""

    written: str
    characters: int  # a bit for each of ASCII, and one for all others
    first: int
    is_single: bool = True  # one character


@dataclass(frozen=True, slots=True)
class _Name:
    name: str
    at: int


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: Node
    count: str


Node = _Text | _Name | _Sequence | _Choice | _Repeat


def gbnf_rules(text: str) -> str:
    """Return the rules of a GBNF grammar in llguidance's language, from `start` on.

    Raises `GrammarError`, which names the line and the column.
    """
    try:
        return _Writer(text, _Parser(text).rules()).written()
    except RecursionError:
        raise GrammarError("the rules refer to each other too deeply") from None


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
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> Node:
        parts = list[Node]()
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if _DEFINED.match(self._text, self._at):
                break  # the next rule
            parts.append(self._counted(self._part()))
            self._skip()
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self) -> Node:
        character = self._text[self._at]
        if character == '"':
            return self._string()
        if character == "[":
            return self._class()
        if self._takes("."):
            return _Text("/(?s:.)/", _ALL, _ALL)
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

    def _group(self) -> Node:
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

    def _counted(self, part: Node) -> Node:
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

    def _string(self) -> Node:
        begin, characters = self._at, list[str]()
        self._at += 1
        while not self._takes('"'):
            characters.append(self._character(begin, "string"))
        bits = [_bits(ord(one), ord(one)) for one in characters]
        found = 0
        for one in bits:
            found |= one
        return _Text(json.dumps("".join(characters)), found, bits[0] if bits else 0, len(bits) == 1)

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
        bits = _ALL & ~bits | _OTHERS if negated else bits
        return _Text(f"/[{'^' if negated else ''}{''.join(pieces)}]/", bits, bits)

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


class _Sets:
    """What rules begin with, whether they may be empty, and what may follow them."""

    def __init__(self, rules: dict[str, Node], names: list[str]) -> None:
        self._rules = rules
        self._nullable = dict.fromkeys(names, False)
        self._first = dict.fromkeys(names, 0)
        self.follow = dict.fromkeys(names, 0)
        self._more: dict[str, int] = {}
        for _ in range(_MAX_PASSES):
            before = (dict(self._nullable), dict(self._first))
            for name in reversed(names):
                self._nullable[name] = self.is_nullable(rules[name])
                self._first[name] = self.first(rules[name])
            if before == (self._nullable, self._first):
                break
        else:
            self._first = dict.fromkeys(names, _ALL)
        for _ in range(_MAX_PASSES):
            known = dict(self.follow)
            for name in names:
                self._add_follow(rules[name], self.follow[name])
            if known == self.follow:
                return
        self.follow = dict.fromkeys(names, _ALL)

    def is_nullable(self, node: Node) -> bool:
        match node:
            case _Text(written):
                return written == '""'
            case _Name(name):
                return self._nullable[name]
            case _Sequence(parts):
                return all(map(self.is_nullable, parts))
            case _Choice(options):
                return any(map(self.is_nullable, options))
            case _Repeat(part, count):
                return count in "*?" or count.startswith("{0,") or self.is_nullable(part)

    def first(self, node: Node) -> int:
        match node:
            case _Text():
                return node.first
            case _Name(name):
                return self._first[name]
            case _Sequence(parts):
                return self.first_of(parts, 0)
            case _Choice(options):
                found = 0
                for one in options:
                    found |= self.first(one)
                return found
            case _Repeat(part):
                return self.first(part)

    def first_of(self, parts: tuple[Node, ...], follow: int) -> int:
        """Return what the parts begin with, or what follows them where they may be empty."""
        found = 0
        for part in parts:
            found |= self.first(part)
            if not self.is_nullable(part):
                return found
        return found | follow

    def _add_follow(self, node: Node, follow: int) -> None:
        match node:
            case _Name(name):
                self.follow[name] |= follow
            case _Sequence(parts):
                for part in reversed(parts):
                    self._add_follow(part, follow)
                    follow = self.first_of((part,), follow)
            case _Choice(options):
                for one in options:
                    self._add_follow(one, follow)
            case _Repeat(part):
                self._add_follow(part, follow | self.first(part))
            case _:
                return

    def more(self, node: Node) -> int:
        """Return the characters with which a text of an expression of the lexer may go on."""
        match node:
            case _Text():
                return 0
            case _Name(name):
                if name not in self._more:
                    self._more[name] = self.more(self._rules[name])
                return self._more[name]
            case _Sequence(parts):
                found = 0
                for part in reversed(parts):
                    found |= self.more(part)
                    if not self.is_nullable(part):
                        break
                    found |= self.first(part)
                return found
            case _Choice(options):
                return self._more_of(options)
            case _Repeat(part, count):
                least, _, most = count.strip("{}").partition(",")
                return self.more(part) | (0 if least == most else self.first(part))

    def _more_of(self, options: tuple[Node, ...]) -> int:
        found = seen = overlap = 0
        for one in options:
            overlap |= seen & self.first(one)
            seen |= self.first(one)
            found |= self.more(one)
        if any(map(self.is_nullable, options)):
            found |= seen
        single = all(isinstance(one, _Text) and one.is_single for one in options)
        return found if single or not overlap else found | self._characters(_Choice(options))

    def _characters(self, node: Node) -> int:
        """Return all characters of an expression."""
        found, waiting, seen = 0, [node], set[str]()
        while waiting:
            match waiting.pop():
                case _Text(_, characters):
                    found |= characters
                case _Name(name) if name not in seen:
                    seen.add(name)
                    waiting.append(self._rules[name])
                case _Sequence(parts) | _Choice(parts):
                    waiting += parts
                case _Repeat(part):
                    waiting.append(part)
        return found


class _Writer:
    """Writes the rules that `root` needs: `g0` and so on those of the parser, `G0` and so on those of the lexer."""

    def __init__(self, text: str, rules: dict[str, Node]) -> None:
        self._text = text
        self._rules = rules
        self._lines: list[str] = []
        self._regular: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._in_pieces: dict[str, None] = {}  # regular rules that the parser needs too

    def written(self) -> str:
        needed = self._needed()
        self._numbers = {name: number for number, name in enumerate(needed)}
        self._find_regular(needed)
        self._sets = _Sets(self._rules, needed)
        root = self._rule(_Name("root", 0), 0)
        for name in needed:
            if name in self._regular:
                self._lines.append(f"G{self._numbers[name]}: {self._expression(self._rules[name])}")
            else:
                self._lines.append(f"g{self._numbers[name]}: {self._rule(self._rules[name], self._sets.follow[name])}")
        written = set[str]()
        while left := [name for name in self._in_pieces if name not in written]:
            for name in left:
                written.add(name)
                self._lines.append(f"p{self._numbers[name]}: {self._rule(self._rules[name], self._sets.follow[name])}")
        return "\n".join([f"start: {root}", *self._lines, ""])

    def _needed(self) -> list[str]:
        """Return the names of the rules that can be reached; raises `GrammarError` for one that is not defined."""
        found, waiting = dict.fromkeys(["root"]), ["root"]
        while waiting:
            for used in _names_in(self._rules[waiting.pop()]):
                if used.name not in self._rules:
                    place = place_of(self._text, used.at - len(used.name))
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
            used = {one.name for one in _names_in(self._rules[name])}
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

    def _is_lexeme(self, node: Node, follow: int) -> bool:
        """Whether the lexer alone finds where a text of the node ends."""
        if not all(one.name in self._regular for one in _names_in(node)):
            return False
        return not self._sets.more(node) & follow

    def _expression(self, node: Node) -> str:
        """Return the lexer's expression of a node."""
        match node:
            case _Text(written):
                return written
            case _Name(name):
                return f"G{self._numbers[name]}"
            case _Sequence(parts):
                return f"({' '.join(map(self._expression, parts))})" if parts else '""'
            case _Choice(options):
                return f"({' | '.join(map(self._expression, options))})"
            case _Repeat(part, count):
                return f"({self._expression(part)}){count}"

    def _rule(self, node: Node, follow: int) -> str:
        """Return the right side of a parser's rule; `follow` has the characters that may come after it."""
        if self._is_lexeme(node, follow):
            return self._lexeme(node)
        match node:
            case _Sequence(parts):
                return self._sequence(parts, follow)
            case _Choice(options):
                plain = _Choice(tuple(one for one in options if self._is_lexeme(one, follow)))
                if not self._is_lexeme(plain, follow):
                    return f"({' | '.join(self._rule(one, follow) for one in options)})"
                others = [self._rule(one, follow) for one in options if one not in plain.options]
                return f"({' | '.join([*([self._lexeme(plain)] if plain.options else []), *others])})"
            case _Repeat(part, count):
                return f"({self._rule(part, follow | self._sets.first(part))}){count}"
            case _Name(name):
                if name not in self._regular:
                    return f"g{self._numbers[name]}"
                self._in_pieces[name] = None
                return f"p{self._numbers[name]}"
            case _:
                raise AssertionError("the lexer finds where a string ends")

    def _sequence(self, parts: tuple[Node, ...], follow: int) -> str:
        """Return parts of which neighbours are one lexeme as far as the lexer finds where that ends."""
        found, end = list[str](), len(parts)
        while end:
            begin = end
            while begin and self._is_lexeme(_Sequence(parts[begin - 1 : end]), follow):
                begin -= 1
            begin = min(begin, end - 1)
            run = _Sequence(parts[begin:end])
            if self._is_lexeme(run, follow):
                found.append(self._lexeme(run if len(run.parts) > 1 else run.parts[0]))
            else:
                found.append(self._rule(parts[begin], follow))
            follow = self._sets.first_of(run.parts, follow)
            end = begin
        return f"({' '.join(reversed(found))})"

    def _lexeme(self, node: Node) -> str:
        if isinstance(node, _Name):
            return f"G{self._numbers[node.name]}"
        expression = self._expression(node)
        if expression == '""':
            return expression
        name = f"L{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name


def _names_in(node: Node) -> Iterator[_Name]:
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
