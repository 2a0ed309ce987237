"""The first pass over a body of /generate: all checks that need no tokens.

It returns the engine's parameters and the inputs to tokenise. Lengths are checked once tokens are known
(`triptych.service.planning.requests`).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

from triptych.model.api.parameters import Beams
from triptych.model.api.request import ImageSpan
from triptych.model.api.sampling_bounds import beams_of, lacks_tokens, over_defaults
from triptych.model.api.sampling_params import SAMPLING, LineStop
from triptych.model.api.stats import ModelInfo
from triptych.model.errors import listed
from triptych.model.text.fill_marks import OtherFile
from triptych.service.core.context_bound import ContextBound
from triptych.service.core.errors import invalid, shorten
from triptych.service.core.models import ServedModel
from triptych.service.planning.infilling import gap_of
from triptych.service.planning.response_format import Constrain, OutputConstraint
from triptych.service.planning.tokenization import PromptInput, outside_vocabulary
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.settings.service_settings import Limits

_SENT = {name: column for name, column in SAMPLING.items() if column.row.sent}
_LIMITED = [column for column in _SENT.values() if column.row.limit]
if unknown := {column.row.limit for column in _LIMITED} - {one.name for one in fields(Limits)}:
    raise TypeError(f"the table of parameters names limits that are no settings: {', '.join(unknown)}")
_TOKENS = [column for column in _SENT.values() if column.is_tokens]
_NOT_WITH_BEAMS = [name for name, column in _SENT.items() if column.row.beams in (Beams.NEVER, Beams.UNREAD)]
_ONLY_WITH_BEAMS = [name for name, column in _SENT.items() if column.row.beams is Beams.ONLY]
_NEUTRAL = {name: column.default for name, column in _SENT.items() if name != "seed"}  # a value that has no effect
_LENGTHS = ("max_tokens", "min_tokens")
_SHOWN = 6  # languages listed in an error
_PREDICTED = 4  # characters of a prediction that are read, for each token of the context


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """Settings of an output that a dialect needs and a native body does not have.

    Without `max_tokens` the output goes on until the model ends it or the context is full. `constrain` makes the
    constraint of the dialect's reply from that of the body. `files` are read before a prompt with a suffix, which is
    cut if it `cuts`. `images` are the pictures of the prompt, which is then one of token ids.
    """

    constrain: Constrain | None = None
    shown_special_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    files: tuple[OtherFile, ...] = ()
    cuts: bool = False
    line_stop: LineStop | None = None
    images: tuple[ImageSpan, ...] = ()

    def put_on(self, sampling: dict[str, Any], body: GenerateBody) -> None:
        """Add the special tokens to show and what stops an output to the fields of `SamplingParams`."""
        sampling["stop_token_ids"] = tuple(dict.fromkeys((*body.stop_token_ids, *self.stop_token_ids)))
        sampling["line_stop"] = self.line_stop
        if body.skip_special_tokens:
            sampling["shown_special_ids"] = self.shown_special_ids


class CheckedPrompts(NamedTuple):
    """A checked body of /generate; `sampling` has all fields of `SamplingParams` except lengths."""

    body: GenerateBody
    served: ServedModel
    info: ModelInfo
    sampling: Mapping[str, Any]
    num_beams: int
    inputs: list[PromptInput]  # everything to tokenise: the prompts, then the other inputs
    prompts: list[PromptInput]
    decoder_prompt: PromptInput | None
    prediction: PromptInput | None
    forced_tokens: tuple[int, ...]  # with which an encoder-decoder's output starts: a language, a sentinel
    fills_context: bool  # whether an output may fill the context if client and checkpoint set no length


def check_body(
    body: GenerateBody, served: ServedModel, info: ModelInfo, limits: Limits, shape: ReplyShape | None
) -> CheckedPrompts:
    """Check a body; raises an `ApiError` that names the first field that cannot be served."""
    _check_limits(body, limits)
    prompts = _with_prefix(_prompts(body, source_language(body, served), info.max_model_len), body, served)
    sampling = sampling_fields(body, served)
    _check_tokens(body, served.vocab_size)
    if shape is not None:
        shape.put_on(sampling, body)
    gap = gap_of(body, served, info, shape.files if shape else (), cuts=shape is not None and shape.cuts)
    if gap is not None:
        ends = (token for token in gap.infilling.marks.ends if token < served.vocab_size)
        sampling["stop_token_ids"] = (*sampling.get("stop_token_ids", ()), *ends)
        prompts = [prompt._replace(gap=gap) for prompt in prompts]
    decoder_prompt, target = _decoder_prompt(body, served, info), target_language(body, served)
    prediction = None
    if body.prediction:
        prediction = PromptInput(body.prediction[: _PREDICTED * info.max_model_len], "prediction", special=False)
    inputs = [*prompts, *(one for one in (decoder_prompt, prediction) if one is not None)]
    bound = ContextBound(info.max_model_len, limits.prompt_characters_per_token, limits.max_text_bytes)
    for one in inputs:
        if isinstance(one.value, str):
            served.require_tokenizer(one.param)
            if gap is None or gap.room is None:
                bound.check(one.value, one.param)
    if gap is not None and gap.room is None:
        bound.check(gap.suffix, "suffix")
    return CheckedPrompts(
        body=body,
        served=served,
        info=info,
        sampling=sampling,
        num_beams=sampling.get("num_beams", 1),
        inputs=inputs,
        prompts=prompts,
        decoder_prompt=decoder_prompt,
        prediction=prediction,
        forced_tokens=target if gap is None else gap.infilling.marks.started,
        fills_context=shape is not None,
    )


def with_constraint(checked: CheckedPrompts, constraint: OutputConstraint) -> CheckedPrompts:
    """Add a constraint of the output; raises an `ApiError` for fields that have no meaning with it."""
    field, body, served = constraint.field, checked.body, checked.served
    if body.ignore_eos:
        message = f"ignore_eos has no meaning with {field}, which says where the output ends"
        raise invalid(message, "ignore_eos")
    if body.allowed_token_ids is not None:
        message = f"allowed_token_ids has no meaning with {field}, which says what is generated"
        raise invalid(message, "allowed_token_ids")
    if checked.num_beams > 1 and not (served.config.eos_token_ids or body.stop_token_ids):  # a beam must end
        message = f"num_beams needs an end-of-sequence id with {constraint.param}, and {served.name} has none"
        raise invalid(f"{message}; send num_beams: 1", "num_beams")
    return checked._replace(sampling={**checked.sampling, "grammar": constraint.grammar})


def _prompts(body: GenerateBody, language: int | None, most: int) -> list[PromptInput]:
    """Return the prompts, each with its path in the body."""
    value = body.prompt
    if isinstance(value, str) or isinstance(value[0], int):
        return [PromptInput(value, "prompt", language=language, most=most)]
    several = cast("list[str | list[int]]", value)
    return [PromptInput(one, f"prompt[{at}]", language=language, most=most) for at, one in enumerate(several)]


def sampling_fields(body: GenerateBody, served: ServedModel) -> dict[str, Any]:
    """Return fields of `SamplingParams` without lengths: the client's values, else the checkpoint's."""
    defaults = served.checkpoint.sampling_defaults
    check_beams(body, beams_of(defaults, body.num_beams, body.temperature))
    values = vars(body)
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name in _SENT
        if (value := values[name]) is not None and name not in _LENGTHS
    }
    if body.stop:
        served.require_tokenizer("stop")
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else given["stop"]
    if body.seed is None:
        given["seed"] = secrets.randbits(63)
    return over_defaults(defaults, given, 0)


def check_beams(body: GenerateBody, beams: int) -> None:
    """Raise an `ApiError` for a field that has no meaning with this number of beams."""
    if beams == 1:
        given = [name for name in _ONLY_WITH_BEAMS if _has_effect(body, name)]
        if given:
            raise invalid(f"{given[0]} has no meaning without beam search: num_beams is 1", given[0])
        return
    if body.n > beams:
        raise invalid(f"n ({body.n}) must be at most num_beams ({beams})", "n")
    given = [name for name in (*_NOT_WITH_BEAMS, "prediction") if _has_effect(body, name)]
    given += ["temperature"] if body.temperature else []
    if given:
        raise invalid(f"{given[0]} has no meaning with beam search; send num_beams: 1", given[0])


def _has_effect(body: GenerateBody, name: str) -> bool:
    """Return whether a field is given with another value than the one that turns it off: clients send defaults too."""
    value = getattr(body, name)
    neutral = _NEUTRAL.get(name)
    return value is not None and (tuple(value) if isinstance(value, list) else value) != neutral


def _check_limits(body: GenerateBody, limits: Limits) -> None:
    """Raise an `ApiError` for the first limit that `body` exceeds."""
    for column in _LIMITED:
        name, value = column.name, getattr(body, column.name)
        if not value:
            continue
        most = getattr(limits, column.row.limit)
        if isinstance(value, int) and value > most:
            raise invalid(f"{name} must be at most {most}", name)
        if isinstance(value, list | dict):
            _check_entries(name, value, most)
    if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
        _check_entries("prompt", body.prompt, limits.max_prompts)
    stop, most = body.stop or (), limits.max_stop_characters
    for index, text in enumerate([stop] if isinstance(stop, str) else stop):
        if len(text) > most:
            param = "stop" if isinstance(stop, str) else f"stop[{index}]"
            raise invalid(f"{param} must have at most {most} characters", param)


def _check_entries(name: str, value: Sequence[Any] | Mapping[Any, Any], most: int) -> None:
    if len(value) > most:
        raise invalid(f"{name} has {len(value)} entries, more than {most}", name)


def _check_tokens(body: GenerateBody, vocab_size: int) -> None:
    """Raise an `ApiError` for ids outside the vocabulary, or if no token may be generated."""
    for column in _TOKENS:
        value = getattr(body, column.name) or ()
        if max(value, default=0) >= vocab_size:
            at, token = next((at, token) for at, token in enumerate(value) if token >= vocab_size)
            place = f".{token}" if isinstance(value, dict) else f"[{at}]"
            raise outside_vocabulary(f"{column.name}{place}", vocab_size)
    if lacks_tokens(body.suppress_tokens, body.allowed_token_ids, vocab_size):
        raise invalid("suppress_tokens leaves no token that may be generated", "suppress_tokens")


def _with_prefix(prompts: list[PromptInput], body: GenerateBody, served: ServedModel) -> list[PromptInput]:
    """Put the prefix of `task` before the prompts; raises an `ApiError` for token ids if there is a prefix."""
    prefix = "" if body.task is None else served.checkpoint.tasks[body.task].prefix
    if not prefix:
        return prompts
    if any(not isinstance(prompt.value, str) for prompt in prompts):
        raise invalid(f"task: {body.task} puts {prefix!r} in front of texts; send no token ids", "task")
    return [prompt._replace(value=f"{prefix}{prompt.value}") for prompt in prompts]


def _decoder_prompt(body: GenerateBody, served: ServedModel, info: ModelInfo) -> PromptInput | None:
    if body.decoder_prompt is None:
        return None
    if not served.is_encoder_decoder:
        message = f"decoder_prompt is for encoder-decoder models; {served.name} is {served.config.form}"
        raise invalid(message, "decoder_prompt")
    return PromptInput(body.decoder_prompt, "decoder_prompt", special=False, most=info.max_model_len)


def source_language(body: GenerateBody, served: ServedModel) -> int | None:
    """Return the token of `source_language`, which is added to the sources; None if it is not given."""
    code = body.source_language
    if code is None:
        return None
    languages = served.require_tokenizer("source_language").source_languages
    if languages is None:
        raise invalid(f"source_language: model {served.name} does not mark the language of a source", "source_language")
    token = languages.token(code)
    if token is None:
        known = listed(languages.codes, most=_SHOWN)
        message = f"source_language: model {served.name} has no language {shorten(code)}; it has {known}"
        raise invalid(message, "source_language")
    if not isinstance(body.prompt, str) and not isinstance(body.prompt[0], str):
        raise invalid("source_language: token ids are taken as they are; send texts", "source_language")
    return token


def target_language(body: GenerateBody, served: ServedModel) -> tuple[int, ...]:
    """Return the token of `target_language`, with which the output starts; empty if it is not given."""
    code = body.target_language
    if code is None:
        return ()
    tokenizer = served.require_tokenizer("target_language")
    token = tokenizer.language_token(code)
    ends = {served.config.bos_token_id, served.config.pad_token_id, *served.config.eos_token_ids}
    if not served.is_encoder_decoder or token is None or token in ends:
        languages = tokenizer.source_languages
        known = "" if languages is None else f"; it has {listed(languages.codes, most=_SHOWN)}"
        raise invalid(f"target_language: model {served.name} has no such language token{known}", "target_language")
    return (token,)
