"""POST /encode: plan, run as one batch, reply in the order asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from model.api.request import EncodeOutput, FinishReason
from model.errors import EngineError, EngineGoneError, QueueFullError
from service.core.errors import cancelled, deadline_passed, engine_failed, not_taken
from service.dialects import huggingface, sglang
from service.dialects.common import speaking
from service.dialects.huggingface_bodies import EmbedBody
from service.dialects.sglang import SglangEncodeBody
from service.http.bodies import (
    context_of_request,
    json_response,
    named,
    read_one_of,
    unless_gone,
)
from service.http.json_replies import Json, encode_reply
from service.lifecycle.jobs import Job, worst
from service.lifecycle.state import Service, service_of
from service.planning.encode import EncodePlan
from service.routes.docs import WORK_ERRORS, body, errors, ok, query_model
from service.schemas.bodies import EncodeBody
from service.schemas.dialect_replies import SglangVector, Vectors
from service.schemas.replies import EncodeReply

router = APIRouter()

_BODIES: dict[str, type[BaseModel]] = {
    "input": EncodeBody,
    "inputs": EmbedBody,
    "text": SglangEncodeBody,
    "input_ids": SglangEncodeBody,
}


@router.post(
    "/encode",
    summary="Turn inputs into vectors",
    response_model=None,
    responses={
        **ok("The vectors.", EncodeReply, Vectors, SglangVector, list[SglangVector]),
        **errors(*WORK_ERRORS),
    },
    openapi_extra={
        **body(
            *(EncodeBody, EmbedBody, SglangEncodeBody),
            triptych={"model": "embed", "input": ["a cat on a mat", "a kitten on a rug"]},
            huggingface={"model": "embed", "inputs": ["a cat on a mat", "a kitten on a rug"]},
            sglang={"model": "embed", "text": "a cat on a mat"},
        ),
        **query_model(),
    },
)
async def encode(request: Request) -> Response:
    """Any loaded model answers: an encoder with its own pooling, an encoder-decoder with its encoder, a decoder
    with its last hidden states.

    A body with `inputs` is Hugging Face's, one with `text` or `input_ids` SGLang's: both answer in their own shape.
    """
    asked = named(request, await read_one_of(request, EncodeBody, _BODIES))
    if isinstance(asked, EmbedBody):
        return await huggingface_answer(request, asked)
    if isinstance(asked, SglangEncodeBody):
        with speaking(sglang.encode_names(asked)):
            return await answer(request, sglang.encode(asked), sglang.encode_reply(asked))
    assert isinstance(asked, EncodeBody)
    return await answer(request, asked)


async def huggingface_answer(request: Request, asked: EmbedBody) -> Response:
    """A vector for each input."""
    with speaking(huggingface.ENCODE_NAMES):
        return await answer(request, huggingface.embed(asked), huggingface.embed_reply)


Show = Callable[[EncodePlan, Json], object]


async def answer(request: Request, asked: EncodeBody, show: Show | None = None) -> Response:
    """The vectors that `asked` asks for, as /encode gives them or as `show` makes of that."""
    service, context = service_of(request), context_of_request()
    with service.taking():
        plan = await service.encode_planner.plan(asked, context.request_id, context.started)
        context.model, context.tokens_in = plan.served.name, plan.prompt_tokens
        service.check_not_given_up()
        job = service.jobs.open(context, tuple(one.request_id for one in plan.requests))
        try:
            outputs = await _run(request, service, plan, job)
            reply = encode_reply(plan, outputs, job, asked.encoding_format)
            return json_response(reply if show is None else show(plan, reply))
        finally:
            await job.aclose()


async def _run(request: Request, service: Service, plan: EncodePlan, job: Job) -> Sequence[EncodeOutput]:
    """Every input's vectors, or the `ApiError` that says why there are none."""
    try:
        outputs = await unless_gone(request, service.client.encode(plan.requests))
    except (QueueFullError, EngineGoneError) as error:
        raise not_taken(error) from None
    except EngineError:
        service.jobs.accept(job)
        job.end(FinishReason.ERROR)
        raise engine_failed() from None
    except BaseException:
        service.jobs.accept(job)
        raise
    service.jobs.accept(job)
    outcome = worst([output.finish_reason for output in outputs])
    if outcome is FinishReason.STOP:  # else there is an input without an output, and no time at which all were there
        scheduled = [output.scheduled_time for output in outputs if output.scheduled_time is not None]
        job.observe(min(scheduled, default=None), time.monotonic())
    job.end(outcome)
    if outcome is FinishReason.ERROR:
        raise engine_failed()
    if outcome is FinishReason.CANCELLED:
        raise cancelled()
    if outcome is FinishReason.DEADLINE:
        raise deadline_passed()
    return outputs
