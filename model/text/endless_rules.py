"""Finds rules of a grammar whose texts never end, and reads the rules of Lark for that."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from triptych.model.text.gbnf_syntax import EMPTY, Choice, Name, Node, Repeat, Sequence, names_in

_MAX_LOOKS = 200_000  # at names: a grammar that needs more is not judged
_MAX_DEPTH = 100

Parts = list[tuple[str, str]]  # kind and text of each token: "name", "count", "other", or anything that ends


def endless_rule(rules: Mapping[str, Node], first: str) -> str | None:
    """Return a rule that `first` needs and whose texts each hold another one of it; None without any."""
    names = {name: [one.name for one in names_in(node)] for name, node in rules.items()}
    needed = dict.fromkeys([first])
    for name in (waiting := [first]):
        new = [one for one in names[name] if one in rules and one not in needed]
        needed.update(dict.fromkeys(new))
        waiting += new
    users: dict[str, list[str]] = {}
    for name in needed:
        for one in dict.fromkeys(names[name]):
            users.setdefault(one, []).append(name)
    ending, queue, looks = set[str](), deque(reversed(needed)), 0
    while queue:
        name = queue.popleft()
        looks += 1 + len(names[name])
        if looks > _MAX_LOOKS:
            return None
        if name not in ending and _ends(rules[name], rules, ending):
            ending.add(name)
            queue.extend(users.get(name, ()))
    stuck = next((name for name in needed if name not in ending), None)
    passed = set[str]()
    while stuck is not None and stuck not in passed:  # to one that leads back to itself
        passed.add(stuck)
        stuck = next(one for one in names[stuck] if one in rules and one not in ending)
    return stuck


def _ends(node: Node, rules: Mapping[str, Node], ending: set[str]) -> bool:
    match node:
        case Name(name):
            return name in ending or name not in rules
        case Sequence(parts):
            return all(_ends(part, rules, ending) for part in parts)
        case Choice(options):
            return any(_ends(one, rules, ending) for one in options)
        case Repeat(part, count):
            return count in "*?" or count.startswith("{0,") or _ends(part, rules, ending)
        case _:
            return True


def lark_rule(parts: Iterable[tuple[str, str]]) -> Node:
    """Return the alternatives of one rule of Lark; an empty text for what is not judged."""
    stack: list[list[list[Node]]] = [[[]]]
    for kind, text in parts:
        if text in ("(", "["):
            stack.append([[]])
            if len(stack) > _MAX_DEPTH:
                return EMPTY
        elif text in (")", "]"):
            if len(stack) == 1:
                return EMPTY
            group = _choice(stack.pop())
            stack[-1][-1].append(Repeat(group, "?") if text == "]" else group)
        elif text == "|":
            stack[-1].append([])
        elif kind == "count" or text in ("?", "*", "+"):
            if not stack[-1][-1]:
                return EMPTY
            least = text.strip("{~ ").partition(",")[0].partition(".")[0].strip(" }")
            may_be_none = text in ("?", "*") or (kind == "count" and least in ("", "0"))
            stack[-1][-1].append(Repeat(stack[-1][-1].pop(), "?" if may_be_none else "+"))
        elif text in ("&", "~"):
            return EMPTY
        else:
            stack[-1][-1].append(Name(text, 0) if kind == "name" else EMPTY)
    return _choice(stack[0])


def _choice(options: list[list[Node]]) -> Node:
    return Choice(tuple(Sequence(tuple(parts)) for parts in options))
