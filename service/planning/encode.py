"""Planning of /encode: a body becomes `EncodeRequest`s that can be served, or is refused before any work.

An input must fit one engine step (its attention is bidirectional, so it is never split), the model's context, and the
length that the checkpoint was trained for. A longer input is refused or, if the client allows it, truncated. Only the
size of the body limits a text that may be truncated.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace

from model.api.request import EncodeRequest, EncodeTask, Pooling
from model.api.source import Source, image_source, token_source
from model.api.stats import ModelInfo
from model.media.images import ImageError, ImageProcessing
from model.text.tokenizer import Encoded
from service.core.engine_client import EngineClient
from service.core.errors import invalid, too_large
from service.core.model_registry import Registry, ServedModel, Task
from service.planning.body_limits import check_encode, encode_too_large
from service.planning.generate import check_room, engine_id
from service.planning.tokenization import (
    Side,
    TokenizerThreads,
    check_characters,
    check_vocabulary,
    truncate_ids,
    truncate_text,
)
from service.schemas.bodies import EncodeBody
from service.schemas.types import ImageFile, TextPair
from service.settings.service_settings import Limits


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Holds an `EncodeRequest` for each input of a body, and which inputs were truncated."""

    served: ServedModel
    requests: tuple[EncodeRequest, ...]
    truncated: tuple[bool, ...]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all texts, or of patches of all images."""
        return sum(request.source.num_positions for request in self.requests)


@dataclass(frozen=True, slots=True)
class _Input:
    """Holds one input as sent: texts, ids or an image file."""

    param: str
    text: str = ""
    pair: str | None = None
    ids: tuple[int, ...] | None = None
    image: str | None = None  # base64

    @property
    def characters(self) -> int:
        return len(self.text) + len(self.pair or "")


class EncodePlanner:
    """Makes plans of bodies, for the loaded models."""

    def __init__(self, registry: Registry, client: EngineClient, limits: Limits, threads: TokenizerThreads) -> None:
        self._registry = registry
        self._client = client
        self._limits = limits
        self._threads = threads

    async def plan(self, body: EncodeBody, request_id: str, arrival: float) -> EncodePlan:
        """Return the plan of a body; raises `ApiError` for a body that cannot be served."""
        served = self._registry.resolve(body.model, Task.ENCODE)
        info = self._client.models[served.name]
        check_encode(body, self._limits)
        _check_output(body, served, info)
        inputs = _inputs(body)
        prompt = _prompt(inputs, body, served)
        check_room(self._client, served, len(inputs))
        if served.config.image is not None:
            return await self._plan_images(body, served, inputs, request_id, arrival)
        inputs = [_with_prompt(one, served, prompt) for one in inputs]
        self._check_inputs(inputs, served, info, may_cut=body.truncate is not False)
        limit = _token_limit(served, info)
        encoded, truncated = await self._fit(inputs, served, limit, body.truncate or None)
        tokens = sum(len(one.ids) for one in encoded)
        if tokens > self._limits.max_encode_tokens:
            raise encode_too_large(tokens, self._limits.max_encode_tokens)
        types = served.token_types > 1
        skipped = 0
        if prompt:
            skipped = served.checkpoint.sentences.unpooled_tokens(served.require_tokenizer("prompt_name"), prompt)
        requests = tuple(
            self._request(
                body,
                served,
                token_source(one.ids, one.type_ids if types else ()),
                engine_id(request_id),
                arrival,
                min(skipped, len(one.ids) - 1) if sent.ids is None else 0,
            )
            for sent, one in zip(inputs, encoded, strict=True)
        )
        return EncodePlan(served, requests, truncated)

    async def _plan_images(
        self, body: EncodeBody, served: ServedModel, inputs: Sequence[_Input], request_id: str, arrival: float
    ) -> EncodePlan:
        image, processing = served.config.image, served.checkpoint.images
        assert image is not None and processing is not None
        if image.num_tokens * len(inputs) > self._limits.max_encode_tokens:
            raise encode_too_large(image.num_tokens * len(inputs), self._limits.max_encode_tokens)
        shape = (image.channels, image.size, image.size)

        def work() -> list[Source]:
            return [image_source(_pixels(one, served, processing), shape, image.num_tokens) for one in inputs]

        found = await self._threads.run_in_thread(work)
        requests = tuple(self._request(body, served, one, engine_id(request_id), arrival) for one in found)
        return EncodePlan(served, requests, (False,) * len(requests))

    def _request(
        self,
        body: EncodeBody,
        served: ServedModel,
        source: Source,
        name: str,
        arrival: float,
        prompt_tokens: int = 0,
    ) -> EncodeRequest:
        return EncodeRequest(
            request_id=name,
            model=served.name,
            source=source,
            task=EncodeTask(body.output),
            pooling=None if body.pooling == "default" else Pooling(body.pooling),
            prompt_tokens=prompt_tokens,
            normalize=body.normalize,
            dimensions=body.dimensions,
            arrival_time=arrival,
            deadline=arrival + (body.timeout_s or self._limits.request_timeout_s),
        )

    def _check_inputs(self, inputs: Sequence[_Input], served: ServedModel, info: ModelInfo, may_cut: bool) -> None:
        per_token = self._limits.prompt_characters_per_token
        characters = 0
        for one in inputs:
            if one.image is not None:
                raise invalid(f"{one.param}: model {served.name} reads text, not images", one.param)
            if one.ids is not None:
                continue
            served.require_tokenizer(one.param)
            if one.pair is not None and served.config.encoder is None:
                raise invalid(f"{one.param}.text_pair: model {served.name} reads one text", f"{one.param}.text_pair")
            if not may_cut:
                check_characters(one.text + (one.pair or ""), per_token * info.max_model_len, one.param)
            characters += one.characters
        bound = per_token * self._limits.max_encode_tokens
        if characters > bound and not may_cut:
            raise too_large(f"input has {characters} characters in all, more than {bound}", "input", "too_many_tokens")

    async def _fit(
        self, inputs: Sequence[_Input], served: ServedModel, limit: int, side: Side | None
    ) -> tuple[list[Encoded], tuple[bool, ...]]:
        """Tokenise each input, truncate it to `limit` tokens, and return which inputs were truncated."""

        def work() -> list[tuple[Encoded, bool]]:
            return [_fit_one(one, served, limit, side) for one in inputs]

        characters = sum(one.characters for one in inputs)
        found = await self._threads.run(served.name, characters, work) if characters else work()
        return [encoded for encoded, _ in found], tuple(cut for _, cut in found)


def _prompt(inputs: Sequence[_Input], body: EncodeBody, served: ServedModel) -> str:
    """Return the prompt in front of the texts, empty for none; raises a 400 for one that does not apply."""
    sentences, name = served.checkpoint.sentences, body.prompt_name
    if name is not None and name not in sentences.prompts:
        known = ", ".join(sorted(sentences.prompts)) or "none"
        raise invalid(f"prompt_name: model {served.name} has no prompt {name!r}; it has {known}", "prompt_name")
    if name is not None and (body.output == "logits" or any(one.pair is not None or one.ids for one in inputs)):
        raise invalid("prompt_name: only vectors of single texts have prompts", "prompt_name")
    prompt = "" if body.output == "logits" else sentences.prompt(name)
    if prompt and body.truncate == "left" and not any(one.ids for one in inputs):
        raise invalid("truncate: a prompt stands at the left end; found 'left', expected 'right'", "truncate")
    return prompt


def _with_prompt(one: _Input, served: ServedModel, prompt: str) -> _Input:
    prepare = served.checkpoint.sentences.prepare
    if one.ids is not None or one.image is not None:
        return one
    if one.pair is not None:
        return replace(one, text=prepare(one.text), pair=prepare(one.pair))
    return replace(one, text=prepare(one.text, prompt))


def _inputs(body: EncodeBody) -> list[_Input]:
    value = body.input
    if isinstance(value, str):
        return [_Input("input", text=value)]
    if isinstance(value[0], int):
        return [_input(value, "input")]
    return [_input(one, f"input[{index}]") for index, one in enumerate(value)]


def _input(one: object, param: str) -> _Input:
    if isinstance(one, ImageFile):
        return _Input(param, image=one.image)
    if isinstance(one, TextPair):
        return _Input(param, text=one.text, pair=one.text_pair)
    if isinstance(one, str):
        return _Input(param, text=one)
    return _Input(param, ids=tuple(one))  # type: ignore[arg-type]


def _pixels(one: _Input, served: ServedModel, processing: ImageProcessing) -> bytes:
    """Decode and resize an image file as the model needs; raises a 400 that names the input."""
    if one.image is None:
        raise invalid(f'{one.param}: model {served.name} reads images: send [{{"image": base64}}]', one.param)
    param = f"{one.param}.image"
    try:
        return processing.prepare(base64.b64decode(one.image, validate=True))
    except ImageError as error:
        raise invalid(f"{param}: {error}", param, "invalid_image") from None
    except ValueError:
        raise invalid(f"{param} is not base64", param, "invalid_image") from None


def _fit_one(one: _Input, served: ServedModel, limit: int, side: Side | None) -> tuple[Encoded, bool]:
    encoded = _encode(one, served)
    if not encoded.ids:
        raise invalid(f"{one.param} is empty: it has no tokens", one.param, "empty_prompt")
    check_vocabulary(encoded.ids, served.vocab_size, one.param)
    if len(encoded.ids) <= limit:
        return encoded, False
    if side is None:
        message = f"{one.param} has {len(encoded.ids)} tokens, more than the {limit} that model {served.name} takes"
        raise invalid(message, one.param, "context_length_exceeded")
    if one.ids is not None:
        return Encoded(truncate_ids(one.ids, limit, side), ()), True
    return truncate_text(served.require_tokenizer(one.param), one.text, one.pair, encoded, limit, side), True


def _encode(one: _Input, served: ServedModel) -> Encoded:
    if one.ids is not None:
        return Encoded(one.ids, ())
    return served.require_tokenizer(one.param).encode(one.text, one.pair)


def _token_limit(served: ServedModel, info: ModelInfo) -> int:
    made_for = served.checkpoint.sentences.max_tokens
    bounds = [info.max_model_len, info.max_num_batched_tokens]
    return min(bounds if made_for is None else [*bounds, made_for])


def _check_output(body: EncodeBody, served: ServedModel, info: ModelInfo) -> None:
    if body.pooling == "pooler" and not served.config.pooler:
        raise invalid(f"pooling: model {served.name} has no pooler", "pooling")
    if body.output == "logits" and served.config.classifier is None:
        raise invalid(f"output: model {served.name} has no classifier", "output")
    own = body.output == "embedding" and body.pooling == "default"
    size = info.embedding_size if own else served.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(f"dimensions must be at most {size}", "dimensions")
