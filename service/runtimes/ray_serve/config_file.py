"""Converts a file for `triptych serve --config` to one for `serve deploy` and KubeRay's `serveConfigV2`.

Each group of models becomes an application. The `args` of all applications are the content of the file, without the
settings that the cluster decides, and the application's own name. So each knows the routes of the others' models.
Imports no Ray.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from triptych.model import names
from triptych.model.checkpoint import hub_names
from triptych.model.errors import ConfigError
from triptych.service.runtimes.ray_serve.replica_gpus import gpus_of_replica, resources
from triptych.service.settings import sources
from triptych.service.settings.resolve import models_or_embedded, resolve_config
from triptych.service.settings.serve_config import ServeConfig

DEPLOYMENT: Final = "triptych"
APPLICATION: Final = "application"  # key of `args` with the application's name
_ANY_HOST = "0.0.0.0"  # the cluster listens for other machines too
CLUSTER_SETTINGS: Final = frozenset({"runtime", "host", "port", "haproxy"})


def serve_config(path: Path, num_cpus: float | None = None) -> dict[str, Any]:
    """Convert a configuration file; each replica will request `num_cpus` CPUs. Raises `ConfigError`."""
    content = sources.read_yaml(path)
    file = sources.from_mapping(content, str(path))
    if file.settings.get("runtime") == "local":
        raise ConfigError(f"{path}: runtime: local is one process without Ray")
    if "haproxy" in file.settings:
        raise ConfigError(f"{path}: haproxy is decided where Ray is started (RAY_SERVE_ENABLE_HA_PROXY)")
    here = {name: value for name, value in file.settings.items() if name not in ("api_key_file", "admin_key_file")}
    config = resolve_config(models_or_embedded(file.models, here), here, file.groups)
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": config.settings.host,
            "port": config.settings.port,
            "request_timeout_s": config.proxy_timeout_s,
            "keep_alive_timeout_s": config.settings.limits.idle_connection_s,
        },
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [_application(one, content, num_cpus) for one in config.applications],
    }


def config_of_application(arguments: Any) -> ServeConfig:
    """Build the `ServeConfig` of an application from its `args`, without reading models. Raises `ConfigError`."""
    content = dict(arguments) if isinstance(arguments, dict) else arguments
    name = content.pop(APPLICATION, None) if isinstance(content, dict) else None
    file = sources.from_mapping(content, "args")
    for setting in sorted(CLUSTER_SETTINGS & file.settings.keys()):
        raise ConfigError(f"args: {setting} is set by the cluster (http_options), not by an application")
    if file.groups and name is None:
        raise ConfigError(f"args: {APPLICATION} is missing: with groups it says which one this is (serve-config)")
    config = resolve_config(models_or_embedded(file.models, file.settings), file.settings, file.groups)
    applications = {one.name: one for one in config.applications}
    if name is not None and name not in applications:
        raise ConfigError(f"args: {APPLICATION}: found {name!r}, expected one of {', '.join(applications)}")
    found = applications[name or config.name]
    return replace(found, settings=replace(found.settings, host=_ANY_HOST))


def _application(config: ServeConfig, content: Mapping[str, Any], num_cpus: float | None) -> dict[str, Any]:
    application = {
        "name": config.name,
        "route_prefix": config.route,
        "import_path": "triptych.service.runtimes.ray_serve.deployment:application",
        "args": _arguments(content) | {APPLICATION: config.name},
    }
    if num_cpus is None:
        return application
    for spec in config.models:
        if spec.engine.tensor_parallel_size > 1 and spec.engine.device == "auto":  # CPUs or GPUs must be requested
            raise ConfigError(f"model {spec.name}: with --num-cpus, device must say where its ranks go: cuda or cpu")
    options = {"num_cpus": num_cpus, **resources(gpus_of_replica(config, 0.0))}
    return application | {"deployments": [{"name": DEPLOYMENT, "ray_actor_options": options}]}


def _arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the file's content with absolute paths, because a replica's working directory is unknown."""
    arguments = {key: copy.deepcopy(value) for key, value in content.items() if _setting(key) not in CLUSTER_SETTINGS}
    for key in content:
        if _setting(key) == "models_dir":
            arguments[key] = str(Path(content[key]).absolute())
        if _setting(key) in ("lora", "lora_dir"):
            given = content[key].split(",") if isinstance(content[key], str) else content[key]
            arguments[key] = [_absolute_adapter(str(one), "=" if _setting(key) == "lora" else ":") for one in given]
    for part in (arguments, *arguments.get("groups", {}).values()):
        if "models" in part:
            part["models"] = {name: _absolute(model) for name, model in part["models"].items()}
    return arguments


def _absolute_adapter(text: str, mark: str) -> str:
    """Make the path absolute that is after the mark of `[MODEL:]NAME=PATH` or `[MODEL:]DIR`."""
    name, found, path = text.partition(mark) if mark == "=" else text.rpartition(mark)
    return name + found + (_absolute(path.strip()) if mark == "=" else str(Path(path.strip()).absolute()))


def _setting(key: str) -> str:
    return key.replace("-", "_")


def _absolute(model: Any) -> Any:
    if isinstance(model, str):
        found = names.locate(model)
        return found if hub_names.is_hub_name(found) else str(Path(found).absolute())
    adapters = {"lora": {name: _absolute(path) for name, path in model["lora"].items()}} if "lora" in model else {}
    return model | {"path": _absolute(model["path"])} | adapters
