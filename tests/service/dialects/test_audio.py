"""Speech by the official clients of OpenAI and Hugging Face, against the application under a real server."""

from __future__ import annotations

import asyncio
import io
import select
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.service.processes import eventually
from tests.service.speech import BEGIN, ENGLISH, PREVIOUS, at, base64_of, ids, saying, speech_app, windows
from tests.service.support import App, check_accounts, counted, live, run
from tests.service.test_bad_requests import check_error
from triptych.service.http.multipart import MAX_PARTS, boundary_of, read_form
from triptych.service.settings.service_settings import Limits, ServiceSettings

pytestmark = pytest.mark.usefixtures("hub_client")
SAID = [BEGIN, *ids(" Hello there."), at(0.2), at(0.2), *ids(" Bye."), at(0.4)]
SHORT = ("speech.wav", b"0.5")


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, App]]:
    app = speech_app(SAID, settings=ServiceSettings(limits=Limits(max_audio_bytes=100_000)))
    with live(app) as url:
        yield url, app
    check_accounts(app)


@pytest.fixture
def url(served: tuple[str, App]) -> str:
    return served[0]


@pytest.fixture
def app(served: tuple[str, App]) -> App:
    served[1].client.submitted.clear()
    served[1].script.answer = saying(SAID)
    return served[1]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def send(url: str, files: Any = None, path: str = "/v1/audio/transcriptions", **fields: Any) -> httpx.Response:
    return httpx.post(url + path, data=fields, files=files or {"file": SHORT})


class TestOpenAI:
    def test_json(self, client: openai.OpenAI, app: App) -> None:
        app.script.answer = saying(ids(" Hello."))
        found = client.audio.transcriptions.create(file=SHORT, model="speech")
        assert found.text == "Hello."
        assert found.usage is not None and (found.usage.type, found.usage.seconds) == ("duration", 1)  # type: ignore[union-attr]

    def test_every_field_arrives(self, client: openai.OpenAI, app: App) -> None:
        client.audio.transcriptions.create(
            file=io.BytesIO(b"0.5"),
            model="speech",
            language="de",
            prompt="Names: Ada",
            temperature=0.25,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
            extra_body={"seed": 4, "request_id": "mine"},
        )
        window, alignment = app.client.submitted
        assert window.request_id.startswith("mine#")
        assert (window.params.temperature, window.params.seed) == (0.25, 5)
        assert window.prompt_token_ids[: 1 + len(ids(" Names: Ada"))] == (PREVIOUS, *ids(" Names: Ada"))
        assert window.params.timestamps is not None and alignment.alignment is not None

    def test_verbose_json_with_words(self, client: openai.OpenAI, app: App) -> None:
        found = client.audio.transcriptions.create(
            file=SHORT, model="speech", response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
        assert (found.text, found.language, found.duration) == ("Hello there. Bye.", "english", 0.5)
        assert [(one.start, one.end, one.text) for one in found.segments or ()] == [
            (0.0, 0.2, " Hello there."),
            (0.2, 0.4, " Bye."),
        ]
        assert [one.word for one in found.words or ()] == ["Hello", "there.", "Bye."]
        plain = client.audio.transcriptions.create(file=SHORT, model="speech", response_format="verbose_json")
        assert plain.segments and plain.words is None

    def test_texts(self, client: openai.OpenAI, app: App) -> None:
        def asked(format: Any) -> str:
            return client.audio.transcriptions.create(file=SHORT, model="speech", response_format=format)  # type: ignore[return-value]

        assert asked("text") == "Hello there. Bye.\n"
        assert asked("srt").startswith("1\n00:00:00,000 --> 00:00:00,200\nHello there.\n\n2\n")
        assert asked("vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.200\nHello there.\n")

    def test_a_stream(self, client: openai.OpenAI, app: App) -> None:
        app.script.answer = saying(ids(" Hello."))
        events = list(client.audio.transcriptions.create(file=SHORT, model="speech", stream=True, include=["logprobs"]))
        deltas, done = events[:-1], events[-1]
        assert {one.type for one in deltas} == {"transcript.text.delta"}
        assert "".join(one.delta for one in deltas) == "Hello."  # type: ignore[union-attr]
        assert len(deltas) > 3, "text comes while the window is decoded"
        assert done.type == "transcript.text.done" and done.text == "Hello."
        assert done.logprobs is not None and len(done.logprobs) == len(" Hello.")

    def test_a_stream_with_several_temperatures(self, client: openai.OpenAI, app: App) -> None:
        app.script.answer = saying([7] * 40, ids(" better"))
        several: Any = {"extra_body": {"temperature": [0, 0.4]}}
        events = list(client.audio.transcriptions.create(file=SHORT, model="speech", stream=True, **several))
        assert "".join(one.delta for one in events[:-1]) == "better"  # type: ignore[union-attr]
        assert [one.params.temperature for one in windows(app)] == [0.0, 0.4]

    def test_bytes_of_a_part_of_a_character_are_not_made_up(self, client: openai.OpenAI, app: App) -> None:
        app.script.answer = saying(ids(" é"))
        found = client.audio.transcriptions.create(file=SHORT, model="speech", include=["logprobs"])
        assert found.text == "é" and [one.bytes for one in found.logprobs or ()] == [[32], None, None]

    def test_the_asynchronous_client(self, url: str, app: App) -> None:
        async def work() -> tuple[str, str]:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
                whole = await client.audio.transcriptions.create(file=SHORT, model="speech")
                stream = await client.audio.transcriptions.create(file=SHORT, model="speech", stream=True)
                parts = [one.delta async for one in stream if one.type == "transcript.text.delta"]
                return whole.text, "".join(parts)

        assert asyncio.run(work()) == ("Hello there. Bye.", "Hello there. Bye.")

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_translations(self, client: openai.OpenAI, app: App) -> None:
        found: Any = client.audio.translations.create(file=SHORT, model="speech", response_format="verbose_json")
        assert (found.text, found.language) == ("Hello there. Bye.", "english")
        assert "translate" in str(found.model_dump())
        assert client.audio.translations.create(file=SHORT, model="speech").text == "Hello there. Bye."

    def test_chunking_strategy_is_all_windows_at_once(self, client: openai.OpenAI, app: App) -> None:
        app.script.answer = saying(ids(" Hello."))
        client.audio.transcriptions.create(file=("a", b"2.0"), model="speech", chunking_strategy="auto")
        assert len(windows(app)) == 3
        with pytest.raises(openai.BadRequestError, match="chunking_strategy"):
            client.audio.transcriptions.create(
                file=SHORT, model="speech", chunking_strategy={"type": "server_vad", "threshold": 0.5}
            )

    def test_errors_name_the_form_s_fields(self, client: openai.OpenAI, app: App) -> None:
        with pytest.raises(openai.NotFoundError):
            client.audio.transcriptions.create(file=SHORT, model="whisper-1")
        with pytest.raises(openai.BadRequestError) as raised:
            client.audio.transcriptions.create(file=("x", b"noise"), model="speech")
        assert raised.value.param == "file" and "not an audio file" in raised.value.message
        with pytest.raises(openai.BadRequestError, match="transcribes speech"):
            client.audio.transcriptions.create(file=SHORT, model="gen")
        with pytest.raises(openai.BadRequestError, match="transcribes speech"):
            client.completions.create(model="speech", prompt="text")


class TestForms:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"temperature": "hot"}, "temperature"),
            ({"temperature": "1.5"}, "temperature"),
            ({"temperature": "nan"}, "temperature"),
            ({"temperature[]": ["0", "2"]}, "temperature[1]"),
            ({"response_format": "diarized_json"}, "response_format"),
            ({"stream": "maybe"}, "stream"),
            ({"stream": "true", "response_format": "srt"}, "stream"),
            ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
            ({"timestamp_granularities[]": "hour", "response_format": "verbose_json"}, "timestamp_granularities[0]"),
            ({"include[]": "logprobs", "response_format": "text"}, "include"),
            ({"keywords[]": "a"}, "keywords"),
            ({"languag": "en"}, "languag"),
            ({"language": ["en", "de"]}, "language"),
            ({"prompt": "<|en|>"}, "prompt"),
            ({"timeout_s": "-1"}, "timeout_s"),
            ({"request_id": "a b"}, "request_id"),
        ],
    )
    def test_bad_fields(self, url: str, fields: dict[str, Any], param: str) -> None:
        error = check_error(send(url, model="speech", **fields), 400)
        assert error["param"] == param, error

    def test_an_empty_field_counts_as_not_sent(self, url: str) -> None:
        empty = dict.fromkeys(("language", "temperature", "response_format", "seed", "timestamp_granularities[]"), "")
        assert send(url, model="speech", prompt="", stream="", **empty).status_code == 200
        assert check_error(send(url, model="speech", temprature=""), 400)["param"] == "temprature"

    def test_files(self, url: str) -> None:
        assert check_error(httpx.post(f"{url}/v1/audio/transcriptions", data={"a": "b"}), 415)
        assert check_error(send(url, {"sound": SHORT}), 400)["param"] == "sound"
        twice = [("file", SHORT), ("file", SHORT)]
        assert check_error(send(url, twice), 400)["param"] == "file"
        body = httpx.post(f"{url}/v1/audio/transcriptions", files={"model": (None, "speech")})
        assert check_error(body, 400)["param"] == "file"

    def test_a_model_that_does_not_translate_is_named(self) -> None:
        app = speech_app(SAID, tokens=ENGLISH)
        reply = run(app, lambda client: client.post("/v1/audio/translations", files={"file": SHORT}))
        error = check_error(reply, 400, "model", code="wrong_task")
        assert error["message"] == "model: model speech transcribes and does not translate"

    def test_a_body_has_a_limit_of_its_own(self, url: str, app: App) -> None:
        check_error(send(url, {"file": ("a", b"0" * 100_001)}), 413, None, code="body_too_large")
        padded = b"0.5".ljust(90_000)
        assert send(url, {"file": ("a", padded)}, model="speech").status_code == 200

    def test_pages_of_other_sites_are_refused(self, url: str) -> None:
        for path in ("/v1/audio/transcriptions", "/pipeline/automatic-speech-recognition"):
            reply = httpx.post(url + path, files={"file": SHORT}, headers={"sec-fetch-site": "cross-site"})
            check_error(reply, 403, None, code="cross_site")
        same = httpx.post(
            f"{url}/v1/audio/transcriptions", files={"file": SHORT}, headers={"sec-fetch-site": "same-origin"}
        )
        assert same.status_code == 200

    def test_no_engine_is_asked_for_more_than_a_count(self, url: str, app: App) -> None:
        assert send(url, model="speech").status_code == 200
        received = counted(app, "triptych_requests_received_total")
        assert set(received) == {("generate",)}


class TestManyUploads:
    LIMITS = Limits(max_audio_requests=2, max_audio_bytes=100_000, max_audio_held_bytes=250_000, receive_s=1.0)

    def upload(self, url: str, sent: int) -> socket.socket:
        """Begin to send a file of 90,000 bytes and stop after `sent` bytes of its body."""
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        head = "POST /pipeline/automatic-speech-recognition HTTP/1.1\r\nhost: a\r\ncontent-type: audio/wav\r\n"
        connection.sendall(head.encode() + b"content-length: 90000\r\n\r\n" + b"0".ljust(sent))
        return connection

    def test_slow_uploads_take_no_place_and_end(self) -> None:
        app = speech_app(SAID, settings=ServiceSettings(limits=self.LIMITS))
        room = app.app.state.speech.room
        with live(app) as url:
            slow = [self.upload(url, 10_000) for _ in range(5)]
            eventually(lambda: room.num_bytes == 50_000)
            assert room.num_files == 0
            assert send(url, model="speech").status_code == 200
            for connection in slow:
                with connection:
                    assert b"408" in connection.recv(12, socket.MSG_WAITALL)
            eventually(lambda: room.num_bytes == 0)
        check_accounts(app)

    def test_many_at_once_hold_no_more_than_the_limit(self) -> None:
        app = speech_app(SAID, settings=ServiceSettings(limits=replace(self.LIMITS, receive_s=60.0)))
        room = app.app.state.speech.room
        with live(app) as url:
            slow = [self.upload(url, 89_999)]
            eventually(lambda: room.num_bytes == 89_999)
            slow += [self.upload(url, 89_999) for _ in range(5)]
            eventually(lambda: len(select.select(slow, [], [], 0)[0]) >= 4)
            refused = select.select(slow, [], [], 0)[0]
            for connection in refused:
                assert b" 429" in connection.recv(12, socket.MSG_WAITALL)
            eventually(lambda: room.num_bytes == 89_999 * (6 - len(refused)))
            slow += [self.upload(url, 89_999) for _ in range(len(refused) - 4)]  # two fit
            eventually(lambda: room.num_bytes == 2 * 89_999)
            check_error(send(url, {"file": ("a", b"0.5".ljust(90_000))}, model="speech"), 429, None, "queue_full")
            for connection in slow:
                connection.close()
            eventually(lambda: room.num_bytes == 0)
            assert send(url, model="speech").status_code == 200
        check_accounts(app)


class TestMultipart:
    """Parsing of forms by RFC 7578, without a server."""

    def parts(self, *heads: bytes) -> bytes:
        return b"".join(b"--b\r\n" + head + b"\r\n\r\nvalue\r\n" for head in heads) + b"--b--\r\n"

    def test_names_files_and_borders(self) -> None:
        body = (
            b'preamble\r\n--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx\r\n--c\r\n'
            b'\r\n--b  \r\ncontent-disposition: form-data; filename="a\\"b.wav"; name=f\r\nContent-Type: audio/wav\r\n'
            b"\r\n\r\n\r\n--b\r\nContent-Disposition: form-data; name=c\r\nContent-Transfer-Encoding: 7bit\r\n\r\nd"
            b"\r\n--b--epilogue"
        )
        form = read_form(body, b"b")
        assert form.texts == (("a", "x\r\n--c\r\n"), ("c", "d"))
        assert [(name, file.data) for name, file in form.files] == [("f", b"\r\n")]

    def test_boundaries(self) -> None:
        assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
        assert boundary_of("Multipart/Form-Data; charset=utf-8; boundary=x-1") == b"x-1"

    @pytest.mark.parametrize("declared", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
    def test_other_bodies(self, declared: str) -> None:
        with pytest.raises(Exception, match="multipart/form-data"):
            boundary_of(declared)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"no border",
            b"--b\r\n",
            b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\nx',
            b"--b\r\n\r\nx\r\n--b--",
            b"--b\r\nContent-Disposition: attachment; name=a\r\n\r\nx\r\n--b--",
            b"--b\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: base64\r\n\r\nx\r\n--b--",
            b"--bc\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n--bc--",
            b"--b\r\nX: " + b"y" * 5000 + b"\r\n\r\nx\r\n--b--",
            b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n\xff\r\n--b--",
            b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n" + b"x" * 70_000 + b"\r\n--b--",
        ],
    )
    def test_broken_forms_are_refused(self, body: bytes) -> None:
        with pytest.raises(Exception, match=r"form|UTF-8|bytes"):
            read_form(body, b"b")

    def test_many_parts_are_refused(self) -> None:
        head = b'Content-Disposition: form-data; name="a"'
        assert len(read_form(self.parts(*[head] * MAX_PARTS), b"b").texts) == MAX_PARTS
        with pytest.raises(Exception, match="parts"):
            read_form(self.parts(*[head] * (MAX_PARTS + 1)), b"b")


class TestHuggingFace:
    def client(self, url: str, model: str = "?model=speech") -> InferenceClient:
        return InferenceClient(model=f"{url}/pipeline/automatic-speech-recognition{model}", token="any")

    def test_a_file(self, url: str, app: App, tmp_path: Any) -> None:
        app.script.answer = saying(ids(" Hello."))
        assert self.client(url).automatic_speech_recognition(b"0.5").text == "Hello."
        anyone = InferenceClient(model=f"{url}/?model=speech", token="any")
        assert anyone.automatic_speech_recognition(b"0.5").text == "Hello."
        timed = anyone.automatic_speech_recognition(b"0.5", extra_body={"return_timestamps": True})
        assert timed.text == "Hello." and timed.chunks
        file = tmp_path / "speech.flac"
        file.write_bytes(b"0.5")
        assert self.client(url, "").automatic_speech_recognition(str(file)).text == "Hello."

    def test_parameters(self, url: str, app: App) -> None:
        found = self.client(url).automatic_speech_recognition(b"0.5", extra_body={"return_timestamps": True})
        assert [(one.text, one.timestamp) for one in found.chunks or ()] == [
            (" Hello there.", [0.0, 0.2]),
            (" Bye.", [0.2, 0.4]),
        ]
        words = self.client(url).automatic_speech_recognition(
            b"0.5",
            extra_body={
                "return_timestamps": "word",
                "generation_parameters": {"max_new_tokens": 30, "do_sample": True, "temperature": 0.3},
            },
        )
        assert [one.text for one in words.chunks or ()] == [" Hello", " there.", " Bye."]
        window = windows(app)[-1]
        assert (window.params.max_tokens, window.params.temperature) == (30, 0.3)
        for given, temperature in (({"temperature": 0.3}, 0.3), ({"do_sample": True}, 1.0), ({}, 0.0)):
            self.client(url).automatic_speech_recognition(b"0.5", extra_body={"generate_kwargs": given})
            assert windows(app)[-1].params.temperature == temperature

    def test_errors(self, url: str) -> None:
        path = f"{url}/pipeline/automatic-speech-recognition"
        reply = httpx.post(path, content=b"noise", headers={"content-type": "audio/wav"})
        assert check_error(reply, 400)["param"] == "inputs"
        check_error(httpx.post(path, content=b"0.5", headers={"content-type": "text/plain"}), 415)
        body = {"inputs": base64_of(b"0.5"), "parameters": {"generation_parameters": {"num_beams": 99}}}
        assert check_error(httpx.post(path, json=body), 400)["param"] == "parameters.generation_parameters.num_beams"
        body = {"inputs": base64_of(b"0.5"), "parameters": {"generation_parameters": {}, "generate_kwargs": {}}}
        assert check_error(httpx.post(path, json=body), 400)["param"] == "parameters.generate_kwargs"
        with pytest.raises(HfHubHTTPError, match="not an audio file"):
            self.client(url).automatic_speech_recognition(b"noise")
