"""Resolution of parsed settings, by option name, into a `ServeConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.api.engine_config import EngineConfig
from model.api.messages import ModelSpec
from model.errors import ConfigError
from model.pretrained import embedded_models
from service.settings.api_keys import KeyRing
from service.settings.option_table import ENGINE_OPTIONS, LIMIT_OPTIONS
from service.settings.scaling import Scaling
from service.settings.serve_config import ServeConfig
from service.settings.service_settings import Limits, ServiceSettings
from service.settings.sources import FileSettings

_SERVICE_FIELDS = {  # by option name
    **{
        name: name
        for name in ("host", "port", "api_keys", "api_key_file", "log_format", "tokenizer_threads", "otlp_endpoint")
    },
    "drain_timeout": "drain_timeout_s",
    "stall_timeout": "stall_timeout_s",
    "stream_interval": "stream_interval_s",
}
_SCALING_FIELDS = {
    "scale_target": "target",
    "scale_up_delay": "up_delay_s",
    "scale_down_delay": "down_delay_s",
    "surge": "surge",
}


def resolve_config(
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    groups: Mapping[str, FileSettings] | None = None,
) -> ServeConfig:
    """Build the `ServeConfig` of models (name -> `path` and engine settings), settings, and groups of other models.

    An engine setting of a model wins over its group's, and a group's over the one for all. Raises `ConfigError`.
    """
    specs = _model_specs(models, settings)
    if not specs:
        raise ConfigError("no model to serve: give a checkpoint folder")
    service = ServiceSettings(
        limits=Limits(**{o.name: settings[o.name] for o in LIMIT_OPTIONS if o.name in settings}),
        vllm_metrics=settings.get("metrics") == "vllm",
        **_renamed(settings, _SERVICE_FIELDS),
    )
    KeyRing.of(service)  # raises for a bad key file before anything starts
    return ServeConfig(
        models=specs,
        settings=service,
        runtime=settings.get("runtime", "ray"),
        scaling=_scaling(settings),
        groups=tuple(_group(name, group, settings, service) for name, group in (groups or {}).items()),
        haproxy=settings.get("haproxy", "auto") == "auto",
    )


def embedded_model_settings() -> dict[str, dict[str, Any]]:
    """The embedded models as a configuration file would name them: name -> `path`."""
    return {name: {"path": str(path)} for name, path in embedded_models().items()}


def _group(name: str, group: FileSettings, settings: Mapping[str, Any], service: ServiceSettings) -> ServeConfig:
    """The application of a group: it inherits engine settings, and has replicas of its own."""
    if not group.models:
        raise ConfigError(f"groups.{name}: there is no model to serve")
    return ServeConfig(
        models=_model_specs(group.models, {**settings, **group.settings}),
        settings=service,
        scaling=_scaling(group.settings),
        name=f"triptych-{name}",
        route=group.settings.get("route", f"/{name}"),
    )


def _model_specs(models: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
    shared = _engine_settings(settings)
    return tuple(
        ModelSpec(name, str(model["path"]), EngineConfig(**{**shared, **_engine_settings(model)}))
        for name, model in models.items()
    )


def _scaling(settings: Mapping[str, Any]) -> Scaling:
    return Scaling(**settings.get("replicas", {}), **_renamed(settings, _SCALING_FIELDS))


def _renamed(settings: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    return {field: settings[name] for name, field in fields.items() if name in settings}


def _engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {option.name: settings[option.name] for option in ENGINE_OPTIONS if option.name in settings}
