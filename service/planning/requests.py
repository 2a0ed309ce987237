"""The last pass over a body of /generate: builds the engine's requests from checked parameters and tokens.

It checks lengths only: against the context, the KV cache, and the log-probabilities that a reply may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from triptych.model.api.request import BACKGROUND_PRIORITY, MAX_PRIORITY, MIN_PRIORITY, ImageSpan, Request, token_source
from triptych.model.api.sampling_bounds import length_of
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.api.stats import ModelInfo
from triptych.model.text.infilling import PromptTokens
from triptych.service.core.context_bound import context_exceeded
from triptych.service.core.errors import ApiError, invalid
from triptych.service.core.models import ServedModel
from triptych.service.core.request_context import current, tenant_id
from triptych.service.images.pictures import picture_places, unlike
from triptych.service.planning.checks import CheckedPrompts, check_beams
from triptych.service.planning.tokenization import PromptInput
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.settings.service_settings import Limits

_numbers = count(1)


def engine_id(request_id: str) -> str:
    """Return a request id for the engines; it is unique even if clients repeat theirs."""
    return f"{request_id}#{next(_numbers)}"


def cache_salt(requested: str | None) -> str:
    """Return the salt of the prefix cache: requests share prefixes if their API key and `cache_salt` are equal."""
    return f"{tenant_id()}/{requested or ''}"


def priority_of(requested: int) -> int:
    """Return the priority of a request: what it asks for and that of its key, together."""
    context = current()
    if context is not None and context.is_background:
        return BACKGROUND_PRIORITY
    own = context.tenant.priority if context is not None else 0
    return min(max(requested + own, MIN_PRIORITY), MAX_PRIORITY)


class Times(NamedTuple):
    """When a request came, and when it ends at the latest, in seconds of `time.monotonic()`."""

    arrival: float
    deadline: float


class Tokens(NamedTuple):
    """The token ids of a body's texts."""

    prompts: Sequence[PromptTokens]
    decoder: tuple[int, ...]  # start of the decoder's input, in an encoder-decoder
    prediction: tuple[int, ...]


def requests_of(
    checked: CheckedPrompts,
    tokens: Tokens,
    request_id: str,
    times: Times,
    limits: Limits,
    images: tuple[ImageSpan, ...] = (),
) -> tuple[Request, ...]:
    """Return a request for each prompt; raises an `ApiError` for a prompt that is too long."""
    requests = tuple(
        _request(checked, tokens, at, engine_id(request_id), times, limits, images) for at in range(len(tokens.prompts))
    )
    _check_logprobs(checked.body, requests, limits)
    return requests


def check_length(checked: CheckedPrompts, text: PromptInput, tokens: int, limits: Limits) -> None:
    """Raise an `ApiError` if a text of `tokens` tokens leaves no room for output in the context."""
    if text is not checked.decoder_prompt:
        _check_source(checked, tokens, text.param)
    _max_tokens(checked, tokens, text.param, limits)


def _request(
    checked: CheckedPrompts,
    tokens: Tokens,
    at: int,
    name: str,
    times: Times,
    limits: Limits,
    images: tuple[ImageSpan, ...],
) -> Request:
    body, served, (ids, begin, end, _) = checked.body, checked.served, tokens.prompts[at]
    encodes, param = served.is_encoder_decoder, checked.prompts[at].param
    if not images and (places := picture_places(ids, served)):
        raise unlike(places, 0, served, param)
    start = len(tokens.decoder) if encodes else len(ids)
    max_tokens = _max_tokens(checked, start, param, limits)
    beams = _fitting_beams(checked, len(ids), start + max_tokens, param)
    return Request(
        request_id=name,
        model=served.name,
        prompt_token_ids=tokens.decoder if encodes else ids,
        params=with_lengths(checked.sampling, beams, body, served, start, max(1, max_tokens)),
        source=token_source(ids) if encodes else None,
        images=images,
        priority=priority_of(body.priority),
        cache_salt=cache_salt(body.cache_salt),
        arrival_time=times.arrival,
        deadline=times.deadline,
        streams=bool(body.stream),
        prediction=tokens.prediction,
        tenant=tenant_id(),
        continued=(begin, end) if end - begin < len(ids) else None,
        num_forced=len(checked.forced_tokens) if encodes and checked.decoder_prompt is None else 0,
    )


def with_lengths(
    sampling: Mapping[str, Any], num_beams: int, body: GenerateBody, served: ServedModel, start: int, max_tokens: int
) -> SamplingParams:
    """Return sampling parameters for an output after `start` tokens, which a checkpoint's `min_length` includes."""
    least, defaults = body.min_tokens, served.checkpoint.sampling_defaults
    if least is not None and least > max_tokens:
        raise invalid(f"min_tokens ({least}) must be at most max_tokens ({max_tokens})", "min_tokens")
    if least is None and "min_length" in defaults:
        least = max(0, defaults["min_length"] - start)
    elif least is None:
        least = defaults.get("min_tokens", 0)
    lengths = {"max_tokens": max_tokens, "min_tokens": min(least, max_tokens)}
    return SamplingParams(**{**sampling, **lengths, "num_beams": num_beams})


def _max_tokens(checked: CheckedPrompts, start: int, param: str, limits: Limits) -> int:
    """Return the maximum length of an output after `start` tokens; raises an `ApiError` if the context is too short.

    Only dialects can request 0, for no output; the engine still generates one token then.
    """
    served, info, requested = checked.served, checked.info, checked.body.max_tokens
    room = info.max_model_len - start
    field = "decoder_prompt" if served.is_encoder_decoder else param
    wanted = 1 if requested is None else requested
    if room < wanted:
        raise _too_long(start, wanted, info, field if room < 1 else "max_tokens")
    if requested is not None:
        return int(requested)
    otherwise = None if checked.fills_context else limits.default_max_tokens
    default = default_max_tokens(served, start, otherwise)
    bounds = (default, output_room(served, info, start), _logprobs_room(checked, limits))
    return max(1, min(bound for bound in bounds if bound is not None))


def default_max_tokens(served: ServedModel, start: int, otherwise: int | None) -> int | None:
    """Return the checkpoint's `max_new_tokens`, or the rest of its `max_length` after `start` tokens, else `otherwise`.

    If `otherwise` is None (the whole context), a decoder's `max_length` is ignored, as other servers do: many
    checkpoints have one below their context.
    """
    whole = otherwise is not None or served.is_encoder_decoder
    found = length_of(served.checkpoint.sampling_defaults, start, whole=whole)
    return otherwise if found is None else found


def output_room(served: ServedModel, info: ModelInfo, start: int) -> int:
    """Return how many tokens fit after `start` tokens, in the context and in an empty KV cache."""
    room = info.max_model_len - start
    capacity = None if served.is_encoder_decoder else info.sequence_capacity
    return room if capacity is None or capacity <= start else min(room, capacity - start)


def _logprobs_room(checked: CheckedPrompts, limits: Limits) -> int | None:
    """Return how many tokens an output may have if one reply holds all log-probabilities; None: any number.

    It bounds the default length. A length that the client requests is refused if it is too large.
    """
    body = checked.body
    if body.logprobs is None or body.stream:
        return None
    return max(1, limits.max_reply_logprobs // (body.n * len(checked.prompts) * (body.logprobs + 1)))


def _too_long(start: int, max_tokens: int, info: ModelInfo, param: str) -> ApiError:
    total = start + max_tokens
    return context_exceeded(info.max_model_len, f"{start} prompt tokens + {max_tokens} max_tokens = {total}", param)


def _fitting_beams(checked: CheckedPrompts, prompt_tokens: int, length: int, param: str) -> int:
    """Return the number of beams: the checkpoint's default is reduced until the beams fit an empty KV cache.

    Raises an `ApiError` if the source does not fit one step and the context, or if the client's beams do not fit.
    """
    info, beams, encodes = checked.info, checked.num_beams, checked.served.is_encoder_decoder
    source = prompt_tokens if encodes else 0
    _check_source(checked, prompt_tokens, param)
    if checked.body.num_beams is None and beams > 1:
        beams = info.most_beams(beams, length, source=source)
        check_beams(checked.body, beams)
    if beams > info.max_num_seqs:
        raise invalid(f"num_beams must be at most {info.max_num_seqs}, the maximum batch size", "num_beams")
    shortage = info.shortage(beams, length, source=source)
    if shortage is not None:
        needed, there = (blocks * info.block_size for blocks in shortage)
        message = f"{param}, max_tokens and num_beams need {needed} tokens of KV cache, which holds {there}"
        raise invalid(message, param, "kv_cache_exceeded")
    return beams


def _check_source(checked: CheckedPrompts, tokens: int, param: str) -> None:
    """Refuse an encoder-decoder's source that does not fit one step."""
    bound = min(checked.info.max_model_len, checked.info.max_num_batched_tokens)
    if checked.served.is_encoder_decoder and tokens > bound:
        raise context_exceeded(bound, f"{param} has {tokens}, which the encoder reads in one step", param)


def _check_logprobs(body: GenerateBody, requests: Sequence[Request], limits: Limits) -> None:
    """Refuse a request for more log-probabilities than one reply may have.

    A reply that is not streamed has those of all its tokens. A stream sends those of each output token by itself, but
    those of its prompts together.
    """
    counts: dict[str, tuple[int, str]] = {}  # by field: the number, and its calculation in words
    if body.logprobs is not None and not body.stream:
        tokens, each = sum(one.params.max_tokens for one in requests), body.logprobs + 1
        counts["logprobs"] = body.n * tokens * each, f"{body.n} n x {tokens} max_tokens x {each}"
    if body.prompt_logprobs is not None:
        tokens, each = sum(one.num_sent_tokens for one in requests), body.prompt_logprobs + 1
        counts["prompt_logprobs"] = body.n * tokens * each, f"{body.n} n x {tokens} prompt tokens x {each}"
    total = sum(count for count, _ in counts.values())
    if total <= limits.max_reply_logprobs:
        return
    param = max(counts, key=lambda name: counts[name][0])
    made = " + ".join(words for _, words in counts.values())
    message = f"{param} asks for {made} = {total} log-probabilities, more than max_reply_logprobs"
    advice = "" if body.stream or param != "logprobs" else "; a stream may have them"
    raise invalid(f"{message} ({limits.max_reply_logprobs}){advice}", param)
