"""The table of all settings of `triptych serve`: the name, parser, default and help of each.

`service.settings.sources` reads their values from the command line, the environment and configuration files. This
module imports nothing slow, because `--help` must answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from model.api.engine_config import (
    ATTENTION_BACKENDS,
    AUTO_CACHE,
    DTYPES,
    KV_CACHE_DTYPES,
    QUANTIZATIONS,
    SLOW_FALLBACKS,
    EngineConfig,
)
from service.settings.option import Option
from service.settings.parsers import (
    boolean,
    byte_size,
    cache_folder,
    context,
    folder,
    hosts,
    key_file,
    keys,
    one_of,
    origins,
    replicas,
    route,
    sources,
)
from service.settings.serve_config import Scaling
from service.settings.service_settings import REASONING_FORMATS, TOOL_FORMATS, Limits, ModelSettings, ServiceSettings

_ENGINE = EngineConfig()
_SERVICE = ServiceSettings()
_SCALING = Scaling()
_MODELS = ModelSettings()

OPTIONS: tuple[Option, ...] = (
    Option("host", str, "127.0.0.1", "address to listen on", "ADDRESS"),
    Option("port", int, 8000, "port to listen on", "PORT"),
    Option(
        "runtime",
        one_of("ray", "local"),
        "ray",
        "ray: Ray Serve (triptych[ray]); local: uvicorn, on this machine alone",
        "ray|local",
        "ray if Ray is installed, else local",
    ),
    Option("replicas", replicas, 1, "number of Ray Serve replicas; a range is scaled automatically", "N|MIN-MAX"),
    Option(
        "scale_target",
        float,
        _SCALING.target,
        "target load of a replica: running and waiting work over its capacity",
        "SHARE",
    ),
    Option(
        "scale_up_delay",
        float,
        _SCALING.up_delay_s,
        "how long the load must stay above the target before replicas are added",
        "SECONDS",
    ),
    Option(
        "scale_down_delay",
        float,
        _SCALING.down_delay_s,
        "how long the load must stay below the target before replicas are removed",
        "SECONDS",
    ),
    Option(
        "surge",
        boolean,
        _SCALING.surge,
        "in a redeploy, start a new replica before stopping the old one; this takes the memory and GPUs of both",
        "BOOL",
        "off",
    ),
    Option(
        "gpus_per_replica",
        float,
        None,
        "number of GPUs of each Ray Serve replica; below 1, replicas share a GPU and its memory",
        "SHARE|N",
        "one for each rank of its models, if they run on GPUs",
    ),
    Option("api_keys", keys, (), "API keys; a client must send one as a bearer token", "KEY[,KEY]", "none: open"),
    Option("api_key_file", key_file, "", "file of more API keys, one a line; reloaded when it changes", "FILE", "none"),
    Option(
        "admin_keys",
        keys,
        (),
        "keys for /models, /models/load and /models/unload, which are off without a key",
        "KEY[,KEY]",
        "none: off",
    ),
    Option(
        "admin_key_file",
        key_file,
        "",
        "file of more admin keys, one a line; reloaded when it changes",
        "FILE",
        "none",
    ),
    Option(
        "cors_origins",
        origins,
        (),
        "origins whose web pages may call the API from a browser, or * for all",
        "ORIGIN[,ORIGIN]",
        "none",
    ),
    Option(
        "allowed_hosts",
        hosts,
        (),
        "host names that clients may use for this service, in addition to localhost and IP addresses; * for all; "
        "checked if any is given, and on a loopback address without keys",
        "NAME[,NAME]",
        "none",
    ),
    Option(
        "models_dir",
        folder,
        _MODELS.models_dir,
        "folder of model folders: each model is served under its folder's name, and loaded on its first request",
        "DIR",
        "none",
    ),
    Option(
        "load_from",
        sources,
        _MODELS.load_from,
        "what /models/load may load: folders in models_dir, models of the Hub, or any folder",
        "SOURCE[,SOURCE]",
        ",".join(_MODELS.load_from),
    ),
    Option(
        "keep_alive",
        float,
        _MODELS.keep_alive_s,
        "idle time after which a model that was loaded on demand is unloaded",
        "SECONDS",
        "none: it stays",
    ),
    Option(
        "model_memory",
        byte_size,
        _MODELS.memory,
        "memory for all models of a replica with their KV caches; the least recently used are unloaded to stay below",
        "SIZE",
        "what the machine has",
    ),
    Option(
        "pin",
        boolean,
        _MODELS.pin,
        "also unload the models given at the start when they are idle or their memory is needed",
        "BOOL",
        "they stay",
    ),
    Option(
        "load_timeout",
        float,
        _MODELS.load_timeout_s,
        "how long loading a model on demand may take, including its download",
        "SECONDS",
    ),
    Option(
        "max_download",
        byte_size,
        _MODELS.max_download,
        "largest model of the Hub that is downloaded on demand",
        "SIZE",
        "100GB",
    ),
    Option("device", str, _ENGINE.device, "device that runs the models", "auto|cpu|cuda[:N]", per_model=True),
    Option(
        "dtype",
        one_of(*DTYPES),
        _ENGINE.dtype,
        "number format of weights and KV cache; auto: bfloat16 where the hardware computes it fast (CPUs with AVX-512 "
        "BF16 or AMX, GPUs of compute capability 8.0 and later), else float32, or float16 on an older GPU if the "
        "model's values fit its range",
        "|".join(DTYPES),
        per_model=True,
    ),
    Option(
        "quantization",
        one_of(*QUANTIZATIONS),
        _ENGINE.quantization,
        "weight matrices in 8 or 4 bits. On a CPU: int8 or int4 (-gN: N inputs share a scale), with activations in 8 "
        "bits. On a GPU of compute capability 8.9 and later: fp8, with activations in fp8",
        "|".join(QUANTIZATIONS),
        per_model=True,
    ),
    Option(
        "attention_backend",
        one_of(*ATTENTION_BACKENDS),
        _ENGINE.attention_backend,
        "implementation of attention",
        "|".join(ATTENTION_BACKENDS),
        per_model=True,
    ),
    Option(
        "kv_cache_dtype",
        one_of(*KV_CACHE_DTYPES),
        _ENGINE.kv_cache_dtype,
        "number format of the KV cache; auto: the model's; fp8 on a GPU of compute capability 8.9 and later",
        "|".join(KV_CACHE_DTYPES),
        per_model=True,
    ),
    Option(
        "tensor_parallel_size",
        int,
        _ENGINE.tensor_parallel_size,
        "number of GPUs of one machine that share a model's weights",
        per_model=True,
    ),
    Option(
        "batch_invariant",
        boolean,
        _ENGINE.batch_invariant,
        "make outputs independent of the rest of the batch, bit for bit; refused where it is not possible, as on a GPU",
        "BOOL",
        "off",
        per_model=True,
    ),
    Option(
        "max_model_len",
        context,
        None,
        "context length: tokens of prompt and output; auto: the model's, or as much of it as the KV cache holds",
        "N|auto",
        "auto",
        per_model=True,
    ),
    Option(
        "max_num_seqs",
        int,
        None,
        "maximum number of sequences in a batch",
        shown="64 on a CPU, 128 or 256 on a GPU, by its memory",
        per_model=True,
    ),
    Option(
        "max_num_batched_tokens",
        int,
        None,
        "maximum number of tokens in a batch",
        shown="2048 on a CPU, up to 8192 on a GPU, by its memory",
        per_model=True,
    ),
    Option("block_size", int, _ENGINE.block_size, "tokens in one block of the KV cache", per_model=True),
    Option("kv_cache_memory", byte_size, None, "memory for the KV cache", "SIZE", "by free memory", per_model=True),
    Option(
        "gpu_memory_utilization",
        float,
        _ENGINE.gpu_memory_utilization,
        "share of a GPU's memory for weights and KV cache",
        "SHARE",
        per_model=True,
    ),
    Option(
        "cuda_graphs",
        boolean,
        _ENGINE.cuda_graphs,
        "on a GPU: record neither decode steps nor batches to encode as CUDA graphs; the start is faster, steps slower",
        "BOOL",
        "CUDA graphs are used",
        per_model=True,
    ),
    Option(
        "slow_fallbacks",
        one_of(*SLOW_FALLBACKS),
        _ENGINE.slow_fallbacks,
        "if kernels fail their check on a GPU, or CUDA graphs do not work: warn and run slower, or refuse to start",
        "|".join(SLOW_FALLBACKS),
        per_model=True,
    ),
    Option(
        "pickle",
        boolean,
        _ENGINE.pickle,
        "read weights from safetensors only, not from pytorch_model.bin (whose code is never run)",
        "BOOL",
        "pytorch_model.bin is read if there are no safetensors",
        per_model=True,
    ),
    Option(
        "weights_cache",
        cache_folder,
        AUTO_CACHE,
        "folder for packed weights: on a CPU the next start maps them and packs nothing; off: none is kept",
        "DIR",
        "triptych/weights in the user's cache directory",
        per_model=True,
    ),
    Option(
        "weights_cache_size",
        byte_size,
        None,
        "maximum size of the weights cache; the least recently used files are removed",
        "SIZE",
        "32 GiB in the user's cache directory, unlimited elsewhere",
        per_model=True,
    ),
    Option(
        "prefix_caching",
        boolean,
        _ENGINE.prefix_caching,
        "do not reuse the KV cache of earlier requests that share a prefix",
        "BOOL",
        "prefixes are cached",
        per_model=True,
    ),
    Option(
        "num_speculative_tokens",
        int,
        _ENGINE.num_speculative_tokens,
        "maximum drafts in a step (speculative decoding): proposed by n-grams where an output repeats its prompt or "
        "itself; the output stays the same, on a GPU but for rounding; a request may set its own number; 0: off",
        per_model=True,
    ),
    Option(
        "draft_model",
        folder,
        None,
        "folder of a small model that proposes drafts for decoder-only models with the same vocabulary; see "
        "num-speculative-tokens",
        "DIR",
        "n-grams only",
        per_model=True,
    ),
    Option(
        "model_weight",
        float,
        _ENGINE.model_weight,
        "share of compute time, relative to the other models of the process",
        "WEIGHT",
        per_model=True,
    ),
    Option(
        "max_queued_requests", int, None, "maximum number of waiting requests", shown="4 x max-num-seqs", per_model=True
    ),
    Option(
        "max_queued_tokens",
        int,
        None,
        "maximum number of waiting prompt tokens",
        shown="8 x max-num-batched-tokens",
        per_model=True,
    ),
    Option(
        "drain_timeout",
        float,
        _SERVICE.drain_timeout_s,
        "how long running requests may continue at shutdown",
        "SECONDS",
    ),
    Option(
        "stall_timeout",
        float,
        _SERVICE.stall_timeout_s,
        "time without progress after which an engine is restarted",
        "SECONDS",
    ),
    Option(
        "stream_interval",
        float,
        _SERVICE.stream_interval_s,
        "minimum time between a stream's events; an event may then hold several tokens",
        "SECONDS",
        "0: each token is sent at once",
    ),
    Option(
        "embed_cache",
        byte_size,
        _SERVICE.embed_cache_bytes,
        "memory for results of /encode: the same input sent with the same key is computed once",
        "SIZE",
        "0: off",
    ),
    Option(
        "tool_format",
        one_of(*TOOL_FORMATS),
        _SERVICE.tool_format,
        "how models write tool calls; auto: as each model's chat template does",
        "FORMAT",
    ),
    Option(
        "reasoning_format",
        one_of(*REASONING_FORMATS),
        _SERVICE.reasoning_format,
        "how models mark reasoning; auto: as each model's chat template does; none: reasoning stays in the content",
        "FORMAT",
    ),
    Option(
        "response_store",
        byte_size,
        _SERVICE.response_store_bytes,
        "memory of a replica for stored responses (previous_response_id, GET /v1/responses/ID); 0: none",
        "SIZE",
        "64MiB",
    ),
    Option("tokenizer_threads", int, _SERVICE.tokenizer_threads, "number of tokenizer threads"),
    Option(
        "metrics",
        one_of("triptych", "vllm"),
        "triptych",
        "vllm: also export metrics under vLLM's names",
        "triptych|vllm",
    ),
    Option("otlp_endpoint", str, "", "collector for OpenTelemetry traces (triptych[otel])", "URL", "no traces"),
    Option(
        "log_format",
        one_of("auto", "plain", "json"),
        "auto",
        "format of log lines; auto: plain on a terminal, else JSON",
        "auto|plain|json",
    ),
    Option(
        "haproxy",
        one_of("auto", "off"),
        "auto",
        "auto: Ray Serve's HAProxy ingress if HAProxy is installed; off: Ray Serve's own proxy",
        "auto|off",
    ),
)


def _limit_options() -> Iterable[Option]:
    """Yield an option for each field of `Limits`; its type follows from its name and default."""
    for item in fields(Limits):
        assert isinstance(item.default, (int, float))
        sized, seconds = item.name.endswith("_bytes"), isinstance(item.default, float)
        parse: Callable[[str], Any] = byte_size if sized else float if seconds else int
        metavar = "SIZE" if sized else "SECONDS" if seconds else "N"
        yield Option(item.name, parse, item.default, item.metadata["meaning"], metavar)


LIMIT_OPTIONS = tuple(_limit_options())
OPTIONS += LIMIT_OPTIONS
_SCALING_NAMES = ("replicas", "gpus_per_replica", "scale_target", "scale_up_delay", "scale_down_delay", "surge")
GROUP_OPTIONS = (  # settings of a group of models
    Option("route", route, None, "path prefix of the group's routes", "PATH", "/NAME"),
    *(option for option in OPTIONS if option.per_model or option.name in _SCALING_NAMES),
)
BY_NAME = {option.name: option for option in OPTIONS}
ENGINE_OPTIONS = tuple(option for option in OPTIONS if option.per_model)
_NOT_BY_REQUEST = ("pickle", "weights_cache", "weights_cache_size", "draft_model")  # they concern files of the machine
REQUEST_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.name not in _NOT_BY_REQUEST)
