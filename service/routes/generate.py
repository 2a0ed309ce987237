"""POST /generate: plan, submit, then stream the outputs or wait for all of them."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from model.api.request import FinishReason
from model.errors import EngineError, EngineGoneError, QueueFullError
from service.core.engine_client import GenerationStream
from service.core.errors import deadline_passed, engine_failed, not_taken
from service.core.model_registry import Task
from service.dialects import huggingface, sglang
from service.dialects.common import NATIVE_NAMES, renamed, speaking
from service.dialects.huggingface_bodies import TextGenerationBody
from service.dialects.sglang import SglangGenerateBody
from service.http.bodies import (
    context_of_request,
    json_response,
    named,
    read_one_of,
    unless_gone,
)
from service.http.json_replies import Generation, Json, Native, Render
from service.http.sse import EventStream, generation_events
from service.lifecycle.jobs import Job
from service.lifecycle.state import Service, service_of
from service.planning.generate import GeneratePlan
from service.routes.docs import WORK_ERRORS, body, errors, ok, query_model
from service.schemas.bodies import GenerateBody
from service.schemas.dialect_replies import HuggingFaceEvent, HuggingFaceText, SglangText
from service.schemas.replies import GenerateEvent, GenerateReply

router = APIRouter()

_BODIES: dict[str, type[BaseModel]] = {
    "prompt": GenerateBody,
    "inputs": TextGenerationBody,
    "text": SglangGenerateBody,
    "input_ids": SglangGenerateBody,
}

_OK = ok(
    "The whole reply, or its events.",
    *(GenerateReply, HuggingFaceText, SglangText, list[SglangText]),
    events=(GenerateEvent, HuggingFaceEvent, SglangText),
)


@router.post(
    "/generate",
    summary="Generate text",
    response_model=None,
    responses={**_OK, **errors(*WORK_ERRORS)},
    openapi_extra={
        **body(
            *(GenerateBody, TextGenerationBody, SglangGenerateBody),
            triptych={"model": "code", "prompt": "def add(a, b):\n    ", "max_tokens": 16},
            huggingface={"model": "code", "inputs": "def add(a, b):\n    ", "parameters": {"max_new_tokens": 16}},
            sglang={"model": "code", "text": "def add(a, b):\n    ", "sampling_params": {"max_new_tokens": 16}},
        ),
        **query_model(),
    },
)
async def generate(request: Request) -> Response:
    """Continue a prompt, or answer it with an encoder-decoder. `stream: true` answers as server-sent events.

    A body with `inputs` is Hugging Face's, one with `text` or `input_ids` SGLang's: both answer in their own shape.
    """
    asked = named(request, await read_one_of(request, GenerateBody, _BODIES))
    if isinstance(asked, TextGenerationBody):
        return await huggingface_answer(request, asked)
    if isinstance(asked, SglangGenerateBody):
        return await _sglang_answer(request, asked)
    assert isinstance(asked, GenerateBody)
    return await answer(request, asked)


async def huggingface_answer(
    request: Request, asked: TextGenerationBody, *, stream: bool | None = None, as_list: bool = False
) -> Response:
    """Text generation; `stream` overrules the body, `as_list` puts a reply in a list."""
    names = huggingface.GENERATE_NAMES
    with speaking(names):
        found = huggingface.generate(asked, stream=stream)
        return await answer(request, found, lambda one: huggingface.TextGeneration(one, asked, as_list=as_list), names)


async def _sglang_answer(request: Request, asked: SglangGenerateBody) -> Response:
    with speaking(names := sglang.generate_names(asked)):
        served = service_of(request).registry.resolve(asked.model, Task.GENERATE)
        found = sglang.generate(asked, served)
        return await answer(request, found, lambda one: sglang.SglangGeneration(one, asked), names)


async def answer(
    request: Request, asked: GenerateBody, render: Render = Native, names: Mapping[str, str] = NATIVE_NAMES
) -> Response:
    """What `asked` generates, streamed or whole, as `render` shows it; 503 while no work is taken. Errors in a stream
    name fields by `names`; those that are raised are for `speaking`.
    """
    with service_of(request).taking():
        return await answer_taken(request, asked, render, names)


async def answer_taken(request: Request, asked: GenerateBody, render: Render, names: Mapping[str, str]) -> Response:
    """`answer`, within `Service.taking`."""
    service, context = service_of(request), context_of_request()
    plan = await service.generate_planner.plan(asked, context.request_id, context.started)
    stream, job = submit(service, plan)
    generation = Generation(plan, job, service.metrics)
    rendering = render(generation)
    if asked.stream:
        events = generation_events(generation, stream, job, rendering, lambda error: renamed(error, names))
        return EventStream(events, job, service.limits)
    try:
        reply = await unless_gone(request, collect(generation, stream, job))
    finally:
        await job.aclose()
    return json_response(rendering.reply(reply))


def submit(service: Service, plan: GeneratePlan) -> tuple[GenerationStream, Job]:
    """Hand the plan to the engine, all of it or nothing; from then on the caller owns the job."""
    service.check_not_given_up()
    context = context_of_request()
    context.model, context.tokens_in = plan.served.name, plan.prompt_tokens
    try:
        stream = service.client.submit(plan.requests)
    except (QueueFullError, EngineGoneError) as error:
        raise not_taken(error) from None
    job = service.jobs.open(context, tuple(request.request_id for request in plan.requests), stream)
    service.jobs.accept(job)
    return stream, job


async def collect(generation: Generation, stream: GenerationStream, job: Job) -> Json:
    """The whole reply; raises `ApiError` 500 when the engine fails, 504 when time is up with nothing to show."""
    deltas: list[Json] = []
    try:
        async for output in stream:
            deltas.append(generation.absorb(output))
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
