"""POST /generate: plans a body, submits it, and streams the outputs or waits for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from triptych.model.api.request import FinishReason
from triptych.model.errors import EngineError
from triptych.service.core.engine_client import GenerationStream
from triptych.service.core.errors import REFUSALS, deadline_passed, engine_failed, engine_refusal
from triptych.service.core.models import Task
from triptych.service.dialects import huggingface
from triptych.service.dialects.common import NATIVE_NAMES, naming_errors, rename_fields
from triptych.service.dialects.huggingface import TextGenerationBody
from triptych.service.http.bodies import (
    cancel_on_disconnect,
    context_of_request,
    json_response,
    raw_body,
    with_model,
)
from triptych.service.http.json_replies import Generation, Json, NativeRendering, Render
from triptych.service.http.model_use import hold_model, planned
from triptych.service.http.parsing import one_of, parsed
from triptych.service.http.route_table import MODEL_IN_QUERY, Example, Routes, json_body, replies
from triptych.service.http.sse import EventStream, GenerationEvents
from triptych.service.lifecycle.jobs import Job
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.capabilities import COMPLETE, GENERATE, REWRITE, SUMMARIZE, TRANSCRIBE, TRANSLATE
from triptych.service.planning.checks import ReplyShape
from triptych.service.planning.generate import GeneratePlan
from triptych.service.schemas.bodies import GenerateBody
from triptych.service.schemas.replies import GenerateEvent, GenerateReply
from triptych.service.schemas.types import TONE
from triptych.service.speech import routes as audio
from triptych.service.speech.bodies import TranscribeBody, TranscribeEvent, TranscribeReply

routes = Routes("generate")

_BODIES: dict[str, type[BaseModel]] = {
    "prompt": GenerateBody,
    "inputs": TextGenerationBody,
}

_body_by_key = one_of(GenerateBody, _BODIES)


def _body_of(keys: Sequence[str]) -> type[BaseModel]:
    return TranscribeBody if "audio" in keys else _body_by_key(keys)


_OK = replies(
    "The whole reply, or its events.",
    *(GenerateReply, TranscribeReply, Any),
    events=(GenerateEvent, TranscribeEvent, Any),
)


@routes.post(
    "/generate",
    "Generate text",
    json_body(
        *(GenerateBody, TranscribeBody, TextGenerationBody),
        complete=Example(COMPLETE),
        translate=Example(TRANSLATE),
        summarize=Example(SUMMARIZE),
        rewrite=Example(REWRITE),
        huggingface=Example(GENERATE, {"inputs": "{text}", "parameters": {"max_new_tokens": 16}}),
        speech=Example(TRANSCRIBE, {"audio": TONE, "timestamps": "segment"}),
    ),
    _OK,
    MODEL_IN_QUERY,
)
async def generate(request: Request) -> Response:
    """Continue a prompt, or answer it with an encoder-decoder. `stream: true` answers as server-sent events.

    A body with `audio` asks for a transcription, by a model that reads audio.

    A body with `inputs` is Hugging Face's; the reply has that API's shape.
    """
    raw = await raw_body(request)
    body = with_model(request, await parsed(request, raw, _body_of))
    if isinstance(body, TranscribeBody):
        return await audio.native_answer(request, body)
    if isinstance(body, TextGenerationBody):
        return await huggingface_answer(request, body)
    assert isinstance(body, GenerateBody)
    return await answer(request, body)


async def huggingface_answer(
    request: Request, body: TextGenerationBody, *, stream: bool | None = None, as_list: bool = False
) -> Response:
    """Generate text for a client of Hugging Face; `stream` overrides the body, `as_list` puts the reply in a list."""
    names = huggingface.GENERATE_NAMES
    context_of_request().is_tgi = True
    with naming_errors(names):
        found = huggingface.generate(body, stream=stream)
        with service_of(request).handling():
            return await answer_in_handling(
                request, found, lambda one: huggingface.TextGeneration(one, body, as_list=as_list), names, ReplyShape()
            )


async def answer(
    request: Request, body: GenerateBody, render: Render = NativeRendering, names: Mapping[str, str] = NATIVE_NAMES
) -> Response:
    """Generate what `body` requests and return it as `render` shows it, streamed or whole; 503 while not ready.

    `names` are the field names for errors in a stream; `naming_errors` renames the fields of errors that are raised.
    """
    with service_of(request).handling():
        return await answer_in_handling(request, body, render, names)


async def answer_in_handling(
    request: Request, body: GenerateBody, render: Render, names: Mapping[str, str], shape: ReplyShape | None = None
) -> Response:
    """Generate as `answer` does, inside `Service.handling`; `shape` is the reply shape of a dialect that has one."""
    service, context = service_of(request), context_of_request()
    await hold_model(request, body.model, Task.GENERATE, body.timeout_s)
    planning = service.generate_planner.plan(body, context.request_id, context.started, shape)
    plan = await (planning if body.images is None else planned(request, body.timeout_s, planning))
    context.model, context.tokens_in = plan.served.name, plan.prompt_tokens
    await service.jobs.reserve(context, plan.max_output_tokens)
    stream, job = submit(service, plan)
    generation = Generation(plan, job, service.metrics)
    rendering = render(generation)
    if body.stream:
        events = GenerationEvents(generation, stream, job, rendering, lambda error: rename_fields(error, names))
        return EventStream(events, job, service.limits, service.writes, rendering.media_type)
    async with job:
        reply = await cancel_on_disconnect(request, collect(generation, stream, job))
        return json_response(rendering.reply(reply))


def submit(service: Service, plan: GeneratePlan) -> tuple[GenerationStream, Job]:
    """Submit all requests of a plan to the engine, or none; the caller must close the returned job."""
    service.check_not_given_up()
    context = context_of_request()
    try:
        stream = service.client.submit(plan.requests)
    except REFUSALS as error:
        raise engine_refusal(error) from None
    job = service.jobs.open(context, tuple(request.request_id for request in plan.requests), stream)
    service.jobs.accept(job)
    return stream, job


async def collect(generation: Generation, stream: GenerationStream, job: Job) -> Json:
    """Wait for the whole reply; raises `ApiError` 500 if the engine fails, 504 at a deadline before the first token."""
    deltas: list[Json] = []
    try:
        async for output in stream:
            if output.is_missing:
                generation.count(output)
            else:
                deltas.append(generation.add(output))
            if generation.ended:
                break
    except EngineError:
        job.end(FinishReason.ERROR)
        raise engine_failed() from None
    if generation.failure is not None:
        raise generation.failure
    if not generation.ended or FinishReason.ERROR in generation.reasons:
        job.end(FinishReason.ERROR)
        raise engine_failed()
    if not generation.completion_tokens and FinishReason.DEADLINE in generation.reasons:
        raise deadline_passed()
    return {**generation.head(), "choices": generation.joined(deltas), **generation.tail()}
