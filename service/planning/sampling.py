"""Sampling parameters of a generation request: the client's fields over the checkpoint's defaults."""

from __future__ import annotations

import secrets

from model.api.sampling_defaults import BEAM_FIELDS, beams_of, over_defaults
from model.api.sampling_params import SamplingParams
from service.core.errors import invalid
from service.core.models import ServedModel
from service.planning.body_limits import stop_texts
from service.schemas.bodies import GenerateBody

_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_tokens",
)
_NOT_WITH_BEAMS = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "stop",
    "logprobs",
    "prompt_logprobs",
    "num_speculative_tokens",
    "prediction",
)


def sampling_params(
    body: GenerateBody, served: ServedModel, start: int, max_tokens: int, grammar: str = "", beams: int | None = None
) -> SamplingParams:
    """Merge the client's fields over the checkpoint's defaults, and those over greedy decoding.

    `start` tokens come before the output. `beams` are those that `num_beams` chose, or fewer.
    """
    beams = num_beams(body, served) if beams is None else beams
    _check_beams(body, beams)
    names = (*_SAMPLING_FIELDS, *(BEAM_FIELDS if beams > 1 else ()))
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    sampling = over_defaults(served.checkpoint.sampling_defaults, {**given, "num_beams": beams}, start)
    min_tokens = sampling.pop("min_tokens", 0)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens ({min_tokens}) must be at most max_tokens ({max_tokens})", "min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        n=body.n,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=dict(body.logit_bias),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        suppress_tokens=tuple(body.suppress_tokens),
        stop=_stop(body, served),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop=body.include_stop,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        num_speculative_tokens=body.num_speculative_tokens,
        grammar=grammar,
        **sampling,
    )


def _stop(body: GenerateBody, served: ServedModel) -> tuple[str, ...]:
    stop = stop_texts(body)
    if stop:
        served.require_tokenizer("stop")
    return tuple(stop)


def num_beams(body: GenerateBody, served: ServedModel) -> int:
    """Return the requested number, or the checkpoint's default unless the client asks for sampling."""
    return beams_of(served.checkpoint.sampling_defaults, body.num_beams, body.temperature)


def _check_beams(body: GenerateBody, beams: int) -> None:
    """Refuse fields that have no meaning with beam search, or without it."""
    if beams == 1:
        for name in BEAM_FIELDS[1:]:
            if getattr(body, name) is not None:
                raise invalid(f"{name} has no meaning without beam search: num_beams is 1", name)
        return
    if body.n > beams:
        raise invalid(f"n ({body.n}) must be at most num_beams ({beams})", "n")
    given = [name for name in _NOT_WITH_BEAMS if getattr(body, name) is not None]
    given += ["temperature"] if body.temperature else []
    if given:
        raise invalid(f"{given[0]} has no meaning with beam search; send num_beams: 1", given[0])
