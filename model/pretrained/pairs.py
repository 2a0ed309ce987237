"""Pairs for `normalize`: spoken English dates, times, numbers and amounts, and how they are written.

    "the meeting is on the third of march twenty twenty four at half past nine"
    -> "the meeting is on 2024-03-03 09:30"

A `Value` is one thing with one written form and several spoken forms; a sample is a value alone or a template
with values in its slots and plain words that are copied.

Invariants
- The written text is a function of the spoken text. Hence the conventions: a time without a.m. or p.m. is read on
  the 24-hour clock; a year stands only inside a date; a string of digits has at least five of them; a weekday goes
  with a full date and is dropped; "<date> at <time>" is always one moment. Plain words are never words of a value
  (but for "the", "on", "at", "of", "in", "to" in templates), and slots never touch each other.
- A value is held out when the CRC of its written form says so. Training samples hold no such value, held-out
  samples no other; the parts of a date with a time count each for itself.
- Every draw goes through `random.Random.random`, the one method whose sequence Python promises to keep.

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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Value:
    """One written form; `forms()` lists the ways to say it."""

    written: str
    forms: Callable[[], list[str]]

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.written.encode()) % 20 == 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A pair, with the written forms of the values in it."""

    spoken: str
    written: str
    values: tuple[str, ...] = ()


def sample(rng: random.Random, *, held_out: bool) -> tuple[str, str]:
    """One (spoken, written) pair."""
    drawn = draw(rng, held_out=held_out)
    return drawn.spoken, drawn.written


def held_out_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """`count` held-out pairs with distinct spoken texts; the same on every machine."""
    rng, pairs = random.Random(seed), dict[str, str]()
    while len(pairs) < count:
        pairs.setdefault(*sample(rng, held_out=True))
    return list(pairs.items())


def draw(rng: random.Random, *, held_out: bool) -> Sample:
    """One pair with its values: 45 % a value alone, the rest sentences."""
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
    """A word no vocabulary lists, so that copying is learned by letters too."""
    while True:
        word = "".join(_pick(rng, "bcdfghjklmnprstvwz") + _pick(rng, "aeiou") for _ in range(2 + _below(rng, 2)))
        word += _pick(rng, ("", "", "n", "r", "s", "t", "l", "x"))
        if word not in RESERVED:
            return word


def _words(text: str) -> list[str]:
    return text.split()


# --- numbers ------------------------------------------------------------------------------------------------------

SMALL = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}


def cardinal(n: int, *, british: bool = False) -> str:
    """0 <= n < 10**9 in words; `british` says "and" before the last two digits of a group."""
    if n < 20:
        return SMALL[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{SMALL[n % 10]}" if n % 10 else "")
    size, name = next(scale for scale in ((10**6, "million"), (1000, "thousand"), (100, "hundred")) if n >= scale[0])
    head, rest = f"{cardinal(n // size, british=british)} {name}", n % size
    if not rest:
        return head
    return f"{head}{' and ' if british and rest < 100 else ' '}{cardinal(rest, british=british)}"


def ordinal(n: int, *, british: bool = False) -> str:
    """1 <= n < 10**9 as an ordinal in words."""
    head, last = re.fullmatch(r"(.*?)(\w+)", cardinal(n, british=british)).groups()  # type: ignore[union-attr]
    if last in IRREGULAR_ORDINALS:
        return head + IRREGULAR_ORDINALS[last]
    return head + (last[:-1] + "ieth" if last.endswith("y") else last + "th")


def cardinal_forms(n: int) -> list[str]:
    forms = [cardinal(n), cardinal(n, british=True)]
    return forms + [re.sub("^one ", "a ", form) for form in forms if re.match("one (hundred|thousand|million)", form)]


def ordinal_written(n: int) -> str:
    suffix = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"


def ordinal_forms(n: int) -> list[str]:
    return [ordinal(n), ordinal(n, british=True)]


def decimal_forms(written: str) -> list[str]:
    """Of "3.14": three point one four."""
    whole, digits = written.split(".")
    heads = ["zero", "nought", ""] if whole == "0" else cardinal_forms(int(whole))[:2]
    tails = [" ".join(_digit(d, zero) for d in digits) for zero in ("zero", "oh")]
    return [f"{head} point {tail}".strip() for head in heads for tail in tails]


def number_forms(written: str) -> list[str]:
    """Of "-12" or "3.14"."""
    if written.startswith("-"):
        return [f"{sign} {form}" for sign in ("minus", "negative") for form in number_forms(written[1:])]
    return decimal_forms(written) if "." in written else cardinal_forms(int(written))


def fraction_forms(whole: int, top: int, bottom: int) -> list[str]:
    """Of 2 3/4: two and three quarters; whole is 0 for a fraction alone."""
    part = {2: "half", 4: "quarter"}.get(bottom) or ordinal(bottom)
    form = f"{cardinal(top)} {part}" + ("s" if top > 1 else "")
    # Not "a third": after an article that is an ordinal.
    forms = [form, f"a {part}"] if top == 1 and bottom in (2, 4) else [form]
    return [f"{cardinal(whole)} and {form}" for form in forms] if whole else forms


def digit_forms(written: str) -> list[str]:
    """Of "55012": five five oh one two, double five zero one two."""
    runs = [match.group() for match in re.finditer(r"(\d)\1{0,2}", written)]
    times = ("", "", "double ", "triple ")
    spelled = [" ".join(_digit(d, zero) for d in written) for zero in ("oh", "zero")]
    return spelled + [" ".join(times[len(run)] + _digit(run[0], zero) for run in runs) for zero in ("oh", "zero")]


def _digit(digit: str, zero: str) -> str:
    return SMALL[int(digit)] if digit != "0" else zero


# --- dates and times ----------------------------------------------------------------------------------------------

MONTHS = _words("january february march april may june july august september october november december")
WEEKDAYS = _words("monday tuesday wednesday thursday friday saturday sunday")


def year_forms(year: int) -> list[str]:
    """1900 <= year < 2100 as years are said."""
    century, rest = divmod(year, 100)
    if year == 2000:
        return ["two thousand"]
    short = "hundred" if rest == 0 else f"oh {SMALL[rest]}" if rest < 10 else cardinal(rest)
    forms = [f"{cardinal(century)} {short}"]
    return forms if year < 2000 else [*forms, cardinal(year), cardinal(year, british=True)]


def date_forms(day: date) -> list[str]:
    nth, month, weekday = ordinal(day.day), MONTHS[day.month - 1], WEEKDAYS[day.weekday()]
    heads = [f"the {nth} of {month}", f"{nth} of {month}", f"{month} {nth}", f"{month} the {nth}", f"{nth} {month}"]
    heads += [
        f"{weekday} the {nth} of {month}",
        f"{weekday} {month} {nth}",
        f"{month} {nth},",
        f"{weekday}, {month} {nth},",
    ]
    return [f"{head} {year}" for year in year_forms(day.year) for head in heads]


def month_day_forms(month: int, day: int) -> list[str]:
    """A date without its year; written 03-14."""
    nth, name = ordinal(day), MONTHS[month - 1]
    return [f"the {nth} of {name}", f"{name} {nth}", f"{name} the {nth}"]


def month_forms(year: int, month: int) -> list[str]:
    """A month of a year; written 2024-03."""
    return [f"{MONTHS[month - 1]} {form}" for form in year_forms(year)]


def time_forms(hour: int, minute: int) -> list[str]:
    return _clock_forms(hour, minute) + _relative_forms(hour, minute)


def _clock_forms(hour: int, minute: int) -> list[str]:
    """Nine thirty, nine oh five, nine o'clock in the evening, oh nine hundred hours."""
    named = cardinal(hour % 12 or 12)
    if minute:
        minutes = f"oh {SMALL[minute]}" if minute < 10 else cardinal(minute)
        return [f"{cardinal(hour)} {minutes}"] + [f"{named} {minutes} {mark}" for mark in _marks(hour)]
    forms = {0: ["midnight"], 12: ["noon", "midday", "twelve noon"]}.get(hour, [])
    forms += [f"{named} o'clock"] if 1 <= hour <= 12 else []
    forms += [f"{'oh ' if hour < 10 else ''}{cardinal(hour)} hundred hours"] if hour else []
    forms += [f"{named} {mark}" for mark in _marks(hour)]
    return forms + [f"{named} o'clock {mark}" for mark in _marks(hour) if " the " in mark]


def _relative_forms(hour: int, minute: int) -> list[str]:
    """Half past nine, quarter to five, seven minutes past three p m."""
    if minute == 0:
        return []
    named, distance, side = (hour, minute, "past") if minute <= 30 else ((hour + 1) % 24, 60 - minute, "to")
    hours = {0: ["midnight"], 12: ["noon", "twelve"]}.get(named) or [cardinal(named)] * (named < 12)
    # Nobody agrees which half of the day "quarter to twelve p m" is in: twelve takes no mark.
    hours = hours + [f"{cardinal(named % 12)} {mark}" for mark in _marks(named) if named % 12]
    return [f"{length} {side} {name}" for name in hours for length in _distance_forms(distance)]


def _distance_forms(minutes: int) -> list[str]:
    if minutes in (15, 30):
        return ["half"] if minutes == 30 else ["quarter", "a quarter"]
    long = f"{cardinal(minutes)} {'minute' if minutes == 1 else 'minutes'}"
    return [long] if minutes % 5 else [cardinal(minutes), long]


def _marks(hour: int) -> list[str]:
    """What says which half of the day `hour` is in."""
    parts = {
        "in the morning": (1, 11),
        "in the afternoon": (12, 17),
        "in the evening": (17, 23),
        "at night": (20, 23),
    }
    half = ["p m", "pm"] if hour >= 12 else ["a m", "am"]
    return half + [part for part, (first, last) in parts.items() if first <= hour <= last]


# --- amounts ------------------------------------------------------------------------------------------------------

CURRENCIES = {  # sign: one, many, one hundredth, hundredths, hundredths where nothing else names the currency
    "$": ("dollar", "dollars", "cent", "cents", "cents"),
    "€": ("euro", "euros", "cent", "cents", "euro cents"),
    "£": ("pound", "pounds", "penny", "pence", "pence"),
}
UNITS = {  # one, many: symbol. No pounds, they are money here
    ("kilometer", "kilometers"): "km",
    ("kilometre", "kilometres"): "km",
    ("meter", "meters"): "m",
    ("centimeter", "centimeters"): "cm",
    ("millimeter", "millimeters"): "mm",
    ("mile", "miles"): "mi",
    ("inch", "inches"): "in",
    ("foot", "feet"): "ft",
    ("kilogram", "kilograms"): "kg",
    ("gram", "grams"): "g",
    ("milligram", "milligrams"): "mg",
    ("tonne", "tonnes"): "t",
    ("liter", "liters"): "l",
    ("milliliter", "milliliters"): "ml",
    ("hour", "hours"): "h",
    ("minute", "minutes"): "min",
    ("second", "seconds"): "s",
    ("watt", "watts"): "W",
    ("kilowatt", "kilowatts"): "kW",
    ("volt", "volts"): "V",
    ("megahertz", "megahertz"): "MHz",
    ("megabyte", "megabytes"): "MB",
    ("gigabyte", "gigabytes"): "GB",
    ("square meter", "square meters"): "m²",
    ("degree celsius", "degrees celsius"): "°C",
    ("degree fahrenheit", "degrees fahrenheit"): "°F",
    ("kilometer per hour", "kilometers per hour"): "km/h",
    ("mile per hour", "miles per hour"): "mph",
}
_DURATIONS = (("h", "min"), ("min", "s"))


def money_written(sign: str, major: int, minor: int) -> str:
    return f"{sign}{major}.{minor:02}" if minor else f"{sign}{major}"


def money_forms(sign: str, major: int, minor: int) -> list[str]:
    """Twelve dollars and fifty cents, twelve dollars fifty; major or minor may be 0."""
    one, many, one_part, parts, parts_alone = CURRENCIES[sign]
    if not major and minor:
        return [f"{cardinal(minor)} {parts_alone}"]
    wholes = [f"{form} {one if major == 1 else many}" for form in cardinal_forms(major)]
    if not minor:
        return wholes
    tail = f"{cardinal(minor)} {one_part if minor == 1 else parts}"
    short = [f"{whole} {cardinal(minor)}" for whole in wholes if minor >= 10]
    return [f"{whole}{glue}{tail}" for whole in wholes for glue in (" and ", " ")] + short


def percent_forms(number: str) -> list[str]:
    return [f"{form} {name}" for form in number_forms(number) for name in ("percent", "per cent")]


def quantity_forms(number: str, symbol: str) -> list[str]:
    """Of ("1.5", "km"): one point five kilometers."""
    names = [one if number == "1" else many for (one, many), known in UNITS.items() if known == symbol]
    return [f"{form} {name}" for form in number_forms(number) for name in names]


def duration_forms(first: int, large: str, rest: int, small: str) -> list[str]:
    """Of (2, "h", 30, "min"): two hours and thirty minutes."""
    pairs = [(a, b) for a in quantity_forms(str(first), large) for b in quantity_forms(str(rest), small)]
    return [f"{a}{glue}{b}" for a, b in pairs for glue in (" and ", " ")]


# --- drawing values -----------------------------------------------------------------------------------------------

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
    """Lengths are equally likely; a third of the numbers end in zeros."""
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
    """A decimal or a negative number."""
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
        (large, small), first, rest = _pick(rng, _DURATIONS), 1 + _below(rng, 48), 1 + _below(rng, 59)
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


# --- sentences ----------------------------------------------------------------------------------------------------

# Words of values; a plain word among them could make a text readable in two ways.
RESERVED = frozenset(
    " ".join(
        [
            *(SMALL + TENS + MONTHS + WEEKDAYS),
            *(ordinal(n) + s for n in [*range(1, 20), *range(20, 100, 10), 100, 1000, 10**6] for s in ("", "s")),
            *(name for names in [*CURRENCIES.values(), *UNITS] for name in names),
            "hundred thousand million a and oh nought minus negative point double triple half quarter quarters",
            "past to at on of the in am pm m p noon midday midnight morning afternoon evening night o'clock",
            "percent per cent",
        ]
    ).split()
)

WORDS = {
    "name": _words(
        "anna ben clara david emma felix grace henry iris jonas karen laura martin nora oscar paula robert "
        "sara thomas ursula victor walter yara zoe alice bruno carmen daniel elena frank georgia hannah ivan "
        "julia kevin linda maria nathan olivia peter quentin rachel simon tina vera william maya leo mr smith "
        "dr jones priya ahmed chen fatima hiroshi ingrid"
    ),
    "noun": _words(
        "meeting call lesson concert lecture workshop interview appointment dinner party delivery flight "
        "train bus ferry match show exam review launch course session ceremony wedding conference deadline "
        "inspection repair reservation booking order invoice contract project report budget ticket house "
        "garden river bridge tower museum library machine engine battery package parcel letter book song film "
        "photo painting ship road tunnel school bakery factory hotel office account sensor server printer "
        "window table"
    ),
    "nouns": _words(
        "people books tickets apples oranges chairs boxes letters students visitors houses trees cars ships "
        "birds horses pages copies items orders bottles stamps photos songs seats rooms beds employees "
        "members voters players teams bricks candles flowers guests lamps coins maps shoes keys plates rivers "
        "islands stars files users lines"
    ),
    "place": _words(
        "london paris berlin tokyo boston chicago madrid rome vienna oslo dublin lisbon cairo delhi sydney "
        "toronto prague athens stockholm geneva hamburg munich zurich warsaw helsinki porto seville naples "
        "lagos nairobi lima bogota kyoto seoul downtown"
    ),
    "adjective": _words(
        "annual big blue bright broken cheap clean cold daily early empty famous final free fresh green happy "
        "heavy large late local long main modern narrow new next nice old open public quick quiet red round "
        "sharp short slow small special strong sunny tall tiny warm weekly ancient careful crowded electric "
        "formal gentle hidden modest polite private rapid silent useful white wide wooden young"
    ),
    "verb": _words(
        "starts begins opens closes ends leaves arrives stops returns continues departs finishes resumes happens"
    ),
    "did": _words(
        "bought sold found counted ordered packed moved painted saved needed wanted lost sent received "
        "printed collected checked delivered produced borrowed returned cleaned shipped carried washed drew "
        "wrote noticed rented tested traded stored opened"
    ),
}

TEMPLATES = tuple(
    line.strip()
    for line in """
    the {noun} is on {moment}
    the {adjective} {noun} {verb} on {moment}
    the {noun} in {place} {verb} on {date}
    the {noun} {verb} at {time}
    the {noun} {verb} at {time} on {date}
    {name} will meet {name} on {moment}
    {name} was born on {date}
    {name} was born on {date} in {place}
    please book the {noun} for {moment}
    please move the {noun} from {date} until {date}
    we are open from {time} until {time}
    the {noun} takes place in {place} on {moment}
    can you call {name} at {time}
    remind me about the {noun} at {time}
    remind {name} about the {adjective} {noun} on {date}
    wake me up at {time}
    set the alarm for {time}
    the last {noun} leaves {place} at {time}
    {name} and {name} arrive at {time}
    the {noun} from {place} arrives before {time}
    it was built in {month} by {name}
    the {noun} was finished in {month}
    since {month} the {noun} has been {adjective}
    the {adjective} {noun} will open in {month}
    it was the {ordinal} {noun} in {place}
    {name} finished the race in {ordinal} place
    this is the {ordinal} {adjective} {noun}
    {name} lives on the {ordinal} floor
    the {ordinal} {noun} costs {money}
    the {noun} costs {money}
    the {adjective} {noun} costs {money} in {place}
    {name} paid {money} for the {noun}
    {name} owes {name} {money}
    the price of the {noun} rose from {money} until it was {money}
    send {money} before {date}
    {name} {did} {cardinal} {nouns}
    {name} {did} {cardinal} {nouns} for {money}
    {name} {did} {cardinal} {adjective} {nouns} in {month}
    there are {cardinal} {nouns} in {place}
    {cardinal} {nouns} came for the {noun}
    about {cardinal} {nouns} were {did} in {place}
    we {did} {cardinal} {nouns} with {cardinal} {nouns}
    {percent} of the {nouns} were {adjective}
    {percent} of the {nouns} in {place} were {did}
    prices in {place} rose by {percent}
    {name} got {percent} in the {noun}
    the {noun} fell by {percent} in {month}
    {fraction} of the {nouns} are {adjective}
    {name} ate {fraction} of the cake
    add {fraction} cups of sugar
    the average is {number}
    the {noun} scored {number} in the {noun}
    multiply the result by {number}
    the value of the {adjective} {noun} is {number}
    call me on {digits}
    the code of the {noun} is {digits}
    my number is {digits}, my name is {name}
    {name} can be reached under {digits} in {place}
    the {noun} is {quantity} long
    it is {quantity} from {place}
    the {adjective} {noun} weighs {quantity}
    the temperature in {place} is {quantity}
    wait for {quantity} before the {noun} {verb}
    {name} ran {quantity} with {name}
    the {noun} of {name} is {quantity} away
    """.splitlines()
    if line.strip()
)
PLAIN_TEMPLATES = (  # nothing but copying: for training, they would flatter a held-out score
    "the {adjective} {noun} {verb} in {place}",
    "{name} {did} the {adjective} {noun} in {place}",
    "please call {name} about the {noun}",
)
