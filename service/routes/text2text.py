"""Hugging Face's tasks for encoder-decoders: /pipeline/translation, summarization, text2text-generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.models import ServedModel, Task
from triptych.service.dialects import text2text
from triptych.service.dialects.common import naming_errors
from triptych.service.dialects.huggingface import TextGenerationBody
from triptych.service.dialects.text2text import AnyBody, Options, Text2TextBody, TranslationBody
from triptych.service.http.bodies import read_body
from triptych.service.http.model_use import choose_model
from triptych.service.http.route_table import MODEL_IN_QUERY, Example, Routes, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.planning.admission import loaded_info
from triptych.service.planning.capabilities import COMPLETE, SEQ2SEQ
from triptych.service.planning.checks import ReplyShape
from triptych.service.planning.tokenization import beginning
from triptych.service.planning.translation import Translation
from triptych.service.routes import generate

routes = Routes("generate")

_EXAMPLE = Example(SEQ2SEQ, {"inputs": "{text}"})


def rewrites(served: ServedModel) -> bool:
    """Return whether a model turns texts into texts with an encoder and a decoder."""
    return served.is_encoder_decoder and served.config.can_generate and served.reads_text


@routes.post(
    "/pipeline/translation",
    "Translate, as InferenceClient asks for it",
    json_body(TranslationBody, huggingface=_EXAMPLE),
    replies("The translations.", Any),
    MODEL_IN_QUERY,
)
async def translation(request: Request) -> Response:
    """Requires an encoder-decoder. Languages are those of its tokenizer, or of the tasks of its config.json."""
    return await translate(request, await read_body(request, TranslationBody), [text2text.TRANSLATED])


@routes.post(
    "/pipeline/summarization",
    "Summarize, as InferenceClient asks for it",
    json_body(Text2TextBody, huggingface=_EXAMPLE),
    replies("The summaries.", Any),
    MODEL_IN_QUERY,
)
async def summarization(request: Request) -> Response:
    """Requires an encoder-decoder. The task `summarization` of its config.json gives the prefix and the defaults."""
    return await rewrite(request, await read_body(request, Text2TextBody), "summarization", [text2text.SUMMARY])


@routes.post(
    "/pipeline/text2text-generation",
    "Make texts of texts, as InferenceClient asks for it",
    json_body(Text2TextBody, huggingface=_EXAMPLE),
    replies("The texts.", Any),
    MODEL_IN_QUERY,
)
async def text2text_generation(request: Request) -> Response:
    """Requires an encoder-decoder."""
    return await rewrite(request, await read_body(request, Text2TextBody), "text2text-generation", [text2text.TEXT])


@routes.post(
    "/pipeline/text-generation",
    "Generate, as InferenceClient asks for it",
    json_body(
        TextGenerationBody, huggingface=Example(COMPLETE, {"inputs": "{text}", "parameters": {"max_new_tokens": 16}})
    ),
    replies("One text in a list, or its events.", Any, events=(Any,)),
    MODEL_IN_QUERY,
)
async def text_generation(request: Request) -> Response:
    """The same as /generate with a body of Hugging Face."""
    return await generate.huggingface_answer(request, await read_body(request, TextGenerationBody), as_list=True)


async def translate(request: Request, body: TranslationBody, keys: Sequence[str]) -> Response:
    """Translate the inputs, and show them under `keys`."""
    served = await _model(request, body)
    with naming_errors(text2text.names_of(Options(body))):
        chosen = text2text.languages_of(body, served)
    return await _answer(request, body, served, chosen, keys)


async def any_task(request: Request, body: TranslationBody) -> Response:
    """Summarize if the model's folder has that task and no translation, else translate; show texts under all names."""
    keys = [text2text.TEXT, text2text.TRANSLATED, text2text.SUMMARY]
    parameters = body.parameters
    if parameters is None or (parameters.src_lang is None and parameters.tgt_lang is None):
        tasks = (await _model(request, body)).checkpoint.tasks
        if "summarization" in tasks and not any(name.startswith("translation") for name in tasks):
            return await rewrite(request, body, "summarization", keys)
    return await translate(request, body, keys)


async def rewrite(request: Request, body: AnyBody, task: str, keys: Sequence[str]) -> Response:
    """Rewrite the inputs by a task that the folder may have, and show the texts under `keys`."""
    served = await _model(request, body)
    return await _answer(request, body, served, text2text.task_of(served, task), keys)


async def _model(request: Request, body: AnyBody) -> ServedModel:
    return await choose_model(
        request, body.model, rewrites, "makes texts of texts with an encoder", body.timeout_s, task=Task.GENERATE
    )


async def _answer(
    request: Request, body: AnyBody, served: ServedModel, chosen: Translation, keys: Sequence[str]
) -> Response:
    service, options = service_of(request), Options(body)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    names = text2text.names_of(options)
    with service.handling(), naming_errors(names):
        if options.parameters.truncation not in (None, False, "do_not_truncate"):
            texts = await _truncated(request, served, chosen, texts)
        found = text2text.generate(body, options, served, chosen, texts)
        return await generate.answer_in_handling(
            request, found, lambda generation: text2text.Text2Text(generation, options, keys), names, ReplyShape()
        )


async def _truncated(request: Request, served: ServedModel, chosen: Translation, texts: Sequence[str]) -> list[str]:
    """Return the texts, each cut so that the model's encoder can read it with the prefix of its task."""
    service, tokenizer = service_of(request), served.require_tokenizer("prompt")
    info = loaded_info(service.client, served)
    task = served.checkpoint.tasks.get(chosen.task or "")
    prefix = chosen.prefix + (task.prefix if task is not None else "")
    limit = min(info.max_model_len, info.max_num_batched_tokens)

    def work() -> list[str]:
        return [beginning(tokenizer, prefix, text, limit) for text in texts]

    return await service.threads.run(served.name, sum(map(len, texts)), work)
