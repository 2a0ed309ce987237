"""Requests to an engine and its outputs, as plain data.

These types cross the process boundary between the service and its engines, so they hold only numbers, strings, bytes,
lists and each other. They do not validate: `triptych.service.schemas` (or, offline,
`triptych.model.api.sampling_bounds`) does, before one is created. Times are seconds of `time.monotonic()`, which all
processes of a host share.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256

from triptych.model.api.parameters import EXTRA, parameter, parameters_of
from triptych.model.api.sampling_params import SAMPLING, SamplingParams

# -- What an encoder reads, as plain data: the token ids of a text, the pixels of an image, or the spectrogram of a
# sound. A source is encoded whole. Sequences of one salt and one digest share the encoding and the cache blocks of its
# cross keys and values while any of them is there (`triptych.model.engine.scheduling.block_manager`).


class SourceKind(StrEnum):
    """How a source becomes the rows that an encoder starts from."""

    TOKENS = "tokens"  # rows of the token table
    IMAGE = "image"  # patches, after a learned first row
    AUDIO = "audio"  # two convolutions over the frames of a window


@dataclass(slots=True)
class Source:
    """One input of an encoder; made by `token_source`, `image_source` or `audio_source`, which compute the digest.

    Do not change it; it is not frozen because a frozen dataclass takes three times as long to make.
    """

    kind: SourceKind
    num_positions: int  # rows of encoder output
    digest: bytes  # SHA-256 of everything else
    token_ids: tuple[int, ...] = ()
    token_type_ids: tuple[int, ...] = ()  # segments, where the model tells two texts apart; empty: all of the first
    features: bytes = b""  # row-major; of an image pixels of 8 bits, of audio log-mel energies as little-endian float32
    shape: tuple[int, ...] = ()  # of the features: channels, height, width; mel bins, frames


def token_source(token_ids: tuple[int, ...], token_type_ids: tuple[int, ...] = ()) -> Source:
    """A text as token ids, one position each."""
    digest = _digest(SourceKind.TOKENS, array("q", token_ids).tobytes(), array("q", token_type_ids).tobytes())
    return Source(SourceKind.TOKENS, len(token_ids), digest, token_ids, token_type_ids)


def image_source(pixels: bytes, shape: tuple[int, int, int], num_positions: int) -> Source:
    """An image of `shape` (channels, height, width) with 8 bits a channel, `num_positions` rows once it is encoded."""
    digest = _digest(SourceKind.IMAGE, array("q", shape).tobytes(), pixels)
    return Source(SourceKind.IMAGE, num_positions, digest, features=pixels, shape=shape)


def audio_source(features: bytes, shape: tuple[int, int], num_positions: int) -> Source:
    """One window of sound as its log-mel spectrogram of `shape` (mel bins, frames), little-endian float32, row-major.

    The encoder makes `num_positions` rows of it. Frames are those of a whole window, padding included. Raises
    `ValueError` where the bytes are not those of the shape.
    """
    mel_bins, frames = shape
    if len(features) != 4 * mel_bins * frames:
        raise ValueError(f"features of {mel_bins} x {frames} take {4 * mel_bins * frames} bytes, found {len(features)}")
    digest = _digest(SourceKind.AUDIO, array("q", shape).tobytes(), features)
    return Source(SourceKind.AUDIO, num_positions, digest, features=features, shape=shape)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """A picture in a prompt: its rows take the place of the vectors of some tokens from `start` on.

    The prompt has the model's image token at each of these places. They follow each other, but for one other token
    after each run of `row_length` where that is not 0 (the line breaks of Pixtral).
    """

    start: int
    source: Source
    row_length: int = 0

    @property
    def stop(self) -> int:
        """One more than the place of its last row."""
        return self.place(self.source.num_positions - 1) + 1

    def place(self, row: int) -> int:
        """Return which token of the prompt a row takes the place of."""
        return self.start + row + (row // self.row_length if self.row_length else 0)


def sent_once(images: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
    """Return the pictures of a prompt as they are sent: of equal ones only the first has its pixels."""
    seen: set[bytes] = set()
    found: list[ImageSpan] = []
    for image in images:
        is_again = image.source.digest in seen
        found.append(replace(image, source=replace(image.source, features=b"")) if is_again else image)
        seen.add(image.source.digest)
    return tuple(found)


def received(images: Sequence[ImageSpan]) -> tuple[ImageSpan, ...]:
    """Return the pictures of a prompt that `sent_once` made, each with its pixels, which equal ones share."""
    sources: dict[bytes, Source] = {}
    return tuple([replace(image, source=sources.setdefault(image.source.digest, image.source)) for image in images])


def _digest(kind: SourceKind, *parts: bytes) -> bytes:
    """SHA-256 over the kind and the parts. Each part follows its length, so other parts give another digest."""
    pieces = [kind.encode()]
    for part in parts:
        pieces += (len(part).to_bytes(8, "little"), part)
    return sha256(b"".join(pieces)).digest()


MIN_PRIORITY, MAX_PRIORITY = -100, 100  # smaller is served first
BACKGROUND_PRIORITY = MAX_PRIORITY + 1  # of work that gets only the time that other requests leave


class FinishReason(StrEnum):
    """Why a sequence ended; every accepted request ends with exactly one of them."""

    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context length was reached
    DEADLINE = "deadline"  # timeout_s passed
    CANCELLED = "cancelled"  # the client disconnected or cancelled
    ERROR = "error"  # the engine failed


class Pooling(StrEnum):
    """How token vectors `[L, d]` become one vector `[d]`."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    MAX = "max"  # of each dimension
    MEAN_SQRT_LEN = "mean_sqrt_len"  # the sum over the root of the number of tokens
    WEIGHTED_MEAN = "weighted_mean"  # token i has the weight i, from 1 up (Muennighoff 2022)
    POOLER = "pooler"


class EncodeTask(StrEnum):
    """The kind of result that `/encode` returns for an input."""

    EMBEDDING = "embedding"  # one pooled vector
    TOKENS = "tokens"  # one vector a token
    LOGITS = "logits"  # a number for each label, of the input or of each token
    SCORES = "scores"  # the same after the classifier's activation
    FILL_MASK = "fill_mask"  # the likeliest tokens at some positions
    MULTI_VECTOR = "multi_vector"  # one projected vector a token, for late interaction
    SPARSE = "sparse"  # a weight for each vocabulary entry that the input is about


class AlignmentMethod(StrEnum):
    """Which definition of an alignment is computed."""

    OPENAI = "openai"  # `find_alignment`: tokens see the audio alone; all rows of the prompt are normalised together
    TRANSFORMERS = "transformers"  # `_extract_token_timestamps`: they see the whole window; only rows that are aligned


@dataclass(frozen=True, slots=True)
class Alignment:
    """A request to find the places in the source to which the rows [first, end) of a prompt belong.

    A row belongs to the token that it reads; its attention shows where the next token is.
    """

    heads: tuple[tuple[int, int], ...]  # (layer, head) of the cross attention that is used
    first: int
    end: int
    num_positions: int  # of the source; later ones are padding
    method: AlignmentMethod = AlignmentMethod.OPENAI
    median_filter_width: int = 7


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request to generate.

    `prompt_token_ids` is the decoder's prompt. In an encoder-decoder that is its start token and any forced beginning,
    and what the client sent is the `source`.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    source: Source | None = None
    priority: int = parameter(
        0,
        "Lower is served first; equal ones in order of arrival. At least `min_priority` of `/info`.",
        0,
        least=MIN_PRIORITY,
        most=MAX_PRIORITY,
        openai=EXTRA,
        responses=EXTRA,
        messages=EXTRA,
    )
    cache_salt: str = parameter(
        "",
        "Only requests with the same salt (and the same API key) share the prefix cache.",
        "tenant-7",
        least=1,
        most=256,
        optional=True,
        openai=EXTRA,
        responses=EXTRA,
        messages=EXTRA,
    )
    arrival_time: float = 0.0
    deadline: float | None = None
    streams: bool = False  # a client reads the tokens as they come, so the pacer keeps steps short
    prediction: tuple[int, ...] = ()  # tokens that the output is expected to copy: drafts, which change nothing else
    continued: tuple[int, int] | None = None  # the part of prompt or source that the output continues; None: the whole
    num_forced: int = 0  # last tokens of the prompt that count as output where beams are compared: a target language
    keeps_source: bool = (
        False  # requests with the same source and salt follow: its encoding stays cached after this one
    )
    alignment: Alignment | None = None  # the first output says where the prompt's tokens are in the source
    images: tuple[ImageSpan, ...] = ()  # pictures that the prompt holds, in order
    tenant: str = ""  # for whom it is computed: tenants of one priority share the engine

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND_PRIORITY

    @property
    def num_sent_tokens(self) -> int:
        """Tokens of what the client sent: of the source, or else of the prompt."""
        return self.source.num_positions if self.source is not None else len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed before the first output: of prompt and source."""
        return len(self.prompt_token_ids) + (self.source.num_positions if self.source is not None else 0)


PARAMETERS = SAMPLING | parameters_of(Request, partly=True)  # all that a client can send of a `Request`


@dataclass(slots=True)
class EncodeRequest:
    """One input to encode. Do not change it: it is not frozen only because that takes three times as long to make."""

    request_id: str
    model: str
    source: Source
    task: EncodeTask = EncodeTask.EMBEDDING
    pooling: Pooling | None = None  # None: the checkpoint's own
    prompt_tokens: int = 0  # first tokens, of a prompt, that are not pooled
    normalize: bool | None = None  # None: the checkpoint's own
    dimensions: int | None = None  # keep only the first ones, then normalise again
    positions: tuple[int, ...] = ()  # fill_mask: the masked tokens; multi_vector, sparse: those that count, empty: all
    spans: tuple[tuple[int, int], ...] = ()  # embedding: pool these runs of tokens, each to a vector; empty: all tokens
    unread: int = 0  # the number of last tokens that read the others and are not read (ColBERT's query expansion)
    top_k: int = 0  # fill_mask: candidates at each position; sparse: keep the heaviest ones alone, 0: all
    adapter: int | None = None  # which of the model's adapters computes it; None: none
    candidates: tuple[int, ...] = ()  # fill_mask: token ids to choose among; empty: the whole vocabulary
    arrival_time: float = 0.0
    deadline: float | None = None
    is_background: bool = False  # it gets only the time that other requests leave
    tenant: str = ""  # for whom it is computed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the unmodified model distribution, with the top-k alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class TokenOutput:
    """The tokens that one step, or several merged ones, added to a sequence; the last output has a `finish_reason`."""

    request_id: str
    index: int = 0  # of the sequence among the request's n
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    text: str = ""  # set by the detokenizer, outside the engine
    score: float | None = None  # of a beam hypothesis
    is_missing: bool = False  # the search found fewer hypotheses than n, and none for this index
    scheduled_time: float | None = None  # start of its prefill; set in the first output
    cached_tokens: int = 0
    drafted_tokens: int = 0  # in the steps of these tokens
    accepted_tokens: int = 0  # accepted ones of those
    error: str | None = None
    # Of all the sequence's tokens so far, under the distribution after bans, rules and penalties, before temperature.
    cumulative_logprob: float | None = None
    probe_logprobs: list[float] | None = None  # once, with the first token: of the probe's tokens, before bans or rules
    alignment: list[int] | None = None  # once: the source's positions at which the aligned rows begin, never decreasing


@dataclass(slots=True)
class EncodeOutput:
    """One input's result, float32 little-endian row-major of `shape`; or why there is none.

    It is a vector `[d]`, or a matrix `[L, d]` of tokens; scores `[labels]` or `[L, labels]`; probabilities
    `[positions, k]` of the tokens in `indices`; or the weights `[n]` of the vocabulary entries in `indices`.
    """

    request_id: str
    data: bytes = b""
    shape: tuple[int, ...] = ()
    scheduled_time: float | None = None
    finish_reason: FinishReason = FinishReason.STOP
    indices: bytes = b""  # int32 little-endian, of the same shape: token ids


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a request's phases, in milliseconds."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    ttft_ms: float
    total_ms: float
