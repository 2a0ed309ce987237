"""OpenAI's files and batches. Without `--state-dir` the routes answer 501."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from triptych.service.batches.objects import BatchBody, FileForm, batch_object, file_object, page_of
from triptych.service.batches.records import DAY_SECONDS, RETENTION_SECONDS, Batch, StoredFile, now
from triptych.service.batches.state import Batches, state_errors
from triptych.service.batches.store import NoSpaceError, Tables, new_id
from triptych.service.core.errors import (
    FINAL,
    ApiError,
    conflict,
    from_validation,
    invalid,
    no_room,
    not_found,
    shorten,
    too_large,
)
from triptych.service.http.bodies import context_of_request, json_response, page_limit, raw_body
from triptych.service.http.file_replies import file_reply
from triptych.service.http.form_stream import StreamedForm, read_form_to
from triptych.service.http.multipart import boundary_of
from triptych.service.http.parsing import parsed
from triptych.service.http.route_table import FORM, Body, Routes, in_path, in_query, json_body, replies
from triptych.service.lifecycle.state import service_of
from triptych.service.schemas.field_paths import siblings

routes = Routes()

_MAX_ACTIVE = 100  # unfinished batches of an owner
_MAX_NAME = 255
_FILE_ID = in_path("file_id", "The id of a file, such as `file-5f0c1d`.")
_BATCH_ID = in_path("batch_id", "The id of a batch, such as `batch_5f0c1d`.")
_AFTER = in_query("after", "The id of the object before the page.", type="string")


@routes.post(
    "/v1/files",
    "Upload a file of requests, as OpenAI has it",
    Body((FileForm,), {}, (FORM,), "max_file_bytes"),
    replies("The `file`.", Any),
    errors=(400, 408, 415, 429, 499, 501),
)
async def create_file(request: Request) -> Response:
    """Works with OpenAI's client. The file belongs to the API key, and is deleted after 30 days, or `expires_after`."""
    batches = _batches(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    batches.begin_upload()
    path = batches.store.new_upload()
    try:
        with state_errors():
            form = await read_form_to(path, request.receive, boundary, _in_thread)
        fields, seconds = _fields(form)
        owner, name = context_of_request().tenant.id, _file_name(form.file_name)
        file = await batches.run(lambda tables: tables.add_file(path, owner, name, fields.purpose, seconds))
    except NoSpaceError:
        raise too_large(
            "the files and batches of this service have max_state_bytes "
            f"({service_of(request).settings.max_state_bytes}); delete files that are not needed",
            code="no_space",
        ) from None
    except Exception:
        await asyncio.to_thread(batches.store.discard, path)
        raise
    finally:
        batches.end_upload()
        await asyncio.to_thread(path.unlink, missing_ok=True)
    return json_response(file_object(file))


@routes.get(
    "/v1/files",
    "The files of this API key",
    replies("A page of files.", Any),
    in_query("purpose", "Only files for this purpose.", enum=["batch", "batch_output"]),
    _AFTER,
    in_query("limit", "Files of a page; default: 10000.", type="integer", minimum=1, maximum=10_000),
    in_query("order", "Default: `desc`, the last first.", enum=["asc", "desc"]),
    errors=(400, 501),
)
async def list_files(request: Request) -> Response:
    """Lists the files, the newest first."""
    batches, owner = _batches(request), context_of_request().tenant.id
    query, limit = request.query_params, page_limit(request, 10_000, 10_000)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc", "order")
    purpose, after = query.get("purpose"), query.get("after")
    found = await batches.run(lambda tables: tables.files(owner, purpose, after, limit + 1, ascending=order == "asc"))
    return json_response(page_of([file_object(one) for one in found], limit))


@routes.get("/v1/files/{file_id}", "A file", replies("The `file`.", Any), _FILE_ID, errors=(404, 501))
async def retrieve_file(request: Request) -> Response:
    """Returns what is known of a file."""
    return json_response(file_object(await _file(request)))


@routes.get(
    "/v1/files/{file_id}/content",
    "The content of a file",
    replies("The content.", texts=("application/jsonl",)),
    _FILE_ID,
    errors=(404, 416, 501),
)
async def file_content(request: Request) -> Response:
    """Returns the bytes of a file; `Range` names a part of them."""
    file = await _file(request)
    path = _batches(request).store.path_of(file.id)
    try:
        found = await asyncio.to_thread(os.stat, path)
    except OSError:
        raise _no_file(file.id) from None
    return file_reply(request, path, found, "application/jsonl", file.filename)


@routes.delete("/v1/files/{file_id}", "Delete a file", replies("It is deleted.", Any), _FILE_ID, errors=(404, 409, 501))
async def delete_file(request: Request) -> Response:
    """Deletes a file; one that an unfinished batch reads is kept (409)."""
    batches, owner, file_id = _batches(request), context_of_request().tenant.id, request.path_params["file_id"]
    deleted = await batches.run(lambda tables: tables.delete_file(owner, file_id))
    if deleted is None:
        raise _no_file(file_id)
    if not deleted:
        raise conflict("a batch that has not ended reads this file; cancel the batch first", "file_in_use")
    await asyncio.to_thread(batches.store.path_of(file_id).unlink, missing_ok=True)
    return json_response({"id": file_id, "object": "file", "deleted": True})


@routes.post(
    "/v1/batches",
    "Run a file of requests in the background, as OpenAI has it",
    json_body(BatchBody),
    replies("The `batch`.", Any),
    errors=(400, 404, 408, 415, 429, 499, 501),
)
async def create_batch(request: Request) -> Response:
    """Works with OpenAI's client. The requests run in the time that others leave; each has one line in an output file.

    All lines are checked before any is run: `errors` of the batch has the lines that are not valid.
    """
    batches, owner = _batches(request), context_of_request().tenant.id
    body = await parsed(request, await raw_body(request), BatchBody)
    after = body.output_expires_after
    time = now()
    batch = Batch(
        new_id("batch_"),
        *(owner, body.endpoint, body.input_file_id, body.completion_window, time, time + DAY_SECONDS),
        metadata=body.metadata,
        output_seconds=RETENTION_SECONDS if after is None else after.seconds,
    )

    def add(tables: Tables) -> bool:
        file = tables.file(owner, body.input_file_id)
        if file is None:
            raise not_found(f"file {shorten(body.input_file_id)} not found", "file_not_found", "input_file_id")
        if file.purpose != "batch":
            raise invalid(f"the file is a {file.purpose}; upload one with the purpose batch", "input_file_id")
        return tables.add_batch(batch, _MAX_ACTIVE)

    if not await batches.run(add):
        raise no_room(f"{_MAX_ACTIVE} batches of this key have not ended", "batches")
    batches.runner.notice()
    return json_response(batch_object(batch))


@routes.get(
    "/v1/batches",
    "The batches of this API key",
    replies("A page of batches.", Any),
    _AFTER,
    in_query("limit", "Batches of a page; default: 20.", type="integer", minimum=1, maximum=100),
    errors=(400, 501),
)
async def list_batches(request: Request) -> Response:
    """Lists the batches, the newest first. They are kept for 30 days after their end."""
    batches, owner = _batches(request), context_of_request().tenant.id
    limit, after = page_limit(request, 20, 100), request.query_params.get("after")
    found = await batches.run(lambda tables: tables.batches(owner, after, limit + 1))
    return json_response(page_of([batch_object(one) for one in found], limit))


@routes.get("/v1/batches/{batch_id}", "A batch", replies("The `batch`.", Any), _BATCH_ID, errors=(404, 501))
async def retrieve_batch(request: Request) -> Response:
    """Returns the state of a batch."""
    batches, owner, batch_id = _batches(request), context_of_request().tenant.id, request.path_params["batch_id"]
    return _answer(batch_id, await batches.run(lambda tables: tables.batch(owner, batch_id)))


@routes.post(
    "/v1/batches/{batch_id}/cancel",
    "Cancel a batch",
    None,
    replies("The `batch`.", Any),
    _BATCH_ID,
    errors=(404, 409, 501),
)
async def cancel_batch(request: Request) -> Response:
    """Ends a batch soon: finished requests stay in the output files, the others get the error `batch_cancelled`."""
    batches, owner, batch_id = _batches(request), context_of_request().tenant.id, request.path_params["batch_id"]
    batch = await batches.run(lambda tables: tables.cancel(owner, batch_id))
    if batch is not None and batch.status not in ("cancelling", "cancelled"):
        raise conflict(f"the batch is {batch.status}, so it cannot be cancelled", "batch_ended")
    batches.runner.notice()
    return _answer(batch_id, batch)


def _answer(batch_id: str, batch: Batch | None) -> Response:
    if batch is None:
        raise not_found(f"batch {shorten(batch_id)} not found", "batch_not_found")
    return json_response(batch_object(batch))


def _in_thread(work: Callable[[], None]) -> Awaitable[None]:
    """Run work in a thread. What is returned ends with it, and is no task, which the end of the loop would cancel."""
    return asyncio.get_running_loop().run_in_executor(None, work)


def _batches(request: Request) -> Batches:
    found = request.app.state.batches
    if found is None:
        message = "files and batches need a folder: start the service with --state-dir DIR"
        raise ApiError(501, message, type="invalid_request_error", code="no_state_dir", headers=FINAL)
    assert isinstance(found, Batches)
    return found


async def _file(request: Request) -> StoredFile:
    """Return the file whose id is in the URL; raises a 404."""
    batches, owner, file_id = _batches(request), context_of_request().tenant.id, request.path_params["file_id"]
    found = await batches.run(lambda tables: tables.file(owner, file_id))
    if found is None:
        raise _no_file(file_id)
    return found


def _no_file(file_id: str) -> ApiError:
    return not_found(f"file {shorten(file_id)} not found", "file_not_found")


def _fields(form: StreamedForm) -> tuple[FileForm, int]:
    """Return the fields of an upload, and after how many seconds its file expires."""
    if form.file_field not in (None, "file"):
        raise invalid(f"unknown file {shorten(str(form.file_field))}; send the file as file", "file")
    given: dict[str, Any] = {"file": ""} if form.file_field is not None else {}
    for name, text in form.texts:
        if name in ("expires_after[anchor]", "expires_after[seconds]"):
            value = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text
            given.setdefault("expires_after", {})[name[14:-1]] = value
        elif name in given:
            raise invalid(f"{shorten(name)} is given twice", name[:64])
        else:
            given[name] = text
    try:
        fields = FileForm.model_validate(given)
    except ValidationError as error:
        known = partial(siblings, FileForm)
        raise from_validation(error.errors(include_url=False, include_input=False), known) from None
    return fields, RETENTION_SECONDS if fields.expires_after is None else fields.expires_after.seconds


def _file_name(name: str) -> str:
    """Return the last part of a client's file name, printable and short."""
    last = PurePosixPath(name.replace("\\", "/")).name
    return "".join(c if c.isprintable() else "_" for c in last)[:_MAX_NAME] or "upload"
