"""Translates GBNF, the grammars of llama.cpp (`root ::= ...`, also called EBNF), to the rules of llguidance.

A rule that refers to itself, directly or through others, becomes a rule of the parser. All others become expressions of
the lexer, and so do neighbours of them within a rule. The lexer takes as much text as an expression matches, so what
could go on with a character that may also follow is left to the parser, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import not_
from typing import TypeVar

from triptych.model.errors import GrammarError
from triptych.model.text.endless_rules import endless_rule
from triptych.model.text.gbnf_syntax import ALL, Choice, Name, Node, Repeat, Sequence, Text, names_in, parsed, place_of

T = TypeVar("T")

_MAX_PASSES = 30  # over all rules, to find what may follow each


def gbnf_rules(text: str) -> str:
    """Return the rules of a GBNF grammar in llguidance's language, from `start` on.

    Raises `GrammarError`, which names the line and the column.
    """
    try:
        return _Writer(text, parsed(text)).written()
    except RecursionError:
        raise GrammarError("the rules refer to each other too deeply") from None


def _remembered(known: dict[int, tuple[Node, T]], node: Node, find: Callable[[Node], T]) -> T:
    """Return what `find` returns of a node, which `known` keeps by the node's identity."""
    if id(node) not in known:
        known[id(node)] = (node, find(node))  # with the node, so that no other gets its identity
    return known[id(node)][1]


class _Sets:
    """What rules begin with, whether they may be empty, and what may follow them."""

    def __init__(self, rules: dict[str, Node], names: list[str]) -> None:
        self._rules = rules
        self._nullable = dict.fromkeys(names, False)
        self._first = dict.fromkeys(names, 0)
        self.follow = dict.fromkeys(names, 0)
        self._more: dict[int, tuple[Node, int]] = {}
        # Results for nodes, by identity: those of groups within groups are asked for many times.
        self._nullable_of: dict[int, tuple[Node, bool]] = {}
        self._first_of: dict[int, tuple[Node, int]] = {}
        for _ in range(_MAX_PASSES):
            before = (dict(self._nullable), dict(self._first))
            for name in reversed(names):
                self._nullable_of.clear()
                self._first_of.clear()
                self._nullable[name] = self.is_nullable(rules[name])
                self._first[name] = self.first(rules[name])
            if before == (self._nullable, self._first):
                break
        else:
            self._first = dict.fromkeys(names, ALL)
        self._nullable_of.clear()
        self._first_of.clear()
        for _ in range(_MAX_PASSES):
            known = dict(self.follow)
            for name in names:
                self._add_follow(rules[name], self.follow[name])
            if known == self.follow:
                return
        self.follow = dict.fromkeys(names, ALL)

    def is_nullable(self, node: Node) -> bool:
        return _remembered(self._nullable_of, node, self._is_nullable)

    def _is_nullable(self, node: Node) -> bool:
        match node:
            case Text(written):
                return written == '""'
            case Name(name):
                return self._nullable[name]
            case Sequence(parts):
                return all(map(self.is_nullable, parts))
            case Choice(options):
                return any(map(self.is_nullable, options))
            case Repeat(part, count):
                return count in "*?" or count.startswith("{0,") or self.is_nullable(part)

    def first(self, node: Node) -> int:
        return _remembered(self._first_of, node, self._found_first)

    def _found_first(self, node: Node) -> int:
        match node:
            case Text():
                return node.first
            case Name(name):
                return self._first[name]
            case Sequence(parts):
                return self.first_of(parts, 0)
            case Choice(options):
                found = 0
                for one in options:
                    found |= self.first(one)
                return found
            case Repeat(part):
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
            case Name(name):
                self.follow[name] |= follow
            case Sequence(parts):
                for part in reversed(parts):
                    self._add_follow(part, follow)
                    follow = self.first_of((part,), follow)
            case Choice(options):
                for one in options:
                    self._add_follow(one, follow)
            case Repeat(part):
                self._add_follow(part, follow | self.first(part))
            case _:
                return

    def more(self, node: Node) -> int:
        """Return the characters with which a text of an expression of the lexer may go on."""
        return _remembered(self._more, node, self._found_more)

    def _found_more(self, node: Node) -> int:
        match node:
            case Text():
                return 0
            case Name(name):
                return self.more(self._rules[name])
            case Sequence(parts):
                found = 0
                for part in reversed(parts):
                    found |= self.more(part)
                    if not self.is_nullable(part):
                        break
                    found |= self.first(part)
                return found
            case Choice(options):
                return self._more_of(options)
            case Repeat(part, count):
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
        single = all(isinstance(one, Text) and one.is_single for one in options)
        return found if single or not overlap else found | self._characters(Choice(options))

    def _characters(self, node: Node) -> int:
        """Return all characters of an expression."""
        found, waiting, seen = 0, [node], set[str]()
        while waiting:
            match waiting.pop():
                case Text(_, characters):
                    found |= characters
                case Name(name) if name not in seen:
                    seen.add(name)
                    waiting.append(self._rules[name])
                case Sequence(parts) | Choice(parts):
                    waiting += parts
                case Repeat(part):
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
        if (endless := endless_rule(self._rules, "root")) is not None:
            raise GrammarError(f"a text of the rule {endless[:64]} never ends: it holds another one")
        self._numbers = {name: number for number, name in enumerate(needed)}
        self._find_regular(needed)
        self._sets = _Sets(self._rules, needed)
        root = self._rule(Name("root", 0), 0)
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
            for used in names_in(self._rules[waiting.pop()]):
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
            used = {one.name for one in names_in(self._rules[name])}
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
        return self._is_regular(node) and not self._sets.more(node) & follow

    def _is_regular(self, node: Node) -> bool:
        return all(one.name in self._regular for one in names_in(node))

    def _expression(self, node: Node) -> str:
        """Return the lexer's expression of a node."""
        match node:
            case Text(written):
                return written
            case Name(name):
                return f"G{self._numbers[name]}"
            case Sequence(parts):
                return f"({' '.join(map(self._expression, parts))})" if parts else '""'
            case Choice(options):
                return f"({' | '.join(map(self._expression, options))})"
            case Repeat(part, count):
                return f"({self._expression(part)}){count}"

    def _rule(self, node: Node, follow: int) -> str:
        """Return the right side of a parser's rule; `follow` has the characters that may come after it."""
        if self._is_lexeme(node, follow):
            return self._lexeme(node)
        match node:
            case Sequence(parts):
                return self._sequence(parts, follow)
            case Choice(options):
                are_plain = [self._is_lexeme(one, follow) for one in options]
                plain = Choice(tuple(compress(options, are_plain)))
                if not self._is_lexeme(plain, follow):
                    return f"({' | '.join(self._rule(one, follow) for one in options)})"
                others = [self._rule(one, follow) for one in compress(options, map(not_, are_plain))]
                return f"({' | '.join([*([self._lexeme(plain)] if plain.options else []), *others])})"
            case Repeat(part, count):
                return f"({self._rule(part, follow | self._sets.first(part))}){count}"
            case Name(name):
                if name not in self._regular:
                    return f"g{self._numbers[name]}"
                self._in_pieces[name] = None
                return f"p{self._numbers[name]}"
            case _:
                raise AssertionError("the lexer finds where a string ends")

    def _sequence(self, parts: tuple[Node, ...], follow: int) -> str:
        """Return the parts, with neighbours joined to one lexeme while the lexer can find its end."""
        found, end = list[str](), len(parts)
        while end:
            first = self._begin_of_lexeme(parts, end, follow)
            begin = min(first, end - 1)
            run = Sequence(parts[begin:end])
            if first < end:
                found.append(self._lexeme(run if len(run.parts) > 1 else run.parts[0]))
            else:
                found.append(self._rule(parts[begin], follow))
            follow = self._sets.first_of(run.parts, follow)
            end = begin
        return f"({' '.join(reversed(found))})"

    def _begin_of_lexeme(self, parts: tuple[Node, ...], end: int, follow: int) -> int:
        """Return the first of the most parts up to `end` that are a lexeme together; `end` if the last alone is none.

        It looks at each part once: there may be thousands.
        """
        begin = end
        more, may_be_empty = 0, True  # what those from `begin` on may go on with, and whether all can be empty
        while begin and self._is_regular(parts[begin - 1]):
            if may_be_empty:
                more |= self._sets.more(parts[begin - 1])
                may_be_empty = self._sets.is_nullable(parts[begin - 1])
                more |= self._sets.first(parts[begin - 1]) if may_be_empty else 0
            if more & follow:
                break
            begin -= 1
        return begin

    def _lexeme(self, node: Node) -> str:
        if isinstance(node, Name):
            return f"G{self._numbers[node.name]}"
        expression = self._expression(node)
        if expression == '""':
            return expression
        name = f"L{len(self._lines)}"
        self._lines.append(f"{name}: {expression}")
        return name
