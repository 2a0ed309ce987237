"""Quotas over replicas: what all admit together, with leases of one bank, is the quota within 5 %."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from triptych.service.core.errors import ApiError
from triptych.service.core.request_context import RequestContext
from triptych.service.settings.tenant import Tenant
from triptych.service.tenants.bank import Ask, Bank, BankLeases, Grant
from triptych.service.tenants.quotas import Quotas


class Cluster:
    """Replicas with one bank, in virtual time."""

    def __init__(self, number: int) -> None:
        self.now = 0.0
        self.asked = 0
        self.running: list[RequestContext] = []
        self.bank = Bank(lambda: self.now)
        self.is_away = False
        self.leases = [BankLeases(self._exchange(str(at)), lambda: self.now) for at in range(number)]
        self.quotas = [Quotas(leases, lambda: self.now) for leases in self.leases]

    def _exchange(self, replica: str):  # type: ignore[no-untyped-def]
        async def exchange(asks: Sequence[Ask]) -> Sequence[Grant]:
            self.asked += 1
            await asyncio.sleep(0)
            if self.is_away:
                raise TimeoutError
            return self.bank.exchange(replica, asks)

        return exchange

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for leases in self.leases:
                await leases.exchange()

    async def admits(self, tenant: Tenant, replica: int, tokens: int = 0, had: int | None = None) -> bool:
        context = RequestContext("r", tenant=tenant, tokens_in=tokens)
        try:
            await self.quotas[replica].enter(context)
            if tokens:
                await self.quotas[replica].reserve(context, 0)
        except ApiError:
            context.end()
            return False
        context.accepted, context.tokens_in = True, tokens if had is None else had
        self.running.append(context) if tenant.concurrent else context.end()
        return True


@pytest.mark.parametrize("shares", [(1, 1, 1), (20, 1, 0)])
def test_all_replicas_together_admit_the_quota_within_5_percent(shares: tuple[int, ...]) -> None:
    async def work() -> None:
        cluster, numbers = Cluster(len(shares)), random.Random(4)
        tenant = Tenant("a", "name:a", requests_per_minute=600, tokens_per_minute=20_000)
        taken: list[tuple[float, int]] = []
        for _ in range(4 * 130):  # at 2.4 times of either quota
            for _ in range(numbers.randint(4, 8)):
                tokens = numbers.randint(1, 79)
                if await cluster.admits(tenant, numbers.choices(range(len(shares)), shares)[0], 2 * tokens, tokens):
                    taken.append((cluster.now, tokens))
            await cluster.pass_time(0.25)
        for begin in range(0, 70, 5):
            window = [tokens for at, tokens in taken if begin <= at < begin + 60]
            assert len(window) <= 600 and sum(window) <= 20_000
        later = [tokens for at, tokens in taken if at >= 60]
        assert max(len(later) / 700, sum(later) / 23_333) >= 0.95

    asyncio.run(work())


def test_a_request_within_the_quota_needs_no_question_of_its_own() -> None:
    async def work() -> None:
        cluster, tenant = Cluster(3), Tenant("a", "name:a", requests_per_minute=20_000, tokens_per_minute=10**6)
        for _ in range(20):
            assert all([await cluster.admits(tenant, at % 3, 10) for at in range(60)])
            await cluster.pass_time(0.25)
        assert cluster.asked < 150  # of 1,200 requests

    asyncio.run(work())


def test_a_quota_that_one_replica_used_is_refused_by_another_with_the_time() -> None:
    async def work() -> None:
        cluster = Cluster(2)
        tenant = Tenant("a", "name:a", requests_per_minute=10)
        assert [await cluster.admits(tenant, 0) for _ in range(12)] == [True] * 10 + [False] * 2
        await cluster.pass_time(20)
        assert not await cluster.admits(tenant, 1)
        with pytest.raises(ApiError) as refused:
            await cluster.quotas[1].enter(RequestContext("r", tenant=tenant))
        assert 35 <= int(refused.value.headers["Retry-After"]) <= 41
        for leases in cluster.leases:
            await leases.exchange()
        with pytest.raises(ApiError) as again:  # refused without a question
            await cluster.quotas[1].enter(RequestContext("r", tenant=tenant))
        assert again.value.headers == refused.value.headers
        await cluster.pass_time(41)
        assert await cluster.admits(tenant, 1)

    asyncio.run(work())


def test_places_are_shared_and_those_of_a_lost_replica_come_back() -> None:
    async def work() -> None:
        cluster = Cluster(3)
        tenant = Tenant("a", "name:a", concurrent=6)
        assert [await cluster.admits(tenant, at % 3) for at in range(8)].count(True) == 6
        cluster.running.pop().end()
        await cluster.pass_time(1)
        assert [await cluster.admits(tenant, 1) for _ in range(2)] == [True, False]
        cluster.leases.pop(0)  # with two requests
        await cluster.pass_time(16)
        assert [await cluster.admits(tenant, 2) for _ in range(3)] == [True, True, False]

    asyncio.run(work())


def test_without_the_bank_requests_are_served(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        cluster = Cluster(1)
        cluster.is_away = True
        tenant = Tenant("a", "name:a", requests_per_minute=10)
        assert all([await cluster.admits(tenant, 0) for _ in range(15)])
        cluster.is_away = False
        await cluster.pass_time(1)
        assert not await cluster.admits(tenant, 0)

    asyncio.run(work())
    assert [record.message for record in caplog.records] == ["quotas are not shared among replicas: TimeoutError"]
