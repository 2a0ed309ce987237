"""Numbers of JSON schemas that llguidance holds as doubles and 64-bit integers: exact, or refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_DOWN, Decimal
from typing import Any

from triptych.model.text.schemas.documents import Place, shown

LARGEST = 2**63 - 1024  # the largest integer that both a double and 64 bits hold
_EXACT = 2**53
_LEAST_BOUND = 10**18  # from which on llguidance writes no lower bound of a magnitude
_LONGEST = 300  # digits of a bound after the point
_DECIMALS = 20  # of numbers that are written with fewer decimals than a bound has
_COEFFICIENT_BITS = 30


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Whether a value is a number of JSON. Integers may be too large for a double."""
    return is_number(value) and (isinstance(value, int) or math.isfinite(value))


def whole(place: Place, keyword: str) -> int:
    """Return the count that a keyword has; 2.0 is 2."""
    value = place.value[keyword]
    if not _is_finite(value) or value != int(value) or value < 0:
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


@dataclass(frozen=True, slots=True)
class Numeric:
    """What the numeric keywords of a schema become."""

    keywords: dict[str, int | float]
    every: list[dict[str, Any]]  # schemas that must hold too
    multiples: list[Decimal]  # which llguidance multiplies in 32 bits


def numeric(place: Place) -> Numeric:
    """Translate the numeric keywords of a schema; raises `GrammarError` for what llguidance cannot hold exactly."""
    value, found = place.value, Numeric({}, [], [])
    integer = value.get("type") == "integer"
    bounds = [one for side in ("minimum", "maximum") if (one := _tightest(place, side, integer=integer)) is not None]
    written = {one.keyword: one.value for one in bounds}
    rounder = [] if integer else [number for one in bounds for number in _rounder_bounds(one) if _fits(number, bounds)]
    if rounder:
        found.every.append({"anyOf": [written, {"enum": rounder}]})
    else:
        found.keywords.update(written)
    if "multipleOf" in value:
        step = _multiple(place)
        steps = [] if integer else _rounder_multiples(Decimal(repr(step)))
        found.multiples.append(steps[-1] if steps else Decimal(repr(step)))
        if steps:
            found.every.append({"anyOf": [{"multipleOf": step}, *({"multipleOf": float(one)} for one in steps)]})
        else:
            found.keywords["multipleOf"] = step
    return found


@dataclass(frozen=True, slots=True)
class _Bound:
    value: int | float
    is_upper: bool
    excluded: bool

    @property
    def keyword(self) -> str:
        side = "maximum" if self.is_upper else "minimum"
        return f"exclusive{side.capitalize()}" if self.excluded else side


def _tightest(place: Place, side: str, *, integer: bool) -> _Bound | None:
    """Return what the two keywords of a side say together."""
    value, found = place.value, list[_Bound]()
    exclusive, upper = f"exclusive{side.capitalize()}", side == "maximum"
    flag = value.get(exclusive)  # a boolean in draft 4, about the other keyword
    given = [(side, flag is True)] if side in value else []
    if exclusive in value and not isinstance(flag, bool):
        given.append((exclusive, True))
    for keyword, excluded in given:
        bound = _bound(place, keyword, upper=upper, needs_double=excluded or not integer)
        if not integer and excluded and bound == int(bound) and (bound == 0 or (bound < 0) == upper):
            bound, excluded = _next(place, keyword, int(bound), upper=upper), False
        found.append(_Bound(bound, upper, excluded))
    return max(found, key=lambda one: (-one.value if upper else one.value, one.excluded), default=None)


def _fits(number: float, bounds: list[_Bound]) -> bool:
    return not any(
        (number > one.value if one.is_upper else number < one.value) or (one.excluded and number == one.value)
        for one in bounds
    )


def _bound(place: Place, keyword: str, *, upper: bool, needs_double: bool) -> int | float:
    """Return a bound that llguidance keeps exactly.

    An upper bound of a magnitude beyond `LARGEST` becomes `LARGEST`: numbers between the two are not generated.
    """
    value = place.value[keyword]
    if not _is_finite(value):
        raise place.refused(keyword, f"must be a number, found {shown(value)}")
    if value == int(value):
        value = int(value)
    outward = value if upper else -value  # the larger, the less it forbids
    if outward > LARGEST:
        return LARGEST if upper else -LARGEST
    if -outward >= _LEAST_BOUND:
        raise place.refused(keyword, f"{shown(value)} leaves only numbers of 10**18 and more, which are not served")
    if isinstance(value, int) and abs(value) > _EXACT and (needs_double or float(value) != value):
        raise place.refused(keyword, f"{shown(value)} is beyond 2**53 and cannot be held exactly")
    if isinstance(value, float) and len(format(Decimal(repr(value)), "f")) > _LONGEST:
        raise place.refused(keyword, f"{shown(value)} has too many digits")
    return value


def _next(place: Place, keyword: str, bound: int, *, upper: bool) -> float:
    """Return the number that stands for an excluded whole bound: llguidance writes the bound itself within fractions.

    It is inward by one at the last place that a double of this size has.
    """
    step = Decimal(1).scaleb(min(len(str(abs(bound))) - 16, -1))
    found = Decimal(bound) + (-step if upper else step)
    if Decimal(repr(float(found))) != found:
        raise place.refused(keyword, f"{shown(bound)} is too large to be held exactly")
    return float(found)


def _rounder_bounds(bound: _Bound) -> list[float]:
    """Return the bound with fewer decimals, towards 0: llguidance writes those numbers with all the decimals alone."""
    if isinstance(bound.value, int) or (bound.value > 0) != bound.is_upper:
        return []
    exact = Decimal(repr(bound.value))
    counts = range(1, min(-int(exact.as_tuple().exponent), _DECIMALS))
    shorter = (float(exact.quantize(Decimal(1).scaleb(-count), ROUND_DOWN)) for count in counts)
    return [one for one in dict.fromkeys(shorter) if one and not one.is_integer()]


def _rounder_multiples(step: Decimal) -> list[Decimal]:
    """Return the steps of the multiples with fewer decimals, the largest last: llguidance writes no 0.5 for 0.25."""
    decimals, found = -int(step.as_tuple().exponent), list[Decimal]()
    for count in range(decimals - 1, 0, -1):
        scale = 10**decimals
        common = math.lcm(int(step * scale), 10 ** (decimals - count))
        found.append((Decimal(common) / scale).normalize())
        if common.bit_length() > _COEFFICIENT_BITS:
            return []
    return [one for one in dict.fromkeys(found) if one != step]


def _multiple(place: Place) -> float | int:
    """Return `multipleOf` if llguidance keeps it exactly: a coefficient of 32 bits and a power of ten."""
    value = place.value["multipleOf"]
    if not _is_finite(value) or value <= 0:
        raise place.refused("multipleOf", f"must be a number above 0, found {shown(value)}")
    coefficient, exponent = float(min(value, 2**64)), 0
    while coefficient != math.floor(coefficient) and exponent < 30:
        coefficient, exponent = coefficient * 10, exponent + 1
    if coefficient > 2**32 - 1 or Decimal(int(coefficient)).scaleb(-exponent) != Decimal(repr(value)):
        raise place.refused("multipleOf", f"{shown(value)} cannot be held exactly")
    return value
