"""Generates the pairs of `normalize`: spoken English dates, times, numbers and amounts, and their written forms.

    "the meeting is on the third of march twenty twenty four at half past nine"
    -> "the meeting is on 2024-03-03 09:30"

A `Value` has one written form and several spoken forms. A sample is a value alone, or a template with values in its
slots and plain words that are copied.

Invariants
- The written text is a function of the spoken text. Hence the conventions: a time without a.m. or p.m. is read on
  the 24-hour clock; a year stands only inside a date; a string of digits has at least five of them; a weekday goes
  with a full date and is dropped; "<date> at <time>" is always one moment. Plain words are never words of a value
  (but for "the", "on", "at", "of", "in", "to" in templates), and slots never touch each other.
- A value is held out by the CRC of its written form. Training samples contain no held-out value, held-out samples no
  other; in a date with a time both parts count.
- Random choices use `random.Random.random` alone, the only method whose sequence Python guarantees.

Lower case only. No torch, no files.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import TypeVar

from lab.training.sentences import PLAIN_TEMPLATES, RESERVED, TEMPLATES, WORDS
from lab.training.spoken import (
    CURRENCIES,
    DURATIONS,
    UNITS,
    cardinal_forms,
    date_forms,
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Value:
    """A written form; `forms()` returns its spoken forms."""

    written: str
    forms: Callable[[], list[str]]

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.written.encode()) % 20 == 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A pair of texts with the written forms of its values."""

    spoken: str
    written: str
    values: tuple[str, ...] = ()


def sample(rng: random.Random, *, held_out: bool) -> tuple[str, str]:
    """Return a random (spoken, written) pair."""
    pair = draw(rng, held_out=held_out)
    return pair.spoken, pair.written


def held_out_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return `count` held-out pairs with distinct spoken texts, the same on every machine."""
    rng, pairs = random.Random(seed), dict[str, str]()
    while len(pairs) < count:
        pairs.setdefault(*sample(rng, held_out=True))
    return list(pairs.items())


def spoken_value(rng: random.Random, kind: str, *, held_out: bool) -> str:
    """Return a spoken form of a random value; `kind` is a slot of the templates: date, moment, digits, ..."""
    return _slot(rng, kind, held_out).spoken


def draw(rng: random.Random, *, held_out: bool) -> Sample:
    """Return a random pair with its values: 45 % are a value alone, the others sentences."""
    templates = TEMPLATES if held_out else TEMPLATES + PLAIN_TEMPLATES
    template = "{" + _pick(rng, _ALONE) + "}" if rng.random() < 0.45 else _pick(rng, templates)
    filled = _fill(rng, template, held_out)
    hyphen = "-" if rng.random() < 0.4 else " "
    end = "." if len(filled.spoken.split()) > 5 and rng.random() < 0.1 else ""
    return Sample(filled.spoken.replace("-", hyphen) + end, filled.written + end, filled.values)


def _fill(rng: random.Random, template: str, held_out: bool) -> Sample:
    parts = re.split(r"\{(\w+)\}", template)  # text, slot, text, slot, ..., text
    pieces = [_slot(rng, part, held_out) if i % 2 else Sample(part, part) for i, part in enumerate(parts)]
    values = tuple(value for piece in pieces for value in piece.values)
    return Sample("".join(p.spoken for p in pieces), "".join(p.written for p in pieces), values)


def _slot(rng: random.Random, name: str, held_out: bool) -> Sample:
    if name in WORDS:
        word = _made_up_word(rng) if rng.random() < 0.25 else _pick(rng, WORDS[name])
        return Sample(word, word)
    if name == "moment":
        day, clock = (_slot(rng, part, held_out) for part in ("date", "time"))
        return Sample(f"{day.spoken} at {clock.spoken}", f"{day.written} {clock.written}", day.values + clock.values)
    value = _DRAW[name](rng)
    while value.held_out != held_out:
        value = _DRAW[name](rng)
    return Sample(_pick(rng, value.forms()), value.written, (value.written,))


def _below(rng: random.Random, n: int) -> int:
    return int(rng.random() * n)


def _pick(rng: random.Random, options: Sequence[T]) -> T:
    return options[_below(rng, len(options))]


def _made_up_word(rng: random.Random) -> str:
    """Return a random word outside the vocabulary, so that copying by letters is learned too."""
    while True:
        word = "".join(_pick(rng, "bcdfghjklmnprstvwz") + _pick(rng, "aeiou") for _ in range(2 + _below(rng, 2)))
        word += _pick(rng, ("", "", "n", "r", "s", "t", "l", "x"))
        if word not in RESERVED:
            return word


_FIRST_DAY, _DAYS = date(1900, 1, 1), (date(2100, 1, 1) - date(1900, 1, 1)).days


def _draw_date(rng: random.Random) -> Value:
    kind = rng.random()
    day = _FIRST_DAY + timedelta(_below(rng, _DAYS))
    if kind < 0.8:
        return Value(day.isoformat(), partial(date_forms, day))
    return Value(f"{day.month:02}-{day.day:02}", partial(month_day_forms, day.month, day.day))


def _draw_month(rng: random.Random) -> Value:
    year, month = 1900 + _below(rng, 200), 1 + _below(rng, 12)
    return Value(f"{year}-{month:02}", partial(month_forms, year, month))


def _draw_time(rng: random.Random) -> Value:
    hour, minute = _below(rng, 24), _below(rng, 60)
    minute = minute // 15 * 15 if rng.random() < 0.3 else minute
    return Value(f"{hour:02}:{minute:02}", partial(time_forms, hour, minute))


def _integer(rng: random.Random, longest: int) -> int:
    """Return a random integer: all lengths are equally likely, and a third of the numbers end in zeros."""
    length = 1 + _below(rng, longest)
    zeros = 10 ** _below(rng, length) if rng.random() < 0.35 else 1
    return _below(rng, 10**length) // zeros * zeros


def _decimal(rng: random.Random) -> str:
    length = 1 + _below(rng, 4)
    return f"{_integer(rng, 3)}.{_below(rng, 10**length):0{length}}"


def _number(rng: random.Random, longest: int) -> str:
    return _decimal(rng) if rng.random() < 0.35 else str(_integer(rng, longest))


def _draw_cardinal(rng: random.Random) -> Value:
    number = _integer(rng, 9)
    return Value(str(number), partial(cardinal_forms, number))


def _draw_ordinal(rng: random.Random) -> Value:
    number = max(1, _integer(rng, 4))
    return Value(ordinal_written(number), partial(ordinal_forms, number))


def _draw_number(rng: random.Random) -> Value:
    """Return a decimal or a negative number."""
    number = f"-{_number(rng, 4)}" if rng.random() < 0.4 else _decimal(rng)
    number = number.removeprefix("-") if float(number) == 0 else number
    return Value(number, partial(number_forms, number))


def _draw_fraction(rng: random.Random) -> Value:
    bottom = 2 + _below(rng, 19)
    top = 1 + _below(rng, bottom - 1)
    whole = 1 + _below(rng, 99) if rng.random() < 0.5 else 0
    return Value(f"{whole} {top}/{bottom}" if whole else f"{top}/{bottom}", partial(fraction_forms, whole, top, bottom))


def _draw_digits(rng: random.Random) -> Value:
    digits = ""
    for _ in range(5 + _below(rng, 7)):
        digits += digits[-1] if digits and rng.random() < 0.15 else str(_below(rng, 10))
    return Value(digits, partial(digit_forms, digits))


def _draw_money(rng: random.Random) -> Value:
    sign, minor = _pick(rng, tuple(CURRENCIES)), 1 + _below(rng, 99) if rng.random() < 0.6 else 0
    major = _integer(rng, 4 if minor else 7)
    return Value(money_written(sign, major, minor), partial(money_forms, sign, major, minor))


def _draw_percent(rng: random.Random) -> Value:
    number = _number(rng, 3)
    return Value(f"{number}%", partial(percent_forms, number))


def _draw_quantity(rng: random.Random) -> Value:
    if rng.random() < 0.2:
        (large, small), first, rest = _pick(rng, DURATIONS), 1 + _below(rng, 48), 1 + _below(rng, 59)
        return Value(f"{first} {large} {rest} {small}", partial(duration_forms, first, large, rest, small))
    symbol, number = _pick(rng, tuple(UNITS.values())), _number(rng, 5)
    number = f"-{number}" if symbol.startswith("°") and rng.random() < 0.3 else number
    return Value(f"{number} {symbol}", partial(quantity_forms, number, symbol))


_DRAW: dict[str, Callable[[random.Random], Value]] = {
    "date": _draw_date,
    "month": _draw_month,
    "time": _draw_time,
    "cardinal": _draw_cardinal,
    "ordinal": _draw_ordinal,
    "number": _draw_number,
    "fraction": _draw_fraction,
    "digits": _draw_digits,
    "money": _draw_money,
    "percent": _draw_percent,
    "quantity": _draw_quantity,
}
_ALONE = (*_DRAW, "moment", "moment", "date", "time", "cardinal", "cardinal", "money")
