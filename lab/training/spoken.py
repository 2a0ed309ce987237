"""Spoken English forms of values and their written forms: numbers, dates and times, amounts.

A `*_forms` function returns the spoken forms of one value. Lower case only. Stdlib only.
"""

from __future__ import annotations

import re
from datetime import date


def words(text: str) -> list[str]:
    return text.split()


# --- numbers ------------------------------------------------------------------------------------------------------

SMALL = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
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
    """Return 0 <= n < 10**9 in words; `british` has "and" before the last two digits of a group."""
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
    """Return 1 <= n < 10**9 as an ordinal in words."""
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

MONTHS = words("january february march april may june july august september october november december")
WEEKDAYS = words("monday tuesday wednesday thursday friday saturday sunday")


def year_forms(year: int) -> list[str]:
    """Return the spoken forms of a year, 1900 <= year < 2100."""
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
    # "quarter to twelve p m" is ambiguous: twelve takes no mark.
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
DURATIONS = (("h", "min"), ("min", "s"))


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
