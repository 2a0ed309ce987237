"""What is asked of an engine and what it answers, as plain data.

Everything here crosses the process boundary between the service and its engines, so the types hold only numbers,
strings, bytes, lists and each other. Nothing is validated here: `service.schemas` (or `model.api.sampling_bounds`
offline) has done that before one of these exists. Times are seconds of `time.monotonic()`, which all processes of a
host share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended; every accepted request ends with exactly one of them."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    DEADLINE = "deadline"  # timeout_s passed
    CANCELLED = "cancelled"  # the client left or asked
    ERROR = "error"  # our fault


class Pooling(StrEnum):
    """How token vectors `[L, d]` become one vector `[d]`."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    POOLER = "pooler"


class EncodeTask(StrEnum):
    """What `/encode` returns for an input."""

    EMBEDDING = "embedding"  # one pooled vector
    TOKENS = "tokens"  # one vector a token
    LOGITS = "logits"  # a score for each label, of the input or of each token


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop; defaults are greedy and unlimited by anything but `max_tokens`."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    n: int = 1
    num_beams: int = 1  # more: beam search, which returns the n best hypotheses at its end
    length_penalty: float = 1.0  # of hypotheses: score / length ** length_penalty
    early_stopping: bool | str = False  # True: with num_beams hypotheses; "never": only when none can get better
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = field(default_factory=dict)
    no_repeat_ngram_size: int = 0  # 0: off; else no run of so many tokens comes twice
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the checkpoint's EOS ids are added by the engine unless ignore_eos
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many alternatives beside the chosen token
    prompt_logprobs: int | None = None
    grammar: str = ""  # what the whole output must match (`model.text.grammar`); empty: anything


@dataclass(frozen=True, slots=True)
class Request:
    """A generation that is known to be servable.

    `prompt_token_ids` is what the decoder continues (decoder-only) or what the encoder reads (encoder-decoder); then
    `decoder_token_ids` is what the decoder starts from: its start token and any forced beginning.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    decoder_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # only requests of one salt share cached blocks
    arrival_time: float = 0.0
    deadline: float | None = None
    streams: bool = False  # somebody reads the tokens as they come, so steps with them are kept short


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """One input to be turned into vectors: token ids, and their segments where the model tells two texts apart; or the
    pixels of an image, as the checkpoint's `ImageConfig` wants them, 8 bits each, channel by channel."""

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    task: EncodeTask = EncodeTask.EMBEDDING
    pooling: Pooling | None = None  # None: the checkpoint's own
    normalize: bool | None = None  # None: the checkpoint's own
    dimensions: int | None = None  # cut to the first so many, then normalised again
    token_type_ids: tuple[int, ...] = ()
    pixels: bytes = b""
    arrival_time: float = 0.0
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability under the model's own distribution, and the most likely alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenOutput:
    """What one step (or several, merged) added to one sequence of a request; the last one has a `finish_reason`."""

    request_id: str
    index: int = 0  # which of the request's n sequences
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string, where one ended it
    text: str = ""  # filled outside the engine
    score: float | None = None  # of a beam hypothesis
    scheduled_time: float | None = None  # when its first token was computed on, with the first output
    cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class EncodeOutput:
    """Vectors of one input: float32, little-endian, row-major, `shape` = `[d]` or `[L, d]`; or why there are none."""

    request_id: str
    data: bytes = b""
    shape: tuple[int, ...] = ()
    scheduled_time: float | None = None
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float
    total_ms: float
