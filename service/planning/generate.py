"""Planning of /generate: a body becomes `Request`s that can be served, or is refused before any work.

Of each prompt the number of characters is checked, then it is tokenised, its ids are checked against the vocabulary,
and its length against the context and the KV cache. An encoder-decoder's prompt is its source; its decoder starts with
`decoder_start_token_id` and the ids of `decoder_prompt`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

from model.api.request import Request
from model.api.source import token_source
from model.api.stats import ModelInfo
from model.errors import ModelNotLoadedError, TooManyTokensError
from service.core.context_bound import ContextBound, context_exceeded
from service.core.engine_client import EngineClient
from service.core.errors import REFUSALS, engine_refusal, invalid
from service.core.models import Models, ServedModel, Task
from service.core.request_context import current
from service.planning.body_limits import check_generate, check_logprobs, num_inputs
from service.planning.languages import source_language, target_language
from service.planning.output_limit import OutputLimit
from service.planning.response_format import GrammarChecker, OutputConstraint, constraint_of, has_constraint
from service.planning.sampling import num_beams, sampling_params
from service.planning.tokenization import (
    TokenizerThreads,
    check_vocabulary,
    outside_vocabulary,
)
from service.schemas.bodies import GenerateBody
from service.settings.service_settings import Limits

_numbers = count(1)
_PREDICTED = 4  # characters of a prediction for each token of the context; what follows is not read


@dataclass(frozen=True, slots=True)
class PromptInput:
    """Holds one prompt as the client sent it, and the name of its field."""

    value: str | list[int]
    param: str


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """Says what a dialect wants of its output that a native body cannot say.

    Without `max_tokens` the output goes on until the model ends it or the context is full.
    """

    constrain: Callable[[OutputConstraint | None], OutputConstraint | None] | None = (
        None  # of the body's own constraint
    )
    shown_special_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def put_on(self, request: Request) -> Request:
        """Return the request with the tokens that are shown and that end its output."""
        params = request.params
        stop = tuple(dict.fromkeys((*params.stop_token_ids, *self.stop_token_ids)))
        shown = self.shown_special_ids if params.skip_special_tokens else ()
        return replace(request, params=replace(params, stop_token_ids=stop, shown_special_ids=shown))


@dataclass(frozen=True, slots=True)
class GeneratePlan:
    """Holds a `Request` for each prompt of a body, and how to present their outputs."""

    served: ServedModel
    requests: tuple[Request, ...]
    n: int
    return_token_ids: bool
    skip_special_tokens: bool
    echo: tuple[str, ...]  # the text before each prompt's output; empty: none
    constraint: OutputConstraint | None = None  # what each output must match

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        return sum(request.num_sent_tokens for request in self.requests)


def engine_id(request_id: str) -> str:
    """Return a request id for the engines that is unique, even if clients repeat theirs."""
    return f"{request_id}#{next(_numbers)}"


def public_id(engine_request: str) -> str:
    """Return the client's id of a request for the engines."""
    return engine_request.rpartition("#")[0]


def prompt_inputs(value: str | list[str] | list[int] | list[list[int]], param: str) -> list[PromptInput]:
    """Return the prompts of a field, each with the name of its place in it."""
    if isinstance(value, str):
        return [PromptInput(value, param)]
    if isinstance(value[0], int):
        return [PromptInput(value, param)]
    several = cast(list[str | list[int]], value)
    return [PromptInput(one, f"{param}[{index}]") for index, one in enumerate(several)]


def check_room(client: EngineClient, served: ServedModel, sequences: int = 1) -> None:
    """Raise the error of a full or failed engine before a request is rendered, tokenised or compiled for it."""
    context = current()
    if context is not None:
        context.model = served.name
    try:
        client.check_room(served.name, sequences)
    except REFUSALS as error:
        raise engine_refusal(error) from None


def loaded_info(client: EngineClient, served: ServedModel) -> ModelInfo:
    """Return what the engine knows of a model; raises a 503 if it has been unloaded meanwhile."""
    info = client.models.get(served.name)
    if info is None:
        raise engine_refusal(ModelNotLoadedError(served.name))
    return info


class GeneratePlanner:
    """Makes plans of bodies, for the loaded models."""

    def __init__(
        self,
        models: Models,
        client: EngineClient,
        limits: Limits,
        threads: TokenizerThreads,
        grammars: GrammarChecker,
    ) -> None:
        self._models = models
        self._client = client
        self._limits = limits
        self._threads = threads
        self._grammars = grammars

    async def _constraint(self, body: GenerateBody, shape: ReplyShape | None) -> OutputConstraint | None:
        """Return what the output must match. Schemas are translated in a thread, since large ones take long."""

        def found() -> OutputConstraint | None:
            own = constraint_of(body, self._limits)
            return own if constrain is None else constrain(own)

        constrain = None if shape is None else shape.constrain
        return await asyncio.to_thread(found) if constrain is not None or has_constraint(body) else None

    async def plan(
        self, body: GenerateBody, request_id: str, arrival: float, shape: ReplyShape | None = None
    ) -> GeneratePlan:
        """Return the plan of a body; raises `ApiError` for a body that cannot be served."""
        served = self._models.resolve(body.model, Task.GENERATE).for_task(body.task)
        if served.config.audio is not None:
            message = f"prompt: model {served.name} transcribes speech: send a file as audio, in base64"
            raise invalid(message, "prompt", "wrong_task")
        info = loaded_info(self._client, served)
        check_generate(body, self._limits)
        limit = OutputLimit.of(body, num_inputs(body.prompt), self._limits, fills_context=shape is not None)
        constraint = await self._constraint(body, shape)
        if constraint is not None and body.ignore_eos:
            message = f"ignore_eos has no meaning with {constraint.field}, which says where the output ends"
            raise invalid(message, "ignore_eos")
        if constraint is not None and body.allowed_token_ids is not None:
            message = f"allowed_token_ids has no meaning with {constraint.field}, which says what is generated"
            raise invalid(message, "allowed_token_ids")
        prompts = _with_prefix(prompt_inputs(body.prompt, "prompt"), body, served)
        prefix = self._decoder_prompt(body, served)
        _check_ids(body, served.vocab_size)
        check_room(self._client, served, len(prompts) * max(body.n, num_beams(body, served)))
        ids = await self._tokenise(prompts, served, info, limit, language=source_language(body, served))
        forced = await self._decoder_ids(prefix, target_language(body, served), served, info, limit)
        if constraint is not None:
            _check_end(body, served, constraint)
            await self._grammars.check(constraint, served)
        grammar = "" if constraint is None else constraint.grammar
        prediction = await self._prediction(body, served, info)
        requests = [
            self._request(
                body, served, info, prompt, prompt_ids, forced, engine_id(request_id), arrival, grammar, limit
            )
            for prompt, prompt_ids in zip(prompts, ids, strict=True)
        ]
        if prediction:
            requests = [replace(request, prediction=prediction) for request in requests]
        if shape is not None:
            requests = [shape.put_on(request) for request in requests]
        check_logprobs(body, requests, self._limits)
        return GeneratePlan(
            served=served,
            requests=tuple(requests),
            n=body.n,
            return_token_ids=body.return_token_ids or served.tokenizer is None,
            skip_special_tokens=body.skip_special_tokens,
            echo=await self._echo(body, served, prompts, prefix),
            constraint=constraint,
        )

    def _request(
        self,
        body: GenerateBody,
        served: ServedModel,
        info: ModelInfo,
        prompt: PromptInput,
        ids: tuple[int, ...],
        forced: tuple[int, ...],
        name: str,
        arrival: float,
        grammar: str,
        limit: OutputLimit,
    ) -> Request:
        """Return the request of one prompt, checked to fit the context and the KV cache."""
        start = len(forced) if served.is_encoder_decoder else len(ids)
        max_tokens = limit.tokens(served, info, start, prompt.param)
        length, beams = start + max_tokens, num_beams(body, served)
        if body.num_beams is None:  # the folder's
            beams = info.most_beams(beams, length, source=len(ids) if served.is_encoder_decoder else 0)
        _check_fit(served, info, len(ids), length, beams, prompt.param)
        return Request(
            request_id=name,
            model=served.name,
            prompt_token_ids=forced if served.is_encoder_decoder else ids,
            params=sampling_params(body, served, start, max(1, max_tokens), grammar, beams),
            source=token_source(ids) if served.is_encoder_decoder else None,
            priority=body.priority,
            cache_salt=cache_salt(body.cache_salt),
            arrival_time=arrival,
            deadline=arrival + (body.timeout_s or self._limits.request_timeout_s),
            streams=bool(body.stream),
        )

    def _decoder_prompt(self, body: GenerateBody, served: ServedModel) -> PromptInput | None:
        if body.decoder_prompt is None:
            return None
        if not served.is_encoder_decoder:
            message = f"decoder_prompt is for encoder-decoder models; {served.name} is {served.config.form}"
            raise invalid(message, "decoder_prompt")
        return PromptInput(body.decoder_prompt, "decoder_prompt")

    async def _tokenise(
        self,
        prompts: list[PromptInput],
        served: ServedModel,
        info: ModelInfo,
        limit: OutputLimit | None,
        *,
        special: bool = True,
        language: int | None = None,
    ) -> list[tuple[int, ...]]:
        """Return the ids of each prompt, checked to be not empty and within the vocabulary.

        With `limit` a text that leaves no room in the context is refused before its ids are made.
        `language` is the token of the texts' language, None for the folder's.
        """
        characters = 0
        for prompt in prompts:
            if isinstance(prompt.value, str):
                served.require_tokenizer(prompt.param)
                bound = ContextBound(info.max_model_len, self._limits.prompt_characters_per_token)
                bound.check(prompt.value, prompt.param)
                characters += len(prompt.value)

        def work() -> list[tuple[int, ...]]:
            return [_ids(prompt, served, info, limit, special, language) for prompt in prompts]

        return await self._threads.run(served.name, characters, work) if characters else work()

    async def _prediction(self, body: GenerateBody, served: ServedModel, info: ModelInfo) -> tuple[int, ...]:
        """Return the ids of what the output is expected to repeat; only the beginning of a long text is read."""
        if not body.prediction:
            return ()
        read = PromptInput(body.prediction[: _PREDICTED * info.max_model_len], "prediction")
        [ids] = await self._tokenise([read], served, info, None, special=False)
        return ids[: info.max_model_len]

    async def _decoder_ids(
        self,
        prefix: PromptInput | None,
        language: tuple[int, ...],
        served: ServedModel,
        info: ModelInfo,
        limit: OutputLimit,
    ) -> tuple[int, ...]:
        """Return the ids that the decoder of an encoder-decoder starts with; none for a decoder-only model."""
        start = served.config.decoder_start_token_id
        if not served.is_encoder_decoder or start is None:
            return ()
        if prefix is None:
            return (start, *language)
        [ids] = await self._tokenise([prefix], served, info, limit, special=False)
        return (start, *language, *ids)

    async def _echo(
        self, body: GenerateBody, served: ServedModel, prompts: list[PromptInput], prefix: PromptInput | None
    ) -> tuple[str, ...]:
        if not body.echo:
            return ()
        if not served.is_encoder_decoder:
            return tuple([await self._text(prompt, body, served) for prompt in prompts])
        return (await self._text(prefix, body, served),) * len(prompts) if prefix is not None else ()

    async def _text(self, source: PromptInput, body: GenerateBody, served: ServedModel) -> str:
        """Return the text of a prompt; ids without a tokenizer have none."""
        if isinstance(source.value, str):
            return source.value
        if served.tokenizer is None:
            return ""
        skip = body.skip_special_tokens
        return await self._threads.decode(served.tokenizer, source.value, skip_special_tokens=skip)


def _with_prefix(prompts: list[PromptInput], body: GenerateBody, served: ServedModel) -> list[PromptInput]:
    """Return the prompts behind the prefix of `task`; refuses token ids where it has one."""
    prefix = "" if body.task is None else served.checkpoint.tasks[body.task].prefix
    if not prefix:
        return prompts
    if any(not isinstance(prompt.value, str) for prompt in prompts):
        raise invalid(f"task: {body.task} puts {prefix!r} in front of texts; send no token ids", "task")
    return [replace(prompt, value=f"{prefix}{prompt.value}") for prompt in prompts]


def _ids(
    prompt: PromptInput,
    served: ServedModel,
    info: ModelInfo,
    limit: OutputLimit | None,
    special: bool,
    language: int | None,
) -> tuple[int, ...]:
    """Return the ids of a prompt; raises a 400 for one that is empty, too long, or outside the vocabulary."""
    if isinstance(prompt.value, str):
        tokenizer = served.require_tokenizer(prompt.param)
        most = None if limit is None else info.max_model_len
        try:
            ids = tokenizer.encode(prompt.value, add_special_tokens=special, most=most).ids
        except TooManyTokensError as error:
            assert limit is not None
            _check_source(served, info, error.count, prompt.param)
            limit.tokens(served, info, error.count, prompt.param)
            raise
        languages = tokenizer.source_languages
        ids = ids if language is None or languages is None else languages.mark(ids, language)
    else:
        ids = tuple(prompt.value)
    if not ids:
        raise invalid(f"{prompt.param} is empty: it has no tokens", prompt.param, "empty_prompt")
    check_vocabulary(ids, served.source_vocab_size, prompt.param)
    return ids


def _check_ids(body: GenerateBody, vocab_size: int) -> None:
    check_vocabulary(body.stop_token_ids, vocab_size, "stop_token_ids")
    for token in body.logit_bias:
        if token >= vocab_size:
            raise outside_vocabulary(f"logit_bias.{token}", vocab_size)
    allowed = body.allowed_token_ids
    check_vocabulary(allowed or (), vocab_size, "allowed_token_ids")
    check_vocabulary(body.suppress_tokens, vocab_size, "suppress_tokens")
    suppressed = set(body.suppress_tokens)
    if len(suppressed) >= vocab_size or (allowed is not None and suppressed.issuperset(allowed)):
        raise invalid("suppress_tokens leaves no token that may be generated", "suppress_tokens")


def _check_fit(served: ServedModel, info: ModelInfo, prompt_tokens: int, length: int, beams: int, param: str) -> None:
    """Check that a source fits one step and the context, and `beams` sequences of `length` an empty KV cache."""
    shortage = info.shortage(beams, length, source=prompt_tokens if served.is_encoder_decoder else 0)
    _check_source(served, info, prompt_tokens, param)
    if beams > info.max_num_seqs:
        raise invalid(f"num_beams must be at most {info.max_num_seqs}, the maximum batch size", "num_beams")
    if shortage is not None:
        needed, there = (blocks * info.block_size for blocks in shortage)
        message = f"{param}, max_tokens and num_beams need {needed} tokens of KV cache, which holds {there}"
        raise invalid(message, param, "kv_cache_exceeded")


def _check_source(served: ServedModel, info: ModelInfo, tokens: int, param: str) -> None:
    """Refuse a source of an encoder-decoder that does not fit one step."""
    bound = min(info.max_model_len, info.max_num_batched_tokens)
    if served.is_encoder_decoder and tokens > bound:
        raise context_exceeded(bound, f"{param} has {tokens}, which the encoder reads in one step", param)


def cache_salt(requested: str | None) -> str:
    """Return the prefix cache's salt: only requests of one API key and one `cache_salt` share prefixes."""
    context = current()
    return f"{context.tenant if context is not None else ''}/{requested or ''}"


def _check_end(body: GenerateBody, served: ServedModel, constraint: OutputConstraint) -> None:
    """Refuse beam search with a grammar for a model without an end-of-sequence id, since a beam must end with one."""
    if num_beams(body, served) > 1 and not (served.config.eos_token_ids or body.stop_token_ids):
        message = f"num_beams needs an end-of-sequence id with {constraint.param}, and {served.name} has none"
        raise invalid(f"{message}; send num_beams: 1", "num_beams")
