"""Orders of operators: which model to load from where, checked against what the settings allow.

An order names a model that is known, or a new one by a path: a folder below `models_dir`, a model of the Hub, or, where
`load_from` says `any`, every folder of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.api.messages import ModelSpec
from model.checkpoint import hub
from model.errors import ConfigError
from model.gguf.container import is_gguf
from service.core.errors import ApiError, conflict, forbidden, invalid, scrub
from service.core.models import Model, Models, Origin, State
from service.core.models_folder import ModelsFolder, valid_name
from service.lifecycle.model_loader import ModelLoader
from service.settings import sources
from service.settings.model_settings import ModelSettings
from service.settings.resolve import engine_config


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Asks for a model: as it is known, or from a path with settings of its own."""

    name: str
    path: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # as beside the path of a model in a configuration file
    pinned: bool = False


class ModelOrders:
    """Turns orders into loads."""

    def __init__(
        self, models: Models, loader: ModelLoader, settings: ModelSettings, folder: ModelsFolder | None
    ) -> None:
        self._models = models
        self._loader = loader
        self._settings = settings
        self._folder = folder

    def check(self, order: LoadOrder) -> None:
        """Raise the `ApiError` with which `load` would refuse the order."""
        self._resolve(order)

    def load(self, order: LoadOrder) -> asyncio.Task[None] | None:
        """Start loading what is ordered; None if it is loaded already. Raises `ApiError`."""
        model, spec = self._resolve(order)
        if model is None:
            return self._loader.begin_load(self._loader.add(spec, order.path, pinned=order.pinned))
        if model.state in (State.LOADED, State.LOADING):
            model.pinned |= order.pinned
            return model.task
        model.spec, model.pinned = spec, order.pinned or (model.origin is Origin.START and self._settings.pin)
        return self._loader.begin_load(model)

    def _resolve(self, order: LoadOrder) -> tuple[Model | None, ModelSpec]:
        """Return the known model, None for a new one, and what to load."""
        if order.name in self._models.elsewhere:
            raise conflict(f"name: {order.name} is a model of another group", "model_exists", "name")
        model = self._models.get(order.name)
        if model is None or (order.path is not None and model.state is State.FAILED and model.origin is Origin.REQUEST):
            return None, self._new_spec(order)
        spec = self._spec_of_known(order, model)
        if model.state is State.UNLOADING:
            raise conflict(f"model {order.name} is being unloaded; try again", "model_unloading", "name")
        if model.state in (State.LOADED, State.LOADING) and spec != model.spec:
            message = f"model {order.name} is {model.state} with other settings; unload it, or take another name"
            raise conflict(message, "model_exists", "name")
        return model, spec

    def _new_spec(self, order: LoadOrder) -> ModelSpec:
        if not valid_name(order.name):
            raise invalid("name: 1-64 letters, digits and ._-, of which the first is a letter or digit", "name")
        if order.path is None:
            raise invalid("path is required: no model of this name is known", "path", "missing_field")
        return ModelSpec(order.name, self._allowed(order.path), self._engine(order, self._settings.engine))

    def _spec_of_known(self, order: LoadOrder, model: Model) -> ModelSpec:
        """Return what is ordered of a known model: by default what it was before."""
        if order.path not in (None, model.given_path) and self._allowed(order.path) != model.spec.path:
            message = f"name: {order.name} is known from another path; take another name"
            raise conflict(message, "model_exists", "name")
        if not order.settings:
            return model.spec
        return ModelSpec(order.name, model.spec.path, self._engine(order, self._settings.engine))

    def _engine(self, order: LoadOrder, shared: Any) -> Any:
        try:
            return engine_config(sources.requested_settings(order.settings, "settings"), shared)
        except ConfigError as error:
            raise invalid(scrub(str(error)), "settings") from None

    def _allowed(self, path: str) -> str:
        """Return the path to load from; raises a 403 for a place that `load_from` does not list, 400 for a bad path."""
        sources_allowed = self._settings.load_from
        if hub.is_hub_name(path):
            if "hub" not in sources_allowed and "any" not in sources_allowed:
                raise _not_allowed("models of the Hub")
            try:
                hub.model_name(path)
            except ConfigError as error:
                raise invalid(scrub(str(error)), "path") from None
            return path
        if "any" in sources_allowed and Path(path).is_absolute():
            return self._any_folder(path)
        if "models-dir" not in sources_allowed and "any" not in sources_allowed:
            raise _not_allowed("folders")
        if self._folder is None:
            raise _not_allowed("folders without --models-dir")
        if Path(path).is_absolute() and not Path(path).is_relative_to(self._folder.path):
            raise _not_allowed("folders outside models_dir")
        try:
            return str(self._folder.below(path))
        except ConfigError as error:
            raise invalid(str(error), "path") from None

    @staticmethod
    def _any_folder(path: str) -> str:
        try:
            found = Path(path).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise invalid("path: no such folder", "path") from None
        if not found.is_dir() and not is_gguf(found):
            raise invalid("path: no such folder", "path")
        return str(found)


def _not_allowed(what: str) -> ApiError:
    return forbidden(f"path: {what} may not be loaded; the setting load_from says what may", "source_not_allowed")
