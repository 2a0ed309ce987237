"""Rewrites a JSON schema for llguidance, which reads some keywords otherwise or refuses them without a place.

What comes out is of the latest draft, and its references lead to `$defs` alone. No value that it accepts is one that
the schema rejects. Keywords that no draft has are annotations, as JSON Schema says; what cannot be held is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from triptych.model.errors import GrammarError
from triptych.model.text.patterns import LONGEST, needs_number, search_pattern
from triptych.model.text.schemas.disjoint import TYPES, Comparison, without_empty
from triptych.model.text.schemas.documents import MAX_NODES, Document, Place, shown
from triptych.model.text.schemas.numbers import checked_value, numeric, whole
from triptych.model.text.schemas.objects import ObjectKeywords

# -- The `format`s that are held; others are annotations, as JSON Schema has it by default.

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTHS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(?:[0-9]{{4}}-(?:{_MONTHS})|{_LEAP_YEAR}-02-29)"
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_ZONE}"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"  # a leap second, written in UTC alone
)

# A label of a host's name, of 63 characters at most. Those with "--" at the third place stand for other characters.
_LETTER, _INNER = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_LABEL = f"{_LETTER}(?:{_INNER}{{0,2}}{_LETTER}|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"

# Keywords for each format; patterns are Rust's expressions. llguidance's own formats have each year of 29 days in
# February, any leap second, and names and addresses of any length.
HELD: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": f"^{_HOST}$", "maxLength": 253},
    "email": {"format": "email", "pattern": f"^[^@]{{1,64}}@{_HOST}$", "maxLength": 254},
    **{name: {"format": name} for name in ("duration", "ipv4", "ipv6", "uuid", "uri")},
}


Schema = dict[str, Any] | bool

_NOT_SERVED = ("contains", "minContains", "maxContains", "unevaluatedItems", "$recursiveRef")
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "$defs"),
        *(
            "definitions",
            "title",
            "description",
            "default",
            "examples",
            "example",
            "deprecated",
            "readOnly",
            "writeOnly",
        ),
        *("contentMediaType", "contentEncoding", "contentSchema", "nullable", "discriminator", "externalDocs", "xml"),
    }
)
_KEYWORDS = _ANNOTATIONS | frozenset(
    {
        *("type", "enum", "const", "format", "pattern", "minLength", "maxLength", "minimum", "maximum", "multipleOf"),
        *("exclusiveMinimum", "exclusiveMaximum", "items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "properties", "required"),
        *("patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *("maxProperties", "dependencies", "dependentRequired", "dependentSchemas", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else", "$ref", "$dynamicRef", "$recursiveRef"),
    }
)
_APPLIED_IN_PLACE = ("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")


def translated(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema for llguidance; raises `GrammarError`, which names the keyword and its place."""
    try:
        found = _Translator(Document(dict(schema))).whole()
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise GrammarError("#: the schema is nested too deeply") from None
    except UnicodeEncodeError:
        raise GrammarError("#: the schema has a half of a surrogate pair, which is no character") from None
    return found


class _Translator:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._comparison = Comparison(document)
        self._names: dict[int, str] = {}  # of the definitions, by the identity of what they translate
        self._waiting: list[tuple[str, Place]] = []
        self._count = 0
        self._multiples: set[Decimal] = set()  # which llguidance multiplies in 32 bits
        self._objects = ObjectKeywords(self.schema)

    def whole(self) -> dict[str, Any]:
        """Return the translated document."""
        root = self.schema(self._document.root)
        definitions = dict[str, Schema]()
        while self._waiting:
            name, place = self._waiting.pop()
            definitions[name] = self.schema(place) if not self._is_empty(place) else False
        root, definitions = without_empty(root, definitions)
        if root is False:
            raise GrammarError("#: no value is accepted by the schema")
        found = {} if root is True else root
        return {**found, "$defs": definitions} if definitions else found

    def _is_empty(self, place: Place) -> bool:
        """Whether a schema contradicts itself."""
        return Comparison(self._document, self._comparison).are_disjoint([place], [])

    def schema(self, place: Place) -> Schema:
        """Return what a schema of the document becomes."""
        value = place.value
        self._count += 1
        if self._count > MAX_NODES:
            raise GrammarError(f"#: the schema has more than {MAX_NODES} parts")
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise place.error(f"a schema must be an object or a boolean, found {shown(value)}")
        if not value.keys() - _ANNOTATIONS:
            return {}
        if not value.keys() & _KEYWORDS and not any(key.startswith("x-") for key in value):
            raise place.error("none of its keys is a keyword of JSON Schema")
        if "$ref" in value and self._document.draft <= 7:
            return {"$ref": self._reference(self._document.resolved(place))}
        found = self._own(place)
        every = [one for one in self._applied(place) if one is not True]
        if found is False or any(one is False for one in every):
            return False
        every = [one for one in every if one != {}]
        if not found and len(every) == 1:
            return every[0]
        self._hold(found, every)
        return found

    def _reference(self, target: Place) -> str:
        name = self._names.get(id(target.value)) if isinstance(target.value, dict) else None
        if name is None:
            name = str(len(self._names))
            self._names[id(target.value)] = name
            self._waiting.append((name, target))
        return f"#/$defs/{name}"

    def _own(self, place: Place) -> dict[str, Any] | Any:
        """Return what the schema itself says about a value, without the schemas that are applied to the same value."""
        value, found = place.value, dict[str, Any]()
        for keyword in _NOT_SERVED:
            if keyword in value and not _says_nothing(value, keyword):
                raise place.refused(keyword)
        if "type" in value:
            found["type"] = _types(place)
        for keyword in ("const", "enum"):
            if keyword in value:
                if keyword == "enum" and not isinstance(value["enum"], list):
                    raise place.refused("enum", f"must be a list, found {shown(value['enum'])}")
                checked_value(place.at(keyword))
                _check_text(place.at(keyword))
                found[keyword] = value[keyword]
        if value.get("enum") == [] or found.get("type") == []:
            return False
        self._numeric(place, found)
        self._textual(place, found)
        self._array(place, found)
        return False if not self._objects.add(place, found, applied=_APPLIED_IN_PLACE) else found

    def _numeric(self, place: Place, found: dict[str, Any]) -> None:
        what = numeric(place)
        found |= what.keywords
        self._hold(found, what.every)
        self._multiples.update(what.multiples)
        scale = max((-int(one.as_tuple().exponent) for one in self._multiples), default=0)
        if len(self._multiples) > 1 and math.prod(one.scaleb(max(scale, 0)) for one in self._multiples) >= 2**32:
            raise place.refused("multipleOf", "stands several times with numbers that are too large together")

    @staticmethod
    def _hold(found: dict[str, Any], every: Sequence[Schema]) -> None:
        """Let these schemas hold too."""
        if every:
            found["allOf"] = [*found.get("allOf", ()), *every]

    def _textual(self, place: Place, found: dict[str, Any]) -> None:
        value = place.value
        for keyword in ("minLength", "maxLength"):
            if keyword in value:
                length = whole(place, keyword)
                if length > LONGEST and keyword == "minLength":
                    raise place.refused(keyword, f"may be {LONGEST:,} at most, found {shown(length)}")
                found[keyword] = min(length, LONGEST)
        if "pattern" in value:
            found["pattern"] = pattern_of(place.at("pattern"), value["pattern"])
        if isinstance(name := value.get("format"), str) and name in HELD:
            self._hold(found, [{key: one} for key, one in HELD[name].items() if key in found])
            found |= {key: one for key, one in HELD[name].items() if key not in found}

    def _array(self, place: Place, found: dict[str, Any]) -> None:
        value = place.value
        for keyword in ("minItems", "maxItems"):
            if keyword in value:
                found[keyword] = whole(place, keyword)
        unique = value.get("uniqueItems", False)
        if unique is not False and not found.get("maxItems", 2) <= 1:
            raise place.refused("uniqueItems", "is not served: items could be repeated")
        first, rest = ("prefixItems", "items") if "prefixItems" in value else ("items", "additionalItems")
        if isinstance(value.get(first), list):
            found["prefixItems"] = [self.schema(place.at(first, at)) for at in range(len(value[first]))]
            # The latest draft ignores `additionalItems`; its authors mean the items that follow.
            rest = rest if rest in value else "additionalItems"
        elif "prefixItems" in value:
            raise place.refused("prefixItems", f"must be a list, found {shown(value['prefixItems'])}")
        else:
            rest = "items"
        if rest in value:
            found["items"] = self.schema(place.at(rest))
        elif value.get("unevaluatedItems") is False:
            found["items"] = False

    def _applied(self, place: Place) -> list[Schema]:
        """Return the schemas that must hold too for the same value."""
        value, found = place.value, list[Schema]()
        resolvers: dict[str, Callable[[Place, str], Place]] = {
            "$ref": self._document.resolved,
            "$dynamicRef": self._document.dynamically_resolved,
        }
        for keyword, resolve in resolvers.items():
            if keyword in value:
                found.append({"$ref": self._reference(resolve(place, keyword))})
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in value:
                found += self._several(place, keyword)
        if "not" in value:
            found.append(_complement(place))
        if "if" in value:
            found.append(self._condition(place))
        found += self._objects.dependencies(place)
        return found

    def _several(self, place: Place, keyword: str) -> list[Schema]:
        options = place.value[keyword]
        if not isinstance(options, list) or not options:
            raise place.refused(keyword, f"must be a list of schemas, found {shown(options)}")
        places = [place.at(keyword, at) for at in range(len(options))]
        if keyword == "oneOf" and len(options) > 1:
            self._check_disjoint(place, places)
        found = [self.schema(one) for one in places]
        if keyword == "allOf":
            return found
        left = [one for one in found if one is not False]
        if not left or True in left:
            return [bool(left)]
        return [left[0] if len(left) == 1 else {"anyOf": left}]

    def _check_disjoint(self, place: Place, options: list[Place]) -> None:
        around = Place({k: v for k, v in place.value.items() if k != "oneOf"}, place.trail, place.base, place.draft)
        for at, one in enumerate(options):
            for other in range(at + 1, len(options)):
                if not self._comparison.are_disjoint([around, one], [options[other]]):
                    raise place.refused(
                        "oneOf", f"is served where no value fits two of its schemas; {at} and {other} may overlap"
                    )

    def _condition(self, place: Place) -> Schema:
        condition = place.value["if"]
        branches = {
            name: place.value[name] for name in ("then", "else") if place.value.get(name, True) not in (True, {})
        }
        if not branches:
            return True
        if condition in (True, {}, False):
            chosen = "else" if condition is False else "then"
            return self.schema(place.at(chosen)) if chosen in branches else True
        raise place.refused("if")


def pattern_of(place: Place, pattern: object) -> str:
    """Return the expression of a pattern of a schema; raises `GrammarError` with its place."""
    if not isinstance(pattern, str):
        raise place.error(f"a pattern must be a string, found {shown(pattern)}")
    try:
        return search_pattern(pattern)
    except GrammarError as error:
        raise place.error(f"pattern: {error}") from None


def _types(place: Place) -> str | list[str]:
    given = place.value["type"]
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) and name in (*TYPES, "integer") for name in names):
        known = ", ".join(sorted({*TYPES, "integer"}))
        raise place.refused("type", f"must be of {known}; found {shown(given)}")
    return given if isinstance(given, str) else list(names)


def _check_text(place: Place) -> None:
    """Refuse control characters that outputs cannot have, and names with them."""
    waiting = [place]
    while waiting:
        one = waiting.pop()
        if isinstance(one.value, str) and needs_number(one.value):
            raise one.error(f"the control character in {shown(one.value)} is not served")
        if isinstance(one.value, dict | list):
            keys: list[str | int] = list(one.value) if isinstance(one.value, dict) else list(range(len(one.value)))
            if any(isinstance(key, str) and needs_number(key) for key in keys):
                raise one.error("a control character in a name is not served")
            waiting += [one.at(key) for key in keys]


def _says_nothing(value: Mapping[str, Any], keyword: str) -> bool:
    """Whether a keyword that is not served has no effect where it stands."""
    if keyword in ("minContains", "maxContains"):
        return True  # `contains` is refused
    if keyword == "contains":
        return value.get("minContains") == 0 and "maxContains" not in value
    if keyword == "unevaluatedItems":
        is_alone = not any(one in value for one in (*_APPLIED_IN_PLACE, "contains"))
        return value[keyword] in (True, {}) or (value[keyword] is False and is_alone)
    return False


def _complement(place: Place) -> Schema:
    """Return what `not` leaves: nothing, all, or the other types."""
    value = place.value["not"]
    if isinstance(value, bool) or value == {}:
        return value is False
    if isinstance(value, dict) and value.keys() == {"type"} and "integer" not in (excluded := _types(place.at("not"))):
        return {"type": sorted(TYPES - ({excluded} if isinstance(excluded, str) else set(excluded)))}
    raise place.refused("not")
