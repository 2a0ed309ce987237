"""What `serve deploy` and KubeRay's `serveConfigV2` take, made of a file for `triptych serve --config`.

Each group of models is an application of its own. All applications get the same `args`, the file's content less what
the cluster decides, and the name of the one that they are; so each knows where the models of the others answer.
Imports no Ray.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from model.errors import ConfigError
from model.pretrained import embedded_models
from service.cli import serve
from service.runtimes.local import KEEP_ALIVE_SECONDS, ServeConfig
from service.runtimes.ray_serve.environment import request_timeout_s
from service.runtimes.ray_serve.placement import gpus_of_replica
from service.settings import option_table

DEPLOYMENT: Final = "triptych"
APPLICATION: Final = "application"  # the key of `args` that says which application of the file this is
OF_THE_CLUSTER: Final = frozenset({"runtime", "host", "port", "haproxy"})


def serve_config(path: Path, num_cpus: float | None = None) -> dict[str, Any]:
    """`num_cpus`: what each replica asks the cluster for; None: nothing. Raises `ConfigError`."""
    content = option_table.read_yaml(path)
    file = option_table.from_mapping(content, str(path))
    if file.settings.get("runtime") == "local":
        raise ConfigError(f"{path}: runtime: local is one process without Ray")
    if "haproxy" in file.settings:
        raise ConfigError(f"{path}: haproxy is decided where Ray is started (RAY_SERVE_ENABLE_HA_PROXY)")
    here = {name: value for name, value in file.settings.items() if name != "api_key_file"}  # a file of the cluster's
    config = serve.configuration(file.models or embedded(), here, file.groups)
    return {
        "proxy_location": "EveryNode",
        "http_options": {
            "host": config.settings.host,
            "port": config.settings.port,
            "request_timeout_s": request_timeout_s(config),
            "keep_alive_timeout_s": KEEP_ALIVE_SECONDS,
        },
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [_application(one, content, num_cpus) for one in (config, *config.groups)],
    }


def chosen(arguments: Any) -> ServeConfig:
    """What an application's `args` ask to serve. Folders of models are not read. Raises `ConfigError`."""
    content = dict(arguments) if isinstance(arguments, dict) else arguments
    name = content.pop(APPLICATION, None) if isinstance(content, dict) else None
    file = option_table.from_mapping(content, "args")
    for setting in sorted(OF_THE_CLUSTER & file.settings.keys()):
        raise ConfigError(f"args: {setting} is the cluster's to set (http_options), not an application's")
    if file.groups and name is None:
        raise ConfigError(f"args: {APPLICATION} is missing: with groups it says which one this is (serve-config)")
    config = serve.configuration(file.models or embedded(), file.settings, file.groups)
    applications = {one.name: one for one in (config, *config.groups)}
    if name is not None and name not in applications:
        raise ConfigError(f"args: {APPLICATION}: found {name!r}, expected one of {', '.join(applications)}")
    return applications[name or config.name]


def embedded() -> dict[str, dict[str, Any]]:
    return {name: {"path": str(path)} for name, path in embedded_models().items()}


def _application(config: ServeConfig, content: Mapping[str, Any], num_cpus: float | None) -> dict[str, Any]:
    application = {
        "name": config.name,
        "route_prefix": config.route,
        "import_path": "service.runtimes.ray_serve.deployment:application",
        "args": _arguments(content) | {APPLICATION: config.name},
    }
    if num_cpus is None:
        return application
    for spec in config.models:
        if spec.engine.tensor_parallel_size > 1 and spec.engine.device == "auto":  # Serve takes these resources for all
            raise ConfigError(f"model {spec.name}: with --num-cpus, device must say where its ranks go: cuda or cpu")
    gpus = gpus_of_replica([spec.engine for spec in config.models], 0.0)
    resources = {"num_cpus": num_cpus, **({"num_gpus": gpus} if gpus else {})}
    return application | {"deployments": [{"name": DEPLOYMENT, "ray_actor_options": resources}]}


def _arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content with absolute paths: where a replica starts is the cluster's affair."""
    arguments = {key: copy.deepcopy(value) for key, value in content.items() if _setting(key) not in OF_THE_CLUSTER}
    for part in (arguments, *arguments.get("groups", {}).values()):
        if "models" in part:
            part["models"] = {name: _absolute(model) for name, model in part["models"].items()}
    return arguments


def _setting(key: str) -> str:
    return key.replace("-", "_")


def _absolute(model: Any) -> Any:
    if isinstance(model, str):
        return str(Path(model).absolute())
    return model | {"path": str(Path(model["path"]).absolute())}
