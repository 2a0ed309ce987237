"""Reads settings from the command line, from `TRIPTYCH_*` variables, and from YAML configuration files.

The command line wins over the environment, and the environment over the file. An unknown key is an error that names the
most similar known key.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from triptych.model.errors import ConfigError
from triptych.service.settings import option_groups
from triptych.service.settings.option import PREFIX, Option
from triptych.service.settings.option_table import ENGINE_OPTIONS, GROUP_OPTIONS, OPTIONS, REQUEST_OPTIONS
from triptych.service.settings.parsers import boolean

_FEW = 12  # names that an error lists
_BOOLEAN = "tag:yaml.org,2002:bool"
_NAMES_FOR_REPLICAS = ("data_parallel", "data_parallel_size", "dp_size", "dp")  # in other services
_REPEATED = ("api_keys", "admin_keys", "cors_origins", "allowed_hosts", "lora", "lora_dir")
OTHER_VARIABLES = frozenset(  # each is read by one module
    {
        "TRIPTYCH_ADMIN_KEY",  # of a client: the commands that /docs shows
        "TRIPTYCH_API_KEY",  # of a client: triptych.service.cli.run, and the commands that /docs shows
        "TRIPTYCH_BIND_THREADS",  # triptych.model.system.cpu_sets
        "TRIPTYCH_CONFIG",  # triptych.service.cli.main
        "TRIPTYCH_CPUS",  # triptych.model.system.cpu_sets
        "TRIPTYCH_DUMP_ACTIVATIONS",  # triptych.model.network.activation_dump
        "TRIPTYCH_ENGINE_MODULE",  # triptych.model.system.child_process
        "TRIPTYCH_KERNEL_CACHE",  # triptych.model.system.kernel_cache
        "TRIPTYCH_SYMMETRIC_SUMS",  # triptych.model.parallel.symmetric_sums
        "TRIPTYCH_URL",  # of a client: triptych.service.cli.run
    }
)


def add_arguments(parser: argparse.ArgumentParser, options: Iterable[Option], *, grouped: bool = False) -> list[str]:
    """Add a flag for each option, and return the flags that a short help leaves out.

    A list is given by repeating its flag, such as `--api-key`.
    """
    options = list(options)
    titles = [title for title in option_groups.ALL if any(option.group == title for option in options)]
    groups = {title: parser.add_argument_group(title) for title in titles} if grouped else {}
    rare: list[str] = []
    for option in options:
        action = _add_argument(groups.get(option.group, parser), option)
        rare += [] if option.common else action.option_strings
    return rare


def _add_argument(group: Any, option: Option) -> argparse.Action:
    default = option.shown or option.default
    text = f"{option.help} (default: {default}; {option.variable})"
    if option.name in _REPEATED:
        metavar = option.metavar.partition("[")[0]
        added = group.add_argument(
            option.flag.removesuffix("s"), dest=option.name, action="append", metavar=metavar, help=text
        )
    elif option.parse is boolean and not option.default:
        added = group.add_argument(option.flag, dest=option.name, action="store_const", const="true", help=text)
    elif option.parse is boolean:  # on by default
        flag = "--no-" + option.name.replace("_", "-")
        added = group.add_argument(flag, dest=option.name, action="store_const", const="false", help=text)
    else:
        added = group.add_argument(option.flag, dest=option.name, metavar=option.metavar, help=text)
    found: argparse.Action = added
    return found


def from_arguments(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """Return the settings given on the command line, by option name."""
    given = {option: getattr(arguments, option.name) for option in options}
    return {
        option.name: _repeated(option, value) if isinstance(value, list) else option.read(value, option.flag)
        for option, value in given.items()
        if value is not None
    }


def _repeated(option: Option, values: list[str]) -> tuple[str, ...]:
    """Return the values of a flag that was given several times. A key may have commas, and is checked later."""
    if option.is_secret:
        return tuple(values)
    flag = option.flag.removesuffix("s")
    return tuple(one for value in values for one in option.read(value, flag))


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings given by `TRIPTYCH_*`, by option name; raises `ConfigError` for an unknown variable."""
    variables = {option.variable: option for option in OPTIONS}
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    _refuse_unknown(ours.keys() - OTHER_VARIABLES, variables, "environment variable")
    return {variables[n].name: variables[n].read(v, n) for n, v in ours.items() if n in variables}


def forget_secrets(environment: MutableMapping[str, str]) -> None:
    """Remove secrets from the environment, so that no child process inherits them."""
    secret = [option.variable for option in OPTIONS if option.is_secret]
    for name in (*secret, "TRIPTYCH_API_KEY", "TRIPTYCH_ADMIN_KEY"):
        environment.pop(name, None)


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The content of a configuration file."""

    settings: dict[str, Any] = field(default_factory=dict)  # by option name
    models: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name: `path` and engine settings
    groups: dict[str, FileSettings] = field(default_factory=dict)  # by name: models with their own settings


def from_file(path: Path) -> FileSettings:
    """Read a YAML file; its keys may have dashes or underscores. Raises `ConfigError`."""
    return from_mapping(read_yaml(path), str(path))


def read_yaml(path: Path) -> Any:
    """Parse a YAML file; raises `ConfigError`, also for an empty file."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's loader, but duplicate keys are refused, and `on`, `off`, `yes`, `no` are words, as in YAML 1.2."""

        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [(tag, pattern) for tag, pattern in found if tag != _BOOLEAN]
            for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [str(key.value) for key, _ in node.value]
            for name in names:
                if names.count(name) > 1 and name != "<<":
                    raise ConfigError(f"{path}: duplicate key {name}, line {node.start_mark.line + 1} and below")
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver(_BOOLEAN, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        raise ConfigError(f"{path} is empty: add settings, or leave the file out")
    return content


def from_mapping(content: Any, where: str, known: Iterable[Option] = OPTIONS) -> FileSettings:
    """Check and parse the content of a file; `where` names the file in errors."""
    settings = _mapping(content, where)
    models = _named(settings.pop("models", {}), f"{where}: models")
    groups = _named(settings.pop("groups", {}), f"{where}: groups") if known is OPTIONS else {}
    return FileSettings(
        _read_keys(settings, known, where),
        {name: _file_model(value, f"{where}: models.{name}") for name, value in models.items()},
        {name: from_mapping(value, f"{where}: groups.{name}", GROUP_OPTIONS) for name, value in groups.items()},
    )


def _file_model(value: Any, where: str) -> dict[str, Any]:
    """Parse a model of a file: its path, or a mapping of `path` and engine settings."""
    if isinstance(value, str):
        return {"path": value}
    settings = _mapping(value, where)
    if not isinstance(settings.get("path"), str):
        raise ConfigError(f"{where}: path is missing")
    path, lora = settings.pop("path"), _named(settings.pop("lora", {}), f"{where}.lora")
    for name, folder in lora.items():
        if not isinstance(folder, str) or not folder:
            raise ConfigError(f"{where}.lora.{name}: expected the path of an adapter's folder, found {folder!r}")
    return {"path": path, **({"lora": lora} if lora else {}), **_read_keys(settings, ENGINE_OPTIONS, where)}


def requested_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check and parse the engine settings of a model that a request loads."""
    return _read_keys(_mapping(settings, where), REQUEST_OPTIONS, where)


def _read_keys(settings: Mapping[str, Any], options: Iterable[Option], where: str) -> dict[str, Any]:
    known = {option.name: option for option in options}
    _refuse_unknown(settings, known, f"{where}: key")
    return {name: known[name].read(value, f"{where}: {name}") for name, value in settings.items()}


def _mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a mapping with the names of settings, which may be written with either mark."""
    found: dict[str, Any] = {}
    for name, item in _named(value, where).items():
        setting = name.replace("-", "_")
        if setting in found:
            raise ConfigError(f"{where}: {setting} is given twice, with - and with _")
        found[setting] = item
    return found


def _named(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, found {type(value).__name__}")
    for name in value:
        if name is None or isinstance(name, bool):
            raise ConfigError(f"{where}: found the key {name}, expected a name; in quotation marks, if it is this word")
    return {str(name): item for name, item in value.items()}


def _refuse_unknown(found: Iterable[str], known: Iterable[str], what: str) -> None:
    for name in sorted(found):
        if name not in known:
            raise ConfigError(f"{what} {name} is not known{nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: what to use instead, else all known names if they are few."""
    if name.removeprefix(PREFIX).strip("-").replace("-", "_").lower() in _NAMES_FOR_REPLICAS:
        return "; use --runtime ray --replicas N: each replica is a copy of the models on GPUs of its own"
    known = list(known)
    by_word = {one.removeprefix(PREFIX).lstrip("-"): one for one in known}  # what all have says nothing
    near = difflib.get_close_matches(name.removeprefix(PREFIX).lstrip("-"), by_word, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {by_word[near[0]]}?"
    return f"; known are {', '.join(known)}" if len(known) <= _FEW else ""
