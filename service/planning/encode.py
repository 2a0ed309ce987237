"""Planning of /encode: a body becomes `EncodeRequest`s that can be served, or is refused before any work.

An input must fit one engine step (its attention is bidirectional, so it is never split), the model's context, and the
length that the checkpoint was trained for. A longer input is refused or, if the client allows it, truncated; outputs
with places in the text divide it into windows. Only the size of the body limits a text that may be truncated. What each
output needs and reads is in `service.planning.outputs`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from model.api.request import EncodeOutput, EncodeRequest, Pooling
from model.api.source import image_source, token_source
from model.api.stats import ModelInfo
from model.errors import TooManyTokensError
from model.media.images import ImageError
from model.text.tokenizer import Encoded, Located
from service.core.context_bound import ContextBound, context_exceeded
from service.core.engine_client import EngineClient
from service.core.errors import invalid, shorten, too_large, unavailable
from service.core.models import Models, ServedModel, Task
from service.planning.admission import check_room, loaded_info
from service.planning.body_limits import EncodeBounds, check_encode, encode_bounds
from service.planning.outputs.base import EncodeInput, Found, Json, Output, Part, inputs_of
from service.planning.outputs.registry import OUTPUTS, output_of
from service.planning.requests import engine_id
from service.planning.tokenization import (
    Side,
    TokenizerThreads,
    check_vocabulary,
    truncate_ids,
    truncate_text,
)
from service.sandbox.pools import ImagePool, RequestImages
from service.sandbox.process_pool import WorkerError
from service.schemas.encode_bodies import EncodeBody
from service.settings.service_settings import Limits

_INLINE_IDS = 4_096  # more token ids are checked in a thread
_DEFAULT_STRIDE = 128  # tokens that two windows of a long text have in common


class _Reading(msgspec.Struct, frozen=True):
    """What one input of the engine is made of: the input's index, its text as the engine reads it, its tokens."""

    owner: int
    sent: EncodeInput
    encoded: Encoded
    cut: bool = False


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """Holds the `EncodeRequest`s of a body, and how their outputs become an item for each of its inputs."""

    served: ServedModel
    body: EncodeBody
    output: Output
    inputs: tuple[EncodeInput, ...]
    readings: tuple[_Reading, ...]
    requests: tuple[EncodeRequest, ...]  # one for each reading

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all texts, or of patches of all images."""
        return sum(request.source.num_positions for request in self.requests)

    def items(self, outputs: Sequence[EncodeOutput]) -> list[Json]:
        """Return the item of each input; every request must have its output."""
        parts: list[list[Part]] = [[] for _ in self.inputs]
        cut = [False] * len(self.inputs)
        for reading, output in zip(self.readings, outputs, strict=True):
            parts[reading.owner].append(Part(reading.sent, reading.encoded, output))
            cut[reading.owner] |= reading.cut
        items = []
        for index, (sent, of_input) in enumerate(zip(self.inputs, parts, strict=True)):
            item = {"index": index, **self.output.item(Found(self.body, self.served, sent, of_input))}
            if cut[index]:
                item["truncated"] = True
            if (self.output.windows or self.body.split is not None) and len(of_input) > 1:
                item["windows"] = len(of_input)
            items.append(item)
        return items


class EncodePlanner:
    """Makes plans of bodies, for the loaded models."""

    def __init__(
        self, models: Models, client: EngineClient, limits: Limits, threads: TokenizerThreads, images: ImagePool
    ) -> None:
        self._models = models
        self._client = client
        self._limits = limits
        self._threads = threads
        self._images = images

    async def plan(self, body: EncodeBody, request_id: str, arrival: float, uncounted: int = 0) -> EncodePlan:
        """Return the plan of a body; raises `ApiError` for a body that cannot be served.

        `uncounted` of its inputs are no inputs of the client: what the others are compared with.
        """
        served = self._models.resolve(body.model, Task.ENCODE)
        if served.config.audio is not None:
            raise invalid(f"input: model {served.name} reads sound, not text or images", "input")
        info = loaded_info(self._client, served)
        detailed = OUTPUTS[body.output].detailed or served.config.image is not None
        bounds = encode_bounds(self._limits, detailed=detailed, uncounted=uncounted)
        check_encode(body, self._limits, bounds)
        output = output_of(body, served)
        _check_size(body, served, info)
        inputs = inputs_of(body)
        prompt = _prompt(inputs, body, served)
        check_room(self._client, served)  # all are admitted where one is
        if served.config.image is not None:
            return await self._plan_images(body, served, output, inputs, bounds, request_id, arrival)
        bounds.check_inputs(len(inputs) * len(body.labels or (None,)))

        def work() -> EncodePlan:
            base = self._base(body, served, output, arrival)
            return self._plan_texts(body, served, info, output, inputs, prompt, bounds, request_id, base)

        characters = sum(one.characters for one in inputs)
        if characters:
            return await self._threads.run(served.name, characters, work)
        ids = sum(len(one.ids or ()) for one in inputs)
        return await self._threads.run_in_thread(work) if ids > _INLINE_IDS else work()

    def _plan_texts(
        self,
        body: EncodeBody,
        served: ServedModel,
        info: ModelInfo,
        output: Output,
        inputs: Sequence[EncodeInput],
        prompt: str,
        bounds: EncodeBounds,
        request_id: str,
        base: Mapping[str, Any],
    ) -> EncodePlan:
        """Tokenise the inputs, and make requests of them; thousands take as long as many steps of the event loop."""
        texts = [
            (owner, one if output.verbatim else _prepared(one, served, prompt))
            for owner, sent in enumerate(inputs)
            for one in output.readings(body, served, sent)
        ]
        bounds.check_inputs(len(texts))
        may_cut, divided = body.truncate is not False, output.windows or body.split is not None
        if prompt and body.split is not None:
            raise invalid("split: a prompt stands in front of the first window alone", "split")
        self._check_inputs([one for _, one in texts], served, info, output, bounds, may_cut=may_cut, divided=divided)
        limit = _token_limit(served, info)
        readings = _read(texts, body, served, output, bounds, min(limit, output.room(body, served) or limit))
        bounds.check_inputs(len(readings))
        bounds.check_tokens(sum(len(one.encoded.ids) for one in readings))
        skipped = 0
        if prompt:
            skipped = served.checkpoint.sentences.unpooled_tokens(served.require_tokenizer("prompt_name"), prompt)
        requests = tuple(
            self._request(body, served, output, one, engine_id(request_id), base, skipped) for one in readings
        )
        return EncodePlan(served, body, output, tuple(inputs), tuple(readings), requests)

    async def _plan_images(
        self,
        body: EncodeBody,
        served: ServedModel,
        output: Output,
        inputs: Sequence[EncodeInput],
        bounds: EncodeBounds,
        request_id: str,
        arrival: float,
    ) -> EncodePlan:
        image, processing = served.config.image, served.checkpoint.images
        assert image is not None and processing is not None
        bounds.check_tokens(image.num_tokens * len(inputs))
        shape = (image.channels, image.size, image.size)
        images = self._images.request(processing)
        found = [image_source(await _pixels(one, served, images), shape, image.num_tokens) for one in inputs]
        base = self._base(body, served, output, arrival)
        requests = tuple(EncodeRequest(engine_id(request_id), source=one, **base) for one in found)
        readings = tuple(_Reading(owner, one, Encoded((), ())) for owner, one in enumerate(inputs))
        return EncodePlan(served, body, output, tuple(inputs), readings, requests)

    def _base(self, body: EncodeBody, served: ServedModel, output: Output, arrival: float) -> dict[str, Any]:
        """Return the fields of every `EncodeRequest` of a body."""
        return {
            "model": served.name,
            "task": output.task,
            "pooling": None if body.pooling == "default" else Pooling(body.pooling),
            "normalize": body.normalize,
            "dimensions": body.dimensions,
            "adapter": served.checkpoint.sentences.adapter(body.task),
            "arrival_time": arrival,
            "deadline": arrival + (body.timeout_s or self._limits.request_timeout_s),
        }

    def _request(
        self,
        body: EncodeBody,
        served: ServedModel,
        output: Output,
        one: _Reading,
        name: str,
        base: Mapping[str, Any],
        skipped: int,
    ) -> EncodeRequest:
        ids, type_ids = one.encoded.ids, one.encoded.type_ids if served.token_types > 1 else ()
        return EncodeRequest(
            name,
            source=token_source(ids, type_ids),
            prompt_tokens=min(skipped, len(ids) - 1) if one.sent.ids is None and not body.chunks else 0,
            **base,
            **output.settings(body, served, one.sent, one.encoded, self._limits),
        )

    def _check_inputs(
        self,
        inputs: Sequence[EncodeInput],
        served: ServedModel,
        info: ModelInfo,
        output: Output,
        bounds: EncodeBounds,
        *,
        may_cut: bool,
        divided: bool,
    ) -> None:
        per_token = self._limits.prompt_characters_per_token
        characters = 0
        for one in inputs:
            if one.image is not None:
                raise invalid(f"{one.param}: model {served.name} reads text, not images", one.param)
            if one.ids is not None:
                if output.offsets:
                    raise invalid(f"{one.param}: output '{output.name}' needs text, not token ids", one.param)
                continue
            served.require_tokenizer(one.param)
            if one.pair is None and served.pairs is not None and output.labelled:
                raise invalid(f"{one.param}: model {served.name} scores pairs: send text and text_pair", one.param)
            if one.pair is not None and served.config.encoder is None and served.pairs is None:
                raise invalid(f"{one.param}.text_pair: model {served.name} reads one text", f"{one.param}.text_pair")
            if not may_cut and not divided:
                ContextBound(info.max_model_len, per_token).check(one.text + (one.pair or ""), one.param)
            characters += one.characters
        bound = per_token * bounds.tokens
        if characters > bound and not may_cut:
            raise too_large(f"input has {characters} characters in all, more than {bound}", "input", "too_many_tokens")


def _read(
    texts: Sequence[tuple[int, EncodeInput]],
    body: EncodeBody,
    served: ServedModel,
    output: Output,
    bounds: EncodeBounds,
    limit: int,
) -> list[_Reading]:
    """Tokenise each text, and truncate it to `limit` tokens or divide it into windows of them."""
    if output.offsets or body.split is not None:
        windows = (
            _Reading(owner, one, window)
            for owner, one in texts
            for window in _windows(one, served, bounds, limit, body.stride)
        )
        return list(islice(windows, bounds.inputs + 1))  # more are refused
    if body.chunks is not None:
        return [_Reading(owner, one, _whole(one, served, limit)) for owner, one in texts]
    side: Side | None = body.truncate or None
    found = ((owner, one, *_fit_one(one, served, limit, side)) for owner, one in texts)
    return [_Reading(owner, one, output.as_read(body, served, one, encoded), cut) for owner, one, encoded, cut in found]


def _prompt(inputs: Sequence[EncodeInput], body: EncodeBody, served: ServedModel) -> str:
    """Return the prompt in front of the texts, empty for none; raises a 400 for one that does not apply."""
    if "prompt_name" not in OUTPUTS[body.output].fields:
        return ""
    sentences, name = served.checkpoint.sentences, body.prompt_name
    _check_task(body, served)
    if served.config.image is not None:
        if name is not None:
            raise invalid(f"prompt_name: model {served.name} reads images, which have no prompts", "prompt_name")
        return ""
    if name is not None and name not in sentences.prompts:
        known = ", ".join(sorted(sentences.prompts)) or "none"
        raise invalid(f"prompt_name: model {served.name} has no prompt {name!r}; it has {known}", "prompt_name")
    single = not any(one.pair is not None or one.ids for one in inputs)
    if name is not None and not single:
        raise invalid("prompt_name: only vectors of single texts have prompts", "prompt_name")
    if body.task is not None and sentences.adapter(body.task) is None:  # it is a prompt, and nothing else
        if not single:
            raise invalid("task: only vectors of single texts have prompts", "task")
        if name not in (None, body.task):
            raise invalid(f"task and prompt_name contradict each other: {body.task!r} is a prompt too", "task")
    prompt = sentences.prompt(name, body.task)
    if prompt and body.truncate == "left" and not any(one.ids for one in inputs):
        raise invalid("truncate: a prompt stands at the left end; found 'left', expected 'right'", "truncate")
    return prompt


def _check_task(body: EncodeBody, served: ServedModel) -> None:
    known = served.checkpoint.sentences.tasks
    if body.task is not None and body.task not in known:
        listed = ", ".join(known) or "none"
        raise invalid(f"task: model {served.name} has no task {shorten(body.task)}; it has {listed}", "task")
    if served.checkpoint.sentences.adapter(body.task) is not None and body.pooling == "pooler":
        raise invalid(
            f"pooling: the pooler of model {served.name} has no adapters; leave out pooling or task", "pooling"
        )


def _prepared(one: EncodeInput, served: ServedModel, prompt: str) -> EncodeInput:
    prepare = served.checkpoint.sentences.prepare
    if one.ids is not None or one.image is not None:
        return one
    if one.pair is not None:
        return msgspec.structs.replace(one, text=prepare(one.text), pair=prepare(one.pair))
    text = prepare(one.text, prompt)
    return one if text == one.text else msgspec.structs.replace(one, text=text)


async def _pixels(one: EncodeInput, served: ServedModel, images: RequestImages) -> bytes:
    """Decode and resize an image file as the model needs; raises a 400 that names the input."""
    if one.image is None:
        raise invalid(f'{one.param}: model {served.name} reads images: send [{{"image": base64}}]', one.param)
    param = f"{one.param}.image"
    try:
        return await images.prepare(base64.b64decode(one.image, validate=True))
    except WorkerError as error:
        raise unavailable(f"no process is free to decode images: {error}; try again", "image_busy", 2) from None
    except ImageError as error:
        raise invalid(f"{param}: {error}", param, "invalid_image") from None
    except ValueError:
        raise invalid(f"{param} is not base64", param, "invalid_image") from None


def _fit_one(one: EncodeInput, served: ServedModel, limit: int, side: Side | None) -> tuple[Encoded, bool]:
    pairs = served.pairs if one.pair is not None else None
    try:
        encoded = _encode(one, served, limit if side is None else None)
    except TooManyTokensError as error:
        raise context_exceeded(limit, f"{one.param} has {error.count} tokens", one.param) from None
    if not encoded.ids:
        raise invalid(f"{one.param} is empty: it has no tokens", one.param, "empty_prompt")
    check_vocabulary(encoded.ids, served.source_vocab_size, one.param)
    if len(encoded.ids) <= limit:
        return encoded, False
    if side is None:  # ids of the client
        raise context_exceeded(limit, f"{one.param} has {len(encoded.ids)} tokens", one.param)
    if pairs is not None:
        if side == "left":
            raise invalid("truncate: documents are cut at the right end; found 'left', expected 'right'", "truncate")
        return Encoded(pairs.cut(served.require_tokenizer(one.param), encoded.ids, limit), ()), True
    if one.ids is not None:
        return Encoded(truncate_ids(one.ids, limit, side), ()), True
    return truncate_text(served.require_tokenizer(one.param), one.text, one.pair, encoded, limit, side), True


def _encode(one: EncodeInput, served: ServedModel, most: int | None) -> Encoded:
    if one.ids is not None:
        return Encoded(one.ids, ())
    tokenizer = served.require_tokenizer(one.param)
    if one.pair is not None and served.pairs is not None:
        return served.pairs.encode(tokenizer, one.text, one.pair, most)
    return tokenizer.encode(one.text, one.pair, most=most)


def _token_limit(served: ServedModel, info: ModelInfo) -> int:
    made_for = served.checkpoint.sentences.max_tokens
    bounds = [info.max_model_len, info.max_num_batched_tokens]
    return min(bounds if made_for is None else [*bounds, made_for])


def _check_size(body: EncodeBody, served: ServedModel, info: ModelInfo) -> None:
    if body.pooling == "pooler" and not served.config.pooler:
        raise invalid(f"pooling: model {served.name} has no pooler", "pooling")
    own = body.output == "embedding" and body.pooling == "default"
    size = info.embedding_size if own else served.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid(f"dimensions must be at most {size}", "dimensions")


def _whole(one: EncodeInput, served: ServedModel, limit: int) -> Located:
    """Return the tokens of a text with their places; raises a 400 if there are too many."""
    try:
        located = served.require_tokenizer(one.param).locate(one.text, most=limit)
    except TooManyTokensError as error:
        raise context_exceeded(limit, f"{one.param} has {error.count} tokens", one.param) from None
    check_vocabulary(located.ids, served.source_vocab_size, one.param)
    return located


def _windows(
    one: EncodeInput, served: ServedModel, bounds: EncodeBounds, limit: int, stride: int | None
) -> Iterator[Located]:
    """Yield the tokens of a text, in windows of `limit` tokens that have `stride` of them in common.

    Of a pair the second text is divided; special tokens and the first text are in every window.
    """
    try:
        located = served.require_tokenizer(one.param).locate(one.text, one.pair, most=bounds.tokens)
    except TooManyTokensError as error:
        bounds.check_tokens(error.count)
        raise
    check_vocabulary(located.ids, served.source_vocab_size, one.param)
    if len(located.ids) <= limit:
        if not any(of is not None for of in located.texts):
            raise invalid(f"{one.param} is empty: it has no tokens", one.param, "empty_prompt")
        yield located
        return
    divided = 0 if one.pair is None else 1
    inside = [at for at, of in enumerate(located.texts) if of == divided]
    room = limit - (len(located.ids) - len(inside))
    if room < 1:
        raise context_exceeded(limit, f"{one.param}.text leaves no room for tokens of the other text", one.param)
    common = min(_DEFAULT_STRIDE, room // 2) if stride is None else stride
    if common >= room:
        raise invalid(f"stride must be below the {room} tokens that a window has of {one.param}", "stride")
    before, after = range(inside[0]), range(inside[-1] + 1, len(located.ids))
    starts = range(0, max(1, len(inside) - common), room - common)
    for start in starts:
        yield located.keep([*before, *inside[start : start + room], *after])
