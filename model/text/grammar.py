"""What an output must be, as the text of a grammar: plain data that travels to where tokens are chosen.

The text is llguidance's: Lark rules around a JSON schema, a regular expression or words. Nothing is checked here but
what the text could not express; `model.text.grammar_matcher` compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# All tokens that a text may be spelt with stay possible, not only those that a tokenizer would have chosen.
_HEAD = '%llguidance {"no_forcing": true}\n'
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[A-Za-z]*x[A-Za-z]*(-[A-Za-z]*)?[:)]")  # the flag by which blanks and comments are no text
_JSON = {"whitespace_pattern": "[ ]?"}  # between the parts; a model could go on with blanks forever


class GrammarError(ValueError):
    """No output can be held to it; the message says why."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """JSON that the schema accepts; properties come in the schema's order."""
    return f"{_HEAD}start: %json {json.dumps({**schema, 'x-guidance': _JSON})}\n"


def regex_grammar(pattern: str) -> str:
    """Texts that the whole of the pattern matches; `.` is no line break. Raises `GrammarError`."""
    return f"{_HEAD}start: TEXT\nTEXT: /{_delimited(pattern)}/\n"


def choice_grammar(choices: Iterable[str]) -> str:
    """One of the texts."""
    return f"{_HEAD}start: TEXT\nTEXT: {' | '.join(map(json.dumps, choices))}\n"


def _delimited(pattern: str) -> str:
    """The pattern between slashes on one line, meaning the same."""
    if ("\n" in pattern or "\r" in pattern) and _VERBOSE.search(_ESCAPE.sub("_", pattern)):
        raise GrammarError("a line break is no text with the flag x and cannot be left out here; write it on one line")
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r"}
    found = []
    characters = iter(pattern)
    for character in characters:
        if character != "\\":
            found.append(escapes.get(character, character))
            continue
        escaped = next(characters, None)
        if escaped is None:
            raise GrammarError("it ends with a backslash")
        found.append(escapes.get(escaped, f"\\{escaped}"))
    return "".join(found)
