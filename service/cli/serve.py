"""`triptych serve`: settings become a `ServeConfig`, it runs, and a banner says what there is once it is ready."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from model.api.engine_config import EngineConfig
from model.api.messages import ModelSpec
from model.api.stats import ModelInfo
from model.errors import ConfigError, EngineDeadError
from service.lifecycle.state import version
from service.runtimes import local
from service.runtimes.ray_serve.autoscaling_policy import Scaling
from service.settings.api_keys import KeyRing
from service.settings.option_table import ENGINE_OPTIONS, LIMIT_OPTIONS, FileSettings
from service.settings.service_settings import Limits, ServiceSettings

_ROUTES = (
    "/generate /encode /v1/completions /v1/chat/completions /v1/embeddings /v1/models /tokenize /detokenize /info "
    "/metrics /livez /readyz /docs"
)
_SERVICE_SETTINGS = {  # by option name
    **{
        name: name
        for name in ("host", "port", "api_keys", "api_key_file", "log_format", "tokenizer_threads", "otlp_endpoint")
    },
    "drain_timeout": "drain_timeout_s",
    "stall_timeout": "stall_timeout_s",
    "stream_interval": "stream_interval_s",
}
_SCALING_SETTINGS = {
    "scale_target": "target",
    "scale_up_delay": "up_delay_s",
    "scale_down_delay": "down_delay_s",
    "surge": "surge",
}
_EXAMPLES = {  # by form: what the curl line at the end asks
    "decoder-only": ("/generate", '{{"model": "{name}", "prompt": "def add(a, b):\\n    ", "max_tokens": 16}}'),
    "encoder-decoder": ("/generate", '{{"model": "{name}", "prompt": "the third of march twenty twenty four"}}'),
    "encoder-only": ("/encode", '{{"model": "{name}", "input": "a cat on a mat"}}'),
}


def serve(
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    groups: Mapping[str, FileSettings] | None = None,
) -> int:
    """Serve the models (name -> `path` and engine settings), and groups of others, until a signal; the exit code."""
    began = time.monotonic()
    config = configuration(models, settings, groups)

    def on_ready(ready: local.Ready) -> None:
        _say(banner(ready, config, time.monotonic() - began))

    _say(f"triptych {version()}: loading {', '.join(models)} ({config.runtime} runtime)")
    try:
        return local.run(config, on_ready)
    except EngineDeadError as error:
        _say(f"triptych: {error}")
        return 1


def _say(text: str) -> None:
    with suppress(OSError):  # a disk that is full for logs stops nobody
        print(text, file=sys.stderr, flush=True)


def configuration(
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    groups: Mapping[str, FileSettings] | None = None,
) -> local.ServeConfig:
    """Settings by option name, as `service.settings.option_table` reads them; a model's own win over a group's over
    those for all."""
    specs = _specs(models, settings)
    if not specs:
        raise ConfigError("no model to serve: give a checkpoint folder")
    service = ServiceSettings(
        limits=Limits(**{o.name: settings[o.name] for o in LIMIT_OPTIONS if o.name in settings}),
        vllm_metrics=settings.get("metrics") == "vllm",
        **_renamed(settings, _SERVICE_SETTINGS),
    )
    KeyRing.of(service)  # what is wrong with a key file is said before anything starts
    return local.ServeConfig(
        models=specs,
        settings=service,
        runtime=settings.get("runtime", "ray"),
        scaling=_scaling(settings),
        groups=tuple(_group(name, group, settings, service) for name, group in (groups or {}).items()),
        haproxy=settings.get("haproxy", "auto") == "auto",
    )


def _group(name: str, group: FileSettings, settings: Mapping[str, Any], service: ServiceSettings) -> local.ServeConfig:
    """An application beside the first; engine settings for all hold for it too, replicas are its own."""
    if not group.models:
        raise ConfigError(f"groups.{name}: there is no model to serve")
    return local.ServeConfig(
        models=_specs(group.models, {**settings, **group.settings}),
        settings=service,
        scaling=_scaling(group.settings),
        name=f"triptych-{name}",
        route=group.settings.get("route", f"/{name}"),
    )


def _specs(models: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> tuple[ModelSpec, ...]:
    shared = _engine_settings(settings)
    return tuple(
        ModelSpec(name, str(model["path"]), EngineConfig(**{**shared, **_engine_settings(model)}))
        for name, model in models.items()
    )


def _scaling(settings: Mapping[str, Any]) -> Scaling:
    return Scaling(**settings.get("replicas", {}), **_renamed(settings, _SCALING_SETTINGS))


def banner(ready: local.Ready, config: local.ServeConfig, seconds: float) -> str:
    """What an operator wants to know, and a line to paste."""
    settings = config.settings
    versions = next(iter(ready.models.values())).versions
    lines = [
        "",
        f"triptych {version()} on {ready.url}  ({ready.ingress}; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + ")",
        "",
        *(line for info in ready.models.values() for line in _model_lines(info)),
        "",
        f"  keys    {'required' if settings.asks_for_key else 'none: anyone who reaches this port may ask'}",
        f"  limits  body {settings.limits.max_body_bytes / 1e6:g} MB, {settings.limits.max_prompts} prompts a request, "
        f"deadline {settings.limits.request_timeout_s:g} s; all of them in /info",
        f"  routes  {_ROUTES}",
        *(
            f"          {', '.join(model.name for model in group.models)} below {group.route}"
            for group in config.groups
        ),
        "",
        f"ready in {seconds:.1f} s. Open {ready.url} in a browser, or try:",
        f"  {_example(ready, settings.asks_for_key)}",
        "",
    ]
    return "\n".join(lines)


def _model_lines(info: ModelInfo) -> list[str]:
    lines = [
        f"  {info.name:<10} {info.form}, {info.model_type}: {info.parameters / 1e6:.1f} M parameters, "
        f"{info.dtype} ({info.dtype_reason}), {info.weight_bytes / 1e6:.0f} MB on {_where(info)}, "
        f"loaded in {info.load_seconds:.1f} s",
        f"  {'':<10} attention {info.attention_backend} ({info.attention_reason})",
        *(f"  {'':<10} SLOWER THAN IT COULD BE: {way}" for way in info.fallbacks),
    ]
    limits = f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens a step"
    if info.num_blocks:
        tokens = info.num_blocks * info.block_size
        per_request = info.max_model_len * (2 if info.form == "encoder-decoder" else 1)
        lines.append(
            f"  {'':<10} KV {info.num_blocks} blocks x {info.block_size} = {tokens:,} tokens "
            f"({tokens * info.kv_bytes_per_token / 1e6:.0f} MB): {tokens // per_request} full-length requests"
        )
    if info.recorded_sizes:
        lines.append(f"  {'':<10} decode steps replayed as CUDA graphs, {info.recorded_sizes} batch sizes")
    queue = f"queue {info.max_queued_requests} requests, {info.max_queued_tokens} tokens"
    context = f"context {info.max_model_len} ({info.max_model_len_reason})"
    return [*lines, f"  {'':<10} {context}, {limits}, {queue}"]


def _where(info: ModelInfo) -> str:
    ranks = info.tensor_parallel_size
    return info.device if ranks == 1 else f"each of {ranks} ranks from {info.device} on"


def _example(ready: local.Ready, with_key: bool) -> str:
    info = next(iter(ready.models.values()))
    path, body = _EXAMPLES[info.form]
    key = "-H 'Authorization: Bearer KEY' " if with_key else ""
    return f"curl {ready.url}{path} {key}-H 'Content-Type: application/json' -d '{body.format(name=info.name)}'"


def _renamed(settings: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    return {field: settings[name] for name, field in fields.items() if name in settings}


def _engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {option.name: settings[option.name] for option in ENGINE_OPTIONS if option.name in settings}
