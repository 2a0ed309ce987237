"""Replies are split into reasoning, content and calls at any chunking, and grammars enforce schemas of calls."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest

from tests.service.support import byte_tokenizer
from triptych.model.text.grammar import json_grammar
from triptych.model.text.grammar_matcher import Matcher, Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.chat.argument_values import Values, python_json
from triptych.service.chat.call_grammar import reply_grammar
from triptych.service.chat.call_parsers import DEEPSEEK_MARKS
from triptych.service.chat.chat_template import CallIds
from triptych.service.chat.formats import REASONING_FORMATS, TOOL_FORMATS, fitting_id
from triptych.service.chat.json_text import JsonText
from triptych.service.chat.message_fit import plain_messages
from triptych.service.chat.parts import WholeReply
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.tools import Tool, ToolUse
from triptych.service.chat.usage import reasoning_tokens
from triptych.service.settings import service_settings

WEATHER = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}, "n": {}}})
TOOLS = {"weather": WEATHER, "f": Tool("f", None, None)}
A = '{"city": "Zü \\"x\\" {]", "n": [1, {"a": null}]}'
OPEN, CLOSE, BEGIN, END, SEPARATOR = DEEPSEEK_MARKS
W, F = ("weather", A), ("f", "{}")

# Format, text, and what it is parted into: reasoning, content, calls.
REPLIES: list[tuple[str, str, tuple[str, str, list[tuple[str, str]]]]] = [
    ("hermes", " just text <tool_cal \n\n", ("", " just text <tool_cal \n\n", [])),
    (
        "hermes",
        f'<think>\nhm <b>\n</think>\n\nSee.\n<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "f"}\n</tool_call>\n',
        ("hm <b>", "See.", [W, F]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", "", [F])),
    ("hermes", "<tool_call> no </tool_call> x <tool", ("", "<tool_call> no </tool_call> x <tool", [])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"ci', ("", "", [("weather", '{"ci')])),
    ("hermes", '<tool_call>{"name": "f", "argum', ("", '<tool_call>{"name": "f", "argum', [])),
    ("hermes", '<tool_call>{"name": "\\ud800"}', ("", '<tool_call>{"name": "\\ud800"}', [])),
    ("hermes", '<tool_call>{"name": "f\\u006f\\\\"}', ("", "", [("fo\\", "{}")])),
    ("hermes", "\n<think>never closed\n", ("never closed", "", [])),
    ("hermes", "a <think>b</think>", ("", "a <think>b</think>", [])),
    (
        "qwen3_coder",
        "hi\n<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<function=f>\n</function>",
        ("", "hi", [("weather", '{"city": "7", "n": 3}'), F]),
    ),
    ("qwen3_coder", "<function=> x </tool_call>", ("", "<function=> x </tool_call>", [])),
    (
        "qwen3_coder",
        "<function=weather><parameter=n>NaN</parameter><parameter=m>-Infinity</parameter></function>",
        ("", "", [("weather", '{"n": "NaN", "m": "-Infinity"}')]),
    ),
    ("mistral", f'[TOOL_CALLS][{{"name": "weather", "arguments": {A}}}, {{"name": "f"}}]', ("", "", [W, F])),
    ("mistral_args", f"ok[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]f[CALL_ID]ab[ARGS]{{}}", ("", "ok", [W, F])),
    ("mistral_args", f"[TOOL_CALLS]weather{A} [1] {{}}", ("", "[1] {}", [W])),
    ("mistral", "[TOOL_CALLS]no call", ("", "[TOOL_CALLS]no call", [])),
    ("llama3", f'{{"name": "weather", "parameters": {A}}}; {{"name": "f", "parameters": {{}}}}', ("", "", [W, F])),
    ("llama3", '<|python_tag|>{"type": "function", "name": "f", "parameters": null}', ("", "", [F])),
    ("llama3", '{"name": "other", "parameters": {}} and', ("", '{"name": "other", "parameters": {}} and', [])),
    ("llama3", '{"x": 1}', ("", '{"x": 1}', [])),
    ("json", f'```json\n[{{"name": "weather", "arguments": {A}}}]\n```', ("", "", [W])),
    ("json", 'So:\n```tool_code\n{"name": "f", "parameters": "{}"}\n```', ("", "So:", [F])),
    (
        "json",
        '[{"name": "f", "arguments": "{\\"a\\": NaN}"}]',
        ("", '[{"name": "f", "arguments": "{\\"a\\": NaN}"}]', []),
    ),
    ("json", '```json\n{"x": 1}\n```\n done', ("", '```json\n{"x": 1}\n```\n done', [])),
    ("json", '[{"name": "f"}, {"type": "function", "function": {"name": "f", "arguments": {}}}]', ("", "", [F, F])),
    (
        "deepseek_v3",
        f"{OPEN}{BEGIN}function{SEPARATOR}weather\n```json\n{A}\n```{END}\n{BEGIN}function{SEPARATOR}f\n```json\n{{}}\n"
        f"```{END}{CLOSE}",
        ("", "", [W, F]),
    ),
    ("deepseek_v31", f"x{OPEN}{BEGIN}weather{SEPARATOR}{A}{END}{CLOSE}", ("", "x", [W])),
    (
        "gemma",
        'ok<|tool_call>call:weather{city:<|"|>O, "no"<|"|>,n:[1,{a:null}]}<tool_call|><|tool_call>call:f{}<tool_call|>',
        ("", "ok", [("weather", '{"city": "O, \\"no\\"", "n": [1, {"a": null}]}'), F]),
    ),
    ("gemma", f"<|tool_call>call:weather{A}<tool_call|>", ("", "", [W])),
    ("gemma", "<|tool_call>call:f{a:None,b:[True]}<tool_call|>", ("", "", [("f", '{"a": null, "b": [true]}')])),
    ("gemma", "<|tool_call>no{<tool_call|>", ("", "<|tool_call>no{<tool_call|>", [])),
    ("gemma", "<|tool_call>call:f{a:1e999}<tool_call|>", ("", "<|tool_call>call:f{a:1e999}<tool_call|>", [])),
    ("gemma", '<|tool_call>call:f{a:"\\ud800"}<tool_call|>', ("", '<|tool_call>call:f{a:"\\ud800"}<tool_call|>', [])),
    ("gemma", '<|tool_call>call:f{ "a" : [ 1 , "b" ] }<tool_call|>', ("", "", [("f", '{ "a" : [ 1 , "b" ] }')])),
    ("gemma", '<|tool_call>call:f{ a : [ true , "b" ] }<tool_call|>', ("", "", [("f", '{"a": [true, "b"]}')])),
    ("functiongemma", "<start_function_call>call:f{}<end_function_call>", ("", "", [F])),
    ("mistral_ids", f"ok[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{A}", ("", "ok", [W])),
    (
        "deepseek_v32",
        'So.\n\n<#function_calls>\n<#invoke name="weather">\n<#parameter name="n" string="true">7</#parameter>\n'
        '<#parameter name="city" string="false">"x"</#parameter>\n</#invoke>\n<#invoke name="f">\n</#invoke>\n'
        "</#function_calls>".replace("#", "\uff5cDSML\uff5c"),
        ("", "So.", [("weather", '{"n": "7", "city": "x"}'), F]),
    ),
    (
        "glm",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7\n</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>[1, {'a': None}]</arg_value>\n</tool_call>\n<tool_call>f</tool_call>",
        ("", "", [("weather", '{"city": "7\\n", "n": [1, {"a": null}]}'), F]),
    ),
    ("glm", "<tool_call>weather\n{}</tool_call> <tool_call>", ("", "<tool_call>", [("weather", "{}")])),
    ("glm", "a <tool_call> no, see", ("", "a <tool_call> no, see", [])),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">a <b>\n</parameter>\n'
        '<parameter name="n">True</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>\n',
        ("", "", [("weather", '{"city": "a <b>\\n", "n": true}'), F]),
    ),
    (
        "kimi_k2",
        f"See.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{A}<|tool_call_end|>"
        "<|tool_call_begin|>functions.f:11<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ("", "See.", [W, F]),
    ),
    (
        "command_r",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {A}}},\n'
        '    {"tool_call_id": "1", "tool_name": "f", "parameters": {}}\n]<|END_ACTION|>',
        ("", "", [W, F]),
    ),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {A}}}, {{"name": "f"}}] x', ("", "x", [W, F])),
    ("functionary_v31", f"<function=weather>{A}</function><function=f>{{}}</function>", ("", "", [W, F])),
    ("functionary_v31", "a <function=no", ("", "a <function=no", [])),
    ("functionary_v32", f">>>all\nHi >> \n>>>weather\n{A}>>>f\n{{}}", ("", "Hi >>", [W, F])),
    ("functionary_v32", f"weather\n{A}", ("", "", [W])),
    ("functionary_v32", "no\n{}", ("", "no\n{}", [])),
    (
        "lfm2",
        "Hm <|tool_call_start|>[weather(city='it\\'s \"x\", (a', n=[1, {'a': None}]), f()]<|tool_call_end|>",
        ("", "Hm", [("weather", '{"city": "it\'s \\"x\\", (a", "n": [1, {"a": null}]}'), F]),
    ),
    ("lfm2", "<|tool_call_start|>[no]", ("", "<|tool_call_start|>[no]", [])),
    ("pythonic", '[weather(city="a", n=true), f()]', ("", "", [("weather", '{"city": "a", "n": true}'), F])),
    ("pythonic", "[1, 2] and [f()]", ("", "[1, 2] and [f()]", [])),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>See.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{A}",
        ("hm", "See.", [W]),
    ),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [F])),
    ("harmony", "<|channel|>final<|message|>Hello", ("", "Hello", [])),
    ("harmony", "<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>Hi", ("hm", "Hi", [])),
    ("harmony", "<|channel|>final<|message|>Hi<|end|><|start|>assistant<|channel|>comm", ("", "Hi", [])),
    # What models write that their templates do not.
    (
        "hermes",
        '<think>I call <tool_call>{"name": "no"}\n<tool_call>\n{"name": "f"}\n</tool_call>',
        ('I call <tool_call>{"name": "no"}', "", [F]),
    ),
    ("hermes", '<think>as <tool_call> says</think><tool_call>{"name": "f"}', ("as <tool_call> says", "", [F])),
    ("glm", "<think>so<tool_call>f</tool_call>", ("so", "", [F])),
    ("hermes", "</think>\n\nHi", ("", "Hi", [])),
    ("hermes", "<think>a</think>\n</think> Hi", ("a", "Hi", [])),
    ("hermes", '<tool_call>{"why": [{}], "name": "f", "arguments": {}, "so": "}"}</tool_call>', ("", "", [F])),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=n>\n3\n</function>\n</tool_call>",
        ("", "", [("weather", '{"city": "Oslo", "n": 3}')]),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\n<parameter=x> </function> B\n</parameter></function>",
        ("", "", [("weather", '{"city": "<parameter=x> </function> B"}')]),
    ),
    (
        "qwen3_coder",
        "<function=weather><parameter=city><a><![CDATA[b]]></a></parameter><parameter=n><![CDATA[b]]></parameter>",
        ("", "", [("weather", '{"city": "<a><![CDATA[b]]></a>", "n": "b"}')]),
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value> <arg_key>n</arg_key> <arg_value>3"
        "</arg_value></tool_call>",
        ("", "", [("weather", '{"city": "Oslo", "n": 3}')]),
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo<arg_key>n</arg_key><arg_value>3</tool_call>"
        "<tool_call>f</tool_call>",
        ("", "", [("weather", '{"city": "Oslo", "n": 3}'), F]),
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Oslo<parameter name="n">3</invoke>'
        "</minimax:tool_call>",
        ("", "", [("weather", '{"city": "Oslo", "n": 3}')]),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ("", "", [F]),
    ),
    ("mistral_args", f"[TOOL_CALLS]weather {A}[TOOL_CALLS]f [ARGS] {{}}", ("", "", [W, F])),
    (
        "gemma",
        "<|tool_call>call:weather{city:90210,n:[high,{a:2026-01-01}]}<tool_call|>",
        ("", "", [("weather", '{"city": "90210", "n": ["high", {"a": "2026-01-01"}]}')]),
    ),
    (
        "deepseek_v32",
        '<#function_calls><#invoke name="weather"><#parameter name="city">7</#parameter><#parameter name="n">7'
        "</#parameter></#invoke></#function_calls>".replace("#", "\uff5cDSML\uff5c"),
        ("", "", [("weather", '{"city": "7", "n": 7}')]),
    ),
    ("granite", '<tool_call>[{"name": "f"}] x', ("", "x", [F])),
    (
        "pythonic",
        "[weather(city='a\nb', n={'x': true, 'y': ['c\nd', null], 'z': (+1, -2)}), f()]",
        ("", "", [("weather", '{"city": "a\\nb", "n": {"x": true, "y": ["c\\nd", null], "z": [1, -2]}}'), F]),
    ),
    ("harmony", " to=f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [F])),
    ("harmony", "<|channel|>commentary to=browser.open<|message|>{}<|call|>", ("", "{}", [])),
    ("harmony", "<|channel|>analysis<|message|>hm \n<|end|>Hi", ("hm", "Hi", [])),
    ("harmony", "<|channel|>analysis<|message|>hm \n<|end|><b>Hi", ("hm", "<b>Hi", [])),
    (
        "harmony",
        "<|channel|>commentary<|message|>See.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        ("", "See.\nHi", []),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b\n<|end|><|start|>assistant"
        "<|channel|>final<|message|>Hi",
        ("a\nb", "Hi", []),
    ),
    ("harmony", "<b>Hi", ("", "<b>Hi", [])),
    ("harmony", "Hello", ("", "Hello", [])),
]


def format_of(name: str, **fields: Any) -> ReplyFormat:
    reasoning = REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    return ReplyFormat(reasoning, calls=TOOL_FORMATS[name], tools=TOOLS, **fields)


def parted(reply: WholeReply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]


def streamed(format: ReplyFormat, pieces: list[str]) -> WholeReply:
    parser, reply = ReplyParser(format), WholeReply()
    for piece in pieces:
        reply.add(parser.push(piece))
    reply.add(parser.push("", end=True))
    return reply


def cuts(text: str) -> Iterator[list[str]]:
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(len(text)))
    generator = random.Random(text)
    for _ in range(5):
        places = sorted(generator.sample(range(len(text) + 1), min(len(text), 4)))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "expected"), REPLIES, ids=lambda value: value if len(value) < 13 else "")
def test_a_reply_is_parted_however_it_is_cut(name: str, text: str, expected: Any) -> None:
    assert parted(ReplyParser(format_of(name)).whole(text)) == expected
    for pieces in cuts(text):
        assert parted(streamed(format_of(name), pieces)) == expected, pieces


def test_the_time_of_parting_grows_with_the_text_alone() -> None:
    """Texts of one unfinished string, number or name, and of long arrays, cost no more for each token than others."""
    begun = time.process_time()
    for name, text in (
        ("hermes", '<tool_call>{"arguments": "'),
        ("hermes", '<tool_call>{"name": "f", "id": 1'),
        ("mistral", "[TOOL_CALLS]"),
        ("lfm2", '<|tool_call_start|>[f(a="'),
        ("lfm2", "<|tool_call_start|>["),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        ("glm", "<tool_call>"),
        ("functionary_v32", ""),
    ):
        parser = ReplyParser(format_of(name))
        for piece in (text, *["1111"] * 10_000):
            parser.push(piece)
    ReplyParser(format_of("gemma")).whole(f"<|tool_call>call:f{{a:[{'1,' * 200_000}]}}<tool_call|>")
    assert time.process_time() - begun < 4


def test_every_format_is_tried_and_can_be_set() -> None:
    assert {name for name, _, _ in REPLIES} == TOOL_FORMATS.keys()
    assert set(service_settings.TOOL_FORMATS) == {"auto", *TOOL_FORMATS}
    assert set(service_settings.REASONING_FORMATS) == {"auto", "none", *REASONING_FORMATS}


def test_parts_come_as_soon_as_they_are_certain() -> None:
    """Content, the name, and each piece of arguments; a mark's beginning and white space before a call wait."""
    parser = ReplyParser(format_of("hermes"))
    taken = [
        parser.push(one) for one in ("Hi", " \n<", "tool_call>", '{"name": "f", ', '"arguments": {', '"a"', ": 1}}")
    ]
    kinds = [[type(part).__name__ for part in parts] for parts in taken]
    assert kinds == [["Content"], [], [], [], ["Call", "Arguments"], ["Arguments"], ["Arguments"]]
    content = ReplyParser(ReplyFormat(REASONING_FORMATS["think"]))
    assert [content.push(one)[0].text for one in ("<think>a", "</think>b", " c ")] == ["a", "b", " c "]  # type: ignore[union-attr]
    assert content.passes


def test_an_opened_reasoning_one_call_and_no_tools() -> None:
    opened = ReplyFormat(REASONING_FORMATS["think"], reasoning_opened=True)
    assert parted(ReplyParser(opened).whole("so\n</think>\n\n yes ")) == ("so", "yes ", [])
    two = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "weather"}</tool_call>'
    assert parted(ReplyParser(format_of("hermes", one_call=True)).whole(two)) == ("", "", [F])
    plain = ReplyFormat(REASONING_FORMATS["harmony"])
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}"
    assert parted(ReplyParser(plain).whole(text)) == ("a", "{}", [])


def test_ids_of_calls() -> None:
    assert fitting_id(CallIds.SHORT, "abcdefghi") == "abcdefghi"
    assert len(fitting_id(CallIds.SHORT, "call_1")) == 9
    assert fitting_id(CallIds.ANY, "call_1") == "call_1"


def test_tools_said_in_plain_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
        {"role": "tool", "content": "8"},
        {"role": "user", "content": "So?"},
    ]
    found = plain_messages(messages, [WEATHER])
    assert [one["role"] for one in found] == ["user", "assistant", "user"]
    assert '"name": "weather"' in found[0]["content"] and found[0]["content"].endswith("\n\nHi")
    assert found[1] == {"role": "assistant", "content": 'Hm\n[{"name": "f", "arguments": {}}]'}
    assert found[2]["content"] == "Result of f:\n7\nResult:\n8\nSo?"
    system = plain_messages([{"role": "system", "content": "Rules."}, messages[0]], [WEATHER])
    assert system[0]["content"].startswith("Rules.\n\nYou can call") and system[1] == messages[0]


# -- grammars

SPECIALS = {
    mark: 300 + at
    for at, mark in enumerate(
        dict.fromkeys(mark for one in TOOL_FORMATS.values() for mark in one.marks if "tool_call>" not in mark)
    )
}
PIECES = [b'{"name": "', b'", "arguments": ', b'": ', b'", "', b"true", b"</tool_call>", b"</think>", b"<tool_call>"]


@cache
def vocabulary() -> tuple[Vocabulary, tuple[bytes, ...]]:
    """Bytes, some longer pieces, and each family's special tokens; also what they show."""
    bytes_ = [bytes([byte]) for byte in range(256)]
    forms = (*bytes_, *PIECES, *[b""] * (300 - 256 - len(PIECES)), *[b""] * len(SPECIALS))
    return Vocabulary(TokenBytes(forms, forms)), (*forms[:300], *(mark.encode() for mark in SPECIALS))


def walk(matcher: Matcher, generator: random.Random, most: int = 90) -> str:
    """Return a random text that the grammar allows; after `most` tokens it ends as soon as it can."""
    _, texts = vocabulary()
    matcher, text = matcher.fork(), b""
    for step in range(24 * most):
        allowed = matcher.tokens.nonzero()[0].tolist()
        if not allowed or (matcher.is_complete and (step > most or generator.random() < 0.3)):
            break
        if step > most:
            marks = [token for token in allowed if token >= 300] or [token for token in allowed if token == _CLOSING]
            ending = sorted(allowed, key=lambda token: _ENDING.find(texts[token][:1]) % 99)
            allowed = (marks[-1:] if generator.random() < 0.5 else []) or ending[:1]
        elif generator.random() < 0.3:
            allowed = [token for token in allowed if token >= 256] or allowed
        token = generator.choice(allowed)
        matcher.accept(token)
        text += texts[token]
    assert matcher.is_complete, text
    return text.decode()


_CLOSING = 256 + PIECES.index(b"</think>")
_ENDING = b'"}]\n,:10'


def schema(generator: random.Random, depth: int = 2) -> dict[str, Any]:
    """Return a random schema of a value."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": -5, "maximum": generator.randint(0, 3000)},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 9},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a b", 'q"uo', 3, None]},
        {"const": {"k": [1]}},
        {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "string", "enum": ["x", "</tool_call>"]}]},
    ]
    if depth == 0 or generator.random() < 0.5:
        return generator.choice(leaves)
    if generator.random() < 0.4:
        low = generator.randint(0, 2)
        return {"type": "array", "items": schema(generator, depth - 1), "minItems": low, "maxItems": low + 2}
    return objects(generator, depth - 1)


def objects(generator: random.Random, depth: int = 2, *, root: bool = False) -> dict[str, Any]:
    """Return a random schema of an object; that of the root may have definitions."""
    names = generator.sample(["city", "n", "a-b", "with space", 'quo"te', "é", "list"], generator.randint(0, 4))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: schema(generator, depth) for name in names},
        "required": [name for name in names if generator.random() < 0.6],
        "additionalProperties": False,
    }
    if root and generator.random() < 0.3:
        found["$defs"] = {"d": schema(generator, 0)}
        found["properties"]["ref"] = {"$ref": "#/$defs/d"}
    return found


def held(use: ToolUse, name: str, answer: str = "", **fields: Any) -> tuple[ReplyFormat, Matcher]:
    """Return the format of replies and the matcher of their grammar."""
    reasoning = REASONING_FORMATS["harmony" if name == "harmony" else "think"]
    tools = {tool.name: tool for tool in use.callable}
    format = ReplyFormat(reasoning, calls=TOOL_FORMATS[name], tools=tools, is_held=True, **fields)
    return format, compile_grammar(reply_grammar(format, use, answer, SPECIALS.get), vocabulary()[0])


def check(reply: WholeReply, use: ToolUse) -> None:
    """Check that all calls are of tools that may be called, with arguments of their schemas."""
    schemas = {tool.name: tool.schema for tool in use.callable}
    for call in reply.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_are_held_to_500_schemas(name: str) -> None:
    """Random texts of the grammar, in each family's form: all are calls, and all arguments are valid."""
    generator = random.Random(name)
    for at in range(12):  # of two tools on average, for 22 formats
        tools = tuple(Tool(f"t{index}", None, objects(generator, root=True)) for index in range(1 + at % 3))
        use = ToolUse(tools, "required", only=frozenset({"t0"}) if at % 4 == 0 else None, parallel=at % 2 == 0)
        format, matcher = held(use, name, reasoning_opened=at % 5 == 0 and name != "harmony")
        text = walk(matcher, generator, 60)
        reply = ReplyParser(format).whole(text)
        assert reply.calls and not reply.content and (use.parallel or len(reply.calls) == 1), text
        check(reply, use)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_strict_tools_are_held_wherever_they_are_called(name: str) -> None:
    """Random texts in which a call may come: none is without a call that is, or with one that is not, held."""
    generator = random.Random(name)
    called = talked = 0
    for parallel in (True, False):
        use = ToolUse((Tool("t", None, objects(generator, 1), strict=True),), parallel=parallel)
        format, matcher = held(use, name)
        for _ in range(12):
            reply = ReplyParser(format).whole(walk(matcher, generator, 40))
            check(reply, use)
            called, talked = called + bool(reply.calls), talked + (not reply.calls)
    assert talked and (called or name not in ("mistral", "harmony", "deepseek_v31")), (called, talked)


@pytest.mark.parametrize("name", ["hermes", "json", "harmony"])
def test_an_answer_is_json_or_calls(name: str) -> None:
    """`response_format` works together with tools, and after reasoning."""
    generator = random.Random(name)
    answer = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}, "required": ["x"]}
    use = ToolUse((Tool("t", None, {"properties": {"n": {"type": "boolean"}}, "additionalProperties": False}),))
    format, matcher = held(use, name, json_grammar(answer | {"additionalProperties": False}))
    kinds = set()
    for _ in range(25):
        reply = ReplyParser(format).whole(walk(matcher, generator, 40))
        check(reply, use)
        if not reply.calls:
            jsonschema.validate(json.loads(reply.content), answer)
        kinds.add((bool(reply.calls), bool(reply.reasoning)))
    assert {calls for calls, _ in kinds} == {True, False}
    assert any(reasoned for _, reasoned in kinds)


@pytest.mark.parametrize("place", [0, 9, 255, 256, 257, 5_000])
@pytest.mark.parametrize("closed", [True, False])
def test_reasoning_is_counted_by_decoding_each_token_about_once(place: int, closed: bool) -> None:
    """Whatever its length: long reasoning must not hold the event loop."""
    decoded = [0]

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            decoded[0] += len(ids)
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(byte_tokenizer()._tokenizer)
    said = "x" * place + "</think>" * closed
    ids = tokenizer.encode(said + "y" * 700, add_special_tokens=False).ids
    format = ReplyFormat(reasoning=REASONING_FORMATS["think"])
    counted = reasoning_tokens(format, ids, tokenizer, has_calls=False)
    assert counted == (len(said) if closed else len(ids))
    assert decoded[0] < 1.1 * len(ids) + 4 * 256


def test_a_mention_of_a_call_does_not_end_the_reasoning_that_is_counted() -> None:
    tokenizer = byte_tokenizer()
    for text, count in (("a <tool_call> b", 15), ('ab<tool_call>{"name": "f"}', 13)):
        has_calls = bool(ReplyParser(format_of("hermes")).whole(f"<think>{text}").calls)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert reasoning_tokens(format_of("hermes"), ids, tokenizer, has_calls=has_calls) == count


JSON_TEXTS = [
    ('{"a": "\\ud800"}', '{"a": "\\ufffd"}'),
    ('{"\\udc00x": "\\udc00\\ud800"}', '{"\\ufffdx": "\\ufffd\\ufffd"}'),
    (
        '["\\uD83D\\uDE00", "\\ud83d\\ud83d\\ude00", "\\ud83d"]',
        '["\\uD83D\\uDE00", "\\ufffd\\ud83d\\ude00", "\\ufffd"]',
    ),
    ('["\\\\ud800", "\\\\\\ud800\\n", "\\ud800\\\\udc00"]', '["\\\\ud800", "\\\\\\ufffd\\n", "\\ufffd\\\\udc00"]'),
    ('{\n"a": "b\nc\x01\t"\n}', '{\n"a": "b\\nc\\u0001\\t"\n}'),
    ('[NaN, -Infinity, Infinity, -1, "NaN -Infinity", -', '[null, null, null, -1, "NaN -Infinity", -'),
    ('["\\ud800', '["\\ufffd'),
    ('["\\ud800\\ud', '["\\ufffd\\ud'),
    ('["\\ud8', '["\\ud8'),
    ('["\\u12x4\\q"', '["\\u12x4\\q"'),
    ("[Na", "[Na"),
]


@pytest.mark.parametrize(("text", "expected"), JSON_TEXTS)
def test_arguments_are_json_that_every_library_reads(text: str, expected: str) -> None:
    """However they are cut."""
    assert JsonText.whole(text) == expected
    generator = random.Random(text)
    for _ in range(40):
        one, shown, at = JsonText(), "", 0
        while at < len(text):
            size = generator.choice([1, 1, 2, 3, 7])
            shown += one.push(text[at : at + size])
            at += size
        assert shown + one.end() == expected


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_no_format_gives_out_half_of_a_surrogate_pair(name: str) -> None:
    for format_name, text, _ in REPLIES:
        for value in ('"\\ud800"', '"a\\udc00\\ud800', '"\\ud83d\\ude00"'):
            if format_name == name and '"Zü' in text:
                format = ReplyFormat(REASONING_FORMATS["think"], calls=TOOL_FORMATS[name], tools=TOOLS)
                found = ReplyParser(format).whole(text.replace('"Zü', value, 1))
                for shown in (found.content, *(call.arguments for call in found.calls)):
                    shown.encode()
                    assert "\\ud800" not in shown or shown is found.content


def test_beginnings_of_cdata_without_an_end_cost_no_more_than_text() -> None:
    began, text = time.thread_time(), "<![CDATA[a]]>" + "<![CDATA[" * 20_000
    values = Values(WEATHER)
    assert values.json("city", text) == json.dumps(text)
    assert values.json("city", f"{text}]]>") == json.dumps("a" + "<![CDATA[" * 19_999)
    assert time.thread_time() - began < 2


TYPED = Tool(
    "typed",
    None,
    {
        "properties": {
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": ["string", "null"]},
            "size": {"enum": ["1", "2"]},
            "kind": {"$ref": "#/$defs/Kind"},
            "all": {"allOf": [{"$ref": "#/$defs/Kind"}, {"description": "It."}]},
            "either": {"oneOf": [{"type": "integer"}, {"type": "string", "minLength": 1}]},
            "number": {"type": "number"},
            "whole": {"anyOf": [{"type": "integer"}, {"const": "all"}]},
            "any": {"anyOf": [{"type": "string"}, {}]},
            "lost": {"$ref": "#/$defs/None"},
            "texts": {"type": "array", "items": {"type": "string"}},
        },
        "$defs": {"Kind": {"enum": ["1", "2"]}, "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "string"}]}},
    },
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("zip", "90210", '"90210"'),
        ("zip", "null", "null"),
        ("zip", "None", "null"),
        ("zip", "true", '"true"'),
        ("zip", '{"a": 1}', '"{\\"a\\": 1}"'),
        ("zip", '"90210"', '"\\"90210\\""'),
        ("any", '"90210"', '"90210"'),
        ("list", "['a']", "\"['a']\""),
        ("size", "1", '"1"'),
        ("kind", "2", '"2"'),
        ("all", "2", '"2"'),
        ("either", "2", "2"),
        ("either", "2.5", '"2.5"'),
        ("either", "2.0", "2.0"),
        ("number", "2", "2"),
        ("whole", "2", "2"),
        ("whole", "all", '"all"'),
        ("any", "2", "2"),
        ("lost", "2", "2"),
        ("other", "2", "2"),
        ("texts", "['a', \"b\"]", '["a", "b"]'),
        ("texts", "{'a'}", '["a"]'),
        ("texts", "[b'a']", "\"[b'a']\""),
    ],
)
def test_the_text_of_an_argument_is_a_value_of_its_schema(name: str, text: str, expected: str) -> None:
    assert Values(TYPED).json(name, text) == expected


def test_schemas_that_refer_to_each_other_twice_are_read_once() -> None:
    definitions = {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(60)}
    schema = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**definitions, "60": {"type": ["string", "null"]}}}
    assert Values(Tool("f", None, schema)).json("a", "5") == '"5"'


@pytest.mark.parametrize("text", ["'" + "\\'" * 30_000, '["' + "\\'\"" * 20_000 + "'\\", "'" * 60_001])
def test_quotes_without_an_end_cost_no_more_than_text(text: str) -> None:
    began = time.thread_time()
    python_json(text)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize("begun", ["", "<think>a</think>", "<think>a", "a", '<tool_call>{"name": "f"}</tool_call>'])
def test_white_space_without_an_end_costs_no_more_than_text(begun: str) -> None:
    for format in (format_of("hermes"), ReplyFormat(REASONING_FORMATS["think"])):
        parser, began = ReplyParser(format), time.thread_time()
        for piece in (begun, *[" " * 64] * 40_000):
            parser.push(piece)
        parser.push("", end=True)
        assert time.thread_time() - began < 2


def test_mentions_of_calls_in_reasoning_cost_no_more_than_text() -> None:
    began = time.thread_time()
    text = "<think>" + '<tool_call>{"arguments": {' * 10_000
    assert parted(ReplyParser(format_of("hermes")).whole(text)) == (text.removeprefix("<think>"), "", [])
    assert time.thread_time() - began < 4


@pytest.mark.parametrize("begun", ["", "<think>", "<think></think>"])
@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>{"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]["),
        ("json", "```json\n{"),
        ("glm", "<tool_call>f "),
        ("lfm2", "<|tool_call_start|>[f(a='"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
        ("kimi_k2", "<|tool_calls_section_begin|>"),
        ("gemma", "<|tool_call>call:f{"),
        ("deepseek_v31", BEGIN),
    ],
)
def test_a_whole_reply_of_marks_costs_no_more_than_text(name: str, mark: str, begun: str) -> None:
    """A client can make a model write one token again and again: the event loop must not wait for it."""
    began = time.thread_time()
    ReplyParser(format_of(name)).whole(begun + mark * (600_000 // len(mark)))
    assert time.thread_time() - began < 2


def test_many_arguments_cost_no_more_than_text() -> None:
    properties = {f"argument_{at}": {"type": "string"} for at in range(2_000)}
    format = ReplyFormat(calls=TOOL_FORMATS["qwen3_coder"], tools={"f": Tool("f", None, {"properties": properties})})
    given = "".join(f"<parameter={at}>1</parameter>" for at in range(20_000))
    began = time.thread_time()
    for text in (given, "<parameter=a>" + "<parameter=argument_" * 10_000):
        ReplyParser(format).whole("<tool_call><function=f>" + text)
    assert time.thread_time() - began < 2


def test_a_grammar_quotes_strings_that_models_write_as_they_are() -> None:
    assert Values(TYPED).json("zip", '"90210"', is_held=True) == '"90210"'
    assert Values(TYPED).json("zip", '"90210"', is_string=False) == '"90210"'
