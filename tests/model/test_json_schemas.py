"""JSON schemas and patterns as grammars: enforced exactly, or refused with the keyword and its place."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from triptych.model.errors import GrammarError
from triptych.model.text.grammar import json_grammar, regex_grammar
from triptych.model.text.grammar_matcher import Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes

BYTES = (*(bytes([byte]) for byte in range(256)), b"")
VOCABULARY = Vocabulary(TokenBytes(BYTES, BYTES))
D4, D7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"


def allows(grammar: str, text: str) -> bool:
    matcher = compile_grammar(grammar, VOCABULARY)
    for byte in text.encode():
        if not matcher.tokens[byte]:
            return False
        matcher.accept(byte)
    return matcher.is_complete


UNION = {
    "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
            "required": ["kind"],
        }
        for kind in ("cat", "dog")
    },
}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
# A schema, texts that it must allow, and texts that it must refuse.
HELD: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "2**60": ({"const": 2**60}, [str(2**60)], [str(2**60 + 1), str(2**60 - 1)]),
    "10**300": ({"const": 10**300}, [str(10**300)], [str(10**300 + 1)]),
    "10**400": ({"type": "string", "maxLength": 10**400, "minLength": 1}, ['"a"'], ['""', "1"]),
    "2**53": ({"type": "integer", "maximum": 2**53, "minimum": 2**53 - 2}, [str(2**53)], [str(2**53 + 1), "9"]),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-7", str(2**62)], [str(2**63)]),
    "64 bits more": ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1024)], [str(2**64)]),
    "floats": ({"enum": [0.1, 1e-7, 2.0]}, ["0.1", "0.0000001", "2"], ["0.10000001", "3"]),
    "multiples": ({"multipleOf": 0.01}, ["0.07", "12.34"], ["0.075"]),
    "escaped name": (NAMED, ['{"a":1}', '{"b":"x"}'], ['{"\\u0061":"x"}', '{"a":"x"}']),
    "escaped in patterns": (
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
        ['{"a":null}', '{"b":1}'],
        ['{"\\u0061":1}', '{"a":1}'],
    ),
    "one more": ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    "one of two": ({**NAMED, "minProperties": 1}, ['{"a":1}', '{"b":2}'], ["{}"]),
    "both": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
        ['{"a":1,"b":2}'],
        ['{"a":1}', '{"b":1}'],
    ),
    "counted by required": ({**NAMED, "required": ["a", "b"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}']),
    "union": (UNION, ['{"kind":"cat"}', '{"kind":"dog","n":1}'], ['{"kind":"cow"}', "{}"]),
    "oneOf of consts": (
        {"oneOf": [{"const": "a", "title": "A"}, {"const": 1}, {"enum": ["b", 2]}]},
        ['"a"', "2"],
        ['"c"'],
    ),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"type": ["null", "integer"]}]}, ['"a"', "1", "null"], ["true"]),
    "oneOf of ranges": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]},
        ["3", "5"],
        ["4"],
    ),
    "unique false": ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
    "if alone": ({"if": {"type": "string"}, "type": "integer"}, ["1"], ['"a"']),
    "whole float": ({"type": "array", "minItems": 2.0, "maxItems": 2.0}, ["[1,2]"], ["[1]", "[1,2,3]"]),
    "format": ({"type": "string", "format": "marvellous"}, ['"x"'], ["1"]),
    "spelling": ({"$schema": "https://json-schema.org/draft-07/schema", "type": "null"}, ["null"], ["1"]),
    "short spelling": (
        {"$schema": "draft-07", "$ref": "#/definitions/x", "definitions": {"x": {"type": "null"}}},
        ["null"],
        ["1"],
    ),
    "latest": ({"$schema": "http://json-schema.org/schema#", "type": "null"}, ["null"], ["1"]),
    "beside a reference": (
        {
            "$schema": D7,
            "properties": {"a": {"$ref": "#/definitions/x", "type": "null"}},
            "definitions": {"x": {"type": "integer"}},
        },
        ['{"a":1}'],
        ['{"a":null}'],
    ),
    "draft 4": ({"$schema": D4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    "anchors": ({"$ref": "#there", "$defs": {"x": {"$anchor": "there", "type": "null"}}}, ["null"], ["1"]),
    "elsewhere": (
        {
            "properties": {"a": {"$ref": "#/components/schemas/x%20y"}},
            "required": ["a"],
            "type": "object",
            "components": {"schemas": {"x y": {"type": "null", "nullable": True}}},
        },
        ['{"a":null}'],
        ['{"a":1}'],
    ),
    "recursive": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        ['{"a":{"a":{}}}'],
        ['{"b":1}'],
    ),
    "names listed": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
        ['{"a":null,"b":null}', "{}"],
        ['{"c":null}', '{"a":1}'],
    ),
    "names by pattern": ({"type": "object", "propertyNames": {"pattern": "^x"}}, ['{"xy":1}'], ['{"y":1}']),
    "names by length": ({"type": "object", "propertyNames": {"maxLength": 2}}, ['{"xy":1}'], ['{"xyz":1}']),
    "rest": ({"type": "array", "prefixItems": [{"const": 1}], "additionalItems": False}, ["[1]"], ["[2]", "[1,2]"]),
    "tuple": (
        {"$schema": D7, "items": [{"const": 1}], "additionalItems": {"type": "null"}},
        ["[1,null]"],
        ["[1,2]", "[2]"],
    ),
    "date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"'],
        ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"'],
    ),
    "date-time": (
        {"type": "string", "format": "date-time"},
        ['"2024-02-29T23:59:60Z"'],
        ['"2023-02-29T01:00:00Z"', '"2024-02-28T01:00:60Z"'],
    ),
    "dependent": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        ['{"a":1,"b":2}', '{"b":2}', "{}"],
        ['{"a":1}'],
    ),
    "evaluated": ({**NAMED, "unevaluatedProperties": False}, ['{"a":1}'], ['{"b":1}']),
    "not a type": ({"not": {"type": ["object", "array"]}}, ["1", '"a"'], ["{}", "[]"]),
    "unknown keyword": ({"type": "null", "x-order": 1, "markdownDescription": "x"}, ["null"], ["1"]),
    "above 0": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.5", "0.25", "0.001"],
        ["0", "-0", "0.0"],
    ),
    "above 0 in parts": (
        {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        ["0.5", "0.25"],
        ["0", "-0", "0.51"],
    ),
    "below -1": ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.25", "-1.5"], ["-1", "-1.0", "1.2"]),
    "above 0 in draft 4": (
        {"$schema": D4, "type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
        ["0.5", "0.25"],
        ["0"],
    ),
    "integer above 0": ({"allOf": [{"exclusiveMinimum": 0}, {"type": "integer"}, {"maximum": 2.5}]}, ["1", "2"], ["0"]),
    "fewer decimals": (
        {"type": "number", "minimum": -99.995, "maximum": 0.905},
        ["-99.9", "-99.99", "0.9", "0.905", "-3"],
        ["-99.999", "0.91"],
    ),
    "quarters": ({"type": "number", "multipleOf": 0.25}, ["0.5", "12.5", "0.25", "3"], ["0.2", "0.05", "0.255"]),
    "patterns besides others": (
        {"type": "string", "format": "date", "pattern": "^2", "anyOf": [{"maxLength": 10}]},
        ['"2024-02-28"'],
        ['"1024-02-28"', '"2"'],
    ),
    "one more besides others": (
        {**NAMED, "required": ["b"], "minProperties": 2, "dependentRequired": {"c": ["b"]}},
        ['{"a":1,"b":2}', '{"b":2,"c":3}'],
        ['{"b":2}'],
    ),
    "names in Python's sense": (
        {"type": "object", "patternProperties": {r"^[^\W]$": {"type": "null"}}},
        ['{"۸":null}', '{"aa":1}'],
        ['{"۸":1}', '{"a":1}'],
    ),
    "names in both senses": (
        {"type": "object", "patternProperties": {r"^\W$": {}}, "additionalProperties": False},
        ['{"-":1}'],
        ['{"é":1}', '{"a":1}'],
    ),
    "nothing within": (
        {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"enum": []}}},
        ["[]", "[null]"],
        ["[null,1]"],
    ),
    "contradiction within": (
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "null", "enum": [1]}}, "type": "object"},
        ["{}"],
        ['{"a":1}', '{"a":null}'],
    ),
    "endless within": (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}, "enum": {"$ref": "#/$defs/x"}},
            "$defs": {"x": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}},
        },
        ["{}"],
        ['{"a":{}}', '{"enum":1}'],
    ),
    "hostname": (
        {"type": "string", "format": "hostname"},
        ['"a-b.c1"', f'"{"a." * 126}a"', f'"{"a" * 63}"', '"a"', '"ab"', '"abc"', '"a--b"'],
        ['"ab--cd"', '"xn--a"', f'"{"a." * 127}a"', f'"{"a" * 64}"', '"-a"', '"a."'],
    ),
    "email": (
        {"type": "string", "format": "email"},
        [f'"{"a" * 64}@b"', '"a.b@c.de"'],
        [f'"{"a" * 65}@b"', '"a@ab--c"', '"a@b@c"', f'"a@{"b." * 127}b"'],
    ),
    "pattern is searched": ({"type": "string", "pattern": "b|^c$"}, ['"abc"', '"c"'], ['"ac"']),
    "pattern of classes": ({"type": "string", "pattern": "^[a[bc]]$"}, ['"a]"', '"[]"'], ['"a"', '"b"']),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_allowed_is_what_the_schema_accepts(name: str) -> None:
    schema, right, wrong = HELD[name]
    grammar = json_grammar(schema)
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"const": 2**53 + 1}}}, "#/properties/a/const: the number 9007199254740993 is too large"),
    ({"enum": [[{"x": 2**70 + 1}]]}, "#/enum/0/0/x: the number"),
    ({"items": {"minimum": 2**53 + 1}}, "#/items/minimum: minimum 9007199254740993 is beyond 2"),
    ({"type": "integer", "exclusiveMaximum": 2**60}, "#/exclusiveMaximum: exclusiveMaximum"),
    ({"minimum": 10**18}, "#/minimum: minimum"),
    ({"multipleOf": 0.07}, "#/multipleOf: multipleOf 0.07 cannot be held exactly"),
    ({"multipleOf": 2**40}, "#/multipleOf: "),
    ({"allOf": [{"multipleOf": 100003}, {"multipleOf": 100019}]}, "#/allOf/1/multipleOf: "),
    ({"type": "object", "minProperties": 2}, "#/minProperties: minProperties 2 is not served"),
    ({"properties": {"a/b": {"uniqueItems": True}}}, r"#/properties/a~1b/uniqueItems: uniqueItems"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf: oneOf is served where .* 0 and 1 may overlap"),
    ({"anyOf": [{"if": {"const": 1}, "then": {"type": "null"}}]}, "#/anyOf/0/if: if is not served"),
    ({"not": {"required": ["a"]}}, "#/not: not is not served"),
    ({"items": {"contains": {}}}, "#/items/contains: contains"),
    ({"type": "text"}, "#/type: type must be of array, .* found a string"),
    ({"minLength": -1}, "#/minLength: minLength must be a whole number"),
    ({"$ref": "#/nowhere"}, "#/\\$ref: \\$ref '#/nowhere' leads to nothing"),
    ({"anyOf": [{}], "$ref": f"#/anyOf/{'9' * 5000}"}, "#/\\$ref: \\$ref '#/anyOf/9999.* leads to nothing"),
    ({"anyOf": [{}], "$ref": "#/anyOf/\u0660"}, "#/\\$ref: \\$ref .* leads to nothing"),
    ({"$ref": "other.json"}, "#/\\$ref: .* none is fetched"),
    ({"$schema": "http://x.org/draft-07/own.json"}, "#/\\$schema: .* is no draft .* none is fetched"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "#/\\$schema: \\$schema is draft 3"),
    ({"properties": {"a": {"pattern": "(?=a)b"}}}, "#/properties/a/pattern: pattern: a lookahead"),
    ({"patternProperties": {"[[:alpha:]]": {}}}, "#/patternProperties/.*: patternProperties: .:alpha:. is not served"),
    ({"const": "\x01"}, "#/const: the control character"),
    ({"properties": {"a": 1}}, "#/properties/a: a schema must be an object or a boolean, found 1"),
    ({"required": "a"}, "#/required: required must be a list of names"),
    ({"properties": {"a": {"name": "string"}}}, "#/properties/a: none of its keys is a keyword"),
    ({"enum": []}, "#: no value is accepted"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#: no value is accepted .* leads back to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "#: .* leads back"),
    ({"minLength": 70_000}, "#/minLength: minLength may be 65,536 at most, found 70000"),
    ({"pattern": "^(a{300}b|c{300}){300}$"}, "#/pattern: pattern: only texts of more than 65,536 characters"),
    ({"pattern": "a\x01?"}, "#/pattern: pattern: a control character .* is not served"),
    ({"pattern": r"^[\u0001]$"}, "#/pattern: pattern: a control character"),
    ({"patternProperties": {"\x7f": {}}}, "#/patternProperties/.*: patternProperties: a control character"),
    ({"type": "number", "exclusiveMinimum": 2**53}, "#/exclusiveMinimum: .* too large to be held exactly"),
    ({"type": [["string"]]}, "#/type: type must be of array, .* found a list"),
    ({"not": {"type": 5}}, "#/not/type: type must be of array, .* found 5"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": 5}}}, "#/\\$defs/a/type: type must be of array"),
    ({"oneOf": [{"type": 5}, {"type": "null"}]}, "#/oneOf: oneOf is served where"),
    ({"minLength": 10**400}, "#/minLength: minLength may be 65,536 at most, found 1000"),
    ({"minimum": 10**400}, "#/minimum: minimum 1000.* leaves only numbers of"),
    ({"multipleOf": 10**400}, "#/multipleOf: multipleOf 1000.* cannot be held exactly"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_a_refusal_names_the_keyword_and_its_place(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=f"^{message}") as refusal:
        json_grammar(schema)
    assert len(str(refusal.value)) <= 400


_TEXTS = [{"const": f"{at}"} for at in range(1_200)]


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": list(range(6_000))}, *_TEXTS]},
        {"oneOf": [{"const": list(range(6_000))}, *_TEXTS]},
        {"type": "string", "pattern": "^" * 60_000},
        {"type": "string", "pattern": f"({'|'.join(['^a', 'b'] * 120)}){'x' * 60_000}"},
    ],
    ids=["enum", "const", "anchors", "alternatives"],
)
def test_the_time_that_a_schema_takes_is_bounded(schema: dict[str, Any]) -> None:
    assert len(json.dumps(schema)) < 70_000
    began = time.thread_time()
    with suppress(GrammarError):
        json_grammar(schema)
    assert time.thread_time() - began < 1.5


def test_a_long_place_is_shortened() -> None:
    with pytest.raises(GrammarError) as refusal:
        json_grammar({"properties": {"x" * 9_000: {"uniqueItems": True}}})
    assert len(str(refusal.value)) <= 400 and "uniqueItems" in str(refusal.value)


@pytest.mark.parametrize(
    "schema", [{"type": "string", "maxLength": 200_000}, {"pattern": "^a{0,200000}$", "type": "string"}]
)
def test_strings_may_end_before_the_lexer_has_too_many_states(schema: dict[str, Any]) -> None:
    matcher = compile_grammar(json_grammar(schema), VOCABULARY)
    for byte in b'"' + b"a" * 65_536:
        matcher.accept(byte)
    assert not matcher.tokens[ord("a")] and matcher.tokens[ord('"')]


def test_bounds_of_numbers_hold_for_random_outputs() -> None:
    draw, finished = random.Random(1), 0
    for _ in range(150):
        values = [
            draw.choice([draw.uniform(-50, 50), draw.randint(-300, 300), round(draw.uniform(-5, 5), 2), 10**12, 1e-5])
            for _ in range(2)
        ]
        low, high = sorted(values)
        schema = {"type": draw.choice(["number", "integer"]), draw.choice(["minimum", "exclusiveMinimum"]): low}
        schema |= {draw.choice(["maximum", "exclusiveMaximum"]): high} if draw.random() < 0.7 else {}
        try:
            matcher, text = compile_grammar(json_grammar(schema), VOCABULARY), ""
        except GrammarError:
            continue  # nothing is between them
        while not matcher.is_exhausted and len(text) < 60 and not (matcher.is_complete and draw.random() < 0.3):
            text += chr(draw.choice(matcher.tokens.nonzero()[0]))
            matcher.accept(ord(text[-1]))
        if matcher.is_complete:
            finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert finished > 80


# A pattern, texts that it must match as a whole, and texts that it must not match, by JavaScript's rules.
PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("[a[bc]]", ["a]", "[]"], ["a", "b"]),
    ("[a&&b]+", ["a&b"], ["c"]),
    ("[a~~b]", ["~"], ["c"]),
    ("[+--]", ["+", "-", ","], ["a"]),
    (r"\d+", ["12"], ["٣"]),
    (r"\w", ["a", "_"], ["é"]),
    ("a{٣}", ["a{٣}"], ["aaa"]),
    (r"\s", ["\u00a0", " "], ["a"]),
    ("a.c", ["abc"], ["a\nc", "a\rc"]),
    ("(^a|b)c$", ["ac", "bc"], ["abc"]),
    ("^ab$", ["ab"], ["ab\n"]),
    ("(?i)ab(?-i)", ["AB"], ["a"]),
    ("{a}b{", ["{a}b{"], ["a"]),
    ("(?P<x>a)(?<y>b)(?:c)(?#d)", ["abc"], ["abcd"]),
    (r"\x41\u0042\u{43}\cC\/\.", ["ABC\x03/."], ["ABC\x03/a"]),
    (r"\ud83d\ude00", ["😀"], ["a"]),
    (r"\p{Lu}+\P{Lu}", ["ÉÀa"], ["ab"]),
    (r"\Aab\Z", ["ab"], ["b"]),
    (r"[^\S\n]", [" "], ["a", "\n"]),
    ("a{2,3}?b*", ["aabb", "aaa"], ["a"]),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), PATTERNS)
def test_a_pattern_is_read_as_javascript_reads_it(pattern: str, right: list[str], wrong: list[str]) -> None:
    grammar = regex_grammar(pattern)
    assert [text for text in right if not allows(grammar, text)] == []
    assert [text for text in wrong if allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("[[:alpha:]]", r"\[:alpha:\] is not served in a class; write its characters"),
        ("[]a]", "']' first in a class"),
        ("a(?=b)", r"a lookahead, \(\?=, is not served \(character 2\)"),
        ("(?<!a)b", r"a negative lookbehind"),
        (r"\bab", r"a word boundary, \\b"),
        (r"(a)\1", r"a reference to a group, \\1"),
        ("(?P=x)", "a reference to a group"),
        ("a$b", "an anchor"),
        ("a{,3}", r"write \{0,n\}"),
        ("a{3,2}", "greater minimum"),
        ("a++", "possessive"),
        ("a**", "two counts"),
        ("*a", "nothing to repeat"),
        ("(?m)^a", "the flag m is not served"),
        ("[b-a]", "out of order"),
        (r"[\d-z]", "a range in a class"),
        (r"\q", r"the escape \\q is not served"),
        (r"\ud800", "no character"),
        ("(a", r"the group has no '\)'"),
        ("a)", "opens nowhere"),
        ("[a", "the class has no"),
        ("a\\", "ends with a backslash"),
        ("(" * 3_000, "nested more than 200 deep"),
    ],
)
def test_what_languages_read_differently_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        regex_grammar(pattern)
