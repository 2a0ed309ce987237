"""OpenAI's transcriptions and translations, and Hugging Face's automatic speech recognition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.responses import Response

from triptych.model.api.languages import NAMES
from triptych.model.api.request import TokenLogprob
from triptych.model.speech.driver import Piece, Written
from triptych.model.speech.segments import Line, srt, vtt
from triptych.service.core.errors import from_validation, invalid
from triptych.service.dialects.common import native
from triptych.service.http.bodies import context_of_request, json_response
from triptych.service.http.json_replies import DataEvents, Json
from triptych.service.http.multipart import Form
from triptych.service.lifecycle.jobs import Job
from triptych.service.schemas.field_paths import siblings
from triptych.service.speech.bodies import TranscribeBody
from triptych.service.speech.dialect_bodies import AudioForm, SpeechBody, SpeechGeneration, TranscriptionForm
from triptych.service.speech.running import RunningTranscription
from triptych.service.speech.transcripts import check_complete

F = TypeVar("F", bound=AudioForm)

FORM_NAMES = {
    "audio": "file",
    "initial_prompt": "prompt",
    "timestamps": "timestamp_granularities",
    "logprobs": "include",
    "task": "model",  # which the route demands of the model
}
HUGGINGFACE_NAMES = {
    "audio": "inputs",
    "timestamps": "parameters.return_timestamps",
    "max_tokens": "parameters.generation_parameters.max_new_tokens",
    **{
        name: f"parameters.generation_parameters.{name}"
        for name in ("temperature", "num_beams", "top_k", "top_p", "language", "task")
    },
}
UNSENT = "-"  # in place of a file, which travels apart from the body


# Forms


def parsed_form(form: Form, model: type[F]) -> tuple[F, bytes]:
    """Return a form as `model`, and its file; raises a 400 that names the field."""
    fields: dict[str, Any] = {}
    for name, value in form.texts:
        if value or name.partition("[")[0] not in model.model_fields:  # pages and some clients send what is not set
            _add(fields, name, value, model)
    files = [one for name, one in form.files if name == "file"]
    for name, _ in form.files:
        if name != "file":
            raise invalid(f"{name[:64]} is a file: only the field file may be one", name[:64], "unknown_field")
    if len(files) != 1:
        raise invalid("file is required: one, as a file", "file", "missing_field")
    fields["file"] = UNSENT
    try:
        body = model.model_validate(fields)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False), partial(siblings, model)) from None
    if body.request_id is not None:
        context_of_request().request_id = body.request_id
    return body, files[0].data


def _add(fields: dict[str, Any], name: str, value: str, model: type[AudioForm]) -> None:
    """Put a field of a form into a body: `name[]` is one of several, `name[key]` an entry of an object."""
    name, bracket, key = name.partition("[")
    key = key.rstrip("]")
    if bracket and key and not key.isdecimal():
        entry = fields.setdefault(name, {})
        if isinstance(entry, dict):
            entry[key] = value
            return
    elif bracket or (name in model.model_fields and _is_list(model, name)):
        several = fields.setdefault(name, [])
        if isinstance(several, list):
            several.append(value)
            return
    elif name not in fields:
        fields[name] = value
        return
    raise invalid(f"{name[:64]} is sent twice", name[:64])


def _is_list(model: type[AudioForm], name: str) -> bool:
    return model.model_fields[name].default_factory is list


def transcribe(form: AudioForm, *, task: str) -> TranscribeBody:
    """Translate a form; raises `ApiError` with native field names."""
    fields: dict[str, Any] = {
        "audio": UNSENT,
        "task": task,
        "initial_prompt": form.prompt,
        "temperature": form.temperature,
        "timestamps": None if form.response_format in ("json", "text") else "segment",
    }
    same = ("model", "num_beams", "seed", "chunking", "condition_on_previous_text", "timeout_s", "request_id")
    fields |= {name: getattr(form, name) for name in same}
    if isinstance(form, TranscriptionForm):
        _check(form)
        fields |= {"language": form.language, "stream": bool(form.stream)}
        if "word" in form.timestamp_granularities:
            fields["timestamps"] = "word"
        if form.include:
            fields["logprobs"] = 0
        if form.chunking_strategy == "auto":
            fields["chunking"] = form.chunking or "parallel"
    return native(TranscribeBody, fields)


def _check(form: TranscriptionForm) -> None:
    """Refuse fields that have no meaning with the format."""
    if form.timestamp_granularities and form.response_format != "verbose_json":
        raise invalid("timestamp_granularities needs response_format: verbose_json", "timestamp_granularities")
    if form.include and form.response_format != "json":
        raise invalid("include needs response_format: json", "include")
    if form.stream and form.response_format not in ("json", "text"):
        raise invalid(f"stream has no meaning with response_format: {form.response_format}", "stream")


class AudioReply(DataEvents):
    """Shows transcriptions as OpenAI has them."""

    def __init__(self, running: RunningTranscription, job: Job, form: AudioForm) -> None:
        self._running = running
        self._form = form
        self._logprobs = isinstance(form, TranscriptionForm) and bool(form.include)

    def piece(self, piece: Piece) -> Iterable[Json]:
        if not piece.text and not piece.logprobs:
            return ()
        return (self._with_logprobs({"type": "transcript.text.delta", "delta": piece.text}, piece.logprobs),)

    def last(self) -> Iterable[Json]:
        check_complete(self._running)
        result, plan = self._running.result, self._running.plan
        output = self._running.completion_tokens
        usage = {
            "type": "tokens",
            "input_tokens": plan.num_positions,
            "input_token_details": {"audio_tokens": plan.num_positions, "text_tokens": 0},
            "output_tokens": output,
            "total_tokens": plan.num_positions + output,
        }
        done = {"type": "transcript.text.done", "text": result.text, "usage": usage}
        return (self._with_logprobs(done, result.logprobs),)

    def reply(self) -> Response:
        check_complete(self._running)
        result, format = self._running.result, self._form.response_format
        if format == "text":
            return _plain(result.text + "\n", "text/plain")
        if format == "srt":
            return _plain(srt(_lines(result.segments)), "application/x-subrip")
        if format == "vtt":
            return _plain(vtt(_lines(result.segments)), "text/vtt")
        usage = {"type": "duration", "seconds": math.ceil(self._running.plan.seconds)}
        if format == "json":
            return json_response(self._with_logprobs({"text": result.text, "usage": usage}, result.logprobs))
        return json_response(self._verbose() | {"usage": usage})

    def _verbose(self) -> Json:
        result, form, plan = self._running.result, self._form, self._running.plan
        asked = form.timestamp_granularities if isinstance(form, TranscriptionForm) else []
        language = "en" if plan.options.task == "translate" else result.language or ""
        found: Json = {
            "task": plan.options.task,
            "language": NAMES.get(language, language),
            "duration": round(plan.seconds, 3),
            "text": result.text,
        }
        if "segment" in asked or not asked:
            found["segments"] = [_segment(at, one) for at, one in enumerate(result.segments)]
        if "word" in asked:
            words = (word for segment in result.segments for word in segment.words)
            found["words"] = [{"word": one.text.strip(), "start": one.start, "end": one.end} for one in words]
        return found

    def _with_logprobs(self, found: Json, logprobs: list[TokenLogprob]) -> Json:
        return found | {"logprobs": [self._logprob(one) for one in logprobs]} if self._logprobs else found

    def _logprob(self, one: TokenLogprob) -> Json:
        text = self._running.plan.tokenizer.token_text(one.token_id)
        known = "\ufffd" not in text  # else part of a character, whose bytes are not known here
        encoded = list(text.encode()) if known else None
        return {"token": text, "bytes": encoded, "logprob": max(one.logprob, -9999.0)}


def _segment(number: int, one: Written) -> Json:
    return {
        "id": number,
        "seek": one.seek,
        "start": one.start,
        "end": one.end,
        "text": one.text,
        "tokens": list(one.token_ids),
        "temperature": one.temperature,
        "avg_logprob": one.mean_logprob,
        "compression_ratio": one.compression_ratio,
        "no_speech_prob": one.no_speech_prob,
    }


def _lines(segments: Iterable[Written]) -> list[Line]:
    return [(one.start, one.end, one.text) for one in segments if one.text.strip()]


def _plain(text: str, media_type: str) -> Response:
    return Response(text.encode(), media_type=f"{media_type}; charset=utf-8")


# Hugging Face


def huggingface(body: SpeechBody | None, model: str | None) -> TranscribeBody:
    """Translate a body, or the lack of one where the file was sent alone; raises `ApiError` with native names.

    The file travels apart from the result.
    """
    parameters = None if body is None else body.parameters
    if parameters and parameters.generation_parameters and parameters.generate_kwargs:
        message = "parameters: generation_parameters and generate_kwargs are the same; send one of them"
        raise invalid(message, "parameters.generate_kwargs")
    given = (parameters.generation_parameters or parameters.generate_kwargs) if parameters else None
    found = given or SpeechGeneration.model_validate({})
    fields: Mapping[str, Any] = {
        "audio": UNSENT,
        "model": model,
        "timestamps": _timestamps(None if parameters is None else parameters.return_timestamps),
        "temperature": 1.0 if found.do_sample and found.temperature is None else found.temperature,
        "num_beams": found.num_beams,
        "max_tokens": found.max_new_tokens,
        "top_k": found.top_k,
        "top_p": found.top_p,
        "language": found.language,
        "task": found.task,
        "timeout_s": None if body is None else body.timeout_s,
        "request_id": None if body is None else body.request_id,
    }
    return native(TranscribeBody, fields)


def _timestamps(asked: bool | str | None) -> str | None:
    if asked is None or asked == "word":
        return asked
    return "segment" if asked else "none"


class SpeechReply(DataEvents):
    """Shows transcriptions as Hugging Face's pipeline has them."""

    def __init__(self, running: RunningTranscription, job: Job) -> None:
        self._running = running

    def piece(self, piece: Piece) -> Iterable[Json]:
        return ()

    def last(self) -> Iterable[Json]:
        return ()

    def reply(self) -> Response:
        check_complete(self._running)
        result, options = self._running.result, self._running.plan.options
        found: Json = {"text": result.text}
        if options.words:
            words = (word for segment in result.segments for word in segment.words)
            found["chunks"] = [{"text": one.text, "timestamp": [one.start, one.end]} for one in words]
        elif options.timestamps:
            segments = result.segments
            found["chunks"] = [{"text": one.text, "timestamp": [one.start, one.end]} for one in segments]
        return json_response(found)
