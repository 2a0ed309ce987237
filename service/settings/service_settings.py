"""Limits and settings of the HTTP service, as frozen and checked data.

`GET /info` reports every field of `Limits` under its own name. Limits of a model (context, batch, queue) are in its
`EngineConfig` and `ModelInfo`.
"""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.api.request import MIN_PRIORITY
from triptych.model.errors import ConfigError
from triptych.model.system.cpu_threads import MOST_THREADS

# -- Settings of models that are loaded on demand: their sources, their memory, and when they are unloaded.

LOAD_SOURCES = ("models-dir", "hub", "any")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of loading models on demand and unloading them. Raises `ConfigError`."""

    models_dir: str = ""  # a folder of model folders, each served under its name; empty: none
    load_from: tuple[str, ...] = ("models-dir", "hub")  # sources of POST /models/load; any: every folder
    keep_alive_s: float = math.inf  # idle time after which a model that is not pinned is unloaded
    memory: int | None = None  # bytes for all models of a replica, with their KV caches; None: what the machine has
    pin: bool = True  # whether models given at the start stay loaded, idle or not
    load_timeout_s: float = 1800.0  # of one load, with its download
    max_download: int = 100 * 10**9  # bytes of one model of the Hub
    engine: EngineConfig = field(default_factory=EngineConfig)  # of a model without its own settings
    max_loras: int | None = None  # LoRA adapters of a replica that are in memory; None: all that are asked for
    lora_dirs: tuple[tuple[str, str], ...] = ()  # models and the folders with their adapters

    def __post_init__(self) -> None:
        for source in self.load_from:
            if source not in LOAD_SOURCES:
                raise ConfigError(f"load_from must list some of {', '.join(LOAD_SOURCES)}, found {source!r}")
        if not self.keep_alive_s > 0:
            raise ConfigError(f"keep_alive must be positive, found {self.keep_alive_s:g}")
        if not 0 < self.load_timeout_s < math.inf:
            raise ConfigError(f"load_timeout must be positive and finite, found {self.load_timeout_s:g}")
        if self.max_loras is not None and self.max_loras < 1:
            raise ConfigError(f"max_loras must be at least 1, found {self.max_loras}")
        for name in ("memory", "max_download"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{'model_memory' if name == 'memory' else name} must be positive, found {value}")

    def pins(self, spec: ModelSpec) -> bool:
        """Whether a model given at the start stays loaded, idle or not; of adapters `max_loras` are in memory."""
        return self.pin and (spec.adapter_of is None or self.max_loras is None)


_MAX_STREAM_INTERVAL = 10.0  # seconds
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")

TOOL_FORMATS = (
    *("auto", "hermes", "qwen3_coder", "llama3", "mistral", "mistral_args", "gemma", "functiongemma", "harmony"),
    *("deepseek_v3", "deepseek_v31", "deepseek_v32", "glm", "minimax_m2", "kimi_k2", "command_r", "granite", "lfm2"),
    *("functionary_v31", "functionary_v32", "mistral_ids", "pythonic", "json"),
)
REASONING_FORMATS = ("auto", "none", "think", "mistral", "seed", "gemma", "harmony")
LogFormat = Literal["auto", "plain", "json"]


def _limit(default: Any, meaning: str, minimum: float | None = None) -> Any:
    """Declare a limit; without a `minimum` it must be above 0."""
    return field(default=default, metadata={"meaning": meaning, "minimum": minimum})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of HTTP requests; each field is a setting of the same name. Raises `ConfigError`."""

    max_body_bytes: int = _limit(2_000_000, "maximum bytes of a body (413)")
    max_text_bytes: int = _limit(2_000_000, "maximum bytes of a text that is tokenised, whatever the context (400)")
    max_json_values: int = _limit(50_000, "maximum number of names, texts, lists and objects in a body (413)")
    max_json_numbers: int = _limit(500_000, "maximum number of numbers, and of escapes in texts, in a body (413)")
    max_held_body_bytes: int = _limit(
        256 << 20, "maximum bytes of all bodies above 64 KiB that are being read or answered (429)"
    )
    max_audio_bytes: int = _limit(26_214_400, "maximum bytes of a body with an audio file (413)")
    max_file_bytes: int = _limit(200_000_000, "maximum bytes of a body with a file for a batch (413)")
    max_audio_seconds: float = _limit(3600.0, "maximum length of an audio file, in seconds")
    max_audio_requests: int = _limit(16, "maximum number of audio files that are transcribed at once (429)")
    max_audio_held_bytes: int = _limit(
        1 << 30, "maximum bytes of all audio in memory: files while they are received, then samples (429)"
    )
    max_audio_windows: int = _limit(
        8, "maximum windows of an audio file that are computed at once, with chunking: parallel"
    )
    audio_decode_s: float = _limit(30.0, "seconds for decoding an audio file")
    max_image_pixels: int = _limit(
        64_000_000, "maximum pixels of all images of a request before resizing; a file has 32,000,000 at most"
    )
    max_image_held_bytes: int = _limit(1 << 30, "maximum bytes of the decoded images of all requests (429)")
    image_decode_s: float = _limit(10.0, "seconds for decoding an image file")
    max_header_bytes: int = _limit(16 * 1024, "maximum bytes of all header names and values (431)")
    max_header_fields: int = _limit(100, "maximum number of header fields (431)")
    max_idle_connections: int = _limit(
        1_024,
        "maximum number of connections on which no request has been accepted yet; the oldest are closed",
    )
    idle_connection_s: int = _limit(120, "seconds after which a connection without a request is closed")
    receive_s: float = _limit(60.0, "seconds for receiving the headers, and as long for the body (408)")
    max_prompts: int = _limit(32, "maximum number of prompts in a request")
    max_n: int = _limit(8, "maximum number of choices for a prompt")
    max_beams: int = _limit(8, "maximum number of beams")
    max_logprobs: int = _limit(20, "maximum number of alternatives for a token")
    max_reply_logprobs: int = _limit(
        250_000, "maximum log-probabilities of a reply: n x max_tokens, except in streams, and n x prompt tokens"
    )
    max_stop_strings: int = _limit(4, "maximum number of stop strings")
    max_stop_characters: int = _limit(256, "maximum characters of a stop string")
    max_stop_token_ids: int = _limit(128, "maximum number of stop token ids")
    max_logit_bias: int = _limit(300, "maximum entries of logit_bias, allowed_token_ids and suppress_tokens")
    max_schema_bytes: int = _limit(65_536, "maximum bytes of a JSON schema or a grammar for the output")
    max_regex_characters: int = _limit(4_096, "maximum characters of a regular expression for the output")
    max_choices: int = _limit(1_000, "maximum number of texts in choice")
    max_choice_characters: int = _limit(1_024, "maximum characters of each text in choice")
    grammar_s: float = _limit(2.0, "seconds for compiling a grammar")
    max_encode_inputs: int = _limit(2_048, "maximum number of inputs to encode (413)")
    max_encode_tokens: int = _limit(300_000, "maximum tokens of all inputs to encode (413)")
    max_detailed_inputs: int = _limit(
        256, "maximum number of inputs that are images, or whose output has a part for each token (413)"
    )
    max_detailed_tokens: int = _limit(16_384, "maximum tokens of all such inputs (413)")
    max_top_k: int = _limit(100, "maximum number of candidates for a mask, and of answers")
    max_candidates: int = _limit(1_000, "maximum of masks x top_k of an input, and maximum number of targets")
    prompt_characters_per_token: int = _limit(
        16, "a text with more characters than this x max_model_len is refused before it is tokenised"
    )
    default_max_tokens: int = _limit(256, "max_tokens of /generate if neither the client nor the checkpoint sets it")
    request_timeout_s: float = _limit(600.0, "default and maximum of timeout_s, in seconds")
    stream_stall_s: float = _limit(
        30.0, "seconds without progress after which a reply that its client does not read is aborted"
    )
    stream_unread_bytes: int = _limit(1 << 20, "unread bytes after which a stream is aborted")
    stream_keepalive_s: float = _limit(15.0, "seconds without an event after which a keep-alive comment is sent")
    max_waiting_for_load: int = _limit(64, "maximum number of requests that wait for models to be loaded (429)")
    max_chat_messages: int = _limit(1_000, "maximum number of messages in a conversation")
    max_content_parts: int = _limit(1_000, "maximum number of parts of a message's content, and of its tool calls")
    max_tools: int = _limit(256, "maximum number of tools in a conversation")
    chat_template_s: float = _limit(2.0, "seconds for rendering a chat template")
    min_priority: int = _limit(
        0, "minimum priority in requests (lower is served first): -100 to 0", minimum=MIN_PRIORITY
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, minimum = getattr(self, item.name), item.metadata["minimum"]
            if not (value > 0 if minimum is None else minimum <= value) or not value < math.inf:
                bound = "positive" if minimum is None else f"at least {minimum}"
                raise ConfigError(f"{item.name} must be {bound} and finite, found {value}")
        if self.min_priority > 0:
            raise ConfigError(f"min_priority must be at most 0, the default of a request, found {self.min_priority}")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings of the HTTP service: address, keys, logs, draining, monitoring. Raises `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str = ""  # more keys, one a line, reloaded when it changes; without any key, access is open
    admin_keys: tuple[str, ...] = field(default=(), repr=False)  # for the routes that load and unload models
    admin_key_file: str = ""  # more admin keys; without any, these routes are off
    cors_origins: tuple[str, ...] = ()  # sites whose pages may call the API from a browser; *: all
    allowed_hosts: tuple[str, ...] = ()  # host names of this service, in addition to localhost and IPs; *: any
    limits: Limits = field(default_factory=Limits)
    models: ModelSettings = field(default_factory=ModelSettings)
    drain_timeout_s: float = 30.0  # how long running requests may continue at shutdown
    threads: int | None = None  # that compute on the CPU, of each replica; None: `triptych.model.system.cpu_threads`
    cpu_binding: str = "auto"  # of `triptych.model.system.cpu_sets.BINDINGS`
    tokenizer_threads: int = 2
    log_format: LogFormat = "auto"  # plain lines on a terminal, JSON lines otherwise
    stall_timeout_s: float = 30.0  # without a finished step, after which an engine is restarted
    stream_interval_s: float = 0.0  # minimum time between a stream's events; 0: each token is sent at once
    tool_format: str = (
        "auto"  # how models write tool calls (`triptych.service.chat.formats`); auto: as their chat template does
    )
    reasoning_format: str = "auto"  # how models mark reasoning; none: it is part of the content
    embed_cache_bytes: int = 0  # cached results of /encode, of all models together; 0: none
    state_dir: str = ""  # a folder for what survives a restart: usage, files and batches; empty: nothing does
    max_state_bytes: int = 10 * 10**9  # of files and batches
    batches_dir: str = ""  # below state_dir: a group of models has files and batches of its own
    response_store_bytes: int = 64 << 20  # stored responses, which `previous_response_id` may name; 0: none
    vllm_metrics: bool = False  # whether metrics are also exported under vLLM's names
    metrics_port: int = 0  # another port for /metrics, /livez and /readyz, without a key; 0: none
    otlp_endpoint: str = ""  # collector of OpenTelemetry traces and metrics; empty: none

    def __post_init__(self) -> None:
        for name, known in (("tool_format", TOOL_FORMATS), ("reasoning_format", REASONING_FORMATS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, found {getattr(self, name)!r}")
        if not self.host.strip():  # an empty address means every interface
            raise ConfigError("host must be an address, found none; 0.0.0.0 is every interface")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port must be 0 to 65535, found {self.port}")
        if not 0 <= self.metrics_port <= 65_535 or (self.metrics_port and self.metrics_port == self.port):
            raise ConfigError(f"metrics_port must be 1 to 65535 and not port ({self.port}), found {self.metrics_port}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint must begin with http:// or https://, found {self.otlp_endpoint!r}")
        for key in self.api_keys:
            check_key(key, "an API key")
        for key in self.admin_keys:
            check_key(key, "an admin key")
        for origin in self.cors_origins:
            check_origin(origin)
        for name in self.allowed_hosts:
            if re.fullmatch(r"[A-Za-z0-9._-]+|\*", name) is None:
                raise ConfigError(f"allowed_hosts: expected a name such as ai.example.com, or *; found {name!r}"[:300])
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ConfigError("cors_origins: * stands for all origins, so give it alone")
        if set(self.admin_keys) & set(self.api_keys):
            raise ConfigError("an admin key must not be an API key as well")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout must not be negative, and finite, found {self.drain_timeout_s}")
        if not 0 <= self.stream_interval_s <= _MAX_STREAM_INTERVAL:
            found = self.stream_interval_s
            raise ConfigError(f"stream_interval must be 0 to {_MAX_STREAM_INTERVAL:g}, found {found}")
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            raise ConfigError(f"threads must be 1 to {MOST_THREADS}, found {self.threads}")
        sizes = {"embed_cache": self.embed_cache_bytes, "response_store": self.response_store_bytes}
        for name, size in {**sizes, "max_state_bytes": self.max_state_bytes}.items():
            if size < 0:
                raise ConfigError(f"{name} must not be negative, found {size}")
        for name, value in (("tokenizer_threads", self.tokenizer_threads), ("stall_timeout", self.stall_timeout_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive and finite, found {value}")

    @property
    def asks_for_key(self) -> bool:
        """Whether requests need a key: true if there is a key file, whatever it contains now."""
        return bool(self.api_keys or self.api_key_file)

    @property
    def checks_host(self) -> bool:
        """Whether the `Host` header is checked: with allowed names, or without keys on a loopback address."""
        return bool(self.allowed_hosts) or (not self.asks_for_key and is_loopback(self.host))

    @property
    def has_admin(self) -> bool:
        """Whether the routes that load and unload models are on."""
        return bool(self.admin_keys or self.admin_key_file)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_origin(origin: str) -> None:
    """Raise `ConfigError` for an invalid origin, and for `null`, which any page can have."""
    if origin != "*" and _ORIGIN.fullmatch(origin) is None:
        message = "cors_origins: expected scheme://host or scheme://host:port, without a path, or *"
        raise ConfigError(f"{message}; found {origin!r}"[:300])


def check_key(key: str, where: str) -> None:
    """Raise `ConfigError` for a key that cannot be sent in a header; the message does not show it."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} must be printable ASCII without spaces and not empty")
