"""What an operator may set of the HTTP service: limits and settings, as frozen, checked data.

Every number of `Limits` is shown by `GET /info` under its own name and is enforced before any work is done. Limits
that belong to one model (context, batch, queue) are in its `EngineConfig` and `ModelInfo` instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from model.config import ConfigError

LogFormat = Literal["auto", "plain", "json"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one HTTP request."""

    max_body_bytes: int = 2_000_000  # 413
    max_header_bytes: int = 16 * 1024  # names and values together, 431
    max_header_fields: int = 100  # 431
    max_prompts: int = 32
    max_n: int = 8
    max_beams: int = 8
    max_logprobs: int = 20
    max_stop_strings: int = 4
    max_stop_characters: int = 256  # of one stop string
    max_stop_token_ids: int = 128
    max_logit_bias: int = 300
    max_encode_inputs: int = 256  # 413
    max_encode_tokens: int = 16_384  # of all inputs together, 413
    prompt_characters_per_token: int = 16  # a text of more than this x max_model_len is refused untokenised
    default_max_tokens: int = 256  # where neither the client nor the checkpoint says
    request_timeout_s: float = 600.0  # default and upper bound of timeout_s
    stream_stall_s: float = 30.0  # a stream whose client takes nothing for so long is aborted
    max_chat_messages: int = 1_000
    chat_template_s: float = 2.0  # rendering one conversation
    stream_keepalive_s: float = 15.0  # a comment is sent after so long without an event

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ConfigError(f"{item.name} must be positive, found {getattr(self, item.name)}")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How the service listens, whom it lets in and how it ends."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: no key is asked for
    limits: Limits = field(default_factory=Limits)
    drain_timeout_s: float = 30.0  # how long running requests may go on after `begin_drain`
    tokenizer_threads: int = 2
    log_format: LogFormat = "auto"  # plain lines on a terminal, JSON lines otherwise

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port must be 0 to 65535, found {self.port}")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII without spaces and not empty")
        if self.drain_timeout_s < 0:
            raise ConfigError(f"drain_timeout_s must not be negative, found {self.drain_timeout_s}")
        if self.tokenizer_threads <= 0:
            raise ConfigError(f"tokenizer_threads must be positive, found {self.tokenizer_threads}")
