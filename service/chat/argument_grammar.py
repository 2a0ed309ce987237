"""Grammar rules for arguments of calls: one JSON object, or each between marks as the model's family writes them.

Strings that a schema leaves free stand as they are; every other value is JSON that its schema holds. A schema that says
more of the object than its properties is held as one JSON object, which parsers of all families take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.text.grammar import json_rule
from service.chat.argument_values import is_text, known_texts
from service.core.call_syntax import KIND, ArgumentSyntax, CallSyntax

_OBJECT_KEYS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
_DEFINITIONS = ("$defs", "definitions")
_KEY = re.compile(r"[^\s<>:,\"'(){}\[\]=]+")
_PYTHON_KEY = re.compile(r"\w+")
_PYTHON_TEXT = r"/'([^'\\\n]|\\.)*'/"
_MOST_APART = 100  # arguments; more are one JSON object


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that stands apart: its name, the schema of its value, and whether it must be there."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def arguments_of(schema: Mapping[str, Any], syntax: ArgumentSyntax) -> list[Argument] | None:
    """Return the arguments of a schema of an object; None where they cannot be held one by one."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= {*_OBJECT_KEYS, *_DEFINITIONS} or not isinstance(properties, dict):
        return None
    if schema.get("type", "object") != "object" or not isinstance(required, list):
        return None
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    if '"#"' in (shown := json.dumps(schema)) or '"#/properties' in shown:
        return None
    extra = schema.get("additionalProperties", True)
    schemas = properties | {name: extra for name in required if name not in properties}
    is_key = _PYTHON_KEY if syntax.between == "=" else _KEY
    if len(schemas) > _MOST_APART or not all(is_key.fullmatch(name) for name in schemas):
        return None
    found = []
    for name, one in schemas.items():
        own: dict[str, Any] | None = {} if one is True else one if isinstance(one, dict) else None
        if own is None:
            return None
        found.append(Argument(name, own if is_text(own) else {**shared, **own}, name in required))
    return found


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """Writes the rules of one tool's arguments into `rules`, under names that begin with `name`.

    `text` gives what matches exactly a text; `until` what matches any text up to a mark, with the mark.
    """

    rules: dict[str, str]
    name: str
    text: Callable[[str], str]
    until: Callable[[str, str], str]

    def call(self, function: str, syntax: CallSyntax, schema: Mapping[str, Any]) -> str:
        """Return what matches a call of a function from its name on: the marks, and the arguments."""
        apart = None if syntax.arguments is None else arguments_of(schema, syntax.arguments)
        between, after = syntax.between, syntax.after
        if syntax.arguments is None or apart is None:
            if between.endswith("{") and after.startswith("}"):
                between, after = between[:-1], after[1:]
            self.rules[self.name] = json_rule(schema)
            return f"{self.text(function + between)} {self.name} {self.text(after)}"
        return f"{self.text(function + between)} {self._all(apart, syntax.arguments)} {self.text(after)}"

    def _all(self, arguments: list[Argument], syntax: ArgumentSyntax) -> str:
        if not syntax.separator:
            return " ".join(
                self._one(at, one, syntax) if one.is_required else f"({self._one(at, one, syntax)})?"
                for at, one in enumerate(arguments)
            )
        # `first` before any argument was written, `more` after one
        first = more = ""
        for at, one in reversed(list(enumerate(arguments))):
            self.rules[f"{self.name}_is_{at}"] = self._one(at, one, syntax)
            written = f"{self.name}_is_{at}"
            begun = f"{written} {more}".strip()
            follows = f"{self.text(syntax.separator)} {begun}"
            if not one.is_required:
                begun = f"({begun} | {first})" if first else f"({begun})?"
                follows = f"({follows} | {more})" if more else f"({follows})?"
            first, more = self._rule(f"first_{at}", begun), self._rule(f"more_{at}", follows)
        return first

    def _rule(self, name: str, right: str) -> str:
        self.rules[f"{self.name}_{name}"] = right
        return f"{self.name}_{name}"

    def _one(self, at: int, one: Argument, syntax: ArgumentSyntax) -> str:
        before, between = syntax.before + one.name, syntax.between
        if is_text(one.schema) and syntax.quotes is not None:
            opening, closing = syntax.quotes
            begin = self.text(before + between.replace(KIND, syntax.text_kind) + opening)
            end = closing + syntax.after
            texts = known_texts(one.schema)
            if texts is None:
                return f"{begin} {self.until(f'{self.name}_text_{at}', end)}"
            if all(isinstance(text, str) and (not end or end not in text) for text in texts):
                allowed = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
                return f"{begin} ({allowed}) {self.text(end)}"
        value = f"{self.name}_value_{at}"
        self.rules[value] = json_rule(one.schema)
        if also := _python_values(one.schema, with_text=syntax.quotes is None):
            value = f"({value} | {also})"
        kinds = " | ".join(self.text(kind) for kind in syntax.other_kinds)
        head, kind, tail = between.partition(KIND)
        begin = self.text(before + head) + (f" ({kinds}) {self.text(tail)}" if kind else "")
        return f"{begin} {value} {self.text(syntax.after)}"


def _python_values(schema: Mapping[str, Any], *, with_text: bool) -> str:
    """Return what else than JSON matches a value, as templates write it by Python; empty if nothing does."""
    if schema.get("type") == "boolean" and "const" not in schema and "enum" not in schema:
        return '"True" | "False"'
    return _PYTHON_TEXT if with_text and is_text(schema) and known_texts(schema) is None else ""
