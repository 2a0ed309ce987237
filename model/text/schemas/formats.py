"""The `format`s that are held; others are annotations, as JSON Schema has it by default."""

from __future__ import annotations

from typing import Any

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_MONTHS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_DATE = f"(?:[0-9]{{4}}-(?:{_MONTHS})|{_LEAP_YEAR}-02-29)"
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_ZONE}"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"  # a leap second, written in UTC alone
)

# A label of a host's name, of 63 characters at most. Those with "--" at the third place stand for other characters.
_LETTER, _INNER = "[0-9A-Za-z]", "[0-9A-Za-z-]"
_LABEL = f"{_LETTER}(?:{_INNER}{{0,2}}{_LETTER}|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"

# Keywords for each format; patterns are Rust's expressions. llguidance's own formats have each year of 29 days in
# February, any leap second, and names and addresses of any length.
HELD: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_TIME}$"},
    "hostname": {"pattern": f"^{_HOST}$", "maxLength": 253},
    "email": {"format": "email", "pattern": f"^[^@]{{1,64}}@{_HOST}$", "maxLength": 254},
    **{name: {"format": name} for name in ("duration", "ipv4", "ipv6", "uuid", "uri")},
}
