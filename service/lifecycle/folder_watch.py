"""Watches the folders of `--models-dir` and `--lora-dir`: adds what is new, and marks what is gone or has changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from triptych.model.api.messages import ModelSpec
from triptych.service.core.errors import invalid, scrub, unavailable
from triptych.service.core.models import Model, Models, Origin, ServedModel, State
from triptych.service.core.models_folder import FoundModel, ModelsFolder, Stamp
from triptych.service.settings.service_settings import ModelSettings

SCAN_SECONDS = 5.0
_MIN_SECONDS = 1.0  # between two scans that requests for unknown models cause

logger = logging.getLogger("triptych.models")


class FolderWatch:
    """Adds each model or adapter of a folder to the known models, and removes those whose folder is gone."""

    def __init__(
        self, folder: ModelsFolder, models: Models, settings: ModelSettings, base: ServedModel | None = None
    ) -> None:
        """`base`: the model that all of them are adapters for; None: they are models."""
        self._folder = folder
        self._models = models
        self._engine = settings.engine if base is None else base.engine
        self._adapter_of = None if base is None else base.name
        self._base = base
        self._unsettled: dict[str, Stamp] = {}  # of loaded adapters whose files have changed
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
        if model is not None and not self._is_own(model):
            if found.name not in self._duplicates:
                self._duplicates.add(found.name)
                logger.warning("%s: %s is not served: another model has its name", self._folder.setting, found.name)
            return
        if found.name in self._models.elsewhere:
            return
        if model is None:
            spec = ModelSpec(found.name, str(found.path), self._engine, adapter_of=self._adapter_of)
            model = Model(spec, Origin.MODELS_DIR, pinned=False)
            self._models.add(model)
            logger.info("%s: found %s", self._folder.setting, found.name)
        else:
            model.missed = 0
            if model.stamp == found.stamp:
                return
            if model.state not in (State.AVAILABLE, State.FAILED):
                self._note_change(model, found.stamp)
                return
        model.stamp = found.stamp
        if found.reason:
            model.fail(invalid(scrub(found.reason), None, "load_failed"), float("inf"))
            model.refuse(unavailable(f"model {found.name} cannot be served: {model.reason}", "model_failed", 60))
            logger.warning("%s: %s cannot be served: %s", self._folder.setting, found.name, found.reason)
            return
        model.state, model.reason, model.error = State.AVAILABLE, "", None
        checkpoint = found.checkpoint if self._base is None else self._base.checkpoint
        assert checkpoint is not None
        model.offer(checkpoint)

    def _is_own(self, model: Model) -> bool:
        """Return whether a model is one of the folder."""
        return model.origin is Origin.MODELS_DIR and model.spec.adapter_of == self._adapter_of

    def _note_change(self, model: Model, stamp: Stamp) -> None:
        """Have a loaded adapter unloaded once its new files have been the same in two scans."""
        if self._base is None or model.state is not State.LOADED:
            return
        if self._unsettled.get(model.name) == stamp:
            model.changed, model.stamp = True, stamp
        self._unsettled[model.name] = stamp

    def _withdraw(self, found: Collection[str]) -> None:
        """Remove the models that are gone. `ModelLoader` unloads those that are loaded, after two scans."""
        for model in self._models:
            if not self._is_own(model) or model.name in found:
                continue
            model.missed += 1
            if model.state in (State.AVAILABLE, State.FAILED):
                self._models.forget(model)
                logger.info("%s: %s is gone", self._folder.setting, model.name)
