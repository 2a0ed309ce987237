"""Finds the Hugging Face task of a body at `/`, where clients send bodies of any task.

Fields that only one task has decide first: a question, a source sentence, labels, languages. Else it is the task of the
model, or of the only model that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from triptych.service.core.models import ServedModel
from triptych.service.dialects.huggingface import GenerateParameters
from triptych.service.dialects.text2text import GenerationOptions, TranslationParameters


class RootTask(StrEnum):
    """The tasks that `/` serves, by their Hugging Face names."""

    TEXT_GENERATION = "text-generation"
    TRANSLATION = "translation"  # and other tasks from text to text
    FEATURE_EXTRACTION = "feature-extraction"
    SENTENCE_SIMILARITY = "sentence-similarity"
    QUESTION_ANSWERING = "question-answering"
    ZERO_SHOT = "zero-shot-classification"
    FILL_MASK = "fill-mask"
    TOKEN_CLASSIFICATION = "token-classification"
    TEXT_CLASSIFICATION = "text-classification"
    IMAGE_CLASSIFICATION = "image-classification"
    ZERO_SHOT_IMAGE = "zero-shot-image-classification"
    SPEECH_RECOGNITION = "automatic-speech-recognition"


_OF_TEXT2TEXT = frozenset(TranslationParameters.model_fields) - set(GenerationOptions.model_fields)
_OF_GENERATION = frozenset(GenerateParameters.model_fields) - set(TranslationParameters.model_fields)


class _Root(msgspec.Struct):
    """The fields of a body that determine its task."""

    model: Any = None
    inputs: msgspec.Raw = msgspec.Raw(b"null")
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


class RootBody:
    """The parts of a body that determine its task. Errors in the body are left to the task's own checks."""

    def __init__(self, raw: bytes) -> None:
        try:
            root = msgspec.json.decode(raw, type=_Root)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            root = _Root()
        self.model: str | None = root.model if isinstance(root.model, str) else None
        self._inputs = _keys(root.inputs)
        self._parameters = _keys(root.parameters)
        self._streams = bytes(root.stream) != b"null"

    def task(self, models: Sequence[ServedModel]) -> RootTask:
        """Return the task; `models` are the candidates: the one that the request names, or all."""
        inputs, parameters = self._inputs or frozenset(), self._parameters or frozenset()
        if "source_sentence" in inputs:
            return RootTask.SENTENCE_SIMILARITY
        if "question" in inputs:
            return RootTask.QUESTION_ANSWERING
        if "candidate_labels" in parameters:
            joint = bool(models) and all(one.config.joint is not None for one in models)
            return RootTask.ZERO_SHOT_IMAGE if joint else RootTask.ZERO_SHOT
        if parameters & _OF_TEXT2TEXT:
            return RootTask.TRANSLATION
        writers = [one for one in models if one.config.can_generate and one.reads_text]
        if writers or not models:
            only_rewrites = bool(writers) and all(one.is_encoder_decoder for one in writers)
            generates = self._streams or parameters & _OF_GENERATION
            return RootTask.TRANSLATION if only_rewrites and not generates else RootTask.TEXT_GENERATION
        return self._of_head(models)

    def _of_head(self, models: Sequence[ServedModel]) -> RootTask:
        """Return the task of the only model with a head. InferenceClient sends `parameters` with all these tasks."""
        tasks = {task for one in models if (task := _task_of_head(one)) is not None}
        if len(models) > 1 and (self._parameters is None or len(tasks) != 1):
            return RootTask.FEATURE_EXTRACTION
        found = tasks.pop() if tasks else RootTask.FEATURE_EXTRACTION
        masked = found is RootTask.FILL_MASK and self._parameters is None
        return RootTask.FEATURE_EXTRACTION if masked else found


def task_of_file(media_type: str, models: Sequence[ServedModel]) -> RootTask | None:
    """Return the task of a body that is a file; None if it is not a file, or no model reads files of this type."""
    if media_type.startswith("image/"):
        return RootTask.IMAGE_CLASSIFICATION
    if media_type.startswith(("audio/", "video/")) or media_type == "application/ogg":
        return RootTask.SPEECH_RECOGNITION
    if media_type not in ("", "application/octet-stream"):
        return None
    tasks = {_task_of_head(one) for one in models}
    found = (RootTask.SPEECH_RECOGNITION, RootTask.IMAGE_CLASSIFICATION)
    return next((task for task in found if task in tasks), None)


def _keys(raw: msgspec.Raw) -> frozenset[str] | None:
    """Return the names of an object's fields; None for anything else."""
    try:
        return frozenset(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _task_of_head(served: ServedModel) -> RootTask | None:
    head = served.config.classifier
    if served.config.audio is not None:
        return RootTask.SPEECH_RECOGNITION
    if served.config.only_images:
        return RootTask.IMAGE_CLASSIFICATION if head is not None else None
    if head is None:
        return RootTask.FILL_MASK if served.config.masked_head is not None else None
    if head.spans:
        return RootTask.QUESTION_ANSWERING
    return RootTask.TOKEN_CLASSIFICATION if head.per_token else RootTask.TEXT_CLASSIFICATION
