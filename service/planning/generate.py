"""A generation body becomes `Request`s that are known to be servable, or a refusal before any work.

For each prompt: characters bounded, tokenised, ids within the vocabulary, room in the context and in the KV pool.
An encoder-decoder's prompt is its source; its decoder starts from `decoder_start_token_id` and the ids of
`decoder_prompt`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, cast

from model.api.request import Request, SamplingParams
from model.api.sampling_bounds import GREEDY_BELOW
from model.api.source import token_source
from model.api.stats import ModelInfo
from model.errors import EngineGoneError, QueueFullError
from service.core.engine_client import EngineClient
from service.core.errors import ApiError, invalid, not_taken
from service.core.model_registry import Registry, ServedModel, Task
from service.core.request_context import current
from service.planning.body_limits import check_generate, check_logprobs, stop_texts
from service.planning.response_format import GrammarTrials, Structure, structure_of
from service.planning.tokenization import (
    TokenizerThreads,
    check_characters,
    check_vocabulary,
    outside_vocabulary,
)
from service.schemas.bodies import GenerateBody
from service.settings.service_settings import Limits

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

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Source:
    """One prompt or input as the client sent it, and the field it stood in."""

    value: str | list[int]
    param: str


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """What one body asks: a `Request` for each prompt, and how to show their outputs."""

    served: ServedModel
    requests: tuple[Request, ...]
    n: int
    return_token_ids: bool
    skip_special_tokens: bool
    echo: tuple[str, ...]  # the text that goes before each prompt's output; empty: nothing
    structure: Structure | None = None  # what each output must match

    @property
    def prompt_tokens(self) -> int:
        return sum(request.num_sent_tokens for request in self.requests)


def engine_id(request_id: str) -> str:
    """A request id for the engines, unique although clients may repeat theirs."""
    return f"{request_id}#{next(_numbers)}"


def sources(value: str | list[str] | list[int] | list[list[int]], param: str) -> list[Source]:
    """The prompts of a field, each with its place in it."""
    if isinstance(value, str):
        return [Source(value, param)]
    if isinstance(value[0], int):
        return [Source(value, param)]
    several = cast(list[str | list[int]], value)
    return [Source(one, f"{param}[{index}]") for index, one in enumerate(several)]


def check_room(client: EngineClient, served: ServedModel, sequences: int = 1) -> None:
    """Raise what handing work over would, so that nothing is rendered, tokenised or tried for a full engine."""
    context = current()
    if context is not None:
        context.model = served.name
    try:
        client.check_room(served.name, sequences)
    except (QueueFullError, EngineGoneError) as error:
        raise not_taken(error) from None


class GeneratePlanner:
    """Turns bodies into plans for the models that are loaded."""

    def __init__(
        self,
        registry: Registry,
        client: EngineClient,
        limits: Limits,
        threads: TokenizerThreads,
        grammars: GrammarTrials,
    ) -> None:
        self._registry = registry
        self._client = client
        self._limits = limits
        self._threads = threads
        self._grammars = grammars

    async def plan(self, body: GenerateBody, request_id: str, arrival: float) -> GeneratePlan:
        """Raises `ApiError` for whatever cannot be served."""
        served = self._registry.resolve(body.model, Task.GENERATE)
        info = self._client.models[served.name]
        check_generate(body, self._limits)
        structure = structure_of(body, self._limits)
        prompts = sources(body.prompt, "prompt")
        prefix = self._decoder_prompt(body, served)
        _check_ids(body, served.vocab_size)
        check_room(self._client, served, len(prompts) * max(body.n, num_beams(body, served)))
        ids = await self._tokenise(prompts, served, info)
        forced = await self._decoder_ids(prefix, _language(body, served), served, info)
        if structure is not None:
            _check_end(body, served, structure)
            await self._grammars.check(structure, served)
        grammar = "" if structure is None else structure.grammar
        requests = [
            self._request(body, served, prompt, prompt_ids, forced, engine_id(request_id), arrival, grammar)
            for prompt, prompt_ids in zip(prompts, ids, strict=True)
        ]
        check_logprobs(body, requests, self._limits)
        return GeneratePlan(
            served=served,
            requests=tuple(requests),
            n=body.n,
            return_token_ids=body.return_token_ids or served.tokenizer is None,
            skip_special_tokens=body.skip_special_tokens,
            echo=await self._echo(body, served, prompts, prefix),
            structure=structure,
        )

    def _request(
        self,
        body: GenerateBody,
        served: ServedModel,
        prompt: Source,
        ids: tuple[int, ...],
        forced: tuple[int, ...],
        name: str,
        arrival: float,
        grammar: str,
    ) -> Request:
        """One prompt's request, which fits the context and the KV pool."""
        info = self._client.models[served.name]
        start = len(forced) if served.is_encoder_decoder else len(ids)
        max_tokens = self._max_tokens(body, served, info, start, prompt.param)
        _check_fit(served, info, len(ids), start + max_tokens, num_beams(body, served), prompt.param)
        return Request(
            request_id=name,
            model=served.name,
            prompt_token_ids=forced if served.is_encoder_decoder else ids,
            params=replace(_sampling(body, served, max(1, max_tokens)), grammar=grammar),
            source=token_source(ids) if served.is_encoder_decoder else None,
            priority=body.priority,
            cache_salt=_salt(body.cache_salt),
            arrival_time=arrival,
            deadline=arrival + (body.timeout_s or self._limits.request_timeout_s),
            streams=bool(body.stream),
        )

    def _decoder_prompt(self, body: GenerateBody, served: ServedModel) -> Source | None:
        if body.decoder_prompt is None:
            return None
        if not served.is_encoder_decoder:
            message = f"decoder_prompt is for encoder-decoder models; {served.name} is {served.config.form}"
            raise invalid(message, "decoder_prompt")
        return Source(body.decoder_prompt, "decoder_prompt")

    async def _tokenise(
        self, prompts: list[Source], served: ServedModel, info: ModelInfo, *, special: bool = True
    ) -> list[tuple[int, ...]]:
        """The ids of each prompt, none empty, all within the vocabulary."""
        characters = 0
        for prompt in prompts:
            if isinstance(prompt.value, str):
                served.require_tokenizer(prompt.param)
                check_characters(
                    prompt.value, self._limits.prompt_characters_per_token * info.max_model_len, prompt.param
                )
                characters += len(prompt.value)

        def work() -> list[tuple[int, ...]]:
            return [_ids(prompt, served, special) for prompt in prompts]

        found = await self._threads.run(served.name, characters, work) if characters else work()
        for prompt, ids in zip(prompts, found, strict=True):
            if not ids:
                raise invalid(f"{prompt.param} is empty: it has no tokens", prompt.param, "empty_prompt")
            check_vocabulary(ids, served.vocab_size, prompt.param)
        return found

    async def _decoder_ids(
        self, prefix: Source | None, language: tuple[int, ...], served: ServedModel, info: ModelInfo
    ) -> tuple[int, ...]:
        """What the decoder of an encoder-decoder starts from; nothing for a decoder-only model."""
        start = served.config.decoder_start_token_id
        if not served.is_encoder_decoder or start is None:
            return ()
        if prefix is None:
            return (start, *language)
        [ids] = await self._tokenise([prefix], served, info, special=False)
        return (start, *language, *ids)

    def _max_tokens(self, body: GenerateBody, served: ServedModel, info: ModelInfo, start: int, param: str) -> int:
        """As asked, or the default cut to what the context leaves after `start` tokens.

        0, which only dialects ask for, wants no output: the engine makes a token all the same, and nothing after it.
        """
        room = info.max_model_len - start
        field = "decoder_prompt" if served.is_encoder_decoder else param
        if body.max_tokens is None:
            if room < 1:
                raise _too_long(start, 1, info.max_model_len, field)
            default = _default_max_tokens(served, start, self._limits.default_max_tokens)
            return max(1, min(default, room, _pool_room(served, info, start) or room))
        if body.max_tokens > room:
            raise _too_long(start, body.max_tokens, info.max_model_len, field if room < 1 else "max_tokens")
        return body.max_tokens

    async def _echo(
        self, body: GenerateBody, served: ServedModel, prompts: list[Source], prefix: Source | None
    ) -> tuple[str, ...]:
        if not body.echo:
            return ()
        if not served.is_encoder_decoder:
            return tuple([await self._text(prompt, body, served) for prompt in prompts])
        return (await self._text(prefix, body, served),) * len(prompts) if prefix is not None else ()

    async def _text(self, source: Source, body: GenerateBody, served: ServedModel) -> str:
        """What was sent, as text; ids have none where there is no tokenizer."""
        if isinstance(source.value, str):
            return source.value
        if served.tokenizer is None:
            return ""
        skip = body.skip_special_tokens
        return await self._threads.decoded(served.tokenizer, source.value, skip_special_tokens=skip)


def _default_max_tokens(served: ServedModel, start: int, otherwise: int) -> int:
    """By the checkpoint: `max_new_tokens`, or what its `max_length` leaves after `start` tokens."""
    defaults = served.checkpoint.sampling_defaults
    if "max_tokens" in defaults:
        return int(defaults["max_tokens"])
    return int(defaults["max_length"]) - start if "max_length" in defaults else otherwise


def _language(body: GenerateBody, served: ServedModel) -> tuple[int, ...]:
    """The token that `target_language` names, which the decoder then starts with."""
    code = body.target_language
    if code is None:
        return ()
    tokenizer = served.require_tokenizer("target_language")
    token = next((t for form in (code, f"__{code}__") if (t := tokenizer.special_token_id(form)) is not None), None)
    ends = {served.config.bos_token_id, served.config.pad_token_id, *served.config.eos_token_ids}
    if not served.is_encoder_decoder or token is None or token in ends:
        raise invalid(f"target_language: model {served.name} has no such language token", "target_language")
    return (token,)


def _pool_room(served: ServedModel, info: ModelInfo, start: int) -> int:
    """Tokens by which a decoder-only sequence of `start` may grow in an empty KV pool; 0: none or unknown."""
    return 0 if served.is_encoder_decoder else max(0, info.num_blocks * info.block_size - start)


def _ids(prompt: Source, served: ServedModel, special: bool) -> tuple[int, ...]:
    if isinstance(prompt.value, str):
        return served.require_tokenizer(prompt.param).encode(prompt.value, add_special_tokens=special).ids
    return tuple(prompt.value)


def _check_ids(body: GenerateBody, vocab_size: int) -> None:
    check_vocabulary(body.stop_token_ids, vocab_size, "stop_token_ids")
    for token in body.logit_bias:
        if token >= vocab_size:
            raise outside_vocabulary(f"logit_bias.{token}", vocab_size)


def _check_fit(served: ServedModel, info: ModelInfo, prompt_tokens: int, length: int, beams: int, param: str) -> None:
    """A source fits one step and the context; `beams` sequences of `length` fit an empty KV pool."""
    blocks = info.blocks_for(beams, length, source=prompt_tokens if served.is_encoder_decoder else 0)
    if served.is_encoder_decoder:
        bound = min(info.max_model_len, info.max_num_batched_tokens)
        if prompt_tokens > bound:
            message = f"{param} has {prompt_tokens} tokens, more than the {bound} that the encoder takes at once"
            raise invalid(message, param, "context_length_exceeded")
    if beams > info.max_num_seqs:
        raise invalid(f"num_beams must be at most {info.max_num_seqs}, the sequences of a step", "num_beams")
    if blocks > info.num_blocks:
        message = (
            f"{param}, max_tokens and num_beams need {blocks * info.block_size} tokens of KV cache, "
            f"the whole of it holds {info.num_blocks * info.block_size}"
        )
        raise invalid(message, param, "kv_cache_exceeded")


def _too_long(start: int, max_tokens: int, max_model_len: int, param: str) -> ApiError:
    total = start + max_tokens
    message = f"{start} prompt tokens + {max_tokens} max_tokens = {total}, more than max_model_len {max_model_len}"
    return invalid(message, param, "context_length_exceeded")


_BEAM_FIELDS = ("num_beams", "length_penalty", "early_stopping")
_NOT_WITH_BEAMS = ("top_k", "top_p", "min_p", "typical_p", "seed", "stop", "logprobs", "prompt_logprobs")


def _salt(asked: str | None) -> str:
    """Who may share computed prefixes: those of one key and one `cache_salt`."""
    context = current()
    return f"{context.tenant if context is not None else ''}/{asked or ''}"


def num_beams(body: GenerateBody, served: ServedModel) -> int:
    """As asked, or the checkpoint's own, which a client that samples does not mean."""
    if body.num_beams is not None:
        return body.num_beams
    return 1 if body.temperature else int(served.checkpoint.sampling_defaults.get("num_beams", 1))


def _beams(body: GenerateBody, served: ServedModel) -> dict[str, Any]:
    """The settings of beam search; refuses what has no meaning with it, or without it."""
    beams = num_beams(body, served)
    if beams == 1:
        for name in _BEAM_FIELDS[1:]:
            if getattr(body, name) is not None:
                raise invalid(f"{name} has no meaning without beam search: num_beams is 1", name)
        return {}
    if body.n > beams:
        raise invalid(f"n ({body.n}) must be at most num_beams ({beams})", "n")
    given = [name for name in _NOT_WITH_BEAMS if getattr(body, name) is not None]
    given += ["temperature"] if body.temperature else []
    if given:
        raise invalid(f"{given[0]} has no meaning with beam search; send num_beams: 1", given[0])
    defaults = served.checkpoint.sampling_defaults
    chosen = {name: defaults[name] for name in _BEAM_FIELDS if name in defaults}
    chosen |= {name: value for name in _BEAM_FIELDS if (value := getattr(body, name)) is not None}
    return {**chosen, "num_beams": beams}


def _check_end(body: GenerateBody, served: ServedModel, structure: Structure) -> None:
    """A beam ends with a token; one that is none of the text."""
    if num_beams(body, served) > 1 and not (served.config.eos_token_ids or body.stop_token_ids):
        message = f"num_beams needs an end-of-sequence id with {structure.param}, and {served.name} has none"
        raise invalid(f"{message}; send num_beams: 1", "num_beams")


def _sampling(body: GenerateBody, served: ServedModel, max_tokens: int) -> SamplingParams:
    """The client's choices over the checkpoint's defaults over greedy."""
    chosen = {name: served.checkpoint.sampling_defaults.get(name) for name in _SAMPLING_FIELDS}
    chosen |= {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    sampling = {name: value for name, value in chosen.items() if value is not None}
    if sampling.get("temperature", 0.0) < GREEDY_BELOW:
        sampling["temperature"] = 0.0
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
        stop=_stop(body, served),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop=body.include_stop,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        **sampling,
        **_beams(body, served),
    )


def _stop(body: GenerateBody, served: ServedModel) -> tuple[str, ...]:
    stop = stop_texts(body)
    if stop:
        served.require_tokenizer("stop")
    return tuple(stop)
