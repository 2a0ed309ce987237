"""The request bodies of files and batches, and their JSON in replies, as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from triptych.service.batches.records import RETENTION_SECONDS, TIMES, Batch, Json, StoredFile
from triptych.service.schemas.types import Body

LEAST_SECONDS = 3_600  # of a file
ENDPOINTS: dict[str, str] = {  # by path: the setting that limits a body
    **dict.fromkeys(
        (
            *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/moderations"),
            *("/v1/rerank", "/v1/score", "/v1/classify", "/generate", "/encode"),
        ),
        "max_body_bytes",
    ),
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), "max_audio_bytes"),
}
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/generate",
    "/encode",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
]


class ExpiresAfter(Body):
    """When a file expires."""

    anchor: Literal["created_at"] = Field(description="From when the seconds count.", examples=["created_at"])
    seconds: int = Field(
        ge=LEAST_SECONDS, le=RETENTION_SECONDS, description="Seconds until the file is deleted.", examples=[86_400]
    )


Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]


class BatchBody(Body):
    """A batch to run."""

    input_file_id: str = Field(
        min_length=1,
        max_length=128,
        description="The id of a file of requests, one JSON object a line, uploaded with the purpose `batch`.",
        examples=["file-5f0c1d"],
    )
    endpoint: Endpoint = Field(description="The route of all requests in the file.", examples=["/v1/chat/completions"])
    completion_window: Literal["24h"] = Field(
        description="After this time the batch ends, with what has been computed.", examples=["24h"]
    )
    metadata: Metadata | None = Field(None, description="Up to 16 texts by name, kept with the batch.")
    output_expires_after: ExpiresAfter | None = Field(None, description="When the output files expire.")


class FileForm(Body):
    """A file to keep."""

    file: str = Field(description="The file.", json_schema_extra={"format": "binary"})
    purpose: Literal["batch"] = Field(description="What the file is for.", examples=["batch"])
    expires_after: ExpiresAfter | None = Field(
        None, description="When the file expires, as `expires_after[anchor]` and `expires_after[seconds]`."
    )


def file_object(file: StoredFile) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: Batch) -> Json:
    usage = batch.usage
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: batch.times.get(name) for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": batch.metadata,
    }


def page_of(objects: list[Json], limit: int) -> Json:
    """Return a page of a list, made of one more object than it has, if there are more."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }
