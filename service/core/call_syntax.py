"""The texts around tool calls, as data: what a grammar writes, and what a parser looks for.

Three characters of Unicode's private use stand in these texts for what differs from call to call: `ID` for the call's
id, `INDEX` for its number, `KIND` for the type of an argument.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ID, INDEX, KIND = "\ue000", "\ue001", "\ue002"
VARYING = {ID: r"[A-Za-z0-9_.:\-]", INDEX: "[0-9]", KIND: "[a-z]"}  # the characters of what stands in their places
_MARK = re.compile(r"<[^<>\s\ue000-\ue002]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class ArgumentSyntax:
    """The texts around one argument, where arguments are not one JSON object.

    They are `before` KEY `between` VALUE `after`, with `separator` between several. A string stands between the two
    `quotes` as it is; without quotes it is JSON, as all other values are. Where `between` has `KIND`, this is
    `text_kind` for a string, and one of `other_kinds` for another value.
    """

    before: str
    between: str
    after: str
    separator: str = ""
    quotes: tuple[str, str] | None = ("", "")
    text_kind: str = ""
    other_kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The texts around calls.

    They are `opening`, then `before` NAME `between` ARGUMENTS `after` with `separator` between several, then `closing`.
    `trigger` is what begins calls after content; empty: calls are a whole reply. Arguments are a JSON object, or as
    `arguments` says.
    """

    before: str
    between: str
    after: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""
    content: str = ""  # what begins a reply without calls, where they have no trigger
    one: bool = False  # a reply ends with its first call
    arguments: ArgumentSyntax | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """The tags in these texts, which may be special tokens."""
        texts = [self.opening, self.before, self.between, self.after, self.separator, self.closing]
        if self.arguments is not None:
            texts += [self.arguments.before, self.arguments.between, self.arguments.after]
        return tuple(dict.fromkeys(mark for text in texts for mark in _MARK.findall(text)))
