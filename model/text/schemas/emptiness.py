"""Finds the definitions of a translated schema that accept no value of finite size, and takes them out.

llguidance refuses a schema as a whole if one definition accepts nothing, and accepts one whose values never end.
"""

from __future__ import annotations

from typing import Any

from triptych.model.errors import GrammarError

Schema = dict[str, Any] | bool

_STEPS = 200_000  # schemas that are looked at; what is not found out within them counts as not empty


def without_empty(root: Schema, definitions: dict[str, Schema]) -> tuple[Schema, dict[str, Schema]]:
    """Return the schemas without references to definitions that accept nothing.

    Raises `GrammarError` if the root accepts nothing.
    """
    found = _Search(definitions)
    if not found.accepts(root):
        endless = _Search(definitions, known=set(definitions)).accepts(root)
        why = ": what it requires leads back to itself without an end" if endless else ""
        raise GrammarError(f"#: no value is accepted by the schema{why}")
    empty = definitions.keys() - found.known
    if not empty:
        return root, definitions
    kept = {name: _cut(schema, empty) for name, schema in definitions.items() if name not in empty}
    return _cut(root, empty), kept


class _Search:
    """Finds which definitions accept a value: those that need none of the others come first."""

    def __init__(self, definitions: dict[str, Schema], known: set[str] | None = None) -> None:
        self._steps = _STEPS
        self.known = known or set[str]()
        grows = True
        while grows:
            new = [name for name in reversed(definitions) if name not in self.known and self.accepts(definitions[name])]
            self.known.update(new)
            grows = bool(new)

    def accepts(self, schema: Schema) -> bool:
        """Whether a schema accepts a value, judged by its references alone."""
        self._steps -= 1
        if isinstance(schema, bool) or self._steps < 0:
            return schema is not False
        if "$ref" in schema and _name(schema) not in self.known:
            return False
        if not all(map(self.accepts, schema.get("allOf", ()))):
            return False
        if "anyOf" in schema and not any(map(self.accepts, schema["anyOf"])):
            return False
        if schema.get("type") == "object":
            properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
            rest = True if "patternProperties" in schema else rest
            return all(self.accepts(properties.get(name, rest)) for name in schema.get("required", ()))
        if schema.get("type") == "array" and (least := schema.get("minItems", 0)):
            first = schema.get("prefixItems", [])
            needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
            return all(map(self.accepts, needed))
        return True


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _cut(schema: Schema, empty: set[str]) -> Schema:
    """Return a schema with False for each reference to one of `empty`."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and _name(schema) in empty:
        return False
    found = dict(schema)
    for keyword in ("items", "additionalProperties"):
        if keyword in found:
            found[keyword] = _cut(found[keyword], empty)
    for keyword in ("allOf", "anyOf", "prefixItems"):
        if keyword in found:
            found[keyword] = [_cut(one, empty) for one in found[keyword]]
    for keyword in ("properties", "patternProperties"):
        if keyword in found:
            found[keyword] = {name: _cut(one, empty) for name, one in found[keyword].items()}
    return found
