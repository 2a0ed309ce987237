"""Transcriptions over a scripted engine: /generate with `audio`, how windows follow each other, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx

from tests.service.speech import (
    BEGIN,
    DE,
    EN,
    END,
    ENGLISH,
    NO_TIMESTAMPS,
    PREVIOUS,
    SAID,
    START,
    TRANSCRIBE,
    TRANSLATE,
    asked,
    at,
    body,
    chunk_digests,
    ids,
    speech_app,
    transcribed,
    windows,
)
from tests.service.support import App, check_accounts, counted, events, hold, run, until
from tests.service.test_bad_requests import check_error
from triptych.model.api.request import Request
from triptych.model.speech.chunks import cut_chunks
from triptych.service.settings.service_settings import Limits, ServiceSettings
from triptych.service.speech.bodies import TranscribeEvent


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

    def test_a_pause_between_segments_is_no_part_of_a_word(self) -> None:
        app = speech_app([BEGIN, *ids(" abcdefg"), at(0.2), at(0.9), *ids(" z"), at(1.0)])
        [choice] = transcribed(app, 1.0, timestamps="word")["choices"]
        words = [(one["text"], one["start"], one["end"]) for part in choice["segments"] for one in part["words"]]
        assert words == [(" abcdefg", 0.0, 0.2), (" z", 0.8, 1.0)]  # of 0.1 s for each token
        app = speech_app([BEGIN, *ids(" a"), at(0.2), at(0.8), *ids(" zyxwvut"), at(1.0)])
        [choice] = transcribed(app, 1.0, timestamps="word")["choices"]
        words = [(one["text"], one["start"], one["end"]) for part in choice["segments"] for one in part["words"]]
        assert words == [(" a", 0.0, 0.2), (" zyxwvut", 0.8, 1.0)]

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
    def test_windows_follow_each_other_with_what_was_said(self) -> None:
        app = speech_app(*SAID)
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
        app = speech_app(*SAID)
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
        # chunks of 1 s; the first and last sixth overlap with their neighbours
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
        app = speech_app(*SAID)
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
