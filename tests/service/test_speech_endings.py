"""Endings of transcriptions other than success: faults, deadlines, disconnected clients, queues and limits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.fake_engine import FakeStream
from tests.service.speech import (
    RATE,
    SAID,
    asked,
    body,
    ids,
    speech_app,
    transcribed,
    windows,
)
from tests.service.support import check_accounts, counted, events, hold, let_time_pass, run, until
from tests.service.test_bad_requests import check_error
from triptych.model.api.request import Request
from triptych.model.errors import QueueFullError
from triptych.model.speech.chunks import Spectrogram
from triptych.model.speech.log_mel import LogMel
from triptych.service.core.request_context import RequestContext
from triptych.service.lifecycle.jobs import Job
from triptych.service.settings.service_settings import Limits, ServiceSettings
from triptych.service.speech.running import RunningTranscription


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

    def test_a_deadline_before_and_after_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = speech_app(ids(" a"), delay_s=0.05)
        check_error(asked(app, timeout_s=0.02), 504, "timeout_s", code="deadline")
        late = speech_app(*SAID)
        let_time_pass(late, monkeypatch, 20.0, outputs=14)  # in the second window
        found = transcribed(late, 30.0, timeout_s=20.0, language="en")
        assert found["choices"][0]["finish_reason"] == "deadline"
        assert found["choices"][0]["text"].startswith("one")
        for one in (app, late):
            check_accounts(one)

    def test_a_client_that_cancels(self) -> None:
        app = speech_app(*SAID)

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
        app = speech_app(*SAID)
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
        assert not app.app.state.speech.decoders.decoded  # type: ignore[attr-defined]
        check_accounts(app)

    def test_one_chunk_that_is_refused_refuses_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = speech_app(ids(" a"))
        refused, features, submit = threading.Event(), Spectrogram.of, app.client.submit

        def first_chunk_last(log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
            assert samples[0] != 0 or refused.wait(60)
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
        app = speech_app(*SAID)

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

    @pytest.mark.parametrize(("chunking", "windows"), [("sequential", 1), ("parallel", 3)])
    def test_samples_are_freed_when_a_reader_goes_away(
        self, monkeypatch: pytest.MonkeyPatch, chunking: str, windows: int
    ) -> None:
        """At once: what refers to each other in circles is found late where there is much else."""
        app = speech_app(*SAID)
        decoder, samples = app.app.state.speech.decoders, list[weakref.ref[NDArray[np.float32]]]()
        decode = decoder.decode

        async def watched(data: bytes, sampling_rate: int) -> NDArray[np.float32]:
            found = await decode(data, sampling_rate)
            samples.append(weakref.ref(found))
            return found

        async def work(client: httpx.AsyncClient) -> None:
            free = hold(app)
            asking = client.post("/generate", json=body(2.0, language="en", stream=True, chunking=chunking))
            task = asyncio.create_task(asking)
            await until(lambda: len(app.client.running) == windows)
            assert samples[0]() is not None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not app.client.running)
            free.set()

        monkeypatch.setattr(decoder, "decode", watched)
        gc.disable()
        try:
            run(app, work)
            assert samples[0]() is None
        finally:
            gc.enable()

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
        room = app.app.state.speech.room
        begun, free, features = threading.Event(), threading.Event(), Spectrogram.of

        def slow(log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
            begun.set()
            assert free.wait(60)
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
        room = app.app.state.speech.room

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
