"""Grammars for constrained decoding, written as plain text that travels with the request.

The text is in llguidance's language: Lark rules around a JSON schema, a regular expression or a list of strings. Only
what that language cannot express, or reads otherwise, is refused here; `triptych.model.text.grammar_matcher` compiles
the text.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Any

from triptych.model.errors import GrammarError as GrammarError  # what this module raises
from triptych.model.text.gbnf import gbnf_rules
from triptych.model.text.lark import is_lark, lark_rules
from triptych.model.text.patterns import whole_pattern
from triptych.model.text.schemas.translate import translated

# Allow every tokenisation of a matching text, not only the tokenizer's own.
_HEADER = '%llguidance {"no_forcing": true}\n'
_OPTIONS = {
    "whitespace_pattern": "[ ]?",  # between JSON tokens; without a bound a model could emit spaces forever
    # No escapes by number: they could spell the name of a property that is declared otherwise.
    "json_allowed_escapes": 'nrbtf\\"',
}
_MAX_KEPT, _MAX_KEPT_CHARACTERS = 256, 4_000_000


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that the schema accepts; properties come in the schema's order.

    Raises `GrammarError`, which names the keyword and its place, for a schema that cannot be held.
    """
    return f"{_HEADER}start: {json_rule(schema)}\n"


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the right side of a rule for JSON that the schema accepts. Raises `GrammarError`."""
    text = json.dumps(schema, separators=(",", ":"))
    found = _RULES.get(text)
    if found is None:
        found = f"%json {json.dumps({**translated(schema), 'x-guidance': _OPTIONS})}"
        _RULES.put(text, found)
    return found


class _Kept:
    """The rules of the schemas that came last, since clients send the same ones again and again."""

    def __init__(self) -> None:
        self._rules: OrderedDict[str, str] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, schema: str) -> str | None:
        with self._lock:
            if schema in self._rules:
                self._rules.move_to_end(schema)
            return self._rules.get(schema)

    def put(self, schema: str, rule: str) -> None:
        with self._lock:
            if schema in self._rules:
                return
            self._rules[schema] = rule
            self._size += len(schema) + len(rule)
            while len(self._rules) > _MAX_KEPT or self._size > _MAX_KEPT_CHARACTERS:
                self._size -= sum(map(len, self._rules.popitem(last=False)))


_RULES = _Kept()


def rules_grammar(rules: Mapping[str, str]) -> str:
    """Return the grammar of these rules, given as right sides by name; `start` is the first rule."""
    return _HEADER + "".join(f"{name}: {right}\n" for name, right in rules.items())


def rules_of(grammar: str, name: str) -> str:
    """Return the rules of a grammar of this module, to be appended to another one, with `name` for its `start`."""
    return grammar.removeprefix(_HEADER).replace("start:", f"{name}:", 1)


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that the whole pattern matches; `.` matches no line break. Raises `GrammarError`."""
    return f"{_HEADER}start: TEXT\nTEXT: /{whole_pattern(pattern)}/\n"


def written_grammar(text: str) -> str:
    """Return the grammar of texts that a client's own grammar accepts, written as GBNF (EBNF) or as Lark.

    Raises `GrammarError`, which names the line and the column.
    """
    return _HEADER + (lark_rules(text, json_rule) if is_lark(text) else gbnf_rules(text))


def choice_grammar(choices: Iterable[str]) -> str:
    """Return the grammar that matches any one of the texts."""
    return f"{_HEADER}start: TEXT\nTEXT: {' | '.join(map(json.dumps, choices))}\n"
