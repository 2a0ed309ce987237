"""The quotas of keys: requests and tokens a minute, requests at a time.

A request to a model takes a place and counts as a request when it comes. Its tokens are reserved
when it is submitted: its prompt, and `max_tokens` if it names a number. At its end the tokens that it had replace them.
So outputs without `max_tokens` may exceed the quota, and then the next request waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol

from triptych.service.core.errors import ApiError, quota_exceeded
from triptych.service.core.request_context import RequestContext
from triptych.service.settings.tenant import Tenant
from triptych.service.tenants.allowances import Minute, Places, Receipt

Kind = Literal["requests", "tokens", "concurrent"]
LABELS: Final[dict[Kind, str]] = {"requests": "requests/min", "tokens": "tokens/min", "concurrent": "concurrent"}
_SHOWN: Final[tuple[Kind, ...]] = ("requests", "tokens")  # in headers
_MOST_KEPT = 4_096
_NO_MORE: Final = math.inf


class Allowance(Protocol):
    """What is left of one quota of one tenant (`triptych.service.tenants.allowances`)."""

    limit: int

    def take(self, units: int, now: float) -> Receipt | None: ...

    def correct(self, receipt: Receipt, units: int, now: float) -> None: ...

    def left(self, now: float) -> int: ...

    def shown(self, now: float) -> int: ...

    def wait(self, units: int, now: float) -> float: ...


class Leases(Protocol):
    """Makes allowances of quotas that several replicas share."""

    def allowance(self, name: str, kind: Kind, limit: int) -> Allowance: ...

    async def lease(self, allowance: Allowance, units: int) -> None:
        """Ask for `units` more, if the allowance may have them."""

    async def exchange_forever(self) -> None:
        """Exchange units with other replicas until cancelled."""


class Quotas:
    """The quotas of all tenants on this replica."""

    def __init__(self, leases: Leases | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases = leases
        self._clock = clock
        self._allowances: dict[tuple[str, Kind], Allowance] = {}

    async def share_forever(self) -> None:
        """Share the quotas with other replicas, until cancelled; return at once if there are none."""
        if self._leases is not None:
            await self._leases.exchange_forever()

    async def enter(self, context: RequestContext) -> None:
        """Count a request that has come, and give it a place until its end; raises a 429."""
        tenant = context.tenant
        if not tenant.has_quota:
            return
        context.headers.append(lambda: self._headers(tenant))
        place = await self._take(tenant, "concurrent", 1)
        if place is not None:
            places = self._allowance(tenant, "concurrent")
            assert places is not None
            context.at_end(lambda: places.correct(place, 0, self._clock()))
        if (tokens := self._allowance(tenant, "tokens")) is not None:  # before the body is read
            await self._lease(tokens, 1)
            if tokens.left(self._clock()) < 1:
                raise self._refusal(tenant, "tokens", tokens, 1)
        await self._take(tenant, "requests", 1)

    async def reserve(self, context: RequestContext, output_tokens: int) -> None:
        """Reserve the tokens of a request's prompt, and of its output if it says how many; raises a 429."""
        tokens = context.tokens_in + output_tokens
        receipt = await self._take(context.tenant, "tokens", tokens)
        if receipt is not None:
            context.at_end(lambda: self._settle(context, receipt))

    def _settle(self, context: RequestContext, receipt: Receipt) -> None:
        allowance = self._allowance(context.tenant, "tokens")
        if allowance is not None:
            had = context.tokens_in + context.tokens_out if context.accepted else 0
            allowance.correct(receipt, had, self._clock())

    async def _take(self, tenant: Tenant, kind: Kind, units: int) -> Receipt | None:
        """Take units of a quota; None if the tenant has no such quota. Raises a 429."""
        allowance = self._allowance(tenant, kind)
        if allowance is None:
            return None
        receipt = allowance.take(units, self._clock())
        if receipt is None:
            await self._lease(allowance, units)
            receipt = allowance.take(units, self._clock())
        if receipt is None:
            raise self._refusal(tenant, kind, allowance, units)
        return receipt

    async def _lease(self, allowance: Allowance, units: int) -> None:
        if self._leases is not None and allowance.left(self._clock()) < units:
            await self._leases.lease(allowance, units)

    def _allowance(self, tenant: Tenant, kind: Kind) -> Allowance | None:
        limit = _limit(tenant, kind)
        if limit is None:
            return None
        found = self._allowances.get((tenant.id, kind))
        if found is None:
            if len(self._allowances) >= _MOST_KEPT:  # the key file has changed often
                self._drop_unused()
            found = self._allowances[tenant.id, kind] = self._made(tenant.id, kind, limit)
        found.limit = limit  # the key file may have changed
        return found

    def _made(self, name: str, kind: Kind, limit: int) -> Allowance:
        if self._leases is not None:
            return self._leases.allowance(name, kind, limit)
        return Places(limit) if kind == "concurrent" else Minute(limit)

    def _drop_unused(self) -> None:
        now = self._clock()
        unused = [key for key, one in self._allowances.items() if one.left(now) == one.limit and self._leases is None]
        for key in unused:
            del self._allowances[key]

    def _refusal(self, tenant: Tenant, kind: Kind, allowance: Allowance, units: int) -> ApiError:
        now = self._clock()
        wait = _NO_MORE if units > allowance.limit else max(0.001, allowance.wait(units, now))
        left = max(0, allowance.shown(now))
        return quota_exceeded(tenant.name, LABELS[kind], allowance.limit, left, units, wait)

    def _headers(self, tenant: Tenant) -> list[tuple[bytes, bytes]]:
        """Return the headers of OpenAI's API that say what is left."""
        found, now = [], self._clock()
        for kind in _SHOWN:
            allowance = self._allowance(tenant, kind)
            if allowance is None:
                continue
            values = (
                ("limit", str(allowance.limit)),
                ("remaining", str(max(0, allowance.shown(now)))),
                ("reset", duration(allowance.wait(allowance.limit, now))),
            )
            found += [(f"x-ratelimit-{name}-{kind}".encode(), value.encode()) for name, value in values]
        return found


def _limit(tenant: Tenant, kind: Kind) -> int | None:
    if kind == "requests":
        return tenant.requests_per_minute
    return tenant.tokens_per_minute if kind == "tokens" else tenant.concurrent


def duration(seconds: float) -> str:
    """Write a time as OpenAI's headers have it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(math.ceil(seconds * 1000) / 1000, 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".")
    return f"{int(minutes)}m{text}s" if minutes else f"{text}s"
