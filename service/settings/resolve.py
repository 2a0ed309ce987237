"""Builds a `ServeConfig` from parsed settings, which are given by option name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from triptych.model import names
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.errors import ConfigError, listed
from triptych.model.pretrained import embedded_models
from triptych.service.settings.api_keys import KeyRing
from triptych.service.settings.option_table import ENGINE_OPTIONS, LIMIT_OPTIONS
from triptych.service.settings.serve_config import Scaling, ServeConfig
from triptych.service.settings.service_settings import Limits, ModelSettings, ServiceSettings
from triptych.service.settings.sources import FileSettings

Models = Mapping[str, Mapping[str, Any]]
_DEFAULTS = EngineConfig(**{option.name: option.default for option in ENGINE_OPTIONS})

_SERVICE_FIELDS = {  # by option name
    **{
        name: name
        for name in (
            *("host", "port", "api_keys", "api_key_file", "admin_keys", "admin_key_file", "cors_origins"),
            *("allowed_hosts", "metrics_port"),
            *("log_format", "threads", "cpu_binding", "tokenizer_threads", "otlp_endpoint"),
            *("tool_format", "reasoning_format", "state_dir", "max_state_bytes"),
        )
    },
    "drain_timeout": "drain_timeout_s",
    "stall_timeout": "stall_timeout_s",
    "stream_interval": "stream_interval_s",
    "embed_cache": "embed_cache_bytes",
    "response_store": "response_store_bytes",
}
_MODEL_FIELDS = {
    **{name: name for name in ("models_dir", "load_from", "pin", "max_download", "max_loras")},
    "keep_alive": "keep_alive_s",
    "model_memory": "memory",
    "load_timeout": "load_timeout_s",
}
_SCALING_FIELDS = {
    "scale_target": "target",
    "scale_up_delay": "up_delay_s",
    "scale_down_delay": "down_delay_s",
    "surge": "surge",
    "gpus_per_replica": "gpus_per_replica",
}


def resolve_config(
    models: Models,
    settings: Mapping[str, Any],
    groups: Mapping[str, FileSettings] | None = None,
) -> ServeConfig:
    """Build a `ServeConfig` from models (name -> `path` and engine settings), settings, and groups of other models.

    An engine setting of a model wins over its group's, and a group's over the common one. Raises `ConfigError`.
    """
    specs = _model_specs(models, settings)
    bases = tuple(spec for spec in specs if spec.adapter_of is None)
    later = ModelSettings(
        engine=_engine_for_all(settings),
        lora_dirs=_adapter_folders(bases, settings.get("lora_dir", ())),
        **_renamed(settings, _MODEL_FIELDS),
    )
    if not specs and not later.models_dir:
        raise ConfigError("no model to serve: give a checkpoint folder")
    service = ServiceSettings(
        limits=Limits(**{o.name: settings[o.name] for o in LIMIT_OPTIONS if o.name in settings}),
        models=later,
        vllm_metrics=settings.get("metrics") == "vllm",
        **_renamed(settings, _SERVICE_FIELDS),
    )
    KeyRing.of(service)  # raises for a bad key file before anything starts
    KeyRing.of_admins(service)
    return ServeConfig(
        models=specs,
        settings=service,
        runtime=settings.get("runtime", "ray"),
        scaling=_scaling(settings),
        groups=tuple(_group(name, group, settings, service) for name, group in (groups or {}).items()),
        haproxy=settings.get("haproxy", "auto") == "auto",
    )


def models_or_embedded(models: Models, settings: Mapping[str, Any]) -> Models:
    """Return the models to start with: those given; else none if there is a `models_dir`; else the embedded ones."""
    return models if models or settings.get("models_dir") else embedded_model_settings()


def engine_config(settings: Mapping[str, Any], shared: EngineConfig | None = None) -> EngineConfig:
    """Build the engine settings of a model: its own first, then those of `shared`, then the options' defaults.

    Raises `ConfigError`.
    """
    return replace(shared or _DEFAULTS, **_engine_settings(settings))


def embedded_model_settings() -> dict[str, dict[str, Any]]:
    """Return the embedded models as a configuration file lists them: name -> `path`."""
    return {name: {"path": str(path)} for name, path in embedded_models().items()}


def _group(name: str, group: FileSettings, settings: Mapping[str, Any], service: ServiceSettings) -> ServeConfig:
    """Build the application of a group: it inherits engine settings, and has its own replicas."""
    if not group.models:
        raise ConfigError(f"groups.{name}: there is no model to serve")
    own = {**settings, **group.settings, "lora": ()}
    later = replace(service.models, models_dir="", lora_dirs=(), engine=_engine_for_all(own))
    return ServeConfig(
        models=_model_specs(group.models, own),
        settings=replace(service, models=later, batches_dir=f"group-{quote(name, safe='')}"),
        scaling=_scaling(group.settings),
        name=f"triptych-{name}",
        route=group.settings.get("route", f"/{name}"),
    )


def _engine_for_all(settings: Mapping[str, Any]) -> EngineConfig:
    """Build the engine settings of a model that sets none itself; it shares the common draft model, if any."""
    engine = engine_config(settings)
    return replace(engine, draft_model_shared=engine.draft_model is not None)


def _model_specs(models: Models, settings: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
    for_all = _engine_for_all(settings)
    own = replace(for_all, draft_model_shared=False)
    paths = {names.checked_name(name): names.locate(str(model["path"])) for name, model in models.items()}
    specs = tuple(
        ModelSpec(name, paths[name], engine_config(model, own if "draft_model" in model else for_all))
        for name, model in models.items()
    )
    return specs + _adapter_specs(models, specs, settings.get("lora", ()))


def _adapter_specs(models: Models, bases: tuple[ModelSpec, ...], given: Sequence[str]) -> tuple[ModelSpec, ...]:
    """Return the LoRA adapters of the models: those of a file, and `given` as `[MODEL:]NAME=PATH`."""
    by_name, found = {base.name: base for base in bases}, dict[str, ModelSpec]()
    wanted = [(base, name, path) for base, one in models.items() for name, path in one.get("lora", {}).items()]
    for text in given:
        left, _, path = text.partition("=")
        base, _, name = left.rpartition(":")
        if not base and len(bases) != 1:
            raise ConfigError(f"lora {text}: name its model, MODEL:{name}=PATH: one of {listed(by_name)}")
        wanted.append((base or bases[0].name, name, path))
    for base, name, path in wanted:
        if base not in by_name:
            raise ConfigError(f"lora {base}:{name}: no model is named {base}; there are {listed(by_name)}")
        if name in by_name or name in found:
            raise ConfigError(f"lora {base}:{name}: another model or adapter has this name")
        found[name] = ModelSpec(name, names.checked_adapter(name, path), by_name[base].engine, adapter_of=base)
    return tuple(found.values())


def _adapter_folders(bases: tuple[ModelSpec, ...], given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return models and the folders of their adapters, given as `[MODEL:]DIR`."""
    names_of, found = [base.name for base in bases], dict[str, str]()
    for text in given:
        name, _, path = text.rpartition(":")
        if not name and len(bases) != 1:
            raise ConfigError(f"lora_dir {text}: name its model, MODEL:{path}: one of {listed(names_of)}")
        name = name or bases[0].name
        if name not in names_of:
            raise ConfigError(f"lora_dir {text}: no model is named {name}; there are {listed(names_of)}")
        if name in found:
            raise ConfigError(f"lora_dir {text}: the model {name} has the folder {found[name]} already")
        if not Path(path).is_dir():
            raise ConfigError(f"lora_dir {text}: no such folder")
        found[name] = str(Path(path).absolute())
    return tuple(found.items())


def _scaling(settings: Mapping[str, Any]) -> Scaling:
    return Scaling(**settings.get("replicas", {}), **_renamed(settings, _SCALING_FIELDS))


def _renamed(settings: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    return {field: settings[name] for name, field in fields.items() if name in settings}


def _engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {option.name: settings[option.name] for option in ENGINE_OPTIONS if option.name in settings}
