"""Grammars for constrained decoding, written as plain text that travels with the request.

The text is in llguidance's language: Lark rules around a JSON schema, a regular expression or a list of strings. Only
what that language cannot express is refused here; `model.text.grammar_matcher` compiles the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Allow every tokenisation of a matching text, not only the tokenizer's own.
_HEADER = '%llguidance {"no_forcing": true}\n'
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[A-Za-z]*x[A-Za-z]*(-[A-Za-z]*)?[:)]")  # the flag that ignores whitespace and comments
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keywords with schemas
_WITHIN = ("items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf", "not", "if", "then", "else")
_ANY_NAME: tuple[object, ...] = ({}, True, {"type": "string"})
_JSON = {"whitespace_pattern": "[ ]?"}  # between JSON tokens; without a bound a model could emit spaces forever


class GrammarError(ValueError):
    """A grammar is invalid, matches nothing or costs too much; the message says why."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that the schema accepts; properties come in the schema's order."""
    return f"{_HEADER}start: {json_rule(schema)}\n"


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the right side of a rule for JSON that the schema accepts."""
    return f"%json {json.dumps({**_with_all_names(schema), 'x-guidance': _JSON})}"


def _with_all_names(schema: Any) -> Any:
    """Return the schema without those `propertyNames` that allow all names: some libraries write them for every object
    of any keys, and llguidance has no `propertyNames`.
    """
    if isinstance(schema, list):
        return [_with_all_names(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = {name: _with_all_names(one) for name, one in value.items()}
        elif key in _WITHIN:
            found[key] = _with_all_names(value)
        elif key != "propertyNames" or value not in _ANY_NAME:
            found[key] = value
    return found


def rules_grammar(rules: Mapping[str, str]) -> str:
    """Return the grammar of these rules, right sides by name, of which `start` is the first."""
    return _HEADER + "".join(f"{name}: {right}\n" for name, right in rules.items())


def rules_of(grammar: str, name: str) -> str:
    """Return the rules of a grammar of this module, to be appended to another one, with `name` for its `start`."""
    return grammar.removeprefix(_HEADER).replace("start:", f"{name}:", 1)


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that the whole pattern matches; `.` matches no line break. Raises `GrammarError`."""
    return f"{_HEADER}start: TEXT\nTEXT: /{_escape_delimiters(pattern)}/\n"


def choice_grammar(choices: Iterable[str]) -> str:
    """Return the grammar that matches any one of the texts."""
    return f"{_HEADER}start: TEXT\nTEXT: {' | '.join(map(json.dumps, choices))}\n"


def _escape_delimiters(pattern: str) -> str:
    """Escape slashes and line breaks in the pattern without changing its meaning."""
    if ("\n" in pattern or "\r" in pattern) and _VERBOSE.search(_ESCAPE.sub("_", pattern)):
        raise GrammarError("a line break is no text with the flag x and cannot be left out here; write it on one line")
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    escaped_pattern = []
    characters = iter(pattern)
    for character in characters:
        if character != "\\":
            escaped_pattern.append(escapes.get(character, character))
            continue
        escaped = next(characters, None)
        if escaped is None:
            raise GrammarError("it ends with a backslash")
        escaped_pattern.append(escapes.get(escaped, f"\\{escaped}"))
    return "".join(escaped_pattern)
