"""Planning of /encode: a body becomes `EncodeRequest`s that can be served, or is refused before any work.

An input must fit one engine step (its attention is bidirectional, so it is never split), the model's context, and the
length that the checkpoint was trained for. A longer input is refused or, if the client allows it, truncated. Outputs
with positions in the text divide it into windows. Only the size of the body limits a text that may be truncated.
What each output needs and reads is in `triptych.service.planning.outputs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from triptych.model.api.request import EncodeOutput, EncodeRequest, Pooling, token_source
from triptych.model.errors import TooManyTokensError
from triptych.model.text.tokenizer import Encoded, Located
from triptych.service.core.context_bound import context_exceeded
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import deadline_passed, invalid
from triptych.service.core.models import Models, ServedModel, Task
from triptych.service.core.request_context import current, tenant_id
from triptych.service.images.files import source_of
from triptych.service.images.image_pool import RequestImages
from triptych.service.planning.admission import check_room, check_timeout, deadline_of, loaded_info
from triptych.service.planning.encode_checks import check_inputs, texts_of
from triptych.service.planning.outputs.base import CheckedInputs, EncodeInput, InputResult, Json, OutputKind, PartResult
from triptych.service.planning.requests import engine_id
from triptych.service.planning.tokenization import Side, TokenizerThreads, check_vocabulary, truncate_ids, truncate_text
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.settings.service_settings import Limits

_INLINE_IDS = 4_096  # token ids that are checked on the event loop; more are checked in a thread


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """The `EncodeRequest`s of a body, and how their outputs become an item for each of its inputs."""

    checked: CheckedInputs
    readings: tuple[Reading, ...]
    requests: tuple[EncodeRequest, ...]  # one for each reading

    @property
    def served(self) -> ServedModel:
        return self.checked.served

    @property
    def output(self) -> OutputKind:
        return self.checked.output

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all texts, or of patches of all images."""
        return sum(request.source.num_positions for request in self.requests)

    def items(self, outputs: Sequence[EncodeOutput]) -> list[Json]:
        """Return the item of each input; `outputs` has one output for each request."""
        body, inputs = self.checked.body, self.checked.inputs
        parts: list[list[PartResult]] = [[] for _ in inputs]
        cut = [False] * len(inputs)
        for reading, output in zip(self.readings, outputs, strict=True):
            for owner in range(len(inputs)) if reading.owner is None else (reading.owner,):
                parts[owner].append(PartResult(reading.sent, reading.encoded, output))
                cut[owner] |= reading.cut
        items = []
        for index, (sent, of_input) in enumerate(zip(inputs, parts, strict=True)):
            item = {
                "index": index,
                **self.output.item(InputResult(body, self.served, self.checked.info, sent, of_input)),
            }
            if cut[index]:
                item["truncated"] = True
            if (self.output.windows or body.split is not None) and len(of_input) > 1:
                item["windows"] = len(of_input)
            items.append(item)
        return items


class EncodePlanner:
    """Plans bodies of /encode for the loaded models."""

    def __init__(self, models: Models, client: EngineClient, limits: Limits, threads: TokenizerThreads) -> None:
        self._models = models
        self._client = client
        self._limits = limits
        self._threads = threads

    async def plan(
        self, body: EncodeBody, images: RequestImages, request_id: str, arrival: float, uncounted: int = 0
    ) -> EncodePlan:
        """Return the plan of a body; raises `ApiError` for a body that cannot be served.

        `images` decodes its files. `uncounted` of its inputs are not the client's (a query, with which the others are
        compared).
        """
        served = self._models.resolve(body.model, Task.ENCODE)
        served.check_reads_text("input")
        info = loaded_info(self._client, served)
        check_timeout(body.timeout_s, self._limits)
        checked = check_inputs(body, served, info, self._limits, uncounted)
        check_room(self._client, served, 0)  # if there is room for one, all are admitted
        if served.config.only_images:
            return await self._plan_images(checked, images, request_id, arrival)

        def work() -> EncodePlan:  # takes long for thousands of inputs
            readings = read(checked, texts_of(checked))
            return EncodePlan(checked, tuple(readings), self._requests(checked, readings, request_id, arrival))

        texts = await self._plan_texts(checked, work)
        if all(one.image is None for one in checked.inputs):
            return texts
        seen = await self._plan_images(checked, images, request_id, arrival)
        checked.bounds.check_tokens(texts.prompt_tokens + seen.prompt_tokens)
        return EncodePlan(checked, (*seen.readings, *texts.readings), (*seen.requests, *texts.requests))

    async def _plan_texts(self, checked: CheckedInputs, work: Callable[[], EncodePlan]) -> EncodePlan:
        """Do the work where it holds nothing up: tokenising many texts, or looking at many ids, takes long."""
        served = checked.served

        characters = sum(one.characters for one in checked.inputs)
        if characters:
            return await self._threads.run(served.name, characters, work)
        ids = sum(len(one.ids or ()) for one in checked.inputs)
        return await self._threads.run_in_thread(work) if ids > _INLINE_IDS else work()

    async def _plan_images(
        self, checked: CheckedInputs, images: RequestImages, request_id: str, arrival: float
    ) -> EncodePlan:
        served, inputs = checked.served, checked.inputs
        image, processing = served.config.image, served.checkpoint.images
        assert image is not None and processing is not None
        files = [(owner, one) for owner, one in enumerate(inputs) if one.image is not None or served.config.only_images]
        checked.bounds.check_tokens(image.num_tokens * len(files))
        shape = (image.channels, image.size, image.size)
        if image.most_patches is None:  # else each is held at its own size
            images.hold(image.pixel_bytes * len(files))
        base, found = self._base(checked, arrival), []
        for _, one in files:
            if one.image is None:
                message = f'model {served.name} reads images: send them to /encode as [{{"image": base64}}]'
                raise invalid(f"{one.param}: {message}", one.param)
            if time.monotonic() > base["deadline"]:
                raise deadline_passed()
            read = source_of(one.image, f"{one.param}.image", images, processing, shape, image.num_tokens)
            found.append(await read)
        requests = tuple(EncodeRequest(engine_id(request_id), source=one, **base) for one in found)
        readings = tuple(Reading(owner, one, Encoded((), ())) for owner, one in files)
        return EncodePlan(checked, readings, requests)

    def _base(self, checked: CheckedInputs, arrival: float) -> dict[str, Any]:
        """Return the fields of every `EncodeRequest` of a body."""
        body, served, context = checked.body, checked.served, current()
        return {
            "model": served.name,
            "task": checked.output.task,
            "pooling": None if body.pooling == "default" else Pooling(body.pooling),
            "normalize": body.normalize,
            "dimensions": body.dimensions,
            "adapter": served.checkpoint.sentences.adapter(body.task),
            "arrival_time": arrival,
            "deadline": deadline_of(arrival, body.timeout_s, self._limits),
            "is_background": context is not None and context.is_background,
            "tenant": tenant_id(),
        }

    def _requests(
        self, checked: CheckedInputs, readings: Sequence[Reading], request_id: str, arrival: float
    ) -> tuple[EncodeRequest, ...]:
        """Return a request for each reading; tokens of the prompt may be excluded from pooling."""
        served, settings = checked.served, checked.output.settings
        base, skipped = self._base(checked, arrival), 0
        if checked.prompt:
            tokenizer = served.require_tokenizer("prompt_name")
            skipped = served.checkpoint.sentences.unpooled_tokens(tokenizer, checked.prompt)
        requests = []
        for one in readings:
            ids, type_ids = one.encoded.ids, one.encoded.type_ids if served.token_types > 1 else ()
            if one.sent.ids is None:
                ids = served.padded(ids)
            has_prompt = one.sent.ids is None and not checked.body.chunks
            request = EncodeRequest(
                engine_id(request_id),
                source=token_source(ids, type_ids),
                prompt_tokens=min(skipped, len(ids) - 1) if has_prompt else 0,
                **base,
                **({} if settings is None else settings(checked, one.sent, one.encoded)),
            )
            requests.append(request)
        return tuple(requests)


_DEFAULT_STRIDE = 128  # tokens that two adjacent windows of a long text share


class Reading(msgspec.Struct, frozen=True):
    """One input of the engine."""

    owner: int | None  # index of the body's input that it belongs to; None: to all
    sent: EncodeInput  # its text as the engine reads it
    encoded: Encoded
    cut: bool = False  # whether it is truncated


def read(checked: CheckedInputs, texts: Sequence[tuple[int | None, EncodeInput]]) -> list[Reading]:
    """Tokenise each text, and truncate or divide it; raises an `ApiError` for a text that is too long."""
    body, served, output, bounds = checked.body, checked.served, checked.output, checked.bounds
    most = [checked.info.max_model_len, checked.info.max_num_batched_tokens, served.checkpoint.sentences.max_tokens]
    most.append(None if output.room is None else output.room(checked))
    limit = min(one for one in most if one)
    if output.offsets or body.split is not None:
        windows = (Reading(owner, one, window) for owner, one in texts for window in _windows(checked, one, limit))
        readings = list(islice(windows, bounds.inputs + 1))
        bounds.check_inputs(len(readings))
    elif body.chunks is not None:
        readings = [Reading(owner, one, _whole(one, served, limit)) for owner, one in texts]
    else:
        side: Side | None = body.truncate or None
        readings = []
        for owner, one in texts:
            encoded, is_cut = _fit_one(one, served, limit, side)
            seen = encoded if output.as_read is None else output.as_read(checked, one, encoded)
            readings.append(Reading(owner, one, seen, is_cut))
    bounds.check_tokens(sum(len(one.encoded.ids) for one in readings))
    return readings


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
    if side is None:  # token ids from the client; texts were checked above
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


def _whole(one: EncodeInput, served: ServedModel, limit: int) -> Located:
    """Return the tokens of a text with their positions in it; raises a 400 if there are too many."""
    try:
        located = served.require_tokenizer(one.param).locate(one.text, most=limit)
    except TooManyTokensError as error:
        raise context_exceeded(limit, f"{one.param} has {error.count} tokens", one.param) from None
    check_vocabulary(located.ids, served.source_vocab_size, one.param)
    return located


def _windows(checked: CheckedInputs, one: EncodeInput, limit: int) -> Iterator[Located]:
    """Yield the tokens of a text in windows of `limit` tokens; adjacent windows share `stride` tokens.

    In a pair the second text is divided; every window has the first text and the special tokens.
    """
    served, bounds, stride = checked.served, checked.bounds, checked.body.stride
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
