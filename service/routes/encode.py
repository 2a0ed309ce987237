"""POST /encode: plans a body, runs its inputs as one batch, and replies in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from triptych.model.api.request import EncodeOutput, FinishReason
from triptych.model.errors import EngineError
from triptych.service.core.errors import REFUSALS, cancelled, deadline_passed, engine_failed, engine_refusal
from triptych.service.core.models import Task
from triptych.service.dialects import huggingface
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.huggingface import EmbedBody
from triptych.service.http.bodies import (
    cancel_on_disconnect,
    context_of_request,
    json_response,
    read_one_of,
)
from triptych.service.http.json_replies import Json, encode_reply
from triptych.service.http.model_use import choose_model, hold_model, planned
from triptych.service.http.route_table import MODEL_IN_QUERY, Example, Routes, json_body, replies
from triptych.service.lifecycle.jobs import Job, combined_outcome
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.capabilities import ANSWER, EMBED, EMBED_IMAGE, FILL, LATE, SPARSE, TAG, ZERO_SHOT
from triptych.service.planning.encode import EncodePlan
from triptych.service.planning.outputs.registry import OUTPUTS, missing
from triptych.service.schemas.encode_bodies import EncodeBody
from triptych.service.schemas.replies import EncodeReply
from triptych.service.schemas.types import ImageFile

routes = Routes("encode")
_LARGE_REPLY = 1 << 18  # bytes of numbers, which take a few milliseconds to write as JSON

_BODIES: dict[str, type[BaseModel]] = {
    "input": EncodeBody,
    "inputs": EmbedBody,
}


@routes.post(
    "/encode",
    "Turn inputs into vectors",
    json_body(
        *(EncodeBody, EmbedBody),
        triptych=Example(EMBED, {"input": ["a cat on a mat", "a kitten on a rug"]}),
        huggingface=Example(EMBED, {"inputs": ["a cat on a mat", "a kitten on a rug"]}),
        fill_mask=Example(FILL),
        zero_shot=Example(ZERO_SHOT),
        token_classification=Example(TAG),
        question_answering=Example(ANSWER),
        sparse=Example(SPARSE),
        multi_vector=Example(LATE),
        image=Example(EMBED_IMAGE),
    ),
    replies("The vectors.", EncodeReply, Any),
    MODEL_IN_QUERY,
)
async def encode(request: Request) -> Response:
    """Any loaded model can encode: an encoder with its own pooling, an encoder-decoder with its encoder, a decoder
    with its last hidden states.

    A body with `inputs` is Hugging Face's; the reply has that API's shape.
    """
    body = await read_one_of(request, EncodeBody, _BODIES)
    if isinstance(body, EmbedBody):
        return await huggingface_answer(request, body)
    assert isinstance(body, EncodeBody)
    return await answer(request, body)


async def huggingface_answer(request: Request, body: EmbedBody) -> Response:
    """Return a vector for each input, for a client of Hugging Face."""
    with naming_errors(huggingface.ENCODE_NAMES):
        return await answer(request, huggingface.embed(body), huggingface.embed_reply)


Show = Callable[[EncodePlan, Json], object]


async def answer(
    request: Request, body: EncodeBody, show: Show | None = None, *, uncounted: int = 0, of_embedder: bool = False
) -> Response:
    """Encode the inputs of `body`, and reply as /encode does, or with what `show` makes of that reply.

    `uncounted` inputs do not count towards the limit of a request. `of_embedder`: embeddings must come from a model
    that was trained to make them.
    """
    service, context = service_of(request), context_of_request()
    with service.handling():
        body = await _with_model(request, body)
        if of_embedder and body.output == "embedding":
            service.models.resolve(body.model, Task.ENCODE).require_embedder()
        with service.images.request() as images:
            planning = service.encode_planner.plan(body, images, context.request_id, context.started, uncounted)
            plan = await (planned(request, body.timeout_s, planning) if _has_images(body) else planning)
            context.model, context.tokens_in = plan.served.name, plan.prompt_tokens
            await service.jobs.reserve(context)
            service.check_not_given_up()
            job = service.jobs.open(context, tuple(one.request_id for one in plan.requests))
            async with job:
                outputs = await _run(request, service, plan, job)
                return await _reply(service, plan, outputs, job, show)


def _has_images(body: EncodeBody) -> bool:
    """Return whether an input is an image; a list that begins with a token id is one input of ids."""
    inputs = body.input
    if not isinstance(inputs, list) or (inputs and isinstance(inputs[0], int)):
        return False
    return any(isinstance(one, ImageFile) for one in inputs)


async def _with_model(request: Request, body: EncodeBody) -> EncodeBody:
    """Hold the model of the request: the named one, else the only one with the requested output."""
    if body.model is None and body.output not in ("embedding", "tokens"):
        output, what = OUTPUTS[body.output], f"has the output {body.output}"
        found = await choose_model(request, None, lambda one: missing(output, one) is None, what, body.timeout_s)
        return body.model_copy(update={"model": found.name})
    await hold_model(request, body.model, Task.ENCODE, body.timeout_s)
    return body


async def _reply(
    service: Service, plan: EncodePlan, outputs: Sequence[EncodeOutput], job: Job, show: Show | None
) -> Response:
    """Return the reply; a large one, or one that decodes texts or compares spans, is made outside the event loop."""

    def made() -> Response:
        reply = encode_reply(plan, plan.items(outputs), job)
        return json_response(reply if show is None else show(plan, reply))

    if plan.output.heavy or sum(len(one.data) for one in outputs) > _LARGE_REPLY:
        return await service.threads.run_in_thread(made)
    return made()


async def _run(request: Request, service: Service, plan: EncodePlan, job: Job) -> Sequence[EncodeOutput]:
    """Run the plan and return the outputs of all inputs; raises `ApiError`."""
    try:
        outputs = await cancel_on_disconnect(request, service.client.encode(plan.requests))
    except REFUSALS as error:
        raise engine_refusal(error) from None
    except EngineError:
        service.jobs.accept(job)
        job.end(FinishReason.ERROR)
        raise engine_failed() from None
    except BaseException:
        service.jobs.accept(job)
        raise
    service.jobs.accept(job)
    outcome = combined_outcome([output.finish_reason for output in outputs])
    if outcome is FinishReason.STOP:  # else some inputs have no output, and the times would be wrong
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
