"""Grammars of clients in GBNF and Lark: the texts that they accept, and errors with line and column."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from tests.model.test_json_schemas import allows
from triptych.model.errors import GrammarError
from triptych.model.text.grammar import written_grammar

ACCEPTED: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "a" b\nb ::= [0-9]+ | "(" b ")" # a comment\n', ["a12", "a((1))"], ["a", "a(1", "a)"]),
    ('root ::= item ("," item)*\nitem ::= "x" |\n  "y"\n', ["x", "x,y,x"], ["x,", ""]),
    ('root::=root "a"|"b"', ["b", "baa"], ["a", "ab"]),
    ('root ::= "\\"\\n\\x41\\u00e9\\U0001F600" [^a-c\\]\\-] .', ['"\nAé😀d\n'], ['"\nAé😀ax', '"\nAé😀]x']),
    ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"?', ["aab", "aabbccd"], ["ab", "aabccc"]),
    ("root ::= (a-b | c_d)\na-b ::= \"1\"\nc_d ::= '2'".replace("'", '"'), ["1", "2"], ["3"]),
    ('root ::= "é" [あ-ん]', ["éい"], ["éx"]),
    ("root ::= [[:a-z]+ (\n  [ ] )*", [":[ "], ["A"]),
    ('start: "a" b\nb: /[0-9]+/ | "(" b ")" // a comment\n', ["a12", "a((1))"], ["a", "a(1"]),
    ('%llguidance {}\n?start: A [b] c~2..3\nA: "x"i\nb: "b"\nc: "c" -> named\n', ["Xbcc", "xccc"], ["xc", "bcc"]),
    ('start: "a" INT\n%import common.INT\n%ignore " "\n', ["a12", "a 12"], ["ab"]),
    (
        'start: j "!"\nj: %json {"type": "object",\n "properties": {"a": {"const": 1}}}\n',
        ['{"a":1}!'],
        ['{"a":2}!', '{"\\u0061":2}!'],
    ),
    ('root ::= (num "\\n")+\nnum ::= [0-9]+ ws | "(" num ")"\nws ::= [ \\n]*', ["1\n", "1 \n2\n\n"], ["1", "\n"]),
    ('root ::= [a-z]+ "x" | "(" root ")"', ["abx", "(xx)"], ["ab", "(x)"]),
    ('root ::= word root | "."\nword ::= [a-z]+ "x"?', ["abx.", "."], ["ab"]),
    ('root ::= "a"{0} "b" ("c"{0,0})* [d]{0}', ["b"], ["ab", "bc", "bd"]),
    ('start: "b" "a"{0} "c"{0,0}', ["b"], ["ba", "bc"]),
    ("start: /[a[bc]]/ /x/i", ["a]X", "[]x"], ["ax"]),
    ('start: call "(" FREE ")"\ncall: "f"\nFREE: /[a-z]*/\n', ["f(x)", "f()"], ["f"]),  # names that we use too
    ('root ::= "a" b # c ::= d\n# root ::= e\nb ::= "x" # b', ["ax"], ["a", "axb"]),
    ('root ::= 0-kv "}"\n0-kv ::= "\\"0\\":" [0-9]', ['"0":7}'], ['"0":}']),  # llama.cpp's names of properties
    ('root ::= "a"{ 2 } "b"{ 1 , } "c"{ , 2 }', ["aab", "aabbcc"], ["ab", "aabccc"]),
]


@pytest.mark.parametrize(("grammar", "right", "wrong"), ACCEPTED)
def test_texts_that_a_grammar_accepts(grammar: str, right: list[str], wrong: list[str]) -> None:
    written = written_grammar(grammar)
    assert [text for text in right if not allows(written, text)] == []
    assert [text for text in wrong if allows(written, text)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a"\n  missing', r"the rule missing is not defined \(line 2, column 3\)"),
        ('root ::= "a', r"the string has no end \(line 1, column 10\)"),
        ('root ::= "a\n"', r"the string has no end \(line 1, column 10\)"),
        ('root ::= ("a"\n', r"the group has no '\)' \(line 1, column 10\)"),
        ('root ::= "a")', r"'\)' is not expected here \(line 1, column 13\)"),
        ("root ::= [z-a]", "out of order"),
        ("root ::= [a", "the class has no end"),
        ("root ::= []", "the class is empty"),
        ('root ::= "\\q"', r"the escape is not known \(line 1, column 12\)"),
        ('root ::= "a"{3,2}', "greater minimum"),
        ('root ::= "a"{99999}', "a count may be 10000 at most"),
        ('root ::= "a"{x}', "a count is expected"),
        ('root ::= "a"\nroot ::= "b"', r"the rule root stands twice \(line 2, column 1\)"),
        ('rule ::= "a"', "the rule root is missing"),
        ("hello", r"'::=' is expected after the name of a rule, hello \(line 1, column 6\)"),
        ("root ::= <think>", "tokens, as in <...>, are not served"),
        ("root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(1_500)) + 'r1500 ::= "a"', "too deeply"),
        ("root ::= " + "(" * 200, "nested more than 100 deep"),
        ("".join(f'r{at} ::= "a"\n' for at in range(3_000)), "more than 2000 rules"),
        ('start: "a"\n  missing\n', r"the rule missing is not defined \(line 2, column 3\)"),
        ('start: "a"\nstart: "b"\n', r"the rule start stands twice \(line 2, column 1\)"),
        ("a: <think>\n", r"tokens, as in <...>, are not served \(line 1, column 4\)"),
        ("start: @other\n", "other grammars"),
        ('start[max_tokens=3]: "a"\n', "only lazy is served"),
        ('start: "\\q"\n', "the string has an escape"),
        ("start: /a(?=b)/\n", r"an expression cannot be followed: a lookahead.*line 1, column 8"),
        ('start: %json {"uniqueItems": true}\n', "%json cannot be followed: #/uniqueItems: "),
        ("start: %json [\n", "%json needs an object of JSON"),
        ('%llguidance {"no_initial_skip": true}\nstart: "a"\n', "options of %llguidance"),
        ('%declare A\nstart: "a"\n', "%declare is not served"),
        ('a: "b"\n', "the rule start is missing"),
        ("root ::= root", "a text of the rule root never ends"),
        ('root ::= x | "b"\nx ::= "a" y\ny ::= ("c" | "d") x', "a text of the rule x never ends"),
        ('root ::= "a" (?="b")', r"lookaheads and their like, as in \(\?...\), are not served \(line 1, column 14\)"),
        ("root ::= /a/", "expressions, as in /.../, are not served in GBNF"),
        ('start: A\nA.2: "a"', r"priorities, as in NAME.2, are not served.*\(line 2, column 1\)"),
        ("start: A\nA[lazy]: /a*/", "lazy is served for rules"),
        ('start: A\nA: b\nb: "x"', r"a terminal cannot use the rule b, only terminals \(line 2, column 4\)"),
        ("%import python.NAME\nstart: NAME", "%import is served for common alone"),
        ('_sep{x}: x\nstart: _sep{"a"}', "templates, as in name{...}, are not served"),
        ("start: start", r"a text of the rule start never ends: it holds another one \(line 1, column 1\)"),
        ('start: "a" start', "a text of the rule start never ends"),
        ('start: x | "b"\n?x: "a" y\ny[lazy]: ("c" | "d") x~2 -> z', r"the rule x never ends.*\(line 2, column 1\)"),
        ('start: "a" [x] x+\nx: (x | x "b"){1,}', "a text of the rule x never ends"),
        ('start: A\nA: "a" A', "a text of the rule A never ends"),
        ('%import common.INT\nstart: INT x\nx: %json {"type": "null"} x\n%ignore / /', "rule x never ends"),
        (
            "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1} r0?\n" for at in range(90)) + 'r90 ::= "a" r90',
            "r\\d+ never ends",
        ),
        ("start: 'a'", "strings are written in double quotes"),
        ('start: "a', "the string has no end"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_column(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as refusal:
        written_grammar(grammar)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start?',
        'start: "a" start*\n',
        'start: "a" [start]',
        'start: "a" | "b" start',
        'start: "a" start{0,3}',
        'start: "a" start~0..2',
        'start: ("a" | start "b") x -> start\nx: ("c" x)? "d"\n%ignore / /\nunused: "z" unused | "z"',
        "start: r0\n" + "".join(f"r{at}: r{at + 1} r0?\n" for at in range(300)) + 'r300: "a"',
    ],
)
def test_a_rule_that_holds_itself_may_end(grammar: str) -> None:
    assert written_grammar(grammar)


def test_what_only_the_library_finds_is_told_with_its_line() -> None:
    with pytest.raises(GrammarError, match=r"\(line 3\)"):
        allows(written_grammar('start: "a"\n\nb: "x" )\n'), "a")


_LOOP = '\nx ::= "(" x ")" | "b"'  # which needs the parser
_LONG = 60_000  # characters; a client may send 65,536


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" b ' + "#" * 64 + '\nb ::= "b"',
        'root ::= "a"{' + " " * _LONG + "x",
        'start: "a"{' + " " * _LONG + "x",
        "\n" * _LONG,
        " " * _LONG + "start",
        "start: " + "a[" * (_LONG // 2),
        "root ::= " + '"a" ' * (_LONG // 4) + "x" + _LOOP,
        "root ::= x " + '"a"? ' * (_LONG // 5) + _LOOP,
        "root ::= " + '"a" | ' * (_LONG // 6) + "x" + _LOOP,
        "root ::= " + "[a-b]? | " * (_LONG // 9) + "x" + _LOOP,
        "root ::= " + ("(" * 95 + "[a-z]* " + " [b-c]*)*" * 95 + " ") * (_LONG // 1200) + "x" + _LOOP,
        "root ::= x " + ("(" * 90 + '"a")? ' * 90) * (_LONG // 600) + _LOOP,
    ],
    ids=lambda grammar: grammar[:12],
)
def test_the_time_that_a_grammar_takes_grows_with_its_length(grammar: str) -> None:
    began = time.thread_time()
    with suppress(GrammarError):
        written_grammar(grammar)
    assert time.thread_time() - began < 4
