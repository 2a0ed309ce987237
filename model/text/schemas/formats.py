"""The `format`s that are held; others are annotations, as JSON Schema has it by default."""

from __future__ import annotations

HELD_BY_LLGUIDANCE = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

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

# Rust's expressions, with anchors. llguidance's own have each year of 29 days in February, and any leap second.
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[tT]{_TIME}$"}
