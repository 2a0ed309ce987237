"""The keywords of objects: their properties, how many there are, how they are named and what depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triptych.model.errors import GrammarError
from triptych.model.text.patterns import Reading, needs_number, search_pattern
from triptych.model.text.schemas.documents import Place, shown
from triptych.model.text.schemas.numbers import whole

_ANY_NAME: tuple[object, ...] = ({}, True, {"type": "string"})
_MOST_NAMES = 256  # that `minProperties` and `propertyNames` are written out for
_ANNOTATIONS = frozenset({"title", "description", "$comment", "examples", "default", "type"})

Schema = dict[str, Any] | bool


class ObjectKeywords:
    """Translates the keywords of objects; `schema` translates the schemas within."""

    def __init__(self, schema: Callable[[Place], Schema]) -> None:
        self._schema = schema

    def add(self, place: Place, found: dict[str, Any], *, applied: Sequence[str]) -> bool:
        """Add what the schema says of objects to `found`; return False if no value is left."""
        value = place.value
        properties = self._named(place, "properties")
        # A name that a pattern means in some language only is held to its schema, or else is not allowed.
        reading: Reading = "widest" if value.get("additionalProperties", True) is not False else "narrowest"
        named = self._named(place, "patternProperties")
        patterns = {self._pattern(place, key, reading): one for key, one in named.items()}
        required = _required(place)
        for name in (*properties, *required):
            if needs_number(name):
                raise place.error(f"the control character in the name {shown(name)} is not served")
        if "additionalProperties" in value:
            rest: Schema = self._schema(place.at("additionalProperties"))
        else:
            rest = self._unevaluated(place, applied)
        if value.get("propertyNames", True) not in _ANY_NAME:
            if patterns:
                raise place.refused("propertyNames", "is not served next to patternProperties")
            rest = self._limit_names(place, properties, patterns, required, rest)
        if properties:
            found["properties"] = properties
        if patterns:
            found["patternProperties"] = patterns
        if rest is not True and rest != {}:
            found["additionalProperties"] = rest
        if required:
            found["required"] = required
        self._count(place, found, is_closed=rest is False and not patterns)
        return True

    def _named(self, place: Place, keyword: str) -> dict[str, Schema]:
        given = place.value.get(keyword, {})
        if not isinstance(given, dict):
            raise place.refused(keyword, f"must be an object, found {shown(given)}")
        return {name: self._schema(place.at(keyword, name)) for name in given}

    def _pattern(self, place: Place, pattern: str, reading: Reading) -> str:
        try:
            return search_pattern(pattern, reading)
        except GrammarError as error:
            raise place.at("patternProperties", pattern).error(f"patternProperties: {error}") from None

    def _unevaluated(self, place: Place, applied: Sequence[str]) -> Schema:
        """Return what is left for other properties by `unevaluatedProperties`, where nothing else evaluates any."""
        given = place.value.get("unevaluatedProperties", True)
        if given in (True, {}):
            return True
        if any(keyword in place.value for keyword in applied):
            raise place.refused("unevaluatedProperties", "is not served next to schemas for the same object")
        return self._schema(place.at("unevaluatedProperties"))

    def _limit_names(
        self,
        place: Place,
        properties: dict[str, Schema],
        patterns: dict[str, Schema],
        required: list[str],
        rest: Schema,
    ) -> Schema:
        """Hold the names of properties to `propertyNames`, which lists them or has one pattern or length for them."""
        names = place.at("propertyNames")
        if names.value is False:
            properties.update(dict.fromkeys(properties, False))
            return False
        known = isinstance(names.value, dict) and names.value.keys() - _ANNOTATIONS
        if known and known <= {"enum", "const"} and names.value.get("type", "string") == "string":
            listed = [names.value["const"]] if "const" in known else names.value["enum"]
            if not isinstance(listed, list) or len(listed) > _MOST_NAMES or known == {"enum", "const"}:
                raise place.refused("propertyNames", "is not served with these names")
            properties.update({name: False for name in properties if name not in listed})
            properties.update({n: rest for n in listed if isinstance(n, str) and n not in properties})
            return False
        if not known or not known <= {"pattern", "minLength", "maxLength"}:
            raise place.refused(
                "propertyNames", f"is served with enum, const, a pattern or lengths; found {shown(names.value)}"
            )
        if properties or required or ("pattern" in known and len(known) > 1):
            raise place.refused("propertyNames", "is not served next to properties, nor with a pattern and lengths")
        if rest is not False:
            patterns[_names_pattern(names)] = rest
        return False

    def _count(self, place: Place, found: dict[str, Any], *, is_closed: bool) -> None:
        """Add how many properties there may be. Names may come twice, so they are counted only where they cannot."""
        value, required = place.value, set(found.get("required", ()))
        optional = [
            name for name, one in found.get("properties", {}).items() if name not in required and one is not False
        ]
        least = whole(place, "minProperties") if "minProperties" in value else 0
        most = whole(place, "maxProperties") if "maxProperties" in value else None
        if most is not None and is_closed and len(required) + len(optional) <= most:
            most = None
        if least <= len(required):
            least = 0
        if most == 0 and not required:
            found["properties"] = dict.fromkeys(found.get("properties", {}), False)
            found.pop("patternProperties", None)
            found["additionalProperties"], most, optional = False, None, []
            if not found["properties"]:
                del found["properties"]
        if least > len(required) + 1 and not (is_closed and least == len(required) + len(optional)):
            raise place.refused("minProperties", f"{least} is not served: other names could be repeated")
        if least and is_closed and least == len(required) + len(optional):
            found["required"], least, optional = [*found.get("required", ()), *optional], 0, []
        if (least or most is not None) and optional:
            if least and most is None and len(optional) <= _MOST_NAMES:
                self._at_least_one(found, optional, is_closed=is_closed)
                return
            keyword = "maxProperties" if most is not None else "minProperties"
            raise place.refused(keyword, "is not served next to optional properties")
        if least:
            found["minProperties"] = least
        if most is not None:
            found["maxProperties"] = most

    def _at_least_one(self, found: dict[str, Any], optional: list[str], *, is_closed: bool) -> None:
        """Ask for one property more than those that are required."""
        options: list[Schema] = [{"required": [name]} for name in optional]
        if not is_closed:
            none: dict[str, Any] = dict(found)
            none |= {"properties": {**found.get("properties", {}), **dict.fromkeys(optional, False)}}
            kept = ("properties", "patternProperties", "additionalProperties", "required")
            none = {key: none[key] for key in kept if key in none}
            options.append({**none, "minProperties": len(found.get("required", ())) + 1})
        found["allOf"] = [*found.get("allOf", ()), {"anyOf": options} if len(options) > 1 else options[0]]

    def dependencies(self, place: Place) -> list[Schema]:
        """Return what must hold where certain properties are there."""
        found = list[Schema]()
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            given = place.value.get(keyword, {})
            if not isinstance(given, dict):
                raise place.refused(keyword, f"must be an object, found {shown(given)}")
            for name, needed in given.items():
                then: Schema
                if isinstance(needed, list):
                    then = {"required": [name, *(one for one in needed if one != name)]}
                else:
                    within = self._schema(place.at(keyword, name))
                    if within is True or within == {}:
                        continue
                    then = False if within is False else {"allOf": [{"required": [name]}, within]}
                absent: Schema = {"properties": {name: False}}
                found.append(absent if then is False else {"anyOf": [absent, then]})
        if len(found) > 8:
            raise place.error("more than 8 dependencies between properties are not served")
        return found


def _names_pattern(names: Place) -> str:
    value = names.value
    if "pattern" in value:
        if not isinstance(value["pattern"], str):
            raise names.refused("pattern", f"must be a string, found {shown(value['pattern'])}")
        try:
            return search_pattern(value["pattern"])
        except GrammarError as error:
            raise names.refused("pattern", f": {error}") from None
    least = whole(names, "minLength") if "minLength" in value else 0
    most = whole(names, "maxLength") if "maxLength" in value else ""
    return f"^(?s:.{{{least},{most}}})$"


def _required(place: Place) -> list[str]:
    given = place.value.get("required", [])
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise place.refused("required", f"must be a list of names, found {shown(given)}")
    return list(dict.fromkeys(given))
