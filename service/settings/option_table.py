"""The table of all settings of `triptych serve`: name, parser, default and help of each.

`service.settings.sources` reads their values from the command line, the environment and configuration files. This
module imports nothing slow, because `--help` must answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
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
from model.errors import ConfigError
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

PREFIX = "TRIPTYCH_"


@dataclass(frozen=True, slots=True)
class Option:
    """Describes one setting: `name` in a file, `--name` on the command line, `TRIPTYCH_NAME` in the environment."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = "N"
    shown: str = ""  # the default in words, where it is no plain value
    per_model: bool = False  # a field of EngineConfig: a file may also set it for one model

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def read(self, value: Any, where: str) -> Any:
        """Parse a value from any source; raises `ConfigError` that names `where` it was found."""
        if value is None:
            raise ConfigError(f"{where}: found nothing; give a value, or leave the setting out")
        if self.is_secret:
            return self._read_secret(value, where)
        try:
            return self.parse(value if isinstance(value, str) else _text(value))
        except ValueError as error:
            expected = str(error) if "invalid literal" not in str(error) else "a whole number"
            raise ConfigError(f"{where}: found {value!r}, expected {expected}") from None

    @property
    def is_secret(self) -> bool:
        """Whether the value is shown to nobody."""
        return self.parse is keys

    def _read_secret(self, value: Any, where: str) -> Any:
        """Parse a text, or a list of texts of which each is one key: YAML reads a number in many ways."""
        texts = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) for text in texts):
            what = "an empty list" if not texts else "a key that is no text"
            raise ConfigError(f"{where}: found {what}, expected texts in quotation marks, one or more")
        if isinstance(value, list) and all(text.strip() for text in texts):
            return tuple(text.strip() for text in texts)
        try:
            return tuple(key for text in texts for key in self.parse(text))
        except ValueError as error:
            raise ConfigError(f"{where}: found an empty key, expected {error}") from None


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


_ENGINE = EngineConfig()
_SERVICE = ServiceSettings()
_SCALING = Scaling()
_MODELS = ModelSettings()

OPTIONS: tuple[Option, ...] = (
    Option("host", str, "127.0.0.1", "address to listen on", "ADDRESS"),
    Option("port", int, 8000, "port to listen on", "PORT"),
    Option(
        "runtime", one_of("ray", "local"), "ray", "ray: Ray Serve; local: uvicorn, on this machine alone", "ray|local"
    ),
    Option("replicas", replicas, 1, "number of Ray Serve replicas; a range is scaled automatically", "N|MIN-MAX"),
    Option(
        "scale_target",
        float,
        _SCALING.target,
        "saturation at which replicas are kept: running and waiting work over capacity",
        "SHARE",
    ),
    Option(
        "scale_up_delay",
        float,
        _SCALING.up_delay_s,
        "how long the load must be higher before replicas are added",
        "SECONDS",
    ),
    Option(
        "scale_down_delay",
        float,
        _SCALING.down_delay_s,
        "how long the load must be lower before replicas are removed",
        "SECONDS",
    ),
    Option(
        "surge",
        boolean,
        _SCALING.surge,
        "start a replica's successor before stopping it in a redeploy: takes the memory, and GPUs, of both",
        "BOOL",
        "off",
    ),
    Option(
        "api_keys", keys, (), "API keys, one of which a client must send as a bearer token", "KEY[,KEY]", "none: open"
    ),
    Option(
        "api_key_file", key_file, "", "file of more API keys, one a line; read again when it changes", "FILE", "none"
    ),
    Option(
        "admin_keys",
        keys,
        (),
        "keys of /models, /models/load and /models/unload, which are off without one",
        "KEY[,KEY]",
        "none: off",
    ),
    Option(
        "admin_key_file",
        key_file,
        "",
        "file of more admin keys, one a line; read again when it changes",
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
        "names besides localhost and addresses by which clients may call the service; checked if any is given, and on "
        "a loopback address without keys, * for all",
        "NAME[,NAME]",
        "none",
    ),
    Option(
        "models_dir",
        folder,
        _MODELS.models_dir,
        "folder of models' folders: each is served by its name, and loaded when a request first names it",
        "DIR",
        "none",
    ),
    Option(
        "load_from",
        sources,
        _MODELS.load_from,
        "what /models/load may load: folders below models_dir, models of the Hub, or any folder",
        "SOURCE[,SOURCE]",
        ",".join(_MODELS.load_from),
    ),
    Option(
        "keep_alive",
        float,
        _MODELS.keep_alive_s,
        "idle time after which a model is unloaded that was loaded while the service ran",
        "SECONDS",
        "none: it stays",
    ),
    Option(
        "model_memory",
        byte_size,
        _MODELS.memory,
        "memory of all models of a replica with their KV caches; the least recently used are unloaded to stay within",
        "SIZE",
        "what the machine has",
    ),
    Option(
        "pin",
        boolean,
        _MODELS.pin,
        "unload models given at the start, too, when they are idle or their memory is needed",
        "BOOL",
        "they stay",
    ),
    Option(
        "load_timeout",
        float,
        _MODELS.load_timeout_s,
        "how long loading a model while the service runs may take, with its download",
        "SECONDS",
    ),
    Option(
        "max_download",
        byte_size,
        _MODELS.max_download,
        "largest model of the Hub that is downloaded while the service runs",
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
        "weight matrices in 8 or 4 bits: int8 and int4 (-g: so many inputs share a scale), on a CPU their inputs in 8; "
        "fp8, their inputs too, on a GPU of compute capability 8.9 and later",
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
        "number of GPUs, on one machine, that a model's weights are split over",
        per_model=True,
    ),
    Option(
        "batch_invariant",
        boolean,
        _ENGINE.batch_invariant,
        "outputs do not depend on the rest of the batch, bit for bit, in any dtype; refused where not possible",
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
        "on a GPU: do not record decode steps as CUDA graphs, which starts sooner and runs slower",
        "BOOL",
        "CUDA graphs are used",
        per_model=True,
    ),
    Option(
        "slow_fallbacks",
        one_of(*SLOW_FALLBACKS),
        _ENGINE.slow_fallbacks,
        "if Triton, CUDA graphs or fused kernels do not work on a GPU: warn and run slower, or refuse to start",
        "|".join(SLOW_FALLBACKS),
        per_model=True,
    ),
    Option(
        "pickle",
        boolean,
        _ENGINE.pickle,
        "take weights from safetensors alone, not from pytorch_model.bin (of which nothing is run)",
        "BOOL",
        "pytorch_model.bin is read where there are no safetensors",
        per_model=True,
    ),
    Option(
        "weights_cache",
        cache_folder,
        AUTO_CACHE,
        "folder where packed weights are kept: on a CPU the next start maps them, not packing again; off: nowhere",
        "DIR",
        "triptych/weights in the user's cache directory",
        per_model=True,
    ),
    Option(
        "weights_cache_size",
        byte_size,
        None,
        "bytes of all files in the weights cache, the ones used longest ago are removed",
        "SIZE",
        "32 GiB in the user's cache directory, unlimited elsewhere",
        per_model=True,
    ),
    Option(
        "prefix_caching",
        boolean,
        _ENGINE.prefix_caching,
        "do not reuse the KV cache of requests with the same beginning",
        "BOOL",
        "prefixes are cached",
        per_model=True,
    ),
    Option(
        "num_speculative_tokens",
        int,
        _ENGINE.num_speculative_tokens,
        "most tokens that a step drafts where an output repeats its prompt or itself (n-gram speculation), without "
        "changing it; a request may say otherwise; 0: off",
        per_model=True,
    ),
    Option(
        "draft_model",
        folder,
        None,
        "folder of a small model of their vocabulary that drafts for decoder-only models; see num-speculative-tokens",
        "DIR",
        "n-grams alone draft",
        per_model=True,
    ),
    Option(
        "model_weight",
        float,
        _ENGINE.model_weight,
        "relative share of compute time that a model gets among the models of its process",
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
        "minimum time between a stream's events, each of which then holds several tokens",
        "SECONDS",
        "0: each token is sent at once",
    ),
    Option(
        "embed_cache",
        byte_size,
        _SERVICE.embed_cache_bytes,
        "memory in which results of /encode are kept, so that the same input of the same key is computed once",
        "SIZE",
        "0: off",
    ),
    Option(
        "tool_format",
        one_of(*TOOL_FORMATS),
        _SERVICE.tool_format,
        "how models write their tool calls; auto: as each model's chat template does",
        "FORMAT",
    ),
    Option(
        "reasoning_format",
        one_of(*REASONING_FORMATS),
        _SERVICE.reasoning_format,
        "how models mark their reasoning; auto: as each model's chat template does; none: it stays in the content",
        "FORMAT",
    ),
    Option(
        "response_store",
        byte_size,
        _SERVICE.response_store_bytes,
        "memory of a replica for responses that previous_response_id and GET /v1/responses/ID may name; 0: none",
        "SIZE",
        "64MiB",
    ),
    Option("tokenizer_threads", int, _SERVICE.tokenizer_threads, "number of tokenizer threads"),
    Option(
        "metrics",
        one_of("triptych", "vllm"),
        "triptych",
        "vllm: export metrics under vLLM's names too",
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
        "auto: Ray Serve's HAProxy ingress where installed; off: its own proxy",
        "auto|off",
    ),
)


def _limit_options() -> Iterable[Option]:
    """Make an option of each field of `Limits`; its type follows from its name and default."""
    for item in fields(Limits):
        assert isinstance(item.default, (int, float))
        sized, seconds = item.name.endswith("_bytes"), isinstance(item.default, float)
        parse: Callable[[str], Any] = byte_size if sized else float if seconds else int
        metavar = "SIZE" if sized else "SECONDS" if seconds else "N"
        yield Option(item.name, parse, item.default, item.metadata["meaning"], metavar)


LIMIT_OPTIONS = tuple(_limit_options())
OPTIONS += LIMIT_OPTIONS
_SCALING_NAMES = ("replicas", "scale_target", "scale_up_delay", "scale_down_delay", "surge")
GROUP_OPTIONS = (  # the settings that a group of models may have
    Option("route", route, None, "path prefix of the group's routes", "PATH", "/NAME"),
    *(option for option in OPTIONS if option.per_model or option.name in _SCALING_NAMES),
)
BY_NAME = {option.name: option for option in OPTIONS}
ENGINE_OPTIONS = tuple(option for option in OPTIONS if option.per_model)
_NOT_BY_REQUEST = ("pickle", "weights_cache", "weights_cache_size", "draft_model")  # what is trusted, read and written
REQUEST_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.name not in _NOT_BY_REQUEST)
