"""Translates regular expressions to the syntax of llguidance, Rust's, so that they mean what JavaScript says.

JSON Schema's `pattern` is JavaScript's by its standard, and Python's `re` differs little. What the languages read in
different ways, and what no finite automaton matches (lookarounds, references to groups), is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from triptych.model.errors import GrammarError

MAX_NESTING = 200  # of groups
LONGEST = 65_536  # characters that counts and lengths allow; each takes one of the lexer's 100,000 states
_MAX_ALTERNATIVES = 256  # into which a pattern with anchors within its groups is divided
_MAX_PARTS = 500_000  # of all of them together
_ANY = "(?s:.*)"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_SPACES = r"\t\n\x{0b}\x{0c}\r\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_SETS = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}  # JavaScript's
# What JavaScript or Python have in these sets, and what both have.
_WIDE_SETS = {"d": r"\p{Nd}", "w": r"_\p{L}\p{N}", "s": rf"{_SPACES}\x{{1c}}-\x{{1f}}\x{{85}}"}
_NARROW_SETS = _SETS | {"s": _SPACES.removesuffix(r"\x{feff}")}
_BY_NUMBER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_UNICODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|U([0-9A-Fa-f]{8})")
_PROPERTY = re.compile(r"[pP](?:\{\^?[A-Za-z_=:0-9 ]{1,64}\}|[A-Z])")
_CONTROL = re.compile(r"\\x\{([0-9a-f]{1,2})\}")
_COUNT = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{0,9}))?\}")
_OPEN_COUNT = re.compile(r"\{,[0-9]+\}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_]\w*>")
_FLAGS = re.compile(r"\?([a-z]*)(?:-([a-z]+))?([:)])")
_POSIX = re.compile(r"\[[:.=][A-Za-z^]+[:.=]\]")
_REFUSED_GROUPS = {
    "?=": "a lookahead, (?=",
    "?!": "a negative lookahead, (?!",
    "?<=": "a lookbehind, (?<=",
    "?<!": "a negative lookbehind, (?<!",
    "?>": "an atomic group, (?>",
    "?(": "a condition, (?(",
    "?P=": "a reference to a group, (?P=",
    "?P>": "a call of a group, (?P>",
    "?R": "recursion, (?R",
}


@dataclass(frozen=True, slots=True)
class _Anchor:
    """The beginning or the end of the text."""

    at_start: bool


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives, each a sequence of parts."""

    alternatives: tuple[tuple[_Part, ...], ...]
    has_anchor: bool


@dataclass(frozen=True, slots=True)
class _Repeated:
    part: _Part
    count: str


_Part = str | _Anchor | _Group | _Repeated  # a string is a piece of Rust's syntax that stands for itself


# Of `.`, \\d, \\w and \\s: what JavaScript has, what JavaScript or Python has, what both have.
Reading = Literal["javascript", "widest", "narrowest"]


def whole_pattern(pattern: str) -> str:
    """Return the Rust expression of a pattern that matches a whole text; raises `GrammarError`."""
    return _written(_Parser(pattern, in_json=False).parse(), searched=False)


def search_pattern(pattern: str, reading: Reading = "javascript") -> str:
    """Return the Rust expression, with anchors, of the texts that a JSON schema's `pattern` is found in.

    Raises `GrammarError`.
    """
    return f"^(?:{_written(_Parser(pattern, in_json=True, reading=reading).parse(), searched=True)})$"


def needs_number(text: str) -> bool:
    """Whether JSON writes a character of the text by its number alone. Such escapes are not allowed in outputs."""
    return _BY_NUMBER.search(text) is not None


def literal(text: str) -> str:
    """Return the Rust expression of exactly this text."""
    return "".join(map(_character, text))


def _character(character: str) -> str:
    """Return a character so that no syntax, neither Rust's nor of what is around, sees more in it."""
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise GrammarError("a half of a surrogate pair is no character")
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


class _Parser:
    def __init__(self, pattern: str, *, in_json: bool, reading: Reading = "javascript") -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._in_json = in_json  # outside of schemas \A, \Z and \z are anchors, as in Python and Rust
        self._reading: Reading = reading
        self._flags: frozenset[str] = frozenset()

    def parse(self) -> _Group:
        group = self._alternatives()
        if self._at < len(self._text):
            raise self._error("the ')' opens nowhere")
        if _shortest(group) > LONGEST:
            raise GrammarError(f"only texts of more than {LONGEST:,} characters would match, which are not served")
        return group

    def _error(self, problem: str, at: int | None = None) -> GrammarError:
        return GrammarError(f"{problem} (character {1 + (self._at if at is None else at)})")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _takes(self, expected: str) -> bool:
        if self._text.startswith(expected, self._at):
            self._at += len(expected)
            return True
        return False

    def _alternatives(self) -> _Group:
        flags, sequences, has_anchor = self._flags, [], False
        while True:
            sequence = list[_Part]()
            while self._next() not in ("", "|", ")"):
                part = self._repeated(self._atom())
                if part is not None:
                    sequence.append(part)
                    has_anchor = has_anchor or _has_anchor(part)
            sequences.append(tuple(sequence))
            if not self._takes("|"):
                break
        self._flags = flags
        return _Group(tuple(sequences), has_anchor)

    def _repeated(self, part: _Part | None) -> _Part | None:
        at = self._at
        count = self._count()
        if count is None:
            return part
        if part is None or _has_anchor(part):
            raise self._error("there is nothing to repeat before the count", at)
        self._takes("?")  # a lazy count matches the same texts
        if self._next() == "+":
            raise self._error("a possessive count is not served")
        if self._next() in ("*", "?") or _COUNT.match(self._text, self._at):
            raise self._error("two counts follow each other")
        return _Repeated(part, count)

    def _count(self) -> str | None:
        if self._next() in ("*", "+", "?"):
            self._at += 1
            return self._text[self._at - 1]
        if _OPEN_COUNT.match(self._text, self._at):
            raise self._error("{,n} means different things in different languages; write {0,n}")
        found = _COUNT.match(self._text, self._at)
        if found is None:
            return None
        if found[3] and int(found[3]) < int(found[1]):
            raise self._error("the count has a greater minimum than maximum")
        self._at = found.end()
        if found[3] and int(found[3]) > LONGEST and self._reading != "widest":
            return f"{{{found[1]},{max(LONGEST, int(found[1]))}}}"
        return found[0]

    def _atom(self) -> _Part | None:
        """Return the next part; None for flags and comments, which match nothing of their own."""
        character = self._next()
        if character in ("*", "+", "?"):
            raise self._error(f"there is nothing to repeat before {character!r}")
        self._at += 1
        match character:
            case "(":
                return self._group()
            case "[":
                return self._folded(self._class())
            case "\\":
                return self._escape()
            case ".":
                return "(?s:.)" if "s" in self._flags else r"[^\n]" if self._reading == "widest" else _DOT
            case "^":
                return _Anchor(at_start=True)
            case "$":
                return _Anchor(at_start=False)
            case _:
                return self._one(character)

    def _one(self, character: str) -> str:
        """Return the piece of a character that stands for itself."""
        if self._in_json and needs_number(character):  # llguidance matches nothing in its place
            raise self._error("a control character that JSON writes by its number is not served")
        return self._folded(_character(character))

    def _folded(self, piece: str) -> str:
        return f"(?i:{piece})" if "i" in self._flags else piece

    def _group(self) -> _Part | None:
        begin, flags = self._at - 1, self._flags
        for opening, name in _REFUSED_GROUPS.items():
            if self._text.startswith(opening, self._at):
                raise self._error(f"{name}, is not served", begin)
        if self._takes("?#"):
            end = self._text.find(")", self._at)
            if end < 0:
                raise self._error("the comment has no end", begin)
            self._at = end + 1
            return None
        if (named := _GROUP_NAME.match(self._text, self._at)) is not None:
            self._at = named.end()
        elif (found := _FLAGS.match(self._text, self._at)) is not None:
            self._at = found.end()
            self._set_flags(found[1], found[2] or "", begin)
            if found[3] == ")":
                return None
        elif self._next() == "?":
            raise self._error("the group begins in a way that is not served", begin)
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._error(f"groups are nested more than {MAX_NESTING} deep", begin)
        group = self._alternatives()
        if not self._takes(")"):
            raise self._error("the group has no ')'", begin)
        self._depth -= 1
        self._flags = flags
        return group

    def _set_flags(self, on: str, off: str, at: int) -> None:
        for flag in on:
            if flag not in "isu":
                raise self._error(f"the flag {flag} is not served", at)
        self._flags = (self._flags | set(on)) - set(off)

    def _escape(self) -> _Part:
        at, character = self._at - 1, self._next()
        anchors = {} if self._in_json else {"A": True, "Z": False, "z": False}
        if character in anchors and character:
            self._at += 1
            return _Anchor(at_start=anchors[character])
        if character in ("b", "B"):
            raise self._error(f"a word boundary, \\{character}, is not served", at)
        if character.isdigit() and character != "0":
            raise self._error(f"a reference to a group, \\{character}, is not served", at)
        if character == "k":
            raise self._error("a reference to a group, \\k, is not served", at)
        piece = self._set(at, self._reading)
        return self._folded(f"[{piece}]") if piece is not None else self._one(self._single(at))

    def _set(self, at: int, reading: Reading) -> str | None:
        """Take the letter of an escape that stands for several characters; return what is in a class for it."""
        letter = self._next()
        if letter.lower() in _SETS and letter:
            self._at += 1
            negated = letter.isupper()
            sets = {"widest": _WIDE_SETS, "narrowest": _NARROW_SETS}.get(_turned(reading, negated), _SETS)
            return f"[^{sets[letter.lower()]}]" if negated else sets[letter]
        if letter in ("p", "P"):
            found = _PROPERTY.match(self._text, self._at)
            if found is None:
                raise self._error(f"\\{letter} needs the name of a property, as in \\p{{L}}", at)
            self._at = found.end()
            return f"\\{found[0]}"
        return None

    def _single(self, at: int) -> str:
        """Take an escape that stands for one character, and return it."""
        character = self._next()
        if not character:
            raise self._error("the pattern ends with a backslash", at)
        if (code := self._code()) is not None:
            if 0xD800 <= code < 0xDC00 and self._takes("\\") and (low := self._code()) is not None:
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise self._error("the escape stands for no character", at)
            return chr(code)
        self._at += 1
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character == "0" and not self._next().isdigit():
            return "\0"
        if character == "c" and self._next().isascii() and self._next().isalpha():
            self._at += 1
            return chr(ord(self._text[self._at - 1]) % 32)
        if character.isalnum():
            raise self._error(f"the escape \\{character} is not served", at)
        return character

    def _code(self) -> int | None:
        found = _UNICODE.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return int(next(group for group in found.groups() if group), 16)

    def _class(self) -> str:
        """Return a class; within it, as in JavaScript and Python, '[', '&&', '--' and '~~' are characters."""
        begin = self._at - 1
        if (posix := _POSIX.match(self._text, self._at)) is not None:
            raise self._error(f"{posix[0]} is not served in a class; write its characters", begin)
        negated = self._takes("^")
        if self._next() == "]":
            raise self._error("']' first in a class means different things in different languages; escape it", begin)
        reading, pieces = _turned(self._reading, negated), list[str]()
        while not self._takes("]"):
            pieces.append(self._class_piece(begin, reading))
        if self._in_json and len(set(pieces)) == 1 and not negated and (code := _CONTROL.fullmatch(pieces[0])):
            self._one(chr(int(code[1], 16)))
        return f"[{'^' if negated else ''}{''.join(pieces)}]"

    def _class_piece(self, begin: int, reading: Reading) -> str:
        first, is_set = self._class_item(begin, reading)
        if self._next() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
            return first if is_set else _character(first)
        self._at += 1
        last, is_last_set = self._class_item(begin, reading)
        if is_set or is_last_set:
            raise self._error("a range in a class needs a character on both sides of '-'")
        if last < first:
            raise self._error(f"the range {first}-{last} of a class is out of order")
        return f"{_character(first)}-{_character(last)}" if first < last else _character(first)

    def _class_item(self, begin: int, reading: Reading) -> tuple[str, bool]:
        """Return the next character of a class, or a set of several and True."""
        at, character = self._at, self._next()
        if not character:
            raise self._error("the class has no ']'", begin)
        if (posix := _POSIX.match(self._text, at)) is not None:
            raise self._error(f"{posix[0]} is not served in a class; write its characters", at)
        self._at += 1
        if character != "\\":
            return character, False
        if self._takes("b"):
            return "\b", False
        found = self._set(at, reading)
        return (found, True) if found is not None else (self._single(at), False)


def _turned(reading: Reading, negated: bool) -> Reading:
    """Return the reading of what is within a complement."""
    others: dict[Reading, Reading] = {"widest": "narrowest", "narrowest": "widest"}
    return others.get(reading, reading) if negated else reading


def _shortest(part: _Part) -> int:
    """Return the number of characters of the shortest text of a part."""
    match part:
        case _Group(alternatives):
            return min(sum(map(_shortest, sequence)) for sequence in alternatives)
        case _Repeated(inner, count):
            least = "0" if count in "*?" else "1" if count == "+" else count.strip("{}").partition(",")[0]
            return int(least) * _shortest(inner)
        case _:
            return isinstance(part, str)


def _has_anchor(part: _Part) -> bool:
    return isinstance(part, _Anchor) or (isinstance(part, _Group) and part.has_anchor)


def _written(group: _Group, *, searched: bool) -> str:
    """Return the expression of whole texts. Anchors are resolved: they may stand where the text begins or ends."""
    if not group.has_anchor:
        inner = _text(group)
        return f"{_ANY}{inner}{_ANY}" if searched else inner
    found, parts = list[str](), 0
    waiting = [(False, sequence, False) for sequence in reversed(group.alternatives)]
    while waiting:
        begins, sequence, ends = waiting.pop()
        parts += len(sequence)
        if len(found) + len(waiting) >= _MAX_ALTERNATIVES or parts > _MAX_PARTS:
            raise GrammarError("anchors within groups make too many alternatives")
        first_part, end = 0, len(sequence)
        while first_part < end and sequence[first_part] == _Anchor(at_start=True):
            first_part += 1
        while first_part < end and sequence[end - 1] == _Anchor(at_start=False):
            end -= 1
        begins, ends, sequence = begins or first_part > 0, ends or end < len(sequence), sequence[first_part:end]
        if sequence and isinstance(first := sequence[0], _Group) and first.has_anchor:
            waiting += [(begins, (*inner, *sequence[1:]), ends) for inner in reversed(first.alternatives)]
            continue
        if sequence and isinstance(last := sequence[-1], _Group) and last.has_anchor:
            waiting += [(begins, (*sequence[:-1], *inner), ends) for inner in reversed(last.alternatives)]
            continue
        if any(map(_has_anchor, sequence)):
            raise GrammarError("an anchor, ^ or $, is served only where the text begins or ends")
        before, after = ("" if begins or not searched else _ANY), ("" if ends or not searched else _ANY)
        found.append(f"{before}{''.join(map(_text, sequence))}{after}")
    return f"(?:{'|'.join(found)})"


def _text(part: _Part) -> str:
    match part:
        case str():
            return part
        case _Group(alternatives):
            return f"(?:{'|'.join(''.join(map(_text, sequence)) for sequence in alternatives)})"
        case _Repeated(inner, count):
            return f"(?:{_text(inner)}){count}"
        case _:
            raise AssertionError("an anchor was left")
