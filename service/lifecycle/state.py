"""The state of an application: the parts that its routes use, and whether it accepts new work."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import metadata

from starlette.applications import Starlette
from starlette.requests import Request

from triptych.model.api.stats import ModelInfo
from triptych.service.chat.render_pool import RenderPool
from triptych.service.core.embed_cache import CachingClient
from triptych.service.core.engine_client import EngineClient, ModelReader
from triptych.service.core.errors import draining, not_begun, scrub, unavailable
from triptych.service.core.models import Models
from triptych.service.core.models_folder import AdaptersFolder, ModelsFolder
from triptych.service.core.response_store import ResponseStore, StoredResponse
from triptych.service.core.state_folder import StateFolder
from triptych.service.core.threads import Threads
from triptych.service.core.write_batch import WriteBatch
from triptych.service.images.image_pool import ImagePool
from triptych.service.lifecycle.fleet import Fleet, LocalFleet, ModelOrders, Replicas
from triptych.service.lifecycle.folder_watch import FolderWatch
from triptych.service.lifecycle.jobs import Jobs
from triptych.service.lifecycle.model_loader import ModelLoader
from triptych.service.observability.metrics import Metrics
from triptych.service.observability.telemetry import Telemetry
from triptych.service.planning.encode import EncodePlanner
from triptych.service.planning.generate import GeneratePlanner
from triptych.service.planning.response_format import GrammarChecker
from triptych.service.planning.tokenization import TokenizerThreads
from triptych.service.sandbox import confinement
from triptych.service.settings.service_settings import ServiceSettings
from triptych.service.tenants.tenancy import Tenancy
from triptych.service.tenants.usage import Found, Question

logger = logging.getLogger(__name__)

_MODELS_SECONDS = 1.0  # between two checks for idle models


class Service:
    """Everything that routes need; `create_app` stores it as `app.state.service`."""

    def __init__(
        self,
        client: EngineClient,
        models: Models,
        settings: ServiceSettings,
        metrics: Metrics,
        reader: ModelReader | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """Without a `reader` no models can be loaded later. `replicas` reaches the other replicas, if there are any.

        Raises `ConfigError`.
        """
        self.embed_cache: CachingClient | None = None
        if settings.embed_cache_bytes:
            client = self.embed_cache = CachingClient(client, settings.embed_cache_bytes, metrics)
        self.client = client
        self.models = models
        self.settings = settings
        self.limits = settings.limits
        self.metrics = metrics
        self.version = version()
        self.telemetry = Telemetry.to(settings.otlp_endpoint, self.version) if settings.otlp_endpoint else None
        self.writes = WriteBatch()  # shared by all streams
        self.state_folder = StateFolder.of(settings.state_dir, shared=replicas is not None)
        self.tenants = Tenancy(self.state_folder, metrics, None if replicas is None else replicas.leases())
        self.jobs = Jobs(client, metrics, self.telemetry, self.tenants)
        self.threads = TokenizerThreads(settings.tokenizer_threads, metrics.tokenized)
        self.body_threads = Threads(1, "triptych-bodies")  # parsing holds the GIL, so more threads would not help
        self.confinement = confinement.support()
        self.renderers = RenderPool(self.limits.chat_template_s)
        self.grammars = GrammarChecker(self.limits)
        limits = self.limits
        self.images = ImagePool(limits.image_decode_s, limits.max_image_pixels, limits.max_image_held_bytes)
        self.generate_planner = GeneratePlanner(models, client, limits, self.threads, self.grammars, self.images)
        self.encode_planner = EncodePlanner(models, client, limits, self.threads)
        self.responses = ResponseStore(settings.response_store_bytes, settings.limits.max_json_values)
        self.created = int(time.time())
        watched = settings.models.models_dir if reader is not None else ""
        folder = ModelsFolder(watched, pickle=settings.models.engine.pickle) if watched else None
        watches = [FolderWatch(folder, models, settings.models)] if folder is not None else []
        for base, path in settings.models.lora_dirs if reader is not None else ():
            adapters = AdaptersFolder(path, pickle=settings.models.engine.pickle)
            watches.append(FolderWatch(adapters, models, settings.models, models.served(base)))
        self.loader = ModelLoader(client, models, reader, settings, metrics, self.version, watches)
        orders = ModelOrders(models, self.loader, settings.models, folder)
        local = LocalFleet(client, models, self.loader, orders)
        self.fleet: Fleet = local if replicas is None else replicas.fleet(local)
        self._replicas = replicas
        self._draining = False
        self._at_drain: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Load the models; raises what `EngineClient.start` raises."""
        if self.confinement.missing:
            logger.warning(
                "templates, grammars and the files of clients are processed without %s: this kernel does not have it",
                " and ".join(self.confinement.missing),
            )
        self.client.on_step(self.metrics.step)
        await self.loader.start()
        await self.fleet.start()

    async def look_after_models(self) -> None:
        """Notice new folders and lost models, and unload idle models, until cancelled at shutdown."""
        while True:
            await asyncio.sleep(_MODELS_SECONDS)
            await self.loader.look_after()

    async def close(self) -> None:
        """End the engines, threads and processes."""
        self.fleet.stop()
        await self.loader.close()
        self.threads.close()
        self.body_threads.close()
        await asyncio.to_thread(self.renderers.close)
        await asyncio.to_thread(self.grammars.close)
        await asyncio.to_thread(self.images.close)
        await self.client.close()
        await self.tenants.usage.close()
        if self.state_folder is not None:
            await asyncio.to_thread(self.state_folder.close)
        if self.telemetry is not None:
            await asyncio.to_thread(self.telemetry.close)

    def begin_drain(self) -> None:
        """Refuse new requests from now on, and fail /readyz; requests in progress continue."""
        self._draining = True
        self.fleet.stop()
        for call in self._at_drain:
            call()

    def at_drain(self, call: Callable[[], None]) -> None:
        """Call `call` when a drain begins."""
        self._at_drain.append(call)

    async def drain(self) -> None:
        """Refuse new requests, wait at most `drain_timeout_s` for those in progress, and cancel the rest."""
        self.begin_drain()
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.jobs.wait_idle()
        except TimeoutError:
            self.jobs.give_up()
            await self.jobs.wait_idle()

    async def cancel(self, request_id: str) -> int:
        """Cancel a request on all replicas; return how many ended. 503 if none did and a replica did not answer."""
        ended = self.jobs.cancel(request_id)
        if self._replicas is not None:
            try:
                ended += await self._replicas.cancel(request_id)
            except TimeoutError:
                if not ended:
                    raise unavailable("a replica that may run the request did not answer", "not_live") from None
        return ended

    async def stored_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response that some replica keeps, or None. 503 if none has it and a replica did not answer."""
        found = self.responses.get(tenant, response_id)
        if found is not None or self._replicas is None or not self.responses.is_on:
            return found
        try:
            return await self._replicas.stored(tenant, response_id)
        except TimeoutError:
            raise unavailable("a replica that may keep the response did not answer", "not_live") from None

    async def forget_response(self, tenant: str, response_id: str) -> bool:
        """Drop a stored response, and return whether some replica kept it; 503 as `stored_response`."""
        if self.responses.drop(tenant, response_id):
            return True
        if self._replicas is None or not self.responses.is_on:
            return False
        try:
            return await self._replicas.forget(tenant, response_id) > 0
        except TimeoutError:
            raise unavailable("a replica that may keep the response did not answer", "not_live") from None

    async def usage(self, question: Question) -> list[Found]:
        """Return what each replica knows of usage, this one last; 503 if one did not answer."""
        found: list[Found] = []
        if self._replicas is not None:
            try:
                found = await self._replicas.usage(question)
            except TimeoutError:
                raise unavailable("a replica that may have counted usage did not answer", "not_live") from None
        try:
            return [*found, await self.tenants.usage.find(question)]
        except sqlite3.Error:  # locked, or a failing disk; the log says which
            raise unavailable("usage cannot be read from state_dir now", "not_live") from None

    def model_info(self, name: str) -> ModelInfo:
        """Return the engine's description of a served model; raises a 503 while it is not loaded."""
        info = self.client.models.get(name)
        if info is None:
            raise unavailable(f"model {name} is not loaded yet", "not_ready")
        return info

    def handling(self) -> AbstractContextManager[None]:
        """Check readiness and return a block in which a request is handled; a drain waits for its end."""
        self.check_ready()
        return self.jobs.in_progress()

    @property
    def is_draining(self) -> bool:
        return self._draining

    def check_ready(self) -> None:
        """Raise a 503 with the reason while no new requests are accepted."""
        self.check_not_draining()
        health = self.client.health()
        if not health.ready:
            raise not_begun(scrub(health.reason) or "the models are not ready", "not_ready")

    def check_not_draining(self) -> None:
        """Raise a 503 once a drain has begun."""
        if self._draining:
            raise draining()

    def check_not_given_up(self) -> None:
        """Raise a 503 if the time of a drain ran out before the request reached an engine."""
        if self.jobs.given_up:
            raise draining()

    def check_live(self) -> None:
        """Raise a 503 with the reason if the engines' step loop makes no progress."""
        health = self.client.health()
        if not health.live:
            raise unavailable(scrub(health.reason) or "the engines make no progress", "not_live")


def service_of(holder: Request | Starlette) -> Service:
    """Return the `Service` of an application, or of the application that received a request."""
    service = (holder.app if isinstance(holder, Request) else holder).state.service
    assert isinstance(service, Service)
    return service


def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "0+unknown"
