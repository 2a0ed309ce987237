"""Transcription: OpenAI's routes and Hugging Face's task take a file, /generate one as base64 (`native_answer`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.coded_files import file_bytes
from triptych.service.core.errors import ApiError
from triptych.service.core.models import Task
from triptych.service.dialects.common import NATIVE_NAMES, naming_errors, rename_fields
from triptych.service.http.bodies import (
    cancel_on_disconnect,
    context_of_request,
    named_model,
    raw_body,
    whole_body,
    with_model,
)
from triptych.service.http.model_use import choose_model
from triptych.service.http.multipart import boundary_of, read_form
from triptych.service.http.parsing import parsed
from triptych.service.http.route_table import MODEL_IN_QUERY, Routes, file_body, form_body, replies
from triptych.service.http.sse import EventStream
from triptych.service.lifecycle.jobs import Job
from triptych.service.lifecycle.state import Service, service_of
from triptych.service.planning.capabilities import SAMPLE, SPEECH_TRANSLATE, TRANSCRIBE
from triptych.service.speech import dialect
from triptych.service.speech.audio_pool import AudioPool, HeldAudio
from triptych.service.speech.bodies import TranscribeBody
from triptych.service.speech.dialect_bodies import AudioForm, SpeechBody, TranscriptionForm, TranslationForm
from triptych.service.speech.metrics import SpeechMetrics
from triptych.service.speech.planner import READS_AUDIO, SpeechPlanner, audio_limits, lacks_for_audio, reads_audio
from triptych.service.speech.running import RunningTranscription
from triptych.service.speech.transcripts import NativeTranscript, RenderTranscript, TranscriptEvents

routes = Routes("generate")
F = TypeVar("F", bound=AudioForm)

_LIMIT = "max_audio_bytes"  # the setting that limits a body with a file
_TEXTS = ("text/plain", "application/x-subrip", "text/vtt")
_TYPES = ("audio/", "video/", "application/octet-stream", "application/ogg")  # of a file that is the whole body


@routes.post(
    "/v1/audio/transcriptions",
    "Transcribe speech, as OpenAI has it",
    form_body(TranscriptionForm, TRANSCRIBE, _LIMIT),
    replies("The transcription.", Any, events=(Any,), texts=_TEXTS),
)
async def transcriptions(request: Request) -> Response:
    """Works with OpenAI's client. A body may have `max_audio_bytes`, its audio `max_audio_seconds`."""
    return await _form_answer(request, TranscriptionForm, "transcribe")


@routes.post(
    "/v1/audio/translations",
    "Translate speech to English, as OpenAI has it",
    form_body(TranslationForm, SPEECH_TRANSLATE, _LIMIT),
    replies("The translation.", Any, texts=_TEXTS),
)
async def translations(request: Request) -> Response:
    """Works with OpenAI's client. Requires a model that has learnt to translate."""
    return await _form_answer(request, TranslationForm, "translate")


@routes.post(
    "/pipeline/automatic-speech-recognition",
    "Transcribe speech, as InferenceClient asks for it",
    file_body(SpeechBody, "audio/*", TRANSCRIBE, SAMPLE, _LIMIT),
    replies("The text.", Any),
    MODEL_IN_QUERY,
)
async def automatic_speech_recognition(request: Request) -> Response:
    """The body is the file, or JSON with the file as base64 and parameters."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared.endswith("json"):
        held = _enter(request)
        return await _recognised(request, held, await raw_body(request, held.hold))
    if declared and not declared.startswith(_TYPES):
        message = "send an audio file with its Content-Type (audio/...), or JSON"
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")
    held = _enter(request)
    held.put(await whole_body(request.receive, held.hold))
    return await _recognised(request, held)


async def recognise(request: Request, raw: bytes) -> Response:
    """Transcribe the file of a JSON body that has been read."""
    return await _recognised(request, _enter(request), raw)


async def _recognised(request: Request, held: HeldAudio, raw: bytes | None = None) -> Response:
    """Transcribe the file of `held`, or that of a JSON body."""
    body = None if raw is None else await _from_json(request, raw, held)
    with naming_errors(dialect.HUGGINGFACE_NAMES):
        found = dialect.huggingface(body, named_model(request, None if body is None else body.model))
        return await answer(request, found, held, dialect.SpeechReply, dialect.HUGGINGFACE_NAMES)


async def _from_json(request: Request, raw: bytes, held: HeldAudio) -> SpeechBody:
    """Return a JSON body without its file, which `held` has then."""
    body = await parsed(request, raw, SpeechBody)
    with naming_errors(dialect.HUGGINGFACE_NAMES):
        held.put(await _decoded(request, body.inputs))
    return body.model_copy(update={"inputs": dialect.UNSENT})


async def _form_answer(request: Request, kind: type[AudioForm], task: str) -> Response:
    boundary = boundary_of(request.headers.get("content-type", ""))
    held = _enter(request)
    form = _from_form(await whole_body(request.receive, held.hold), boundary, kind, held)
    with naming_errors(dialect.FORM_NAMES):
        found = dialect.transcribe(with_model(request, form), task=task)
        return await answer(
            request, found, held, lambda running, job: dialect.AudioReply(running, job, form), dialect.FORM_NAMES
        )


def _from_form(raw: bytes, boundary: bytes, kind: type[F], held: HeldAudio) -> F:
    """Return the fields of a form, whose file `held` has then."""
    form, file = dialect.parsed_form(read_form(raw, boundary), kind)
    held.put(file)
    return form


async def native_answer(request: Request, body: TranscribeBody) -> Response:
    """Transcribe a body of /generate with `audio`."""
    held = _enter(request)
    held.put(await _decoded(request, body.audio))
    segments, token_ids = body.timestamps not in (None, "none"), body.return_token_ids

    def render(running: RunningTranscription, job: Job) -> NativeTranscript:
        return NativeTranscript(running, job, segments=segments, token_ids=token_ids)

    return await answer(request, body, held, render)


async def answer(
    request: Request,
    body: TranscribeBody,
    held: HeldAudio,
    render: RenderTranscript,
    names: Mapping[str, str] = NATIVE_NAMES,
) -> Response:
    """Transcribe the file of `held` as `body` says, and return it as `render` shows it, streamed or whole.

    Errors in a stream name fields by `names`; those that are raised are renamed by `naming_errors`.
    """
    service, context = service_of(request), context_of_request()
    served = await choose_model(
        request, body.model, reads_audio, READS_AUDIO, body.timeout_s, task=Task.GENERATE, lack=lacks_for_audio
    )
    with service.handling():
        body = body.model_copy(update={"model": served.name})
        plan = await cancel_on_disconnect(
            request, speech_of(request).plan(body, held, context.request_id, context.started)
        )
        service.check_not_given_up()
        running = RunningTranscription(plan, service.client, service.jobs, speech_of(request).metrics, service.limits)
        try:
            job = await cancel_on_disconnect(request, running.start(context))
        except BaseException:  # a client that goes away as the job is opened: nothing else would close it
            await running.abandon()
            raise
        rendering = render(running, job)
        if body.stream:
            events = TranscriptEvents(running, rendering, lambda error: rename_fields(error, names))
            return EventStream(events, job, service.limits, service.writes)
        async with job:
            await cancel_on_disconnect(request, running.ended())
            return rendering.reply()


def speech_planner(service: Service) -> SpeechPlanner:
    """Make what plans the requests of speech; the application keeps it as `app.state.speech`."""
    limits = service.limits
    decoders = AudioPool(limits.audio_decode_s, audio_limits(limits))
    metrics = SpeechMetrics(service.metrics, service.models)
    return SpeechPlanner(service.models, service.client, limits, service.threads, decoders, metrics)


def speech_of(request: Request) -> SpeechPlanner:
    """Return what plans the requests of speech of the application that received the request."""
    planner = request.app.state.speech
    assert isinstance(planner, SpeechPlanner)
    return planner


def _enter(request: Request) -> HeldAudio:
    """Return what the request holds of audio until its reply has been sent; raises a 429 if there is no room for it."""
    declared = request.headers.get("content-length", "")
    held = speech_of(request).room.enter(int(declared) if declared.isdecimal() else 0)
    context_of_request().on_end.append(held.release)
    return held


async def _decoded(request: Request, text: str) -> bytes:
    """Return the bytes of a file in base64, in a thread."""
    return await service_of(request).body_threads.run_in_thread(lambda: file_bytes(text, "audio", "invalid_audio"))
