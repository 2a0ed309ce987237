"""Transcriptions over a scripted engine: /generate with `audio`, how windows follow each other, how all of it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from model.api.request import Request
from model.errors import ConfigError, QueueFullError
from model.llm_speech import transcribe
from model.media.log_mel import LogMel
from model.speech.chunks import cut_chunks
from model.speech.requests import SpeechOptions
from model.speech.spectrogram import Spectrogram
from service.core.fake_engine import FakeStream
from service.core.request_context import RequestContext
from service.lifecycle.jobs import Job
from service.sandbox.process_pool import WorkerError
from service.schemas.speech_bodies import TranscribeEvent, TranscribeReply
from service.settings.service_settings import Limits, ServiceSettings
from service.speech.running import RunningTranscription
from tests.service.speech import (
    BEGIN,
    DE,
    EN,
    END,
    ENGLISH,
    NO_TIMESTAMPS,
    PREVIOUS,
    RATE,
    START,
    TOKENIZER,
    TRANSCRIBE,
    TRANSLATE,
    at,
    base64_of,
    chunk_digests,
    ids,
    served_speech,
    sound,
    speech_app,
)
from tests.service.support import App, check_accounts, counted, events, hold, run, until
from tests.service.test_bad_requests import check_error


@pytest.fixture
def speech(request: pytest.FixtureRequest) -> Iterator[App]:
    made = speech_app(ids(" Hello."))
    yield made
    check_accounts(made)


def body(seconds: float = 0.5, **fields: Any) -> dict[str, Any]:
    return {"model": "speech", "audio": base64_of(f"{seconds}".encode()), **fields}


def asked(app: App, seconds: float = 0.5, **fields: Any) -> httpx.Response:
    return run(app, lambda client: client.post("/generate", json=body(seconds, **fields)))


def transcribed(app: App, seconds: float = 0.5, **fields: Any) -> dict[str, Any]:
    reply = asked(app, seconds, **fields)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    TranscribeReply.model_validate(found)
    return found


def windows(app: App) -> list[Request]:
    """The requests for outputs of windows, without questions for languages and alignments."""
    return [one for one in app.client.submitted if not one.params.allowed_token_ids and one.alignment is None]


class TestShort:
    def test_the_language_is_found_out_and_the_text_returned(self, speech: App) -> None:
        found = transcribed(speech)
        [choice] = found["choices"]
        assert choice == {
            **{"index": 0, "prompt_index": 0, "text": "Hello.", "language": "en", "finish_reason": "stop"}
        }
        assert found["usage"] == {
            **{"prompt_tokens": 25, "completion_tokens": 9, "total_tokens": 34, "cached_tokens": 0},
            "audio_seconds": 0.5,
        }
        detection, window = speech.client.submitted
        assert detection.prompt_token_ids == (START,)
        assert detection.params.allowed_token_ids == (EN, DE)
        assert window.prompt_token_ids == (START, EN, TRANSCRIBE, NO_TIMESTAMPS)
        assert window.params.timestamps is None
        assert window.source is not None and window.source == detection.source
        assert window.source.shape == (4, 100)
        assert window.params.max_tokens == 60
        assert counted(speech, "triptych_audio_seconds_total") == {("speech",): 0.5}
        assert counted(speech, "triptych_audio_windows_total") == {("speech", "text"): 1}
        assert counted(speech, "triptych_audio_real_time_factor_count") == {("speech",): 1}

    def test_a_language_a_task_and_a_prompt(self, speech: App) -> None:
        transcribed(speech, language="German", task="translate", initial_prompt="Names: Ada")
        [window] = windows(speech)
        assert len(speech.client.submitted) == 1
        assert window.prompt_token_ids == (PREVIOUS, *ids(" Names: Ada"), START, DE, TRANSLATE, NO_TIMESTAMPS)
        assert window.params.probe is not None
        assert window.params.probe.position == len(window.prompt_token_ids) - 4

    def test_segments_and_words(self) -> None:
        said = [BEGIN, *ids(" Hi there."), at(0.2), at(0.2), *ids(" Bye"), at(0.4)]
        app = speech_app(said)
        found = transcribed(app, timestamps="word", return_token_ids=True)
        [choice] = found["choices"]
        assert choice["text"] == "Hi there. Bye"
        assert choice["token_ids"] == ids(" Hi there. Bye")
        segments = [(one["start"], one["end"], one["text"]) for one in choice["segments"]]
        assert segments == [(0.0, 0.2, " Hi there."), (0.2, 0.4, " Bye")]
        words = [(one["text"], one["start"], one["end"]) for part in choice["segments"] for one in part["words"]]
        # the scripted alignment gives each token (a byte) 0.1 s, within the half second of audio
        assert words == [(" Hi", 0.0, 0.3), (" there.", 0.3, 0.5), (" Bye", 0.5, 0.5)]
        window, alignment = windows(app)[0], app.client.submitted[-1]
        assert window.params.timestamps is not None
        assert alignment.prompt_token_ids == (START, EN, TRANSCRIBE, NO_TIMESTAMPS, *ids(" Hi there. Bye"), END)
        assert alignment.alignment is not None
        assert (alignment.alignment.first, alignment.alignment.num_positions) == (3, 25)
        assert all(one.keeps_source for one in app.client.submitted)
        check_accounts(app)

    def test_a_model_of_english_alone(self) -> None:
        app = speech_app(ids(" Hello"), tokens=ENGLISH)
        assert transcribed(app)["choices"][0]["language"] == "en"
        assert transcribed(app, language="en")["choices"][0]["text"] == "Hello"
        assert windows(app)[0].prompt_token_ids == (START, NO_TIMESTAMPS)
        check_error(asked(app, language="de"), 400, "language")
        check_error(asked(app, task="translate"), 400, "task", code="wrong_task")
        check_error(asked(app, timestamps="word"), 400, "timestamps")

    def test_sampling_and_beams(self, speech: App) -> None:
        transcribed(speech, temperature=0.7, top_k=5, top_p=0.5, seed=3, suppress_tokens=[7], max_tokens=20)
        transcribed(speech, num_beams=3, length_penalty=0.5)
        sampled, searched = windows(speech)
        assert (sampled.params.temperature, sampled.params.top_k, sampled.params.top_p) == (0.7, 5, 0.5)
        assert (sampled.params.max_tokens, sampled.params.suppress_tokens) == (20, (7,))
        assert (searched.params.num_beams, searched.params.length_penalty) == (3, 0.5)

    def test_a_file_has_one_text_unless_samples_are_asked_for(self) -> None:
        app = speech_app([7] * 40)
        for temperature in (None, None, 0.0, 0.5, 0.5):
            transcribed(app, language="en", temperature=temperature)
        seeds = [one.params.seed for one in windows(app)]
        assert seeds[:6] == seeds[6:12] == seeds[12:18]
        assert seeds[18] != seeds[19]

    def test_logprobs_of_the_text(self, speech: App) -> None:
        [choice] = transcribed(speech, logprobs=1)["choices"]
        assert [one["text"] for one in choice["logprobs"]] == list(" Hello.")
        assert all(len(one["top"]) == 1 for one in choice["logprobs"])


class TestLong:
    SAID = (
        [BEGIN, *ids(" one"), at(0.5), at(0.5), *ids(" tw")],  # cut off: the next window begins at 0.5 s
        [BEGIN, *ids(" two"), at(0.9)],
        [BEGIN, *ids(" three"), at(0.3)],
    )

    def test_windows_follow_each_other_with_what_was_said(self) -> None:
        app = speech_app(*self.SAID)
        found = transcribed(app, 2.0, timestamps="segment")
        [choice] = found["choices"]
        assert choice["text"] == "one two three"
        segments = [(one["start"], one["end"], one["seek"]) for one in choice["segments"]]
        assert segments == [(0.0, 0.5, 0), (0.5, 1.4, 50), (1.5, 1.8, 150)]
        first, second, third = windows(app)
        assert first.prompt_token_ids == (START, EN, TRANSCRIBE)
        assert second.prompt_token_ids == (PREVIOUS, BEGIN, *ids(" one"), at(0.5), START, EN, TRANSCRIBE)
        assert third.prompt_token_ids[0] == PREVIOUS
        assert len({one.source.digest for one in (first, second, third) if one.source}) == 3
        assert {one.deadline for one in windows(app)} == {first.deadline}
        assert {one.arrival_time for one in windows(app)} == {first.arrival_time}
        assert counted(app, "triptych_requests_total") == {("speech", "stop", "generate"): 1}
        # the time to the first token of a window is none between tokens
        tokens = counted(app, "triptych_generation_tokens_total")["speech",]
        assert counted(app, "triptych_inter_token_latency_seconds_count") == {("speech",): tokens - 4}
        check_accounts(app)

    def test_without_context(self) -> None:
        app = speech_app(*self.SAID)
        transcribed(app, 2.0, condition_on_previous_text=False)
        assert {one.prompt_token_ids for one in windows(app)} == {(START, EN, TRANSCRIBE)}

    def test_a_failed_output_is_decoded_again(self) -> None:
        app = speech_app([7] * 40, ids(" better"))
        found = transcribed(app, timestamps="segment", seed=1)
        [segment] = found["choices"][0]["segments"]
        assert (segment["text"], segment["temperature"]) == (" better", 0.2)
        assert [one.params.temperature for one in windows(app)] == [0.0, 0.2]
        assert counted(app, "triptych_audio_windows_total") == {("speech", "text"): 1, ("speech", "repeated"): 1}
        assert [one.params.seed for one in windows(app)] == [2, 3]

    def test_silence_is_skipped(self) -> None:
        app = speech_app(ids(" you"), logprob=-2.0, no_speech_prob=0.8)
        found = transcribed(app, 2.0, timestamps="segment")
        assert found["choices"][0]["text"] == "" and found["choices"][0]["segments"] == []
        assert counted(app, "triptych_audio_windows_total") == {("speech", "silence"): 2}
        app = speech_app(ids(" you"), logprob=-2.0, no_speech_prob=0.8)
        assert transcribed(app, 0.5, no_speech_threshold=None)["choices"][0]["text"] == "you"
        assert len(windows(app)) == 6  # the last temperature's output counts

    def test_chunks_are_decoded_at_once_and_merged(self) -> None:
        # chunks of 1 s, of which the first and last sixth are their neighbours' too
        said = dict(zip(chunk_digests(2.2), (" one two", " two three", " three four"), strict=True))

        def answer(request: Request) -> Sequence[int]:
            assert request.source is not None
            if request.params.allowed_token_ids:
                return [EN]
            return [*ids(said[request.source.digest]), END]

        app = speech_app()
        app.script.answer = answer
        found = transcribed(app, 2.2, chunking="parallel", logprobs=0)
        [choice] = found["choices"]
        assert choice["text"] == "one two three four"
        assert len(choice["logprobs"]) == len(ids(" one two three four"))
        assert len(app.client.submitted) == 4  # the language is asked for once
        assert {one.prompt_token_ids for one in windows(app)} == {(START, EN, TRANSCRIBE, NO_TIMESTAMPS)}
        check_accounts(app)

    def test_chunks_with_segments_and_words(self) -> None:
        app = speech_app([BEGIN, *ids(" one"), at(0.4), at(0.4), *ids(" two"), at(0.66)])
        found = transcribed(app, 1.6, chunking="parallel", timestamps="word")
        segments = [(one["start"], one["end"], one["text"]) for one in found["choices"][0]["segments"]]
        assert segments[0] == (0.0, 0.4, " one")
        assert all(start <= end for start, end, _ in segments)
        assert segments[-1][1] <= 1.6
        # frames of the whole audio at which the windows begin: of the two chunks
        assert {one["seek"] for one in found["choices"][0]["segments"]} == {0, 66}
        words = [word for part in found["choices"][0]["segments"] for word in part["words"]]
        assert [one["start"] for one in words] == sorted(one["start"] for one in words)
        check_accounts(app)

    def test_no_more_windows_at_a_time_than_the_limit(self) -> None:
        app = speech_app(ids(" a"), settings=ServiceSettings(limits=Limits(max_audio_windows=2)))

        async def work(client: httpx.AsyncClient) -> None:
            free = hold(app)
            task = asyncio.create_task(client.post("/generate", json=body(5.0, chunking="parallel", language="en")))
            await until(lambda: len(app.client.running) == 2)
            await asyncio.sleep(0.05)
            assert len(app.client.running) == 2
            free.set()
            assert (await task).status_code == 200

        run(app, work)
        assert len(windows(app)) == len(cut_chunks(80_000, 16_000)) == 8
        check_accounts(app)


class TestStream:
    def test_text_comes_while_a_window_is_decoded(self) -> None:
        app = speech_app(*TestLong.SAID)
        reply = asked(app, 2.0, stream=True, timestamps="segment", language="en")
        *shown, done = events(reply.text)
        assert done == "[DONE]"
        for one in shown:
            TranscribeEvent.model_validate(one)
        texts = [one["choices"][0]["text"] for one in shown]
        assert "".join(texts) == "one two three"
        # the first segment of a window letter by letter, what is cut off not at all
        assert texts[:4] == ["", "o", "n", "e"] or texts[:3] == ["o", "n", "e"]
        segments = [part for one in shown for part in one["choices"][0]["segments"]]
        assert [part["id"] for part in segments] == [0, 1, 2]
        assert shown[-1]["choices"][0]["finish_reason"] == "stop"
        assert shown[-1]["usage"]["audio_seconds"] == 2.0
        assert all("usage" not in one for one in shown[:-1])
        assert [one.params.temperature for one in windows(app)] == [0.0] * 3
        assert all(one.streams for one in windows(app))
        check_accounts(app)

    def test_text_of_later_segments_waits_for_their_end(self) -> None:
        app = speech_app([BEGIN, *ids(" a"), at(0.1), at(0.1), *ids(" bcd"), at(0.3)])
        reply = asked(app, 0.5, stream=True, timestamps="segment", language="en")
        texts = [one["choices"][0]["text"] for one in events(reply.text)[:-1]]
        assert [one for one in texts if one] == ["a", " bcd"]

    def test_a_window_that_may_be_silent_or_repeated_shows_nothing_before_it_is_complete(self) -> None:
        app = speech_app(ids(" abc"), no_speech_prob=0.9)
        texts = [one["choices"][0]["text"] for one in events(asked(app, stream=True, language="en").text)[:-1]]
        assert [one for one in texts if one] == ["abc"]
        app = speech_app([7] * 40, ids(" abc"))
        reply = asked(app, stream=True, language="en", temperature=[0.0, 0.5])
        texts = [one["choices"][0]["text"] for one in events(reply.text)[:-1]]
        assert [one for one in texts if one] in (["abc"], ["a", "b", "c"])

    def test_an_output_that_failed_in_a_stream_is_no_context(self) -> None:
        loop = [BEGIN, *[104] * 36, at(0.9)]
        app = speech_app(loop, ids(" two"), ids(" three"))
        asked(app, 2.6, stream=True, language="en")
        first, second, third = windows(app)
        assert first.params.temperature == 0.0
        assert second.prompt_token_ids == (START, EN, TRANSCRIBE)
        assert third.prompt_token_ids == (PREVIOUS, *ids(" two"), START, EN, TRANSCRIBE)
        told = speech_app(loop, ids(" two"), ids(" three"))
        asked(told, 2.6, temperature=[0.0], language="en")
        assert windows(told)[1].prompt_token_ids[0] == PREVIOUS  # as transformers does it

    def test_chunks_stream_in_order(self) -> None:
        app = speech_app(ids(" one two three"))
        reply = asked(app, 3.0, stream=True, chunking="parallel", language="en")
        texts = [one["choices"][0]["text"] for one in events(reply.text)[:-1]]
        whole = transcribed(speech_app(ids(" one two three")), 3.0, chunking="parallel", language="en")
        assert "".join(texts) == whole["choices"][0]["text"]
        check_accounts(app)


class TestEnds:
    def test_a_failed_engine(self) -> None:
        app = speech_app(ids(" a"), die_after=1)
        check_error(asked(app), 500, None, code="engine_failed")
        app2 = speech_app(ids(" abc"), die_after=1)
        *_, failed, done = events(asked(app2, stream=True, language="en").text)
        assert failed["error"]["code"] == "engine_failed" and done == "[DONE]"
        for one in (app, app2):
            assert sum(counted(one, "triptych_requests_total").values()) == 1
            check_accounts(one)

    def test_a_deadline_before_and_after_text(self) -> None:
        app = speech_app(ids(" a"), delay_s=0.05)
        check_error(asked(app, timeout_s=0.02), 504, "timeout_s", code="deadline")
        late = speech_app(*TestLong.SAID, delay_s=0.02)
        found = transcribed(late, 30.0, timeout_s=1.5, language="en")
        assert found["choices"][0]["finish_reason"] == "deadline"
        assert found["choices"][0]["text"].startswith("one")
        for one in (app, late):
            check_accounts(one)

    def test_a_client_that_cancels(self) -> None:
        app = speech_app(*TestLong.SAID)

        async def work(client: httpx.AsyncClient) -> None:
            free = hold(app)
            task = asyncio.create_task(client.post("/generate", json=body(2.0, language="en", request_id="one")))
            await until(lambda: app.client.running)
            reply = await client.delete("/requests/one")
            assert reply.status_code == 200
            free.set()
            found = (await task).json()
            assert found["choices"][0]["finish_reason"] == "cancelled"

        run(app, work)
        assert len(windows(app)) == 1
        assert not counted(app, "triptych_audio_real_time_factor_count")  # it was given up
        assert not counted(app, "triptych_audio_seconds_total")
        check_accounts(app)

    def test_a_later_window_waits_for_room_in_the_queue(self) -> None:
        app = speech_app(*TestLong.SAID)
        answer = app.script.answer
        assert answer is not None

        def fills_the_queue(request: Request) -> Sequence[int]:
            app.script.queue_full = "queue_requests"
            return answer(request)

        app.script.answer = fills_the_queue

        async def work(client: httpx.AsyncClient) -> None:
            task = asyncio.create_task(client.post("/generate", json=body(2.0, language="en")))
            for count in (1, 2, 3):
                await until(lambda count=count: len(windows(app)) == count and not app.client.running)
                await asyncio.sleep(0.06)
                app.script.queue_full = None
            assert (await task).json()["choices"][0]["text"] == "one two three"

        run(app, work)
        check_accounts(app)

    def test_a_full_queue_refuses_the_first_window(self) -> None:
        app = speech_app(ids(" a"), queue_full="queue_requests")
        check_error(asked(app), 429, None, code="queue_full")
        assert not app.service.decoders.decoded  # type: ignore[attr-defined]
        check_accounts(app)

    def test_one_chunk_that_is_refused_refuses_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = speech_app(ids(" a"))
        refused, features, submit = threading.Event(), Spectrogram.of, app.client.submit

        def first_chunk_last(log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
            assert samples[0] != 0 or refused.wait(5)
            return features(log_mel, samples)

        def full_once(requests: Sequence[Request]) -> FakeStream:
            if not refused.is_set():
                refused.set()
                raise QueueFullError("queue_requests", 1.0)
            return submit(requests)

        monkeypatch.setattr(Spectrogram, "of", first_chunk_last)
        monkeypatch.setattr(app.client, "submit", full_once)
        check_error(asked(app, 2.2, chunking="parallel", language="en"), 429, None, code="queue_full")
        assert not app.client.submitted
        check_accounts(app)

    def test_no_window_begins_after_a_drain_has_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = speech_app(ids(" a"))
        features = Spectrogram.of

        def late(log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
            app.service.jobs.give_up()
            return features(log_mel, samples)

        monkeypatch.setattr(Spectrogram, "of", late)
        check_error(asked(app), 503, None, code="draining")
        assert not app.client.submitted

    def test_a_reader_that_goes_away_ends_the_windows(self) -> None:
        app = speech_app(*TestLong.SAID)

        async def work(client: httpx.AsyncClient) -> None:
            free = hold(app)
            task = asyncio.create_task(client.post("/generate", json=body(2.0, language="en", stream=True)))
            await until(lambda: app.client.running)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not app.client.running)
            free.set()

        run(app, work)
        assert len(windows(app)) == 1
        check_accounts(app)

    def test_a_client_that_goes_away_as_it_is_accepted_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = speech_app(ids(" a"))
        start = RunningTranscription.start

        async def work(client: httpx.AsyncClient) -> None:
            async def started(running: RunningTranscription, context: RequestContext) -> Job:
                job = await start(running, context)
                task.cancel()
                return job

            monkeypatch.setattr(RunningTranscription, "start", started)
            hold(app)
            task = asyncio.create_task(client.post("/generate", json=body(language="en")))
            await asyncio.gather(task, return_exceptions=True)
            assert not app.client.running and not len(app.service.jobs)

        run(app, work)
        check_accounts(app)

    def test_samples_count_until_their_thread_has_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = speech_app(ids(" a"))
        room = app.service.speech_planner.room
        begun, free, features = threading.Event(), threading.Event(), Spectrogram.of

        def slow(log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
            begun.set()
            assert free.wait(5)
            return features(log_mel, samples)

        async def work(client: httpx.AsyncClient) -> None:
            task = asyncio.create_task(client.post("/generate", json=body(1.0)))
            await until(begun.is_set)
            task.cancel()
            await asyncio.sleep(0.05)
            assert (room.num_files, room.num_bytes) == (1, 4 * RATE)
            free.set()
            await asyncio.gather(task, return_exceptions=True)
            assert (room.num_files, room.num_bytes) == (0, 0)

        monkeypatch.setattr(Spectrogram, "of", slow)
        run(app, work)
        assert not app.client.submitted

    def test_no_more_files_at_a_time_than_the_limit(self) -> None:
        app = speech_app(ids(" a"), settings=ServiceSettings(limits=Limits(max_audio_requests=1)))

        async def work(client: httpx.AsyncClient) -> None:
            free = hold(app)
            task = asyncio.create_task(client.post("/generate", json=body()))
            await until(lambda: app.client.running)
            refused = await client.post("/generate", json=body())
            check_error(refused, 429, None, code="queue_full")
            assert refused.headers["retry-after"]
            free.set()
            assert (await task).status_code == 200
            assert (await client.post("/generate", json=body())).status_code == 200

        run(app, work)
        check_accounts(app)

    def test_no_more_bytes_at_a_time_than_the_limit(self) -> None:
        limits = Limits(max_audio_held_bytes=5 * RATE)  # samples of 1.25 s
        app = speech_app(ids(" a"), settings=ServiceSettings(limits=limits))
        room = app.service.speech_planner.room

        async def work(client: httpx.AsyncClient) -> None:
            free = hold(app)
            first = asyncio.create_task(client.post("/generate", json=body(1.0, language="en")))
            await until(lambda: app.client.running)
            assert (room.num_files, room.num_bytes) == (1, 4 * RATE)
            refused = await client.post("/generate", json=body(0.5, language="en"))
            check_error(refused, 429, None, code="queue_full")
            second = asyncio.create_task(client.post("/generate", json=body(0.2, language="en")))
            await until(lambda: len(app.client.running) == 2)
            free.set()
            assert [(await one).status_code for one in (first, second)] == [200, 200]
            # what is alone is taken whatever its size, which has limits of its own
            assert (await client.post("/generate", json=body(2.0, language="en"))).status_code == 200

        run(app, work)
        assert (room.num_files, room.num_bytes) == (0, 0)
        assert counted(app, "triptych_rejections_total")[("speech", "audio_bytes")] == 1
        check_accounts(app)


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"audio": "%%%"}, "audio"),
            ({"audio": base64_of(b"noise")}, "audio"),
            ({"language": "xx"}, "language"),
            ({"task": "sing"}, "task"),
            ({"num_beams": 99}, "num_beams"),
            ({"num_beams": 2, "temperature": 0.5}, "num_beams"),
            ({"length_penalty": 2.0}, "length_penalty"),
            ({"logprobs": 99}, "logprobs"),
            ({"logprobs": 1, "num_beams": 2}, "logprobs"),
            ({"suppress_tokens": [4000]}, "suppress_tokens[0]"),
            ({"temperature": -1.0}, "temperature"),
            ({"temperature": []}, "temperature"),
            ({"temperature": [0.0, 999.0]}, "temperature[1]"),
            ({"temperature": [0.1] * 17}, "temperature"),
            ({"temprature": 1}, "temprature"),
            ({"initial_prompt": "<|en|>"}, "initial_prompt"),
            ({"timeout_s": 1e9}, "timeout_s"),
            ({"prompt": "text"}, "prompt"),
        ],
    )
    def test_fields(self, speech: App, fields: dict[str, Any], param: str) -> None:
        check_error(asked(speech, **fields), 400, param)

    def test_models_that_do_not_fit(self, speech: App) -> None:
        found = asked(speech, model="gen")
        check_error(found, 400, "model", code="wrong_task")
        assert "speech" in found.json()["error"]["message"]
        text = run(speech, lambda client: client.post("/generate", json={"model": "speech", "prompt": "a"}))
        check_error(text, 400, "prompt", code="wrong_task")
        check_error(asked(speech, model="none"), 404, "model")
        assert transcribed(speech, model=None)["model"] == "speech"  # the only one

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (SpeechOptions(language="de"), "no language 'de'"),
            (SpeechOptions(task="translate"), "no task 'translate'"),
            (SpeechOptions(words=True), "no alignment_heads"),
        ],
    )
    def test_the_library_ignores_no_option(self, options: SpeechOptions, message: str) -> None:
        engine: Any = SimpleNamespace(name="speech", max_model_len=64)
        with pytest.raises(ConfigError, match=message):
            transcribe(engine, served_speech(tokens=ENGLISH).checkpoint, TOKENIZER, sound(0.5), options, None)

    def test_decoders_that_fail(self, speech: App) -> None:
        speech.service.decoders.error = WorkerError("busy", "all workers are busy")  # type: ignore[attr-defined]
        check_error(asked(speech), 503, None, code="audio_busy")
        speech.service.decoders.error = WorkerError("crashed", "its process ended")  # type: ignore[attr-defined]
        check_error(asked(speech), 400, "audio", code="invalid_audio")


class TestWithoutModel:
    """A body without `model` is for the one model that can answer it."""

    def post(self, app: App, path: str, **sent: Any) -> httpx.Response:
        return run(app, lambda client: client.post(path, json=sent))

    def test_the_body_says_which_model_is_meant(self, speech: App) -> None:
        speech.service.registry.remove("seq")
        text = {"prompt": "ab", "max_tokens": 2}
        for path, sent in (("/generate", text), ("/v1/completions", text), ("/generate_stream", {"inputs": "ab"})):
            assert self.post(speech, path, **sent).status_code == 200
        assert {one.model for one in speech.client.submitted} == {"gen"}
        assert self.post(speech, "/generate", audio=base64_of(b"0.5")).json()["model"] == "speech"

    def test_several_are_named_and_none_is_explained(self, speech: App) -> None:
        registry = speech.service.registry
        registry.offer("dictation", served_speech().checkpoint)
        error = check_error(self.post(speech, "/generate", audio=base64_of(b"0.5")), 400, "model")
        assert "not only one transcribes speech: speech, dictation" in error["message"]
        for name in ("gen", "seq", "dictation"):
            registry.remove(name)
        error = check_error(self.post(speech, "/generate", prompt="ab"), 400, "prompt", code="wrong_task")
        assert "send a file as audio" in error["message"]
        registry.remove("speech")
        error = check_error(self.post(speech, "/generate", audio=base64_of(b"0.5")), 400, "model", code="wrong_task")
        assert error["message"] == "no model transcribes speech"
