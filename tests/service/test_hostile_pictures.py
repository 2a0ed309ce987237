"""Pictures over HTTP from clients that leave, send the same picture often, or spell the marks of pictures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.service.encode_models import Client, client_of
from tests.service.picture_chats import (
    ASKED,
    FILES,
    MARK,
    app_of,
    claude_part,
    coded,
    make_folder,
    openai_part,
    url_of,
    words,
)
from tests.service.test_bad_requests import check_error
from triptych.model.api.request import Request
from triptych.model.vision.pictures import PreparedPicture

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with client_of(app_of(folder)) as made:
        yield made


@pytest.fixture(autouse=True)
def no_picture_is_held(client: Client) -> Iterator[None]:
    yield
    assert client.images.held_bytes == 0


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(parts)}]}


def different(count: int) -> list[bytes]:
    """Return files that no one has decoded before: what follows the end of a file is not read."""
    return [FILES[0] + bytes([number]) for number in range(count)]


MANY = different(50)
_RESPONSES_PARTS = [{"type": "input_image", "image_url": url_of(one)} for one in MANY]
_CODED = [coded(one) for one in MANY]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, said(*map(openai_part, MANY))),
        ("/v1/responses", {"input": [{"role": "user", "content": _RESPONSES_PARTS}]}),
        ("/v1/messages", said(*map(claude_part, MANY)) | {"max_tokens": 4}),
        ("/v1/messages/count_tokens", said(*map(claude_part, MANY))),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": _CODED}]}),
        ("/api/generate", {"prompt": "x", "images": _CODED}),
        ("/generate", {"prompt": MARK * len(MANY), "images": _CODED}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_no_more_pictures_are_decoded_once_the_client_has_gone(
    path: str, fields: dict[str, Any], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = iter([{"type": "http.request", "body": json.dumps({"model": "seeing"} | fields).encode()}])
    decoded, replies, second = 0, list[Any](), asyncio.Event()

    async def prepare(*_: object) -> tuple[PreparedPicture, int]:
        nonlocal decoded
        decoded += 1
        if decoded == 2:
            second.set()
        await asyncio.sleep(0.005)
        return PreparedPicture(features=bytes(192), shape=(3, 8, 8), num_positions=1), 1

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await second.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        replies.append(message)

    monkeypatch.setattr(client.images, "prepare_picture", prepare)
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1"}
    client.call(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
    assert 2 <= decoded < 10 and client.images.held_bytes == 0
    assert replies[0]["status"] == 499


@pytest.mark.parametrize("path", [CHAT, "/generate"])
def test_no_more_pictures_are_decoded_once_the_time_is_over(
    path: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = 0

    async def prepare(*_: object) -> tuple[PreparedPicture, int]:
        nonlocal decoded
        decoded += 1
        await asyncio.sleep(0.02)
        return PreparedPicture(features=bytes(192), shape=(3, 8, 8), num_positions=1), 1

    monkeypatch.setattr(client.images, "prepare_picture", prepare)
    fields = said(*map(openai_part, MANY)) if path == CHAT else {"prompt": MARK * len(MANY), "images": _CODED}
    reply = client.post(path, model="seeing", max_tokens=4, timeout_s=0.2, **fields)
    check_error(reply, 504, "timeout_s")
    assert decoded < 30


def submitted(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return the list to which all requests to the engine are added from now on."""
    engine, found = client.app.state.service.client, list[Request]()
    submit = engine.submit

    def seen(requests: Sequence[Request]) -> Any:
        found.extend(requests)
        return submit(requests)

    monkeypatch.setattr(engine, "submit", seen)
    return found


def test_a_picture_that_is_sent_often_goes_to_the_engine_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pixels were in the request as often as in the prompt, and counted once."""
    found = submitted(client, monkeypatch)
    one, other = openai_part(FILES[0]), openai_part(FILES[1])
    again = openai_part(different(1)[0])  # another file with the same pixels
    reply = client.post(CHAT, **ASKED, **said(one, other, words("x"), *[one] * 5, again, other))
    assert reply.status_code == 200, reply.text
    spans = found[0].images
    assert len(spans) == 9 and len({span.source.digest for span in spans}) == 2
    assert [bool(span.source.features) for span in spans] == [True, True] + [False] * 7


def test_a_prompt_that_is_too_long_is_counted(client: Client) -> None:
    def count(times: int) -> int:
        reply = client.post("/v1/messages/count_tokens", model="seeing", **said(*[claude_part(FILES[0])] * times))
        assert reply.status_code == 200, reply.text
        return int(reply.json()["input_tokens"])

    one, two = count(1), count(2)
    assert count(100) == one + 99 * (two - one) > 1024  # the context


def test_a_message_that_ends_with_a_picture_is_not_continued(client: Client) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    reply = client.post(CHAT, **ASKED, **fields, **said(words("x"), openai_part(FILES[0])))
    assert "no text at its end" in check_error(reply, 400, "continue_final_message")["message"]


def test_pictures_are_counted(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "triptych.access"):
        client.post(CHAT, **ASKED, **said(*map(openai_part, FILES)))
        client.post(CHAT, **ASKED, **said(words("x")))
    records: list[Any] = [record for record in caplog.records if record.name == "triptych.access"]
    assert [one.fields.get("images") for one in records] == [2, None]
    assert [", 2 images" in one.message for one in records] == [True, False]


@pytest.mark.parametrize("mark", [MARK, "<|im_end|>", "<|vision_start|>"])
@pytest.mark.parametrize("with_picture", [True, False])
def test_a_mark_that_goes_on_in_the_next_part_is_text(mark: str, with_picture: bool, client: Client) -> None:
    def tokens(*texts: str) -> int:
        parts = [words(text) for text in texts]
        reply = client.post(CHAT, **ASKED, **said(*parts, *[openai_part(FILES[0])] * with_picture))
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens"])

    joined = 0 if with_picture else 1  # without pictures parts are joined by line breaks
    plain = tokens("A" * len(mark))
    for cut in (1, 4, len(mark) - 1):
        assert tokens(mark[:cut], mark[cut:]) == plain + joined
    assert tokens(mark[:2], "", mark[2:5], mark[5:]) == plain + 3 * joined


def test_a_mark_in_a_variable_of_the_template_is_text(folder: Path, tmp_path: Path) -> None:
    made = make_folder(tmp_path)
    template = made / "chat_template.jinja"
    template.write_text("{{ (given or none) | tojson }}" + template.read_text())
    with client_of(app_of(made)) as client:
        asked = {**ASKED, **said(openai_part(FILES[0]))}
        for is_name in (False, True):
            plain, spelled = (
                client.post(CHAT, **asked, chat_template_kwargs={"given": {text: [text]} if is_name else text})
                for text in ("A" * len(MARK), MARK)
            )
            assert spelled.status_code == 200, spelled.text
            assert spelled.json()["usage"] == plain.json()["usage"]
