"""Values of arguments that stand as text between marks, and not in a JSON object."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from service.chat.json_calls import json_value
from service.chat.tools import Tool

_NOTES = {"type", "title", "description", "default", "examples", "example", "deprecated", "$comment", "enum", "const"}
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_MOST_PYTHON = 1 << 16  # characters of a literal, which is read at once
_PYTHON = re.compile(r"\s*([\[{(]|(True|False|None)\s*$)")


def is_text(schema: object) -> bool:
    """Return whether a schema is of strings alone that it bounds by nothing, or by a list of them."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and schema.keys() <= _NOTES


def properties_of(tool: Tool | None) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    found = tool.schema.get("properties") if tool is not None else None
    return found if isinstance(found, dict) else {}


def value_json(text: str, schema: object, *, is_string: bool | None = None) -> str:
    """Return the JSON of an argument's text, by its schema.

    `is_string`: what the text's marks say; None: they say nothing. Templates of some families write Python's literals
    in the place of JSON.
    """
    if "<![CDATA[" in text:
        text = _CDATA.sub(lambda found: found[1], text)
    if is_string or (is_string is None and is_text(schema)):
        return _string(text)
    wants_string = isinstance(schema, Mapping) and schema.get("type") == "string"
    try:
        value = json_value(text)
        if isinstance(value, str) or not wants_string:
            return text.strip()
    except (ValueError, RecursionError):
        pass
    if not wants_string and _PYTHON.match(text):
        found = python_json(text)
        if found is not None:
            return found
    return _string(text)


def python_json(text: str) -> str | None:
    """Return the JSON of a Python literal; None if it is none, or no value of JSON, or very long."""
    if len(text) > _MOST_PYTHON:
        return None
    try:
        shown = json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
        shown.encode()  # raises for half of a surrogate pair
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return shown


def known_texts(schema: object) -> Sequence[str] | None:
    """Return the texts that `enum` or `const` of a schema of strings allows; None: any."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return list(found) if isinstance(found, list) else None


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
