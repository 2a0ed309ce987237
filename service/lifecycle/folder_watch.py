"""Keeps the models that are known in step with the folder of `--models-dir`: new, changed and vanished ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from model.api.messages import ModelSpec
from service.core.errors import invalid, scrub, unavailable
from service.core.model_registry import Registry
from service.core.models_folder import FoundModel, ModelsFolder
from service.lifecycle.model_manager import ModelManager
from service.lifecycle.model_slots import Origin, State
from service.settings.model_settings import ModelSettings

SCAN_SECONDS = 5.0
_MIN_SECONDS = 1.0  # between scans that requests for unknown models cause

logger = logging.getLogger("triptych.models")


class FolderWatch:
    """Offers each model of the folder, and withdraws those whose folder has gone."""

    def __init__(
        self,
        folder: ModelsFolder,
        manager: ModelManager,
        registry: Registry,
        settings: ModelSettings,
        drain_s: float,
    ) -> None:
        self._folder = folder
        self._manager = manager
        self._registry = registry
        self._settings = settings
        self._drain_s = drain_s
        self._scanning = asyncio.Lock()
        self._last_scan = 0.0
        self._missed: set[str] = set()  # loaded models whose folder the last scan did not find
        self._taken: set[str] = set()  # names of the folder that other models have

    async def scan(self, min_seconds: float = 0.0) -> None:
        """Look at the folder, unless that was done within the last `min_seconds`."""
        async with self._scanning:
            if self._last_scan and time.monotonic() - self._last_scan < min_seconds:
                return
            found = await asyncio.to_thread(self._folder.scan)
            self._last_scan = time.monotonic()
            if found is None:
                return
            for model in found.values():
                self._offer(model)
            self._withdraw(found.keys())

    async def find_new(self) -> None:
        """Look at the folder for a request that names an unknown model."""
        await self.scan(_MIN_SECONDS)

    def _offer(self, model: FoundModel) -> None:
        self._missed.discard(model.name)
        slot = self._manager.get(model.name)
        if slot is not None and slot.origin is not Origin.MODELS_DIR:
            if model.name not in self._taken:
                self._taken.add(model.name)
                logger.warning("models_dir: %s is not served: another model has its name", model.name)
            return
        if model.name in self._registry.elsewhere:
            return
        if slot is None:
            spec = ModelSpec(model.name, str(model.path), self._settings.engine)
            slot = self._manager.add(spec, Origin.MODELS_DIR, pinned=False)
            logger.info("models_dir: found %s", model.name)
        elif slot.stamp == model.stamp or slot.state not in (State.AVAILABLE, State.FAILED):
            return
        slot.stamp = model.stamp
        if model.checkpoint is None:
            slot.failed(invalid(scrub(model.reason), None, "load_failed"), float("inf"))
            message = f"model {model.name} cannot be served: {slot.reason}"
            self._registry.refuse(model.name, unavailable(message, "model_failed", 60))
            logger.warning("models_dir: %s cannot be served: %s", model.name, model.reason)
            return
        slot.state, slot.reason, slot.error = State.AVAILABLE, "", None
        self._registry.offer(model.name, model.checkpoint)

    def _withdraw(self, found: Collection[str]) -> None:
        """Forget the models that are gone. One that is loaded is unloaded after two scans without its folder."""
        for slot in self._manager:
            if slot.origin is not Origin.MODELS_DIR or slot.name in found:
                continue
            if slot.state in (State.AVAILABLE, State.FAILED):
                self._manager.forget(slot)
                self._missed.discard(slot.name)
                logger.info("models_dir: %s is gone", slot.name)
            elif slot.state is State.LOADED and slot.name in self._missed:
                self._manager.begin_unload(slot, "gone", self._drain_s)
            else:
                self._missed.add(slot.name)
