"""Watches the folder of `--models-dir`: adds new models to the known ones, and marks those that are gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from triptych.model.api.messages import ModelSpec
from triptych.service.core.errors import invalid, scrub, unavailable
from triptych.service.core.models import Model, Models, Origin, State
from triptych.service.core.models_folder import FoundModel, ModelsFolder
from triptych.service.settings.service_settings import ModelSettings

SCAN_SECONDS = 5.0
_MIN_SECONDS = 1.0  # between two scans that requests for unknown models cause

logger = logging.getLogger("triptych.models")


class FolderWatch:
    """Adds each model of the folder to the known models, and removes those whose folder is gone."""

    def __init__(self, folder: ModelsFolder, models: Models, settings: ModelSettings) -> None:
        self._folder = folder
        self._models = models
        self._settings = settings
        self._scanning = asyncio.Lock()
        self._last_scan = 0.0
        self._duplicates: set[str] = set()  # names of folders that another model already has

    async def scan(self, min_seconds: float = 0.0) -> None:
        """Scan the folder, unless that was done within the last `min_seconds`."""
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
        """Scan the folder because a request names an unknown model."""
        await self.scan(_MIN_SECONDS)

    def _offer(self, found: FoundModel) -> None:
        model = self._models.get(found.name)
        if model is not None and model.origin is not Origin.MODELS_DIR:
            if found.name not in self._duplicates:
                self._duplicates.add(found.name)
                logger.warning("models_dir: %s is not served: another model has its name", found.name)
            return
        if found.name in self._models.elsewhere:
            return
        if model is None:
            spec = ModelSpec(found.name, str(found.path), self._settings.engine)
            model = Model(spec, Origin.MODELS_DIR, pinned=False)
            self._models.add(model)
            logger.info("models_dir: found %s", found.name)
        else:
            model.missed = 0
            if model.stamp == found.stamp or model.state not in (State.AVAILABLE, State.FAILED):
                return
        model.stamp = found.stamp
        if found.checkpoint is None:
            model.fail(invalid(scrub(found.reason), None, "load_failed"), float("inf"))
            model.refuse(unavailable(f"model {found.name} cannot be served: {model.reason}", "model_failed", 60))
            logger.warning("models_dir: %s cannot be served: %s", found.name, found.reason)
            return
        model.state, model.reason, model.error = State.AVAILABLE, "", None
        model.offer(found.checkpoint)

    def _withdraw(self, found: Collection[str]) -> None:
        """Remove the models that are gone. `ModelLoader` unloads those that are loaded, after two scans."""
        for model in self._models:
            if model.origin is not Origin.MODELS_DIR or model.name in found:
                continue
            model.missed += 1
            if model.state in (State.AVAILABLE, State.FAILED):
                self._models.forget(model)
                logger.info("models_dir: %s is gone", model.name)
