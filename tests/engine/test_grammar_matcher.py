"""Grammars: masks equal a naive check, and outputs pass independent validators under any schedule."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tests.engine.support import Running, request, running
from tests.matrix import rest_is_slow
from tests.model.checkpoints import VOCAB
from triptych.model.api.request import FinishReason, TokenOutput
from triptych.model.text import grammar_matcher
from triptych.model.text.grammar import GrammarError, choice_grammar, json_grammar, regex_grammar, written_grammar
from triptych.model.text.grammar_matcher import Grammars, Matcher, Vocabulary, compile_grammar
from triptych.model.text.token_bytes import TokenBytes
from triptych.service.chat.call_grammar import reply_grammar
from triptych.service.chat.formats import TOOL_FORMATS
from triptych.service.chat.reply_parser import ReplyFormat, ReplyParser
from triptych.service.chat.tools import Tool, ToolUse

EOS = 2
CHARACTERS = [
    *"{}[]\":,.-+ \\truefalsnE0123456789abcdxyz_ABé/'\n",
    '{"',
    '":',
    '", "',
    "true",
    "null",
    "ab",
    "12",
]
_FORMS = [b"", b"", b"", *(text.encode() for text in dict.fromkeys(CHARACTERS)), b"\xc3", b"\xa9", b"\xf0\x9f"]
FORMS = (*_FORMS, *[b""] * (VOCAB - len(_FORMS)))
PLAIN = TokenBytes(FORMS, FORMS)
BYTES = (*(bytes([byte]) for byte in range(256)), b"")
# As word pieces: a longer token starts with a space, unless it is the first of an output.
SPACED = TokenBytes(FORMS, tuple(b" " + form if len(form) > 1 else form for form in FORMS))
KINDS = rest_is_slow(("llama", "bart", "t5-relu", "marian"), lambda kind: kind in ("llama", "bart"))


def engine(kind: str, tokens: TokenBytes = PLAIN, **settings: Any) -> Running:
    run = running(kind, **settings)
    run.engine.eos_token_ids = (EOS,)
    run.engine.compiling.grammars = Grammars(lambda: tokens)
    return run


def finish(run: Running) -> Running:
    """Run until all requests end; compiling may take longer than the steps that a test allows."""
    while run.engine.has_work:
        run.engine.wait_for_grammars(5.0)
        run.step()
    return run.run()


def text(run: Running, name: str = "r", index: int = 0, tokens: TokenBytes = PLAIN) -> str:
    return tokens.text([token for token in run.ids(name, index) if token != EOS]).decode()


def end(outputs: Iterable[TokenOutput], name: str = "r", index: int = 0) -> TokenOutput:
    [found] = [o for o in outputs if (o.request_id, o.index) == (name, index) and o.finish_reason is not None]
    return found


FINITE: list[tuple[str, set[str]]] = [
    (choice_grammar(["true", "tru", "nul", "ab12", "é", "{}"]), {"true", "tru", "nul", "ab12", "é", "{}"}),
    (choice_grammar(["a/b\\n\n\"'", "a/b"]), {"a/b\\n\n\"'", "a/b"}),
    (regex_grammar("(ab|a){1,2}[0-2]?"), {a + b + c for a in ("ab", "a") for b in ("", "a", "ab") for c in "012"}
     | {a + b for a in ("ab", "a") for b in ("", "a", "ab")}),
    (regex_grammar("^é{2}$|x y"), {"éé", "x y"}),
    (json_grammar({"enum": ["ab", 12, True, None]}), {'"ab"', "12", "true", "null"}),
    (json_grammar({"type": "integer", "minimum": 9, "maximum": 12}), {"9", "10", "11", "12"}),
]  # fmt: skip


@pytest.mark.parametrize("tokens", [PLAIN, SPACED], ids=["plain", "spaced"])
@pytest.mark.parametrize(("grammar", "words"), FINITE, ids=range(len(FINITE)))
def test_masks_are_those_of_a_naive_check(grammar: str, words: set[str], tokens: TokenBytes) -> None:
    """Check every reachable state: a token is allowed iff some word begins with the text followed by the token."""
    whole = {word.encode() for word in words}
    states: list[tuple[bytes, bool, Matcher]] = [(b"", True, compile_grammar(grammar, Vocabulary(tokens)))]
    seen = set()
    for so_far, is_first, matcher in states:
        forms = tokens.first if is_first else tokens.later
        expected = {t for t, form in enumerate(forms) if form and any(w.startswith(so_far + form) for w in whole)}
        assert set(matcher.tokens.nonzero()[0].tolist()) == expected, so_far
        assert matcher.is_complete == (so_far in whole)
        for token in expected:
            after = so_far + forms[token]
            if after not in seen:
                seen.add(after)
                states.append((after, False, matcher.fork()))
                states[-1][2].accept(token)
    assert len(states) > 2


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "array", "items": {"type": ["integer", "boolean", "null"]}, "minItems": 1, "maxItems": 4},
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -5, "maximum": 120}, "b": {"enum": ["x", "yz", 1.5]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"a": {"$ref": "#"}, "x": {"type": "null"}}, "additionalProperties": False},
    {"anyOf": [{"type": "string", "pattern": "^[ab]{2,4}$"}, {"const": [True, {}]}]},
    {"type": "string", "maxLength": 6},
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 99},
    {"type": "object", "patternProperties": {"^a[0-9]$": {"type": "boolean"}}, "additionalProperties": {"const": 1}},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 2}], "items": False},
    {"$defs": {"n": {"enum": [1, 2]}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]},
]


def test_names_of_properties_that_may_be_any() -> None:
    """Check that `propertyNames` that allow every name compile, as some libraries write them; others are refused."""
    vocabulary = Vocabulary(TokenBytes(BYTES, BYTES))
    names: dict[str, Any] = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": False}
    named = {"properties": {"propertyNames": {"anyOf": [names, {"type": "null"}]}}, "required": ["propertyNames"]}
    matcher = compile_grammar(json_grammar({**names, **named}), vocabulary)
    for token in b'{"propertyNames":{}}':
        assert matcher.tokens[token]
        matcher.accept(token)
    assert matcher.is_complete
    with pytest.raises(GrammarError, match="propertyNames"):
        json_grammar({"type": "array", "items": {"propertyNames": {"format": "email"}}})


@pytest.mark.parametrize("kind", KINDS)
def test_every_finished_output_parses_and_validates(kind: str) -> None:
    run = engine(kind)
    asked = {f"{i}-{seed}": schema for i, schema in enumerate(SCHEMAS) for seed in range(4)}
    for number, (name, schema) in enumerate(asked.items()):
        params = dict(max_tokens=60, temperature=float(number % 3), seed=number, n=2, ignore_eos=False)
        run.engine.add(request(kind, name, 3 + number % 9, number, grammar=json_grammar(schema), **params))
    finish(run)
    stopped = 0
    for name, schema in asked.items():
        for index in range(2):
            last = end(run.outputs, name, index)
            assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if last.finish_reason is FinishReason.STOP:
                stopped += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(text(run, name, index)))
    assert stopped > len(asked) // 2


def _random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = draw.choice(["integer", "string", "boolean", "null", "enum", *["object", "array"] * (depth < 2)])
    if kind == "enum":
        return {"enum": draw.sample(["a", "xy", 1, -2, None, True, [1], {"a": 0}], 3)}
    if kind == "integer":
        low = draw.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + draw.randint(0, 90)}
    if kind == "string":
        return {"type": kind, "minLength": (low := draw.randint(0, 2)), "maxLength": low + draw.randint(0, 4)}
    if kind == "array":
        return {"type": kind, "items": _random_schema(draw, depth + 1), "maxItems": draw.randint(1, 3)}
    if kind == "object":
        names = draw.sample(["a", "b", "xy", "é"], draw.randint(1, 3))
        properties = {name: _random_schema(draw, depth + 1) for name in names}
        required = names[: draw.randint(0, len(names))]
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def test_random_schemas_hold_for_random_tokens() -> None:
    """Check 150 random schemas in two vocabularies with the matcher alone."""
    finished = 0
    for number in range(150):
        draw = random.Random(number)
        schema, tokens = _random_schema(draw), (PLAIN, SPACED)[number % 2]
        matcher, ids = compile_grammar(json_grammar(schema), Vocabulary(tokens)), list[int]()
        while not matcher.is_exhausted and len(ids) < 300 and not (matcher.is_complete and draw.random() < 0.5):
            ids.append(int(draw.choice(matcher.tokens.nonzero()[0])))
            matcher.accept(ids[-1])
        if matcher.is_complete:
            finished += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(tokens.text(ids)))
    assert finished > 100


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["[ab]{3,9}", r"\d{2}-\d{2}", "(true|false)( (true|false))*", "é+|x.{0,3}y"])
def test_the_pattern_matches_the_whole_output(kind: str, pattern: str) -> None:
    run = engine(kind, SPACED)
    for seed in range(6):
        params = dict(max_tokens=40, temperature=1.0, seed=seed, ignore_eos=False)
        run.engine.add(request(kind, f"r{seed}", 5, seed, grammar=regex_grammar(pattern), **params))
    finish(run)
    ends = [end(run.outputs, f"r{seed}").finish_reason for seed in range(6)]
    assert FinishReason.STOP in ends
    for seed, reason in enumerate(ends):
        if reason is FinishReason.STOP:
            assert re.fullmatch(pattern, text(run, f"r{seed}", tokens=SPACED))


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_the_choices_for_each_beam(kind: str) -> None:
    choices = ["ab", "abcd", "true", "null", "12"]
    run = engine(kind)
    run.engine.add(
        request(kind, "r", 5, num_beams=4, n=4, max_tokens=12, ignore_eos=False, grammar=choice_grammar(choices))
    )
    finish(run)
    found = [end(run.outputs, "r", index) for index in range(4)]
    assert all(output.finish_reason is FinishReason.STOP and output.stop_reason == EOS for output in found)
    assert all(text(run, "r", index) in choices for index in range(4))
    assert found[0].score is not None and found[0].score >= (found[1].score or 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_same_alone_in_a_batch_preempted_and_in_chunks(kind: str) -> None:
    def asked(name: str, number: int) -> Any:
        schema = SCHEMAS[number % len(SCHEMAS)]
        settings = dict(num_beams=3, n=2) if number % 4 == 3 else dict(temperature=number % 2, seed=number, n=2)
        return request(kind, name, 4 + number, number, max_tokens=24, ignore_eos=False,
                       grammar=json_grammar(schema), **settings)  # fmt: skip

    alone = {}
    for number in range(8):
        run = engine(kind)
        run.engine.add(asked("r", number))
        finish(run)
        alone[number] = [run.ids("r", index) for index in range(2)]
    crowd = engine(kind, num_blocks=36, budget=40, max_num_seqs=12)
    for number in range(8):
        crowd.engine.add(asked(f"r{number}", number))
    for number in range(4):
        crowd.engine.add(request(kind, f"free{number}", 9, number))
    wait([prepared for prepared, _ in crowd.engine.compiling._pending])  # the batch is full even if compiling is slow
    finish(crowd)
    assert crowd.engine.scheduler.num_preemptions
    assert {number: [crowd.ids(f"r{number}", index) for index in range(2)] for number in range(8)} == alone


def test_drafts_end_where_the_grammar_refuses() -> None:
    """Check that correct, refused and wrong drafts, and drafts beyond the end, do not change the output."""
    grammar = json_grammar({"type": "array", "items": {"enum": ["ab", "ba"]}, "minItems": 4, "maxItems": 9})
    plain, drafted = engine("llama"), engine("llama")
    for seed in range(6):
        one = request("llama", f"r{seed}", 9, 1, grammar=grammar, temperature=1.0, seed=seed, max_tokens=60, logprobs=0)
        plain.engine.add(one)
        finish(plain)
        said = plain.ids(f"r{seed}")
        expected = [0 if at % 9 == 8 else said[at - 1] if at % 7 == 6 else token for at, token in enumerate(said)]
        drafted.engine.add(replace(one, prediction=(*expected, *expected)))
    finish(drafted)
    for seed in range(6):
        assert drafted.ids(f"r{seed}") == plain.ids(f"r{seed}")
        assert end(drafted.outputs, f"r{seed}").finish_reason == end(plain.outputs, f"r{seed}").finish_reason
    stats = drafted.engine.stats()
    assert stats.draft_tokens > stats.accepted_tokens > 20


def test_tool_calls_with_special_tokens_as_marks() -> None:
    """Check a whole reply: marks are ids in the grammar and in the output, and the arguments are valid."""
    marks = {VOCAB - 1: "[TOOL_CALLS]", VOCAB - 2: "[ARGS]"}
    ids = {text: token for token, text in marks.items()}
    schema = {"type": "object", "properties": {"a": {"enum": [1, "x", None]}, "b": {"type": "boolean"}}}
    tool = Tool("ab", None, schema | {"required": ["a"], "additionalProperties": False})
    format = ReplyFormat(calls=TOOL_FORMATS["mistral_args"], tools={"ab": tool})
    run = engine("llama")
    for seed in range(8):
        use = ToolUse((tool,), "required", parallel=False)
        grammar = reply_grammar(format, use, "", ids.get)
        params = dict(max_tokens=60, temperature=1.0, seed=seed, ignore_eos=False)
        run.engine.add(request("llama", f"r{seed}", 5, seed, grammar=grammar, **params))
    finish(run)
    for seed in range(8):
        assert end(run.outputs, f"r{seed}").finish_reason is FinishReason.STOP
        tokens = [token for token in run.ids(f"r{seed}") if token != EOS]
        shown = b"".join(marks.get(token, "").encode() or FORMS[token] for token in tokens).decode()
        reply = ReplyParser(format).whole(shown)
        assert len(reply.calls) == 1 and not reply.content
        for call in reply.calls:
            jsonschema.validate(json.loads(call.arguments), tool.schema)


def test_logprobs_are_the_models_own() -> None:
    free, held = engine("llama"), engine("llama")
    free.engine.add(request("llama", "r", 6, max_tokens=1, logprobs=5))
    held.engine.add(request("llama", "r", 6, max_tokens=1, logprobs=5, grammar=choice_grammar(["ab", "x"])))
    finish(free), finish(held)
    [theirs], [ours] = (run.outputs[0].logprobs or [] for run in (free, held))
    assert ours.top == theirs.top
    assert ours.token_id != theirs.token_id and ours.logprob < theirs.logprob


def test_output_ends_where_no_token_can_follow() -> None:
    """Check the end without an end-of-sequence id, before min_tokens, and with biases and bans."""
    letter = FORMS.index(b"a")
    for params in (
        {"min_tokens": 9},
        {"ignore_eos": True},
        {"logit_bias": {letter: -100.0}},
        {"no_repeat_ngram_size": 1},
    ):
        run = engine("llama")
        run.engine.add(request("llama", "r", 5, **{"max_tokens": 10, "grammar": regex_grammar("a{4}"), **params}))
        finish(run)
        assert (text(run), end(run.outputs).finish_reason) == ("aaaa", FinishReason.STOP)
        assert end(run.outputs).stop_reason is None
    run = engine("llama")
    run.engine.add(request("llama", "r", 5, max_tokens=4, grammar=regex_grammar("a{4}")))
    assert end(finish(run).outputs).finish_reason is FinishReason.STOP  # complete with its last token
    run = engine("llama")
    run.engine.add(request("llama", "r", 5, max_tokens=3, grammar=regex_grammar("a{4}")))
    assert end(finish(run).outputs).finish_reason is FinishReason.LENGTH


def test_an_end_is_allowed_only_where_the_output_is_complete() -> None:
    run = engine("llama")
    bias = {EOS: 100.0}
    run.engine.add(request("llama", "r", 5, grammar=regex_grammar("(ab)+"), ignore_eos=False, logit_bias=bias))
    run.engine.add(
        request("llama", "s", 5, grammar=regex_grammar("(ab)+"), ignore_eos=False, logit_bias=bias, min_tokens=5)
    )
    finish(run)
    assert (text(run, "r"), end(run.outputs, "r").stop_reason) == ("ab", EOS)
    assert re.fullmatch("(ab)+", text(run, "s")) and len(run.ids("s")) >= 6


@pytest.mark.parametrize("beams", [1, 3])
def test_grammar_that_no_tokens_match_ends_with_a_reason(beams: int) -> None:
    run = engine("llama")
    several = dict(num_beams=beams, n=beams, max_tokens=20, ignore_eos=False)
    run.engine.add(request("llama", "never", 5, grammar=regex_grammar("Z+"), **several))
    run.engine.add(request("llama", "midway", 5, grammar=regex_grammar("abZ"), **several))
    run.engine.add(request("llama", "broken", 5, grammar=choice_grammar(["a"]).replace('"a"', "/(a/"), **several))
    run.engine.add(request("llama", "fine", 5))
    finish(run)
    for name, message in (("never", "no token"), ("midway", "no token"), ("broken", "unclosed group")):
        for index in range(beams):
            last = end(run.outputs, name, index)
            assert last.finish_reason is FinishReason.ERROR and message in (last.error or "")
    assert len(run.ids("fine")) == 12


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 5}, {"num_beams": 2, "ignore_eos": False}])
@pytest.mark.parametrize(
    ("pattern", "stops", "expected"),
    [
        ("ab", "a", "no token of the model can come next"),  # at the beginning
        ("ab", "b", "no token of the model can come next"),  # midway
        ("a?", "a", "only the empty output would match"),
        ("abb?", "b", "no token of the model can come next"),
        ("[ab]", "b", "a"),
        ("ab?", "b", "a"),
    ],
)
def test_stop_id_is_not_part_of_the_matched_text(
    pattern: str, stops: str, expected: str, settings: dict[str, Any]
) -> None:
    run = engine("llama")
    asked = dict(grammar=regex_grammar(pattern), stop_token_ids=(FORMS.index(stops.encode()), FORMS.index(b"ab")))
    run.engine.add(request("llama", "r", 5, **{"max_tokens": 10, **asked, **settings}))
    run.engine.add(request("llama", "fine", 5))
    last = end(finish(run).outputs)
    if last.finish_reason is FinishReason.STOP:
        shown = [token for token in run.ids("r") if token != last.stop_reason]
        assert PLAIN.text(shown).decode() == expected
    else:
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, expected)
        assert all(token > EOS for token in run.ids("r"))
    assert len(run.ids("fine")) == 12


def test_other_requests_run_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine("llama")
    assert run.engine.compiling.grammars is not None
    slow: Future[Matcher] = Future()
    ready = run.engine.compiling.grammars.compile(regex_grammar("a{3}")).result()
    monkeypatch.setattr(run.engine.compiling.grammars, "compile", lambda grammar: slow)
    late = time.monotonic() + 0.05
    run.engine.add(request("llama", "held", 5, grammar="...", n=2))
    run.engine.add(request("llama", "cancelled", 5, grammar="..."))
    expiring = request("llama", "late", 5, grammar="...")
    object.__setattr__(expiring, "deadline", late)
    run.engine.add(expiring)
    assert run.engine.waits_for_grammars
    run.engine.add(request("llama", "free", 5))
    assert not run.engine.waits_for_grammars
    while run.engine.scheduler.running or run.ids("free") == []:
        run.step()
    assert len(run.ids("free")) == 12 and run.engine.waits_for_grammars
    run.outputs += run.engine.abort("cancelled", None, FinishReason.CANCELLED)
    time.sleep(max(0.0, late - time.monotonic()))
    run.step()
    assert end(run.outputs, "late").finish_reason is FinishReason.DEADLINE
    slow.set_result(ready)
    run.run()
    assert [text(run, "held", index) for index in range(2)] == ["aaa", "aaa"]
    assert run.ids("cancelled") == run.ids("late") == []


@pytest.mark.parametrize("pattern", ["(?x)a # c\nb", "(?ix-s)a\rb", "(?:a(?-u)(?x: b # c\n c ))"])
def test_a_line_break_in_verbose_mode_is_refused(pattern: str) -> None:
    with pytest.raises(GrammarError, match="flag x"):
        regex_grammar(pattern)


@pytest.mark.parametrize("pattern", ["a\nb", "(?-x)a\n", "(\\(?x)\n", "(?P<x>a)\n", "[(?x]\n"])
def test_a_line_break_elsewhere_is_text(pattern: str) -> None:
    assert "\n" not in regex_grammar(pattern).split("TEXT: ")[1][:-1]


def test_compiled_grammars_are_cached_up_to_a_bound() -> None:
    reads = []
    grammars = Grammars(lambda: reads.append(1) or PLAIN)  # type: ignore[func-returns-value]
    first = grammars.compile(choice_grammar(["a"]))
    assert grammars.compile(choice_grammar(["a"])) is first
    for number in range(70):
        grammars.compile(choice_grammar([f"a{number}"])).result()
    assert grammars.compile(choice_grammar(["a"])) is not first
    assert reads == [1]
    with pytest.raises(GrammarError, match="unclosed group"):
        grammars.compile(choice_grammar(["a"]).replace('"a"', "/(a/")).result()


def follow(matcher: Matcher, text: str) -> Matcher:
    """Follow a text byte by byte; check that each byte is allowed."""
    for place, byte in enumerate(text.encode()):
        assert matcher.tokens[byte], (place, text[:place][-40:], matcher.failure)
        matcher.accept(byte)
    return matcher


def test_a_grammar_that_was_accepted_can_be_followed_again_and_again() -> None:
    """Check long strings of limited length in several sequences that share one compiled grammar."""
    texts = {f"p{place}": {"type": "string", "maxLength": 600 + place} for place in range(12)}
    grammar = json_grammar({"type": "object", "properties": texts, "additionalProperties": False})
    grammars = Grammars(lambda: TokenBytes(BYTES, BYTES))
    for letter in "abcd":
        start = grammars.compile(grammar).result().with_stop_tokens(())
        second = start.fork()
        assert follow(start, json.dumps(dict.fromkeys(texts, letter * 600))).is_complete
        assert follow(second, '{"p3": "').tokens[ord("x")]


def test_a_string_may_be_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "LEXER_STATES", 12_000)  # 5,000 letters with their masks exceed it
    start = compile_grammar(json_grammar({"type": "string", "maxLength": 5_000}), Vocabulary(TokenBytes(BYTES, BYTES)))
    matcher = follow(start, '"' + "a" * 5_000)
    assert not matcher.tokens[ord("a")] and follow(matcher.fork(), '"').is_complete and not matcher.is_complete


def test_a_grammar_with_slow_masks_ends_its_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(grammar_matcher, "MASK_SECONDS_PER_TOKEN", -1.0)
    run = engine("llama")
    run.engine.add(request("llama", "r", 5, max_tokens=9, grammar=regex_grammar("a+")))
    last = end(finish(run).outputs)
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "it takes too much to follow: what comes next is found too slowly"


def test_slow_masks_count_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a grammar with slow masks, which delay others, ends its sequence before its time is used up."""
    for name, value in {"MASK_SECONDS": 0.5, "MASK_SECONDS_PER_TOKEN": 0.0, "SLOW_MASK": 0.0}.items():
        monkeypatch.setattr(grammar_matcher, name, value)
    grammar = written_grammar('root ::= s\ns ::= s s | "a" | "b" | "ab"')
    matcher, began = compile_grammar(grammar, Vocabulary(TokenBytes(BYTES, BYTES))), time.thread_time()
    while not matcher.is_exhausted:
        matcher.accept(ord("a"))
    assert matcher.failure == "it takes too much to follow: what comes next is found too slowly"
    assert time.thread_time() - began < 0.25


def test_objects_may_have_many_properties_that_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(TokenBytes(BYTES, BYTES))
    names = {f"p{number}": {"type": "boolean"} for number in range(520)}
    start = compile_grammar(json_grammar({"type": "object", "properties": names}), vocabulary)
    assert follow(start, '{"p519": true}').is_complete
    monkeypatch.setattr(grammar_matcher, "ROW_ITEMS", 1_000)
    start = compile_grammar(json_grammar({"type": "object", "properties": names}), vocabulary)
    start.accept(ord("{"))
    assert start.is_exhausted and "such as properties that may be left out" in start.failure


def test_cached_grammars_are_few_where_they_cost_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_matcher, "CACHED_SECONDS", 0.0)
    grammars = Grammars(lambda: PLAIN)
    first = grammars.compile(choice_grammar(["a"]))
    assert first.result().seconds > 0
    assert grammars.compile(choice_grammar(["a"])) is first
    grammars.compile(choice_grammar(["b"])).result()
    assert grammars.compile(choice_grammar(["a"])) is not first
