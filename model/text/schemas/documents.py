"""Finds what the references of a JSON schema mean. Nothing is fetched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin

from triptych.model.errors import GrammarError

MAX_NODES = 50_000
LATEST = 2020
_DRAFTS = re.compile(r"draft[-/]?0?(3|4|5|6|7|2019-09|2020-12)\b")
_OPENAPI = re.compile(r"^https?://spec\.openapis\.org/oas/3\.1")
_VALUES = frozenset({"const", "enum", "default", "examples", "example"})  # have no schemas in them
_SHOWN = 80  # characters of what a message quotes
_INDEX = re.compile("0|[1-9][0-9]{0,8}")  # of a list in a pointer


_Trail = tuple[Any, str | int] | None  # the steps to a place, the last one first


@dataclass(frozen=True, slots=True)
class Place:
    """A schema within a document: its value, how to get to it, and the address that its references go from."""

    value: Any
    trail: _Trail
    base: str
    draft: int

    @property
    def pointer(self) -> str:
        """The JSON pointer to it, as a fragment."""
        steps, trail = list[str](), self.trail
        while trail is not None:
            trail, step = trail
            steps.append(str(step).replace("~", "~0").replace("/", "~1"))
        return "/".join(["#", *reversed(steps)])

    def at(self, *steps: str | int) -> Place:
        """Return the place of a key, or of an entry, within this one."""
        value, trail, base = self.value, self.trail, self.base
        for step in steps:
            value, trail = value[step], (trail, step)
            base = _base(value, base, self.draft)
        return Place(value, trail, base, self.draft)

    def error(self, reason: str) -> GrammarError:
        """Return the error that names this place."""
        return GrammarError(f"{_shortened(self.pointer, 3 * _SHOWN)}: {reason}")

    def refused(self, keyword: str, reason: str = "is not served") -> GrammarError:
        """Return the error about a keyword of this schema."""
        return self.at(keyword).error(f"{keyword} {reason}")


def shown(value: object) -> str:
    """Return a value as a message describes it; texts are not quoted, since they may be the client's own data."""
    kinds: dict[type, str] = {str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value)) or _shortened(repr(value), _SHOWN)


def quoted(address: str) -> str:
    """Return an address as a message quotes it."""
    return _shortened(repr(address), _SHOWN)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 3 :]}"


def id_key(draft: int) -> str:
    """Return the keyword that gives a schema an address of its own."""
    return "id" if draft == 4 else "$id"


def _base(value: Any, base: str, draft: int) -> str:
    """Return the address from which references in `value` go: some schemas have one of their own."""
    if not isinstance(value, dict) or (draft <= 7 and "$ref" in value):  # whose siblings say nothing in old drafts
        return base
    own = value.get(id_key(draft))
    if not isinstance(own, str) or own.startswith("#"):
        return base
    return _joined(base, own).partition("#")[0]


def _joined(base: str, reference: str) -> str:
    try:
        return base.partition("#")[0] + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        return reference


class Document:
    """A whole JSON schema."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.draft = _draft(Place(schema, None, "", LATEST))
        self.root = Place(schema, None, _base(schema, "", self.draft), self.draft)
        self._addresses: dict[str, Place] = {"": self.root, self.root.base: self.root}
        self._anchors: dict[str, Place] = {}
        self._dynamic: Counter[str] = Counter()
        for place in self._nodes():
            self._index(place)

    def _nodes(self) -> Iterator[Place]:
        waiting, count = [self.root], 0
        while waiting:
            place = waiting.pop()
            count += 1
            if count > MAX_NODES:
                raise GrammarError(f"#: the schema has more than {MAX_NODES} parts")
            if isinstance(place.value, dict):
                yield place
                keys: list[str | int] = [key for key in place.value if key not in _VALUES]
            else:
                keys = list(range(len(place.value)))
            waiting += [place.at(key) for key in keys if isinstance(place.value[key], dict | list)]

    def _index(self, place: Place) -> None:
        own = place.value.get(id_key(self.draft)) if self.draft > 7 or "$ref" not in place.value else None
        if isinstance(own, str) and own.startswith("#"):
            self._anchors.setdefault(place.base + own, place)
        elif isinstance(own, str):
            self._addresses.setdefault(place.base, place)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := place.value.get(keyword), str):
                self._anchors.setdefault(f"{place.base}#{name}", place)
                self._dynamic[name] += keyword == "$dynamicAnchor"

    def resolved(self, place: Place, keyword: str = "$ref") -> Place:
        """Return the schema that a reference leads to; raises `GrammarError`."""
        reference = place.value[keyword]
        if not isinstance(reference, str):
            raise place.refused(keyword, f"must be a string, found {shown(reference)}")
        address, _, fragment = _joined(place.base, reference).partition("#")
        found = self._addresses.get(address)
        if found is None:
            raise place.refused(keyword, f"{quoted(reference)} leads out of the schema; none is fetched")
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get(f"{address}#{unquote(fragment)}")
        else:
            target = _pointed(found, unquote(fragment))
        if target is None:
            raise place.refused(keyword, f"{quoted(reference)} leads to nothing")
        return target

    def dynamically_resolved(self, place: Place, keyword: str) -> Place:
        """Return what a dynamic reference leads to, if that is the same wherever it is followed from."""
        target = self.resolved(place, keyword)
        name = target.value.get("$dynamicAnchor") if isinstance(target.value, dict) else None
        if isinstance(name, str) and self._dynamic[name] > 1:
            raise place.refused(keyword, "is served only where one schema alone has its $dynamicAnchor")
        return target


def _pointed(place: Place, pointer: str) -> Place | None:
    for part in pointer.split("/")[1:]:
        step = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place.value, dict) and step in place.value:
            place = place.at(step)
        elif isinstance(place.value, list) and _INDEX.fullmatch(step) and int(step) < len(place.value):
            place = place.at(int(step))
        else:
            return None
    return place


def _draft(root: Place) -> int:
    """Return the draft of a schema: 4 to 7, 2019 or 2020; the latest where none is said."""
    given = root.value.get("$schema")
    if given is None or given == "":
        return LATEST
    is_known = isinstance(given, str) and ("json-schema.org/" in given.lower() or "/" not in given.strip("/#"))
    found = _DRAFTS.search(given.lower()) if is_known else None
    if found is not None:
        if found[1] == "3":
            raise root.refused("$schema", "is draft 3, which is not served; draft 4 and later are")
        return max(int(found[1][:4]), 4)
    if isinstance(given, str) and (_OPENAPI.match(given) or given.rstrip("#/").endswith("json-schema.org/schema")):
        return LATEST
    raise root.refused(
        "$schema", f"{quoted(str(given))} is no draft of JSON Schema that is known here; none is fetched"
    )
