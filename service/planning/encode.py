"""Planning of /encode: a body becomes `EncodeRequest`s that can be served, or is refused before any work.

An input must fit one engine step (its attention is bidirectional, so it is never split), the model's context, and the
length that the checkpoint was trained for. A longer input is refused or, if the client allows it, truncated. Outputs
with positions in the text divide it into windows. Only the size of the body limits a text that may be truncated.
What each output needs and reads is in `triptych.service.planning.outputs`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triptych.model.api.request import EncodeOutput, EncodeRequest, Pooling, image_source, token_source
from triptych.model.media.images import ImageError
from triptych.model.text.tokenizer import Encoded
from triptych.service.core.engine_client import EngineClient
from triptych.service.core.errors import invalid, unavailable
from triptych.service.core.models import Models, ServedModel, Task
from triptych.service.planning.admission import check_room, check_timeout, loaded_info
from triptych.service.planning.encode_checks import check_inputs, texts_of
from triptych.service.planning.encode_tokens import Reading, read
from triptych.service.planning.outputs.base import CheckedInputs, EncodeInput, InputResult, Json, OutputKind, PartResult
from triptych.service.planning.requests import engine_id
from triptych.service.planning.tokenization import TokenizerThreads
from triptych.service.sandbox.image_pool import ImagePool, RequestImages
from triptych.service.sandbox.process_pool import WorkerError
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
            parts[reading.owner].append(PartResult(reading.sent, reading.encoded, output))
            cut[reading.owner] |= reading.cut
        items = []
        for index, (sent, of_input) in enumerate(zip(inputs, parts, strict=True)):
            item = {"index": index, **self.output.item(InputResult(body, self.served, sent, of_input))}
            if cut[index]:
                item["truncated"] = True
            if (self.output.windows or body.split is not None) and len(of_input) > 1:
                item["windows"] = len(of_input)
            items.append(item)
        return items


class EncodePlanner:
    """Plans bodies of /encode for the loaded models."""

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

        `uncounted` of its inputs are not the client's (a query, with which the others are compared).
        """
        served = self._models.resolve(body.model, Task.ENCODE)
        served.check_reads_text("input")
        info = loaded_info(self._client, served)
        check_timeout(body.timeout_s, self._limits)
        checked = check_inputs(body, served, info, self._limits, uncounted)
        check_room(self._client, served, 0)  # if there is room for one, all are admitted
        if served.config.image is not None:
            return await self._plan_images(checked, request_id, arrival)

        def work() -> EncodePlan:  # takes long for thousands of inputs
            readings = read(checked, texts_of(checked))
            return EncodePlan(checked, tuple(readings), self._requests(checked, readings, request_id, arrival))

        characters = sum(one.characters for one in checked.inputs)
        if characters:
            return await self._threads.run(served.name, characters, work)
        ids = sum(len(one.ids or ()) for one in checked.inputs)
        return await self._threads.run_in_thread(work) if ids > _INLINE_IDS else work()

    async def _plan_images(self, checked: CheckedInputs, request_id: str, arrival: float) -> EncodePlan:
        served, inputs = checked.served, checked.inputs
        image, processing = served.config.image, served.checkpoint.images
        assert image is not None and processing is not None
        checked.bounds.check_tokens(image.num_tokens * len(inputs))
        shape = (image.channels, image.size, image.size)
        images = self._images.request(processing)
        found = [image_source(await _pixels(one, served, images), shape, image.num_tokens) for one in inputs]
        base = self._base(checked, arrival)
        requests = tuple(EncodeRequest(engine_id(request_id), source=one, **base) for one in found)
        readings = tuple(Reading(owner, one, Encoded((), ())) for owner, one in enumerate(inputs))
        return EncodePlan(checked, readings, requests)

    def _base(self, checked: CheckedInputs, arrival: float) -> dict[str, Any]:
        """Return the fields of every `EncodeRequest` of a body."""
        body, served = checked.body, checked.served
        return {
            "model": served.name,
            "task": checked.output.task,
            "pooling": None if body.pooling == "default" else Pooling(body.pooling),
            "normalize": body.normalize,
            "dimensions": body.dimensions,
            "adapter": served.checkpoint.sentences.adapter(body.task),
            "arrival_time": arrival,
            "deadline": arrival + (body.timeout_s or self._limits.request_timeout_s),
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
