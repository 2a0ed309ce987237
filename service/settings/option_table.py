"""The settings of `triptych serve`: one table for the command line, the environment, and the configuration file.

The command line wins over `TRIPTYCH_*` over the file; an unknown key anywhere is an error that names it and the nearest
known one. Nothing heavy is imported: `--help` has to be quick.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from model.api.engine_config import (
    ATTENTION_BACKENDS,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    SLOW_FALLBACKS,
    EngineConfig,
)
from model.errors import ConfigError
from service.runtimes.ray_serve.autoscaling_policy import Scaling
from service.settings.service_settings import Limits, ServiceSettings

PREFIX = "TRIPTYCH_"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MOST_BYTES = 2**63
_FOREIGN_VARIABLES = frozenset({"TRIPTYCH_CONFIG"})  # read elsewhere


def byte_size(text: str) -> int:
    """`2GiB`, `500MB`, `1048576` as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * _UNITS.get(match[2].upper(), math.inf) if match is not None else math.inf
    if size >= _MOST_BYTES:
        raise ValueError("a size such as 2GiB, 500MB or a number of bytes")
    return int(size)


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(",") if key.strip())


def _replicas(text: str) -> dict[str, int]:
    """`3`, or `1-4`."""
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text.strip())
    if match is None:
        raise ValueError("a number, or a range such as 1-4")
    return {"least": int(match[1]), "most": int(match[2] or match[1])}


def _context(text: str) -> int | None:
    """A number, or `auto`, which the engine decides."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number, or auto") from None


def _route(text: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", text):
        raise ValueError("a path such as /chat")
    return text


def truth(text: str) -> bool:
    """Yes or no, in any of the usual words."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: `name` in a file, `--name` on the command line, `TRIPTYCH_NAME` in the environment."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = "N"
    shown: str = ""  # the default in words, where it is not a value
    per_model: bool = False  # an EngineConfig field, which a file may also set for one model

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def read(self, value: Any, where: str) -> Any:
        """`value` of the command line, environment or file, parsed; raises `ConfigError` saying where."""
        try:
            return self.parse(value if isinstance(value, str) else _text(value))
        except ValueError as error:
            expected = str(error) if "invalid literal" not in str(error) else "a whole number"
            raise ConfigError(f"{where}: found {value!r}, expected {expected}") from None


_ENGINE = EngineConfig()
_SERVICE = ServiceSettings()
_SCALING = Scaling()

OPTIONS: tuple[Option, ...] = (
    Option("host", str, "127.0.0.1", "address to listen on", "ADDRESS"),
    Option("port", int, 8000, "port to listen on", "PORT"),
    Option("runtime", one_of("ray", "local"), "ray", "Ray Serve, or one plain uvicorn process", "ray|local"),
    Option("replicas", _replicas, 1, "copies of the service under Ray, as many as the work asks for", "N|LEAST-MOST"),
    Option("scale_target", float, _SCALING.target, "how full replicas should be, queue included", "SHARE"),
    Option("scale_up_delay", float, _SCALING.up_delay_s, "before there are more of them", "SECONDS"),
    Option("scale_down_delay", float, _SCALING.down_delay_s, "before there are fewer", "SECONDS"),
    Option(
        "surge",
        truth,
        _SCALING.surge,
        "a redeploy starts a replica's successor before it ends: needs the memory, and GPUs, of both",
        "BOOL",
        "off",
    ),
    Option("api_keys", _keys, (), "keys that clients must send as a bearer token", "KEY[,KEY]", "none: open"),
    Option("api_key_file", str, "", "more keys, one a line; read again when it changes", "FILE", "none"),
    Option("device", str, _ENGINE.device, "where the models run", "auto|cpu|cuda[:N]", per_model=True),
    Option(
        "dtype",
        one_of(*DTYPES),
        _ENGINE.dtype,
        "number format of weights and KV; auto: bfloat16 where it is computed fast (CPUs with AVX-512 BF16 or AMX, "
        "GPUs from compute capability 8.0 on), else float32, or float16 on an older GPU if the model keeps within it",
        "|".join(DTYPES),
        per_model=True,
    ),
    Option(
        "quantization",
        one_of(*QUANTIZATIONS),
        _ENGINE.quantization,
        "int8: matrices and the rows they multiply in 8 bits, on a CPU",
        "|".join(QUANTIZATIONS),
        per_model=True,
    ),
    Option(
        "attention_backend",
        one_of(*ATTENTION_BACKENDS),
        _ENGINE.attention_backend,
        "what computes attention",
        "|".join(ATTENTION_BACKENDS),
        per_model=True,
    ),
    Option(
        "kv_cache_dtype",
        one_of(*KV_CACHE_DTYPES),
        _ENGINE.kv_cache_dtype,
        "number format of KV",
        "|".join(KV_CACHE_DTYPES),
        per_model=True,
    ),
    Option(
        "tensor_parallel_size",
        int,
        _ENGINE.tensor_parallel_size,
        "GPUs of one machine that share a model's matrices",
        per_model=True,
    ),
    Option(
        "batch_invariant",
        truth,
        _ENGINE.batch_invariant,
        "an answer's bits never depend on its neighbours, in any dtype; refused where that cannot be had",
        "BOOL",
        "off",
        per_model=True,
    ),
    Option(
        "max_model_len",
        _context,
        None,
        "tokens of prompt and output; auto: all that the model takes, or what of it the KV pool holds",
        "N|auto",
        "auto",
        per_model=True,
    ),
    Option(
        "max_num_seqs",
        int,
        None,
        "sequences that run at once",
        shown="64 on a CPU, 128 or 256 by a GPU's memory",
        per_model=True,
    ),
    Option(
        "max_num_batched_tokens",
        int,
        None,
        "tokens of one step",
        shown="2048 on a CPU, to 8192 by a GPU's memory",
        per_model=True,
    ),
    Option("block_size", int, _ENGINE.block_size, "tokens of one KV block", per_model=True),
    Option("kv_cache_memory", byte_size, None, "memory of the KV pool", "SIZE", "by what is free", per_model=True),
    Option(
        "gpu_memory_utilization",
        float,
        _ENGINE.gpu_memory_utilization,
        "share of a GPU's memory that weights and KV may take",
        "SHARE",
        per_model=True,
    ),
    Option(
        "cuda_graphs",
        truth,
        _ENGINE.cuda_graphs,
        "on a GPU: launch each decode step's kernels one by one, which starts sooner and runs slower",
        "BOOL",
        "decode steps are recorded",
        per_model=True,
    ),
    Option(
        "slow_fallbacks",
        one_of(*SLOW_FALLBACKS),
        _ENGINE.slow_fallbacks,
        "where Triton, CUDA graphs or fused kernels do not work on a GPU: run slower and say so, or do not start",
        "|".join(SLOW_FALLBACKS),
        per_model=True,
    ),
    Option(
        "prefix_caching",
        truth,
        _ENGINE.prefix_caching,
        "compute again what requests that begin the same have computed",
        "BOOL",
        "prefixes are kept",
        per_model=True,
    ),
    Option(
        "model_weight",
        float,
        _ENGINE.model_weight,
        "share of the time that a model gets beside others in its process, relative to theirs",
        "WEIGHT",
        per_model=True,
    ),
    Option("max_queued_requests", int, None, "waiting requests", shown="4 x max-num-seqs", per_model=True),
    Option("max_queued_tokens", int, None, "waiting prompt tokens", shown="8 x max-num-batched-tokens", per_model=True),
    Option(
        "drain_timeout", float, _SERVICE.drain_timeout_s, "how long running requests may go on at shutdown", "SECONDS"
    ),
    Option(
        "stall_timeout", float, _SERVICE.stall_timeout_s, "silence of an engine after which it is replaced", "SECONDS"
    ),
    Option(
        "stream_interval",
        float,
        _SERVICE.stream_interval_s,
        "least time between a stream's events, which then hold several tokens",
        "SECONDS",
        "0, each token at once",
    ),
    Option("tokenizer_threads", int, _SERVICE.tokenizer_threads, "threads that turn texts into tokens"),
    Option("metrics", one_of("triptych", "vllm"), "triptych", "vllm: its names beside ours", "triptych|vllm"),
    Option("otlp_endpoint", str, "", "collector of OpenTelemetry traces (triptych[otel])", "URL", "no traces"),
    Option("log_format", one_of("auto", "plain", "json"), "auto", "plain on a terminal, else JSON", "auto|plain|json"),
    Option("haproxy", one_of("auto", "off"), "auto", "Ray Serve's HAProxy ingress, or its default proxy", "auto|off"),
)


def _limit_options() -> Iterable[Option]:
    for item in fields(Limits):
        assert isinstance(item.default, (int, float))
        sized, seconds = item.name.endswith("_bytes"), isinstance(item.default, float)
        parse: Callable[[str], Any] = byte_size if sized else float if seconds else int
        metavar = "SIZE" if sized else "SECONDS" if seconds else "N"
        yield Option(item.name, parse, item.default, item.metadata["meaning"], metavar)


LIMIT_OPTIONS = tuple(_limit_options())
OPTIONS += LIMIT_OPTIONS
_SCALES = ("replicas", "scale_target", "scale_up_delay", "scale_down_delay", "surge")
GROUP_OPTIONS = (  # what a group of models may set for itself
    Option("route", _route, None, "the path below which it answers", "PATH", "/NAME"),
    *(option for option in OPTIONS if option.per_model or option.name in _SCALES),
)
BY_NAME = {option.name: option for option in OPTIONS}
ENGINE_OPTIONS = tuple(option for option in OPTIONS if option.per_model)


def add_arguments(parser: argparse.ArgumentParser, options: Iterable[Option]) -> None:
    """A flag for each option; `--api-key` may be repeated instead of the variable's list."""
    limits = parser.add_argument_group("limits of one request")
    for option in options:
        group = limits if option in LIMIT_OPTIONS else parser
        default = option.shown or option.default
        text = f"{option.help} (default: {default}; {option.variable})"
        if option.name == "api_keys":
            group.add_argument("--api-key", dest="api_keys", action="append", metavar="KEY", help=text)
        elif option.parse is truth and not option.default:
            group.add_argument(option.flag, dest=option.name, action="store_const", const="true", help=text)
        elif option.parse is truth:  # on unless told otherwise
            flag = "--no-" + option.name.replace("_", "-")
            group.add_argument(flag, dest=option.name, action="store_const", const="false", help=text)
        else:
            group.add_argument(option.flag, dest=option.name, metavar=option.metavar, help=text)


def from_arguments(arguments: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """What the command line sets."""
    given = {option: getattr(arguments, option.name) for option in options}
    return {
        option.name: tuple(value) if isinstance(value, list) else option.read(value, option.flag)
        for option, value in given.items()
        if value is not None
    }


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What `TRIPTYCH_*` sets; raises `ConfigError` for one that is not known."""
    variables = {option.variable: option for option in OPTIONS}
    ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
    _refuse_unknown(ours.keys() - _FOREIGN_VARIABLES, variables, "environment variable")
    return {variables[n].name: variables[n].read(v, n) for n, v in ours.items() if n in variables}


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a configuration file holds: settings by option name, models by name (`path` and engine settings), and groups
    of models with settings of their own."""

    settings: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, FileSettings] = field(default_factory=dict)


def from_file(path: Path) -> FileSettings:
    """Of a YAML file; keys with dashes or underscores."""
    return from_mapping(read_yaml(path), str(path))


def read_yaml(path: Path) -> Any:
    """What a file holds; nothing is an empty mapping. Raises `ConfigError`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's own takes the last of two keys that are the same, and drops the first without a word."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            names = [str(key.value) for key, _ in node.value]
            for name in names:
                if names.count(name) > 1 and name != "<<":
                    raise ConfigError(f"{path}: key {name} stands twice, line {node.start_mark.line + 1} and below")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader) or {}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def from_mapping(content: Any, where: str, known: Iterable[Option] = OPTIONS) -> FileSettings:
    """As `from_file`, of what a file holds."""
    settings = _mapping(content, where)
    models = _named(settings.pop("models", {}), f"{where}: models")
    groups = _named(settings.pop("groups", {}), f"{where}: groups") if known is OPTIONS else {}
    return FileSettings(
        _read_keys(settings, known, where),
        {name: _file_model(value, f"{where}: models.{name}") for name, value in models.items()},
        {name: from_mapping(value, f"{where}: groups.{name}", GROUP_OPTIONS) for name, value in groups.items()},
    )


def _file_model(value: Any, where: str) -> dict[str, Any]:
    """A model of a file: its path alone, or a mapping of `path` and engine settings."""
    if isinstance(value, str):
        return {"path": value}
    settings = _mapping(value, where)
    if not isinstance(settings.get("path"), str):
        raise ConfigError(f"{where}: path is missing")
    path = settings.pop("path")
    return {"path": path, **_read_keys(settings, ENGINE_OPTIONS, where)}


def _read_keys(settings: Mapping[str, Any], options: Iterable[Option], where: str) -> dict[str, Any]:
    known = {option.name: option for option in options}
    _refuse_unknown(settings, known, f"{where}: key")
    return {name: known[name].read(value, f"{where}: {name}") for name, value in settings.items()}


def _mapping(value: Any, where: str) -> dict[str, Any]:
    return {name.replace("-", "_"): item for name, item in _named(value, where).items()}


def _named(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping, found {type(value).__name__}")
    return {str(name): item for name, item in value.items()}


def _refuse_unknown(found: Iterable[str], known: Iterable[str], what: str) -> None:
    for name in sorted(found):
        if name not in known:
            raise ConfigError(f"{what} {name} is not known{nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error: what may have been meant, or all there is."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
