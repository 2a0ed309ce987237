"""What a replica asks the other replicas of its application, and what the cluster keeps for all. Imports Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from triptych.service.core.errors import error_fields, internal, unavailable
from triptych.service.core.response_store import StoredResponse
from triptych.service.lifecycle.fleet import Fleet, LocalFleet
from triptych.service.runtimes.ray_serve.replicated_fleet import Command, CommandResult, ReplicatedFleet, WantedStore
from triptych.service.settings.serve_config import ServeConfig
from triptych.service.tenants.bank import Ask, Bank, BankLeases, Grant
from triptych.service.tenants.quotas import Leases
from triptych.service.tenants.usage import Found, Question

_CONTROL_SECONDS = 30.0  # for a command, in addition to the time that a load may take
_ASK_SECONDS = 5.0  # for an answer of the other replicas, which may hang
_BANK_SECONDS = 2.0  # for an answer of the bank of quotas
_STORE = "triptych"  # namespace of keys in the cluster's store

logger = logging.getLogger("triptych.ray")


class Siblings:
    """The other replicas of the application (`triptych.service.lifecycle.fleet.Replicas`)."""

    def __init__(self, config: ServeConfig) -> None:
        self._name = config.name
        self._has_admin = config.settings.has_admin
        self._follow_seconds = config.settings.models.load_timeout_s + _CONTROL_SECONDS
        self._handle: DeploymentHandle[Any] | None = None
        self._bank: Any = None

    def fleet(self, local: LocalFleet) -> Fleet:
        """Return the fleet of all replicas; without an admin key each replica manages only its own models."""
        if not self._has_admin:
            return local
        return ReplicatedFleet(local, WantedStore(_ClusterStore(), self._name), self._send_to_others)

    async def cancel(self, request_id: str) -> int:
        """Cancel a request on all other replicas: a DELETE may reach any replica, and only one has the request."""
        return sum(await self._asked("cancel", request_id))

    async def stored(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response that another replica keeps."""
        return next(iter(await self._asked("stored", (tenant, response_id))), None)

    def leases(self) -> Leases:
        """Return the leases of quotas, of a bank that all replicas of the application share."""
        return BankLeases(self._exchange)

    async def _exchange(self, asks: Sequence[Ask]) -> Sequence[Grant]:
        """Ask the bank, an actor that the first replica with a question starts."""
        if self._bank is None:
            self._bank = await asyncio.to_thread(_bank_of, self._name)
        async with asyncio.timeout(_BANK_SECONDS):
            found: Sequence[Grant] = await self._bank.exchange.remote(replica_id(), asks)
        return found

    async def usage(self, question: Question) -> list[Found]:
        """Return what the other replicas know of usage; raises `TimeoutError` if one did not answer."""
        return await self._asked("usage", question, all_of_them=True)

    async def forget(self, tenant: str, response_id: str) -> int:
        """Drop a stored response on the other replicas; return how many kept it."""
        return sum(await self._asked("forget", (tenant, response_id)))

    async def _asked(self, method: str, argument: object, *, all_of_them: bool = False) -> list[Any]:
        """Call a method of all other replicas, and return what is not empty of their answers.

        Raises `TimeoutError` if a replica did not answer and there is nothing, or all answers are needed.
        """
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                answers = await self._broadcast(method, argument)
        except (RayError, RayServeException) as error:
            raise TimeoutError from error
        given = [one for one in answers if not isinstance(one, BaseException)]
        found = [one for one in given if one]
        if (all_of_them or not found) and len(given) < len(answers):
            raise TimeoutError
        return found

    async def _send_to_others(self, command: Command) -> list[CommandResult | None]:
        """Send a command to all other replicas and return their results; None for a replica that has ended."""
        seconds = _ASK_SECONDS if command.kind == "entries" else self._follow_seconds + (command.drain_s or 0.0)
        try:
            async with asyncio.timeout(seconds):
                answers = await self._broadcast("follow", command)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the other replicas did not answer: %s", type(error).__name__)
            raise unavailable("the other replicas did not answer", "not_live") from error
        return [_result(one) for one in answers if one is not None]

    async def _broadcast(self, method: str, argument: object) -> list[Any]:
        """Call a method of every replica, including this one, with the argument and this replica's id."""
        if self._handle is None:
            self._handle = await asyncio.to_thread(serve.get_app_handle, serve.get_replica_context().app_name)
        calls = self._handle.broadcast(method, argument, replica_id())
        return list(await calls.results_async(return_exceptions=True))


def _bank_of(application: str) -> Any:
    """Return the actor with the bank of quotas; it outlives the replicas, as they may be replaced."""
    made = ray.remote(num_cpus=0, max_restarts=-1)(Bank)
    name = f"{application}-quotas"
    return made.options(name=name, namespace=_STORE, lifetime="detached", get_if_exists=True).remote()


class _ClusterStore:
    """Ray's key-value store, which exists as long as the cluster (`Store`)."""

    async def get(self, key: str) -> bytes | None:
        return await asyncio.to_thread(_internal_kv_get, key, namespace=_STORE)

    async def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        existed = await asyncio.to_thread(_internal_kv_put, key, value, overwrite, namespace=_STORE)
        return overwrite or not existed

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(_internal_kv_del, key, namespace=_STORE)


def _result(answer: CommandResult | BaseException) -> CommandResult | None:
    """Return a replica's result, None if the replica has ended; another exception becomes an error in the result."""
    if isinstance(answer, CommandResult):
        return answer
    logger.warning("a replica did not answer: %s", type(answer).__name__)
    return None if isinstance(answer, RayActorError) else CommandResult(error=error_fields(internal()))


def replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)
