"""The embedded models' data: spoken and written forms, the split by value, the corpus, the tokenizers."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator
from datetime import date, timedelta

import jsonschema
import pytest

from lab.training import chat, conversations, corpus, pairs, sentences, tool_catalogue, vocabulary
from lab.training.spoken import (
    cardinal_forms,
    date_forms,
    decimal_forms,
    digit_forms,
    duration_forms,
    fraction_forms,
    money_forms,
    money_written,
    month_day_forms,
    month_forms,
    number_forms,
    ordinal_forms,
    ordinal_written,
    percent_forms,
    quantity_forms,
    time_forms,
)

MARCH_3 = date(2024, 3, 3)

SPOKEN = [  # the forms of a value, and one that must be among them
    (date_forms(MARCH_3), "the third of march twenty twenty-four"),
    (date_forms(MARCH_3), "march third twenty twenty-four"),
    (date_forms(MARCH_3), "march the third two thousand and twenty-four"),
    (date_forms(MARCH_3), "march third, twenty twenty-four"),
    (date_forms(MARCH_3), "sunday march third twenty twenty-four"),
    (date_forms(date(1905, 12, 31)), "the thirty-first of december nineteen oh five"),
    (date_forms(date(1900, 1, 12)), "january twelfth nineteen hundred"),
    (date_forms(date(2000, 2, 29)), "the twenty-ninth of february two thousand"),
    (date_forms(date(2007, 5, 20)), "the twentieth of may two thousand and seven"),
    (date_forms(date(2007, 5, 20)), "may twentieth two thousand seven"),
    (date_forms(date(2012, 8, 9)), "the ninth of august twenty twelve"),
    (month_day_forms(3, 3), "the third of march"),
    (month_forms(2024, 3), "march twenty twenty-four"),
    (time_forms(9, 30), "half past nine"),
    (time_forms(9, 30), "nine thirty"),
    (time_forms(21, 30), "nine thirty p m"),
    (time_forms(21, 30), "half past nine in the evening"),
    (time_forms(4, 45), "quarter to five"),
    (time_forms(3, 10), "ten past three"),
    (time_forms(19, 0), "seven o'clock in the evening"),
    (time_forms(12, 0), "noon"),
    (time_forms(0, 0), "midnight"),
    (time_forms(0, 0), "twelve a m"),
    (time_forms(12, 45), "quarter to one p m"),
    (time_forms(23, 55), "five to midnight"),
    (time_forms(19, 5), "nineteen oh five"),
    (time_forms(7, 0), "oh seven hundred hours"),
    (ordinal_forms(23), "twenty-third"),
    (ordinal_forms(112), "one hundred and twelfth"),
    (ordinal_forms(1000), "one thousandth"),
    (ordinal_forms(40), "fortieth"),
    (cardinal_forms(405_012), "four hundred and five thousand and twelve"),
    (cardinal_forms(405_012), "four hundred five thousand twelve"),
    (cardinal_forms(100_000_100), "a hundred million one hundred"),
    (money_forms("$", 12, 50), "twelve dollars and fifty cents"),
    (money_forms("$", 12, 50), "twelve dollars fifty"),
    (money_forms("€", 3, 5), "three euros and five cents"),
    (money_forms("€", 0, 5), "five euro cents"),
    (money_forms("£", 7, 0), "seven pounds"),
    (money_forms("£", 1, 1), "one pound and one penny"),
    (decimal_forms("3.14"), "three point one four"),
    (decimal_forms("0.50"), "point five oh"),
    (percent_forms("3.5"), "three point five percent"),
    (number_forms("-12"), "minus twelve"),
    (fraction_forms(0, 3, 4), "three quarters"),
    (fraction_forms(2, 1, 2), "two and a half"),
    (digit_forms("55012"), "double five oh one two"),
    (quantity_forms("1.5", "km"), "one point five kilometers"),
    (quantity_forms("-5", "°C"), "minus five degrees celsius"),
    (duration_forms(2, "h", 30, "min"), "two hours and thirty minutes"),
]


@pytest.mark.parametrize(("forms", "spoken"), SPOKEN, ids=[spoken for _, spoken in SPOKEN])
def test_a_value_is_said_as_people_say_it(forms: list[str], spoken: str) -> None:
    assert spoken in forms


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (money_written("$", 12, 50), "$12.50"),
        (money_written("€", 3, 5), "€3.05"),
        (money_written("£", 7, 0), "£7"),
        *((ordinal_written(n), w) for n, w in ((1, "1st"), (12, "12th"), (23, "23rd"), (111, "111th"), (202, "202nd"))),
    ],
)
def test_written_forms(written: str, expected: str) -> None:
    assert written == expected


def test_draws_are_pinned() -> None:
    """A change here changes what the model card's held-out score is measured on."""
    text = repr(pairs.held_out_pairs(300, seed=1))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "56f8449fb48bdd64"
    assert len(dict(pairs.held_out_pairs(300))) == 300


def test_values_of_small_spaces_never_share_a_spoken_form() -> None:
    seen: dict[str, str] = {}
    for written, forms in _small_spaces():
        for form in forms:
            spoken = form.replace("-", " ")
            assert seen.setdefault(spoken, written) == written, spoken


def _small_spaces() -> Iterator[tuple[str, list[str]]]:
    yield from ((f"{h:02}:{m:02}", time_forms(h, m)) for h in range(24) for m in range(60))
    yield from ((str(n), cardinal_forms(n)) for n in range(3000))
    yield from ((ordinal_written(n), ordinal_forms(n)) for n in range(1, 3000))
    yield from ((f"{w} {t}/{b}", fraction_forms(w, t, b)) for b in range(2, 21) for t in range(1, b) for w in range(25))
    yield from ((f"{y}-{m:02}", month_forms(y, m)) for y in range(1900, 2100) for m in range(1, 13))
    yield from ((f"{d.month:02}-{d.day:02}", month_day_forms(d.month, d.day)) for d in _days(2024, 366, 1))
    yield from ((d.isoformat(), date_forms(d)) for d in _days(1900, 73_000, 61))
    yield from ((f"{n} {s}", quantity_forms(str(n), s)) for n in range(200) for s in ("h", "min", "s", "m"))
    moneys = ((s, a, b) for s in "$€£" for a in range(30) for b in range(0, 100, 3))
    yield from ((money_written(*money), money_forms(*money)) for money in moneys)


def _days(year: int, count: int, step: int) -> Iterator[date]:
    return (date(year, 1, 1) + timedelta(n) for n in range(0, count, step))


def _check_samples(count: int) -> None:
    rng, seen, values = random.Random(5), dict[str, str](), (set[str](), set[str]())
    for i in range(count):
        held_out = i % 4 == 0
        drawn = pairs.draw(rng, held_out=held_out)
        values[held_out].update(drawn.values)
        key = drawn.spoken.replace("-", " ")
        assert seen.setdefault(key, drawn.written) == drawn.written, key
        assert drawn.values or not held_out
    assert not values[0] & values[1]
    assert all(pairs.Value(written, list).held_out for written in values[1])
    assert not any(pairs.Value(written, list).held_out for written in values[0])


def test_one_reading_and_no_leak() -> None:
    _check_samples(30_000)


@pytest.mark.slow
def test_one_reading_and_no_leak_in_many_samples() -> None:
    _check_samples(200_000)


def test_plain_words_are_never_words_of_values() -> None:
    said = {word for _, forms in _small_spaces() for form in forms for word in re.findall(r"[\w']+", form)}
    assert said <= sentences.RESERVED
    plain = {word for words in sentences.WORDS.values() for word in words}
    assert len(plain) > 300
    assert not plain & sentences.RESERVED


def test_templates_keep_values_apart() -> None:
    values = rf"\{{(?:{'|'.join(pairs._DRAW)}|moment)\}}"
    joins = rf"{values} (?:{values}|(?:to|past|and|point|per)\b)|\b(?:a|an|and|minus|point) {values}"
    for template in sentences.TEMPLATES:
        assert re.search(values, template), template
        assert not re.search(joins, template), template
        assert not re.search(r"\{date\} at|the \{(?:date|moment|month)\}|\{time\} (?:in|at)", template), template


def test_samples_are_short() -> None:
    rng = random.Random(0)
    drawn = [pairs.sample(rng, held_out=False) for _ in range(3000)]
    assert max(len(spoken.split()) for spoken, _ in drawn) <= 40
    assert sum(len(written) <= 60 for _, written in drawn) >= 0.98 * len(drawn)


# --- corpus -------------------------------------------------------------------------------------------------------


def test_corpus_sides_are_disjoint_ordered_and_free_of_tests() -> None:
    train, held_out = corpus.documents(held_out=False), corpus.documents(held_out=True)
    paths = [document.path for document in train]
    assert paths == sorted(paths)
    assert not set(paths) & {document.path for document in held_out}
    assert not [path for path in paths if re.search(r"(^|/)(tests?|site-packages|encodings)/", path)]
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in train + held_out)
    assert 0.01 < share < 0.06


@pytest.mark.parametrize("module", corpus.SAMPLE_MODULES)
def test_sample_modules_are_held_out_whatever_they_become(module: str) -> None:
    for path in (f"{module}.py", f"{module}/__init__.py", f"{module}/_local.py"):
        assert corpus.is_held_out(path)


def test_the_committed_sample_is_intact() -> None:
    text = corpus.held_out_sample()
    assert 16_000 <= len(text.encode()) <= 24_576
    assert text.isascii()
    assert "\r" not in text
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "bc93778b727db967"
    compile(text, "held_out_code", "exec")


# --- tokenizers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def some_pairs() -> list[tuple[str, str]]:
    rng = random.Random(2)
    return [pairs.sample(rng, held_out=False) for _ in range(4000)]


def test_normalize_tokenizer_round_trips(some_pairs: list[tuple[str, str]]) -> None:
    tokenizer = vocabulary.normalize_tokenizer(some_pairs)
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "</s>", "<unk>")] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == 1200
    texts = [text for pair in some_pairs + pairs.held_out_pairs(500) for text in pair] + ["É!  ☃ 12  a\n", ""]
    for text, encoding in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert encoding.ids[-1] == 1
        assert 2 not in encoding.ids
        assert tokenizer.decode(encoding.ids) == text


def test_normalize_tokenizer_splits_digits(some_pairs: list[tuple[str, str]]) -> None:
    assert vocabulary.normalize_tokenizer(some_pairs[:200], 300).encode("$12.50").tokens == [*"$12.50", "</s>"]


def test_code_tokenizer_round_trips_and_keeps_indentation_whole() -> None:
    text = corpus.held_out_sample()
    tokenizer = vocabulary.code_tokenizer([text], 1024)
    ids = tokenizer.encode(text + "\tß ☃\r\n   ").ids
    assert ids[0] == tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.decode(ids) == text + "\tß ☃\r\n   "
    body = tokenizer.encode("\n        return self\n", add_special_tokens=False).tokens
    assert body[0] == "Ċ" + "Ġ" * 8
    prompt = tokenizer.encode("    def bisect(a):\n        ").ids
    assert tokenizer.encode("    def bisect(a):\n        return").ids[: len(prompt)] == prompt


def test_a_conversation_has_all_that_its_reply_says() -> None:
    """Names come from the tools, values from the request or the result; of these none is on both sides of the split."""
    rng = random.Random(3)
    seen: dict[bool, set[str]] = {False: set(), True: set()}
    replies: dict[str, int] = {}
    for at in range(600):
        drawn = conversations.draw(rng, held_out=bool(at % 2))
        prompt, reply = chat.rendered(drawn)
        request, last = drawn.messages[0]["content"], drawn.messages[-1]
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in drawn.tools}
        assert len(offered) == len(drawn.tools)
        for call in last.get("tool_calls", ()):
            function = call["function"]
            jsonschema.validate(function["arguments"], offered[function["name"]])
            assert list(function["arguments"]) == offered[function["name"]]["required"]
            values = [str(value) for value in function["arguments"].values()]
            assert all(value in request for value in values)
            seen[bool(at % 2)] |= set(values)
        kind = "calls" if "tool_calls" in last else drawn.messages[-2]["role"]
        replies[kind] = replies.get(kind, 0) + 1
        if kind == "tool":
            told = [str(value) for value in json.loads(drawn.messages[-2]["content"]).values()]
            assert any(value in reply for value in told) or told in (["sent"], ["delivered"], ["done"], ["ok"])
        assert prompt.endswith("<|im_start|>assistant\n") and reply.count("<|im_end|>") == 1
    fixed = {value for values in tool_catalogue.FIXED_VALUES.values() for value in values}
    both = {value for value in seen[False] & seen[True] if not value[0].isdigit()} - fixed
    assert not both and min(replies.values()) > 30 and len(replies) == 3


def test_assistant_tokenizer_has_marks_and_digits() -> None:
    rng = random.Random(4)
    texts = ["".join(chat.rendered(conversations.draw(rng, held_out=False))) for _ in range(300)]
    tokenizer = vocabulary.assistant_tokenizer(texts, 400)
    assert [tokenizer.id_to_token(id) for id in range(4)] == [
        "<|im_end|>",
        "<|im_start|>",
        "<tool_call>",
        "</tool_call>",
    ]
    text = '<tool_call>\n{"n": 905, "name": "Zürich"}\n</tool_call><|im_end|>'
    found = tokenizer.encode(text)
    assert tokenizer.decode(found.ids, skip_special_tokens=False) == text
    assert [token for token in found.tokens if token.isdigit()] == ["9", "0", "5"]
