"""What an operator may set of the HTTP service: limits and settings, as frozen, checked data.

Every number of `Limits` is shown by `GET /info` under its own name and is enforced before any work is done. Limits
that belong to one model (context, batch, queue) are in its `EngineConfig` and `ModelInfo` instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from model.errors import ConfigError

MIN_PRIORITY, MAX_PRIORITY = -100, 100  # of a request; the smaller is served first
_LONGEST_INTERVAL = 10.0  # seconds without an event, by our own doing

LogFormat = Literal["auto", "plain", "json"]


def _limit(default: Any, meaning: str, least: float | None = None) -> Any:
    """`least`: the smallest value that it may have; without, it must be above 0."""
    return field(default=default, metadata={"meaning": meaning, "least": least})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one HTTP request; each is a setting of its own name."""

    max_body_bytes: int = _limit(2_000_000, "bytes of a body (413)")
    max_header_bytes: int = _limit(16 * 1024, "bytes of all header names and values (431)")
    max_header_fields: int = _limit(100, "header fields (431)")
    receive_s: float = _limit(60.0, "seconds in which headers, and then the body, must have come (408)")
    max_prompts: int = _limit(32, "prompts of a request")
    max_n: int = _limit(8, "outputs for a prompt")
    max_beams: int = _limit(8, "beams of a prompt")
    max_logprobs: int = _limit(20, "alternatives shown for a token")
    max_reply_logprobs: int = _limit(
        250_000, "log-probabilities of a reply: of n x max_tokens tokens, streams excepted, and of n x their prompts"
    )
    max_stop_strings: int = _limit(4, "stop strings")
    max_stop_characters: int = _limit(256, "characters of a stop string")
    max_stop_token_ids: int = _limit(128, "stop token ids")
    max_logit_bias: int = _limit(300, "entries of logit_bias")
    max_schema_bytes: int = _limit(65_536, "bytes of a JSON schema for the output")
    max_regex_characters: int = _limit(4_096, "characters of a pattern for the output")
    max_choices: int = _limit(1_000, "texts of which the output is to be one")
    max_choice_characters: int = _limit(1_024, "characters of each of them")
    grammar_s: float = _limit(2.0, "seconds for compiling what an output must match")
    max_encode_inputs: int = _limit(256, "inputs to encode (413)")
    max_encode_tokens: int = _limit(16_384, "tokens of all inputs to encode (413)")
    prompt_characters_per_token: int = _limit(16, "a text of more than this x max_model_len is refused untokenised")
    default_max_tokens: int = _limit(256, "max_tokens where neither the client nor the checkpoint says")
    request_timeout_s: float = _limit(600.0, "seconds: default and upper bound of timeout_s")
    stream_stall_s: float = _limit(
        30.0, "seconds in which a client takes nothing of a reply or stream until it is aborted"
    )
    stream_unread_bytes: int = _limit(1 << 20, "output that may wait for a stream's client until it is aborted")
    stream_keepalive_s: float = _limit(15.0, "seconds without an event after which a stream gets a comment")
    max_chat_messages: int = _limit(1_000, "messages of a conversation")
    chat_template_s: float = _limit(2.0, "seconds for rendering one conversation")
    min_priority: int = _limit(
        0, "smallest priority, the first to be served, that clients may ask for: -100 to 0", least=MIN_PRIORITY
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            value, least = getattr(self, item.name), item.metadata["least"]
            if not (value > 0 if least is None else least <= value) or not value < math.inf:
                bound = "positive" if least is None else f"at least {least}"
                raise ConfigError(f"{item.name} must be {bound} and finite, found {value}")
        if self.min_priority > 0:
            raise ConfigError(f"min_priority must be at most 0, the default of a request, found {self.min_priority}")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How the service listens, whom it lets in and how it ends."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str = ""  # more keys, one a line, read again when it changes; neither: no key is asked for
    limits: Limits = field(default_factory=Limits)
    drain_timeout_s: float = 30.0  # how long running requests may go on after `begin_drain`
    tokenizer_threads: int = 2
    log_format: LogFormat = "auto"  # plain lines on a terminal, JSON lines otherwise
    stall_timeout_s: float = 30.0  # without a sign of the step loop: the engine is replaced
    stream_interval_s: float = 0.0  # least time between a stream's events; 0: each token leaves at once
    vllm_metrics: bool = False  # the figures under vLLM's names too
    otlp_endpoint: str = ""  # of a collector of OpenTelemetry traces; empty: none are made

    def __post_init__(self) -> None:
        if not self.host.strip():  # which the system takes for every interface
            raise ConfigError("host must be an address, found none; 0.0.0.0 is every interface")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port must be 0 to 65535, found {self.port}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_endpoint must begin with http:// or https://, found {self.otlp_endpoint!r}")
        for key in self.api_keys:
            check_key(key, "an API key")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ConfigError(f"drain_timeout_s must not be negative, and finite, found {self.drain_timeout_s}")
        if not 0 <= self.stream_interval_s <= _LONGEST_INTERVAL:
            found = self.stream_interval_s
            raise ConfigError(f"stream_interval_s must be 0 to {_LONGEST_INTERVAL:g}, found {found}")
        for name in ("tokenizer_threads", "stall_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive and finite, found {getattr(self, name)}")

    @property
    def asks_for_key(self) -> bool:
        """Whether a request needs a key: not what is in the file at the moment, but that there is one, decides."""
        return bool(self.api_keys or self.api_key_file)


def check_key(key: str, where: str) -> None:
    """Raise `ConfigError` for what could not be sent in a header; the key itself is not shown."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where} must be printable ASCII without spaces and not empty")
