"""GET /usage: what the holders of keys have used, for operators."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.errors import invalid, shorten
from triptych.service.http.bodies import json_response
from triptych.service.http.route_table import Routes, in_query, replies
from triptych.service.routes.models import require_admin
from triptych.service.schemas.replies import UsageReply
from triptych.service.tenants.usage import GROUPS, HOUR, MOST_GROUPS, Amounts, Question, added, merged

routes = Routes(access="admin")

_TIMES = frozenset({"hour", "day"})
_LAST = datetime.max.replace(tzinfo=UTC).timestamp() - HOUR  # a zone can take a time beyond what can be written


@routes.get(
    "/usage",
    "Who used what",
    replies("Sums for each group.", UsageReply),
    in_query("from", "The first hour: a date or time, of UTC without a zone. Default: the beginning.", type="string"),
    in_query("to", "The end, which is not included; up to the next full hour. Default: now.", type="string"),
    in_query("by", f"Groups, with commas between them: {', '.join(GROUPS)}. Default: tenant.", type="string"),
    errors=(400, 403, 503),
)
async def usage(request: Request) -> Response:
    """Adds up what accepted requests have used that have ended, by the hour of their end. Needs an admin key.

    A request that broke off counts with the tokens that it had until then.
    """
    service = require_admin(request)
    given = request.query_params
    unknown = set(given) - {"from", "to", "by"}
    if unknown:
        raise invalid(f"unknown parameter {shorten(min(unknown))}; known are from, to and by", min(unknown)[:64])
    by = tuple(dict.fromkeys(name for name in given.get("by", "tenant").split(",") if name))
    for name in by:
        if name not in GROUPS:
            raise invalid(f"by: found {shorten(name)}, expected some of {', '.join(GROUPS)}", "by")
    now = service.tenants.usage.hour()
    begin = int(_seconds(given["from"], "from") // HOUR) if "from" in given else 0
    end = -(-_seconds(given["to"], "to") // HOUR) if "to" in given else now + 1
    rows = merged(await service.usage(Question(begin, int(end), by)))
    if len(rows) > MOST_GROUPS:
        raise invalid(f"by: more than {MOST_GROUPS} groups; ask for a shorter time or for fewer groups", "by")
    total = added(amounts for _, amounts in rows)
    reply = {
        "object": "list",
        "from": _time(begin * HOUR),
        "to": _time(min(int(end), now + 1) * HOUR),
        "is_stored": service.state_folder is not None,
        "by": by,
        "data": [_shown(by, group, amounts) for group, amounts in rows],
        "total": total._asdict(),
    }
    return json_response(reply)


def _shown(by: tuple[str, ...], group: list[str | int], amounts: Amounts) -> dict[str, object]:
    labels = {name: _time(int(value)) if name in _TIMES else value for name, value in zip(by, group, strict=True)}
    return {**labels, **amounts._asdict()}


def _seconds(text: str, name: str) -> float:
    """Return a time of a query in seconds since 1970; raises a 400."""
    if len(text) > 20:
        text = text.replace(" ", "+")  # the plus sign of a zone, which is a space in an address
    try:
        found = datetime.fromisoformat(text)
        return min(max(0.0, (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()), _LAST)
    except (ValueError, OverflowError):
        message = f"{name}: found {shorten(text)}, expected a date such as 2027-01-31, or 2027-01-31T12:00:00Z"
        raise invalid(message, name) from None


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
