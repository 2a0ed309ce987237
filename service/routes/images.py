"""Hugging Face's task for images: /pipeline/image-classification takes a file, or JSON with the file as base64."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.service.core.errors import ApiError, invalid
from triptych.service.core.models import ServedModel
from triptych.service.dialects import pipelines
from triptych.service.dialects.common import names_of, naming_errors
from triptych.service.dialects.pipelines import ImageBody, ImageLabelBody
from triptych.service.http.bodies import named_model, raw_body, read_body, whole_body, with_model
from triptych.service.http.model_use import choose_model
from triptych.service.http.parsing import parsed
from triptych.service.http.route_table import MODEL_IN_QUERY, Routes, file_body, json_body, replies
from triptych.service.planning.capabilities import CLASSIFY_IMAGE, LABEL_IMAGE
from triptych.service.routes import encode
from triptych.service.schemas.types import PIXEL

routes = Routes("encode")

_TYPES = ("image/", "application/octet-stream")  # media types of a body that is the file itself


def labels_images(served: ServedModel) -> bool:
    """Return whether a model compares images with texts."""
    return served.config.joint is not None


def classifies_images(served: ServedModel) -> bool:
    """Return whether a model classifies images."""
    return served.config.only_images and served.config.classifier is not None


@routes.post(
    "/pipeline/image-classification",
    "Classify an image, as InferenceClient asks for it",
    file_body(ImageBody, "image/*", CLASSIFY_IMAGE, PIXEL),
    replies("The classes, the best first.", Any),
    MODEL_IN_QUERY,
)
async def image_classification(request: Request) -> Response:
    """The body is the file, or JSON with the file as base64 and parameters; JPEG, PNG, WebP or GIF."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared.endswith("json"):
        return await classify(request, with_model(request, await parsed(request, await raw_body(request), ImageBody)))
    if declared and not declared.startswith(_TYPES):
        message = "send an image file with its Content-Type (image/...), or JSON"
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")
    file = await whole_body(request.receive)
    if not file:
        raise invalid("the body is empty; expected an image file", code="invalid_image")
    fields = {"inputs": base64.b64encode(file).decode(), "model": named_model(request, None)}
    return await classify(request, ImageBody.model_validate(fields))


@routes.post(
    "/pipeline/zero-shot-image-classification",
    "Classify an image by any labels, as InferenceClient asks for it",
    json_body(ImageLabelBody, ability=LABEL_IMAGE),
    replies("The labels, the best first.", Any),
    MODEL_IN_QUERY,
)
async def zero_shot_image_classification(request: Request) -> Response:
    """Requires a model of texts and images (CLIP, SigLIP)."""
    return await classify_by(request, await read_body(request, ImageLabelBody))


async def classify_by(request: Request, body: ImageLabelBody) -> Response:
    """Return scores of the body's labels."""
    served = await choose_model(request, body.model, labels_images, "classifies images by any labels", body.timeout_s)
    with naming_errors(names_of(body) | pipelines.IMAGE_NAMES):
        asked = pipelines.image_labels(body.model_copy(update={"model": served.name}))
        return await encode.answer(request, asked, pipelines.zero_shot_reply)


async def classify(request: Request, body: ImageBody) -> Response:
    """Return the classes of an image."""
    served = await choose_model(request, body.model, classifies_images, "classifies images", body.timeout_s)
    with naming_errors(pipelines.IMAGE_NAMES):
        asked = pipelines.image(body.model_copy(update={"model": served.name}))
        return await encode.answer(request, asked, pipelines.image_reply(body))
