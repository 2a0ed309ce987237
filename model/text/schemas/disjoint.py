"""Tells whether two JSON schemas have no value in common, so that `oneOf` means what `anyOf` means."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from triptych.model.errors import GrammarError
from triptych.model.text.schemas.documents import Document, Place
from triptych.model.text.schemas.numbers import is_number

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_STEPS = 20_000  # of all comparisons
_DEPTH = 6  # of properties within each other
_LIMITS = {"number": ("minimum", "maximum"), "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}

_Parts = tuple[Place, ...]  # schemas that all hold


class Comparison:
    """Compares the schemas of one document, within a limited number of steps."""

    def __init__(self, document: Document, before: Comparison | None = None) -> None:
        """`before` has compared some of them, and knows what is in long lists."""
        self._document = document
        self._steps = _STEPS
        # The contents of lists of the document, by their identity.
        self._known: dict[tuple[str, int], Any] = {} if before is None else before._known

    def are_disjoint(self, first: Iterable[Place], second: Iterable[Place], depth: int = _DEPTH) -> bool:
        """Whether no value is accepted by all of `first` and all of `second`. False where that is not proven."""
        ours, theirs = self._conjuncts(first), self._conjuncts(second)
        return self._disjoint(ours, theirs, depth)

    def _disjoint(self, ours: _Parts, theirs: _Parts, depth: int) -> bool:
        self._steps -= 1 + len(ours) + len(theirs)
        if self._steps < 0 or depth < 0:
            return False
        both = (*ours, *theirs)
        if any(part.value is False for part in both):
            return True
        types = TYPES.intersection(*map(self._types, both))
        if all(self._without_common(kind, ours, theirs, depth) for kind in types):
            return True
        for mine, other in ((ours, theirs), (theirs, ours)):
            for place, part in enumerate(mine):
                for keyword in ("anyOf", "oneOf"):
                    options = part.value.get(keyword) if isinstance(part.value, dict) else None
                    if isinstance(options, list) and options and not _is_divided(mine, part, keyword):
                        rest = (*mine[:place], _without(part, keyword), *mine[place + 1 :])
                        return all(
                            self._disjoint((*rest, *self._conjuncts([part.at(keyword, at)])), other, depth - 1)
                            for at in range(len(options))
                        )
        return False

    def _conjuncts(self, places: Iterable[Place]) -> _Parts:
        """Return the schemas that these consist of: themselves, what they refer to and all of `allOf`."""
        found, waiting, seen = list[Place](), list(places), set[int]()
        while waiting and self._steps > 0:
            place = waiting.pop()
            if id(place.value) in seen and isinstance(place.value, dict):
                continue
            seen.add(id(place.value))
            self._steps -= 1
            if isinstance(place.value, dict) and "$ref" in place.value:
                try:
                    waiting.append(self._document.resolved(place))
                except GrammarError:
                    continue  # refused where it is translated
                if self._document.draft <= 7:
                    continue
            found.append(place)
            if isinstance(place.value, dict) and isinstance(every := place.value.get("allOf"), list):
                waiting += [place.at("allOf", at) for at in range(len(every))]
        return tuple(found)

    def _without_common(self, kind: str, ours: _Parts, theirs: _Parts, depth: int) -> bool:
        """Whether no value of this type is in both."""
        values = [self._values(part) for part in (*ours, *theirs)]
        listed = [one.get(kind, frozenset[str]()) for one in values if one is not None]
        if listed and not listed[0].intersection(*listed[1:]):
            return True
        if kind in _LIMITS and _is_empty_range((*ours, *theirs), *_LIMITS[kind]):
            return True
        return kind == "object" and self._differ_in_a_property(ours, theirs, depth)

    def _differ_in_a_property(self, ours: _Parts, theirs: _Parts, depth: int) -> bool:
        names = dict.fromkeys(name for part in (*ours, *theirs) for name in _required(part))
        return any(
            self._disjoint(
                self._conjuncts(one for part in ours for one in _property(part, name)),
                self._conjuncts(one for part in theirs for one in _property(part, name)),
                depth - 1,
            )
            for name in names
        )

    def _types(self, part: Place) -> frozenset[str]:
        given = part.value.get("type") if isinstance(part.value, dict) else None
        if isinstance(given, str):
            return frozenset({"number" if given == "integer" else given})
        if not isinstance(given, list):
            return TYPES  # none is given, or it is refused where it is translated
        found: frozenset[str] | None = self._known.get(("type", id(given)))
        if found is None:
            found = frozenset("number" if name == "integer" else str(name) for name in given)
            self._known["type", id(given)] = found
        return found

    def _values(self, part: Place) -> dict[str, frozenset[str]] | None:
        """Return the values that a schema lists, by their type; None where it lists none."""
        value = part.value
        if not isinstance(value, dict):
            return None
        keyword = "const" if "const" in value else "enum"
        if keyword == "enum" and not isinstance(value.get("enum"), list):
            return None
        found: dict[str, frozenset[str]] | None = self._known.get((keyword, id(value[keyword])))
        if found is None:
            sets: defaultdict[str, set[str]] = defaultdict(set)
            for one in [value["const"]] if keyword == "const" else value["enum"]:
                sets[_kind(one)].add(_canonical(one))
            found = {kind: frozenset(texts) for kind, texts in sets.items()}
            self._known[keyword, id(value[keyword])] = found
        return found


def _canonical(value: Any) -> str:
    """Return a text that equal values share: 1.0 is 1, and keys have no order."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_canonical(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names[type(value)]


def _is_empty_range(parts: _Parts, low: str, high: str) -> bool:
    lows = [part.value[low] for part in parts if isinstance(part.value, dict) and is_number(part.value.get(low))]
    highs = [part.value[high] for part in parts if isinstance(part.value, dict) and is_number(part.value.get(high))]
    return bool(lows and highs) and max(lows) > min(highs)


def _required(part: Place) -> list[str]:
    names = part.value.get("required") if isinstance(part.value, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(part: Place, name: str) -> list[Place]:
    """Return what a schema says about the value of a property, without its patterns."""
    if not isinstance(part.value, dict):
        return []
    properties = part.value.get("properties")
    if isinstance(properties, dict) and name in properties:
        return [part.at("properties", name)]
    if "additionalProperties" in part.value and not part.value.get("patternProperties"):
        return [part.at("additionalProperties")]
    return []


def _without(part: Place, keyword: str) -> Place:
    kept = {key: value for key, value in part.value.items() if key != keyword}
    return Place(kept, part.trail, part.base, part.draft)


def _is_divided(parts: _Parts, part: Place, keyword: str) -> bool:
    """Whether the alternatives are those of a schema that came into the parts by one of them already."""
    return sum(one.trail == part.trail and one is not part for one in parts) > 0


Schema = dict[str, Any] | bool

_EMPTY_STEPS = 200_000  # schemas that are looked at; what is not found out within them counts as not empty


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
        self._steps = _EMPTY_STEPS
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
