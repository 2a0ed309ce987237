"""Quotas that several replicas share: a bank leases units to each, so that a request needs no question to it.

The `Bank` is one object of the cluster. Several times a second each replica tells it what it has spent and what it
would like to have; the bank takes back what the replica had left, and leases it units that no other replica has. So all
replicas together never take more than the quota. What a replica that has ended may have spent counts as spent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from triptych.service.tenants.allowances import Minute, Receipt
from triptych.service.tenants.quotas import Allowance, Kind

_EVERY_SECONDS: Final = 0.25  # between two exchanges of a replica, and for which a refusal is repeated
_LEASE_SECONDS: Final = 15.0  # after which a lease of a silent replica ends

logger = logging.getLogger(__name__)


class Ask(NamedTuple):
    """What a replica says of one quota."""

    name: str
    kind: Kind
    limit: int
    spent: int  # units since it last asked, without corrections
    returned: int  # units of earlier receipts that were not needed
    held: int  # places that its requests have
    needed: int  # units for a request that waits for the answer
    wanted: int  # units that it is likely to spend until it asks again


class Grant(NamedTuple):
    """What the bank answers."""

    units: int  # that the replica may spend until it asks again
    left: int  # of all replicas
    wait: float  # seconds until the units that are needed are left
    full: float  # seconds until all units are left


class _Account:
    """One quota of one tenant: what was spent within a minute, and what replicas have leased."""

    def __init__(self, limit: int) -> None:
        self.minute = Minute(limit)
        self.leases: dict[str, tuple[int, float]] = {}  # by replica: units, and when they end

    def exchange(self, replica: str, ask: Ask, now: float) -> Grant:
        is_places = ask.kind == "concurrent"
        self.minute.limit = ask.limit
        self.leases.pop(replica, None)
        for other in [one for one, (_, ends) in self.leases.items() if ends <= now]:
            units, _ = self.leases.pop(other)
            if not is_places:
                self.minute.charge(units, now)
        if not is_places:
            self.minute.charge(ask.spent, now)
            self.minute.give_back(ask.returned)
        left = self.minute.left(now) - sum(units for units, _ in self.leases.values()) - ask.held
        units = min(ask.wanted, left // 2)
        if units < ask.needed <= left:
            units = ask.needed
        units = max(0, units)
        if units + ask.held:
            self.leases[replica] = (units + ask.held, now + _LEASE_SECONDS)
        leased = self.minute.left(now) - left
        wait = 1.0 if is_places else self.minute.wait(ask.needed + leased, now)
        return Grant(units, left, wait, self.minute.wait(ask.limit, now))


class Bank:
    """The accounts of all quotas."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[tuple[str, Kind], _Account] = {}

    def exchange(self, replica: str, asks: Sequence[Ask]) -> list[Grant]:
        """Take what a replica says, and lease it units."""
        now, grants = self._clock(), []
        for ask in asks:
            account = self._accounts.setdefault((ask.name, ask.kind), _Account(ask.limit))
            grants.append(account.exchange(replica, ask, now))
        return grants


class LeasedAllowance:
    """What this replica has leased of one quota."""

    def __init__(self, name: str, kind: Kind, limit: int) -> None:
        self.name, self.kind, self.limit = name, kind, limit
        self._stock = self._spent = self._returned = self._held = self._demand = 0
        self._refused, self._refused_at = 0, -_EVERY_SECONDS  # the units that the bank refused last
        self._until = 0.0  # when it may have them
        self._before = 0  # the stock when the bank was asked
        self._grant = Grant(0, limit, 0.0, 0.0)
        self._granted = 0.0

    def take(self, units: int, now: float) -> Receipt | None:
        """Take units of those that are leased, or none if fewer are."""
        self._demand += units
        if units > self._stock:
            return None
        self._stock -= units
        if self.kind == "concurrent":
            self._held += units
        else:
            self._spent += units
        return Receipt(units)

    def correct(self, receipt: Receipt, units: int, now: float) -> None:
        """Set the true units of a receipt."""
        more = units - receipt.units
        receipt.units = units
        self._stock -= more
        if self.kind == "concurrent":
            self._held += more
        elif more > 0:
            self._spent += more
        else:
            self._returned -= more

    def left(self, now: float) -> int:
        """Return the leased units that are left."""
        return self._stock

    def shown(self, now: float) -> int:
        """Return what was left of the whole quota at the last exchange, without what was spent since."""
        return self._grant.left - self._spent - self._held * (self.kind == "concurrent")

    def wait(self, units: int, now: float) -> float:
        """Return the seconds until `units` are left, by the last answer of the bank."""
        until = self._granted + self._grant.full if units >= self.limit else self._until
        return max(0.0, until - now)

    # -- exchanges with the bank

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to tell the bank."""
        return not (self._stock or self._spent or self._returned or self._held or self._demand)

    def is_refused(self, units: int, now: float) -> bool:
        """Return whether the bank has refused these units so lately that it is not asked again."""
        return units >= self._refused and now - self._refused_at < _EVERY_SECONDS

    def ask(self, needed: int) -> Ask:
        """Return what to tell the bank; no units are leased until `granted` or `restore`."""
        found = Ask(
            *(self.name, self.kind, self.limit, self._spent, self._returned, self._held),
            *(needed, max(needed, 2 * self._demand)),
        )
        self._before, self._stock, self._spent, self._returned, self._demand = self._stock, 0, 0, 0, 0
        return found

    def granted(self, ask: Ask, grant: Grant, now: float) -> None:
        """Take the answer; corrections that were made meanwhile count."""
        self._stock += grant.units
        if grant.units < ask.needed:
            self._refused, self._refused_at = ask.needed, now
            self._until = now + max(_EVERY_SECONDS, grant.wait)
        self._grant, self._granted = grant, now

    def restore(self, ask: Ask) -> None:
        """Go on without an answer: what is needed is taken, because a lost bank must not stop the service."""
        self._stock += max(self._before, ask.needed)
        self._spent += ask.spent
        self._returned += ask.returned


Exchange = Callable[[Sequence[Ask]], Awaitable[Sequence[Grant]]]


class BankLeases:
    """The leases of this replica (`triptych.service.tenants.quotas.Leases`)."""

    def __init__(self, exchange: Exchange, clock: Callable[[], float] = time.monotonic) -> None:
        """`exchange` asks the bank; an exception of it means that there was no answer."""
        self._exchange = exchange
        self._clock = clock
        self._allowances: list[LeasedAllowance] = []
        self._lock = asyncio.Lock()
        self._failing = False

    def allowance(self, name: str, kind: Kind, limit: int) -> Allowance:
        self._allowances.append(LeasedAllowance(name, kind, limit))
        return self._allowances[-1]

    async def lease(self, allowance: Allowance, units: int) -> None:
        """Ask the bank for `units`, unless it has just refused them."""
        assert isinstance(allowance, LeasedAllowance)
        async with self._lock:
            now = self._clock()
            if allowance.left(now) < units and not allowance.is_refused(units, now):
                await self._ask([allowance], units)

    async def exchange_forever(self) -> None:
        """Give back and lease units several times a second, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            await self.exchange()

    async def exchange(self) -> None:
        """Tell the bank what was spent, and lease what is likely to be spent next."""
        async with self._lock:
            busy = [one for one in self._allowances if not one.is_idle]
            if busy:
                await self._ask(busy, 0)

    async def _ask(self, allowances: Sequence[LeasedAllowance], needed: int) -> None:
        asks = [one.ask(needed) for one in allowances]
        try:
            grants = await self._exchange(asks)
        except Exception as error:
            if not self._failing:
                logger.error("quotas are not shared among replicas: %s", type(error).__name__)
            self._failing = True
            for one, ask in zip(allowances, asks, strict=True):
                one.restore(ask)
            return
        self._failing = False
        for one, ask, grant in zip(allowances, asks, grants, strict=True):
            one.granted(ask, grant, self._clock())
