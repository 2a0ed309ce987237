"""The banner that `triptych serve` prints when it is ready: models, memory, limits, routes and an example request."""

from __future__ import annotations

from collections.abc import Mapping

from triptych.model.api.stats import CachePool, ModelInfo
from triptych.service.lifecycle.state import version
from triptych.service.settings.serve_config import ModelUse, Ready, ServeConfig

_ROUTES = "/v1/models /info /metrics /readyz; all of them in /docs"
_MOST_EXAMPLES = 3
_NO_USE = ModelUse()


def banner(ready: Ready, config: ServeConfig, seconds: float) -> str:
    """Return the text of the banner; the start took `seconds`."""
    settings = config.settings
    later, adapters = settings.models.models_dir, settings.models.lora_dirs
    versions = next((info.versions for info in ready.models.values()), {})
    lines = [
        "",
        f"triptych {version()} on {ready.url}  ({_parts(ready.ingress, versions)})",
        "",
        *(line for name, info in ready.models.items() for line in _model_lines(info, ready.uses.get(name, _NO_USE))),
        "",
        *([f"  folder  {later}: a model in it is loaded when a request names it"] if later else []),
        *(f"  folder  {path}: an adapter of {name} in it is loaded when a request names it" for name, path in adapters),
        f"  keys    {'required' if settings.asks_for_key else 'none: open to anyone who reaches this port'}"
        + ("; admin keys load and unload models" if settings.has_admin else ""),
        f"  limits  body {settings.limits.max_body_bytes / 1e6:g} MB, {settings.limits.max_prompts} prompts a request, "
        f"deadline {settings.limits.request_timeout_s:g} s; all of them in /info",
        f"  routes  {' '.join(_routes(ready))}",
        *(
            f"          {', '.join(model.name for model in group.models)} below {group.route}"
            for group in config.groups
        ),
        "",
        f"ready in {seconds:.1f} s. Open {ready.url} in a browser, or try:",
        *(f"  {line}" for line in _examples(ready, settings.asks_for_key)),
        "",
    ]
    return "\n".join(lines)


def _parts(ingress: str, versions: Mapping[str, str]) -> str:
    return "; ".join(
        [ingress, *([", ".join(f"{name} {number}" for name, number in versions.items())] if versions else [])]
    )


def _model_lines(info: ModelInfo, use: ModelUse = _NO_USE) -> list[str]:
    lines = [
        f"  {info.name:<10} {info.form}, {info.model_type}: {info.parameters / 1e6:.1f} M parameters, "
        f"{info.dtype} ({info.dtype_reason}), {info.weight_bytes / 1e6:.0f} MB on {_where(info)}, "
        f"loaded in {info.load_seconds:.1f} s"
        + (f" (weights cache: {cache})" if (cache := info.weights_cache) else ""),
        *([f"  {'':<10} can {', '.join(use.abilities)}"] if use.abilities else []),
        f"  {'':<10} attention {info.attention_backend} ({info.attention_reason})",
        *(f"  {'':<10} SLOWER THAN IT COULD BE: {way}" for way in info.fallbacks),
    ]
    limits = f"{info.max_num_seqs} sequences, {info.max_num_batched_tokens} tokens a step"
    if info.num_blocks:
        lines += _cache_lines(info)
    if info.recorded_sizes:
        prompts = f", with prompts {info.recorded_prompts}" if info.recorded_prompts else ""
        lines.append(f"  {'':<10} decode steps replayed as CUDA graphs, {info.recorded_sizes} batch sizes{prompts}")
    if info.recorded_batches:
        lines.append(f"  {'':<10} inputs encoded by CUDA graphs, {info.recorded_batches} batch sizes")
    queue = f"queue {info.max_queue_seconds:g} s, {info.max_queued_requests} requests, {info.max_queued_tokens} tokens"
    context = f"context {info.max_model_len} ({info.max_model_len_reason})"
    return [*lines, f"  {'':<10} {context}, {limits}, {queue}"]


def _cache_lines(info: ModelInfo) -> list[str]:
    """Describe the pools of the KV cache, and how many requests of the whole context fit."""
    pools = info.cache_pools or (CachePool(None, 0, info.num_blocks, info.kv_bytes_per_token),)
    whole, source = -(-info.max_model_len // info.block_size), info.form == "encoder-decoder"
    fitting = min(pool.num_blocks // (min(whole, pool.max_sequence_blocks or whole) + whole * source) for pool in pools)
    lines = []
    for pool in pools:
        tokens = pool.num_blocks * info.block_size
        layers = f" for {pool.layers} layers with a window of {pool.window}" if pool.window is not None else ""
        lines.append(
            f"  {'':<10} KV {pool.num_blocks} blocks x {info.block_size} = {tokens:,} tokens "
            f"({tokens * pool.bytes_per_token / 1e6:.0f} MB){layers}"
        )
    lines[-1] += f": {fitting} full-length requests"
    if info.state_slots:
        size = info.state_slots * info.state_slot_bytes / 1e6
        lines.append(
            f"  {'':<10} recurrent states {info.state_slots} slots ({size:.0f} MB): two for each running sequence, "
            "the others for prefixes"
        )
    return lines


def _where(info: ModelInfo) -> str:
    ranks = info.tensor_parallel_size
    one = info.device
    if info.device == "cpu" and info.threads:
        one += f" ({info.threads} thread{'s' * (info.threads > 1)})"
    return one if ranks == 1 else f"each of {ranks} ranks from {info.device} on"


def _routes(ready: Ready) -> list[str]:
    """Return the paths that the examples of the models name, and those that every service has."""
    return [*dict.fromkeys(path for use in ready.uses.values() for path in use.routes), _ROUTES]


def _examples(ready: Ready, with_key: bool) -> list[str]:
    """Return a command for each of the first models, of those that chat first."""
    uses = sorted(ready.uses.values(), key=lambda use: "chat" not in use.abilities)
    found = [use.example for use in uses if use.example][:_MOST_EXAMPLES]
    key = ' -H "Authorization: Bearer $TRIPTYCH_API_KEY"' if with_key else ""
    return found or [f"curl {ready.url}/v1/models{key}"]
