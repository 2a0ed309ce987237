"""Numbers of JSON schemas that llguidance holds as doubles and 64-bit integers: exact, or refused."""

from __future__ import annotations

import math
from decimal import Decimal

from model.text.schemas.documents import Place, shown

LARGEST = 2**63 - 1024  # the largest integer that both a double and 64 bits hold
_EXACT = 2**53
_LEAST_BOUND = 10**18  # from which on llguidance writes no lower bound of a magnitude
_LONGEST = 300  # digits of a bound behind the point


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def whole(place: Place, keyword: str) -> int:
    """Return the count that a keyword has; 2.0 is 2."""
    value = place.value[keyword]
    if not is_number(value) or not math.isfinite(value) or value != int(value) or value < 0:
        raise place.refused(keyword, f"must be a whole number that is not negative, found {shown(value)}")
    return int(value)


def checked_value(place: Place) -> None:
    """Raise `GrammarError` for a number in a const or an enum that could not be written exactly."""
    value = place.value
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            checked_value(place.at(key))
    elif isinstance(value, float) and not math.isfinite(value):
        raise place.error(f"{shown(value)} is no number of JSON")
    elif is_number(value) and not _is_written(value):
        raise place.error(f"the number {shown(value)} is too large to be held exactly")


def _is_written(value: int | float) -> bool:
    """Whether llguidance writes this number: through a double, as an integer of 64 bits or by its shortest digits."""
    try:
        double = float(value)
    except OverflowError:
        return False
    if isinstance(value, int) and abs(value) <= LARGEST:
        return int(double) == value
    return Decimal(repr(double)) == Decimal(value if isinstance(value, int) else repr(value))


def bound(place: Place, keyword: str, *, integer: bool) -> int | float:
    """Return a bound as llguidance keeps it exactly.

    An upper bound of a magnitude beyond `LARGEST` becomes `LARGEST`: numbers between the two are not generated.
    """
    value = place.value[keyword]
    if not is_number(value) or not math.isfinite(value):
        raise place.refused(keyword, f"must be a number, found {shown(value)}")
    if value == int(value):
        value = int(value)
    upper = "max" in keyword.lower()
    outward = value if upper else -value  # the larger, the less it forbids
    if outward > LARGEST:
        return LARGEST if upper else -LARGEST
    if -outward >= _LEAST_BOUND:
        raise place.refused(keyword, f"{shown(value)} leaves only numbers of 10**18 and more, which are not served")
    exclusive = keyword.startswith("exclusive")
    if isinstance(value, int) and abs(value) > _EXACT and (float(value) != value or not integer or exclusive):
        raise place.refused(keyword, f"{shown(value)} is beyond 2**53 and cannot be held exactly")
    if isinstance(value, float) and len(format(Decimal(repr(value)), "f")) > _LONGEST:
        raise place.refused(keyword, f"{shown(value)} has too many digits")
    return value


def multiple(place: Place) -> float | int:
    """Return `multipleOf` if llguidance keeps it exactly: a coefficient of 32 bits and a power of ten."""
    value = place.value["multipleOf"]
    if not is_number(value) or not math.isfinite(value) or value <= 0:
        raise place.refused("multipleOf", f"must be a number above 0, found {shown(value)}")
    coefficient, exponent = float(value), 0
    while coefficient != math.floor(coefficient) and exponent < 30:
        coefficient, exponent = coefficient * 10, exponent + 1
    if coefficient > 2**32 - 1 or Decimal(int(coefficient)).scaleb(-exponent) != Decimal(repr(value)):
        raise place.refused("multipleOf", f"{shown(value)} cannot be held exactly")
    return value
