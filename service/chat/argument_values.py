"""The values of a call's arguments that are written as texts, not in a JSON object."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

from triptych.service.chat.tools import Tool

_NOTES = {"type", "title", "description", "default", "examples", "example", "deprecated", "$comment", "enum", "const"}
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
_MOST_PYTHON = 1 << 16  # characters of a literal that is not one string
_PYTHON = re.compile(r"\s*([\[{(]|(True|False|None)\s*$)")
_PYTHON_TEXT = re.compile(r"'(?:[^'\\]|\\(?:.|\Z))*(?:'|\Z)" + r'|"(?:[^"\\]|\\(?:.|\Z))*(?:"|\Z)', re.DOTALL)
_BREAK = re.compile(r"\\.|[\n\r\0]", re.DOTALL)
_JSON_NAMES = {"true": True, "false": False, "null": None}
_TEXT = frozenset({"string"})  # the types of a string


def is_text(schema: object) -> bool:
    """Return whether a schema allows only strings, without constraints except a list of allowed ones."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and schema.keys() <= _NOTES


class Values:
    """The values of a tool's arguments that are written as texts, by their schemas."""

    def __init__(self, tool: Tool | None) -> None:
        self._root: Mapping[str, Any] = {} if tool is None else tool.schema
        found = self._root.get("properties")
        self._properties: Mapping[str, Any] = found if isinstance(found, dict) else {}
        self._types: dict[str, frozenset[str] | None] = {}

    @property
    def names(self) -> Set[str]:
        """The arguments that the tool declares."""
        return self._properties.keys()

    def json(self, name: str, text: str, *, is_string: bool | None = None, is_held: bool = False) -> str:
        """Return the JSON of an argument's text.

        `is_string`: whether the marks around the text declare a string; None: they do not declare a type. `is_held`: a
        grammar wrote it, which quotes a string that is not just any text.
        """
        schema, text = self._properties.get(name), _without_cdata(text)
        if is_string or (is_string is None and is_text(schema)):
            return _string(text)
        if name not in self._types:
            self._types[name] = _types_of(schema, self._root)
        return _typed_json(text, self._types[name], is_quoted=is_held or is_string is False)


def _typed_json(text: str, types: frozenset[str] | None, *, is_quoted: bool) -> str:
    """Return the JSON of a text that is JSON, a Python literal or a string: what the types allow.

    Templates of some families write Python literals in place of JSON.
    """
    takes_text = types is not None and "string" in types
    try:
        value = json_value(text)
        is_json = is_quoted if isinstance(value, str) else _fits(value, types)
        return text.strip() if is_json or not takes_text else _string(text)
    except (ValueError, RecursionError):
        pass
    found = python_json(text) if types != _TEXT and _PYTHON.match(text) else None
    if found is None or (takes_text and not _fits(json.loads(found), types)):
        return _string(text)
    return found


def _types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types of JSON that a schema allows; None: any, or they are not known. `root` has its definitions."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [(schema, True)]  # with False: others decide if it allows anything
    while waiting:
        one, decides = waiting.pop()
        if types := _own_types(one):
            found |= types
            continue
        parts = _parts(one, root, seen)
        if parts is None or (decides and not parts):
            return None
        waiting += parts
    return frozenset(found) or None


def _own_types(schema: object) -> set[str]:
    """Return the types that a schema names, or those of the values that it lists."""
    if not isinstance(schema, Mapping):
        return set()
    types, values = schema.get("type"), schema.get("enum")
    if types is not None:
        return {one for one in (types if isinstance(types, list) else [types]) if isinstance(one, str)}
    if "const" in schema:
        values = [schema["const"]]
    return {_type_of(value) for value in values} if isinstance(values, list) else set()


def _parts(schema: object, root: Mapping[str, Any], seen: set[str]) -> list[tuple[object, bool]] | None:
    """Return the schemas that a schema consists of, each reference once; None: one does not exist."""
    if not isinstance(schema, Mapping):
        return []
    found: list[tuple[object, bool]] = []
    if isinstance(path := schema.get("$ref"), str):
        at: object = root
        for name in path.removeprefix("#/").split("/"):
            at = at.get(name) if isinstance(at, Mapping) else None
        if at is None:
            return None
        found.append(({}, False) if path in seen else (at, True))
        seen.add(path)
    for keyword, decides in (("anyOf", True), ("oneOf", True), ("allOf", False)):
        if isinstance(parts := schema.get(keyword), list):
            found += [(one, decides) for one in parts]
    return found


def _type_of(value: object) -> str:
    """Return the JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    kinds = (("string", str), ("integer", int), ("number", float), ("array", list), ("object", dict))
    return next((name for name, kind in kinds if isinstance(value, kind)), "null")


def _fits(value: object, types: frozenset[str] | None) -> bool:
    """Return whether a value has one of the types; an integer is a number too, and 1.0 is an integer."""
    if types is None or _type_of(value) in types:
        return True
    is_whole = _type_of(value) == "integer" or (isinstance(value, float) and value.is_integer())
    return is_whole and bool(types & {"integer", "number"})


def _without_cdata(text: str) -> str:
    """Return a text that consists of sections of XML's CDATA without their marks, any other text as it is."""
    whole = text.strip()
    if not (whole.startswith("<![CDATA[") and whole.endswith("]]>")) or _CDATA.sub("", whole).strip():
        return text
    return _CDATA.sub(lambda found: found[1], whole)


def python_json(text: str) -> str | None:
    """Return the JSON of a Python literal; None if the text is not one, has no JSON form, or is very long.

    As models write them, strings may hold line breaks, and true, false and null are values.
    """
    text = text.strip()
    if len(text) > _MOST_PYTHON and _PYTHON_TEXT.fullmatch(text) is None:
        return None
    try:
        shown = json.dumps(_literal(_expression(text)), ensure_ascii=False, allow_nan=False)
        shown.encode()  # raises for half of a surrogate pair
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return shown


def _expression(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they would log escapes that Python does not know
        try:
            return ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError):
            return ast.parse(_PYTHON_TEXT.sub(_on_one_line, text), mode="eval").body


def _on_one_line(found: re.Match[str]) -> str:
    """Return a Python string with its line breaks as escapes."""
    return _BREAK.sub(lambda one: one[0] if len(one[0]) > 1 else repr(one[0])[1:-1], found[0])


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; raises `ValueError`."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
            return [_literal(one) for one in values]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_literal(key): _literal(one) for key, one in zip(keys, values, strict=True) if key is not None}
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -value if isinstance(sign, ast.USub) else value
    raise ValueError


def known_texts(schema: object) -> Sequence[str] | None:
    """Return the texts that a string schema allows by `enum` or `const`; None: any."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return list(found) if isinstance(found, list) else None


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(text: str) -> Any:
    """Return the value of a JSON text; raises `ValueError`, also for NaN and infinities, which Python takes."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(name)
