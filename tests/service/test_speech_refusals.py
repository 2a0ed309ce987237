"""Refused transcriptions, and bodies without `model`, which go to the only model that can answer them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.service.speech import (
    ENGLISH,
    TOKENIZER,
    asked,
    base64_of,
    served_speech,
    sound,
    transcribed,
)
from tests.service.support import App, run
from tests.service.test_bad_requests import check_error
from triptych.model.api.messages import ModelSpec
from triptych.model.errors import ConfigError
from triptych.model.llm_speech import transcribe
from triptych.model.speech.requests import SpeechOptions
from triptych.service.core.models import Model, Origin
from triptych.service.sandbox.process_pool import WorkerError


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
            (SpeechOptions(language="de"), "language: the model has no 'de'; it has en"),
            (SpeechOptions(task="translate"), "task: the model transcribes and does not translate"),
            (SpeechOptions(words=True), "no alignment_heads"),
        ],
    )
    def test_the_library_ignores_no_option(self, options: SpeechOptions, message: str) -> None:
        engine: Any = SimpleNamespace(name="speech", max_model_len=64)
        with pytest.raises(ConfigError, match=message):
            transcribe(engine, served_speech(tokens=ENGLISH).checkpoint, TOKENIZER, sound(0.5), options, None)

    def test_decoders_that_fail(self, speech: App) -> None:
        speech.app.state.speech.decoders.error = WorkerError("busy", "all workers are busy")  # type: ignore[attr-defined]
        check_error(asked(speech), 503, None, code="audio_busy")
        speech.app.state.speech.decoders.error = WorkerError("crashed", "its process ended")  # type: ignore[attr-defined]
        check_error(asked(speech), 400, "audio", code="invalid_audio")


def forget(app: App, name: str) -> None:
    app.service.models.forget(app.service.models[name])


class TestWithoutModel:
    """A body without `model` is for the one model that can answer it."""

    def post(self, app: App, path: str, **sent: Any) -> httpx.Response:
        return run(app, lambda client: client.post(path, json=sent))

    def test_the_body_says_which_model_is_meant(self, speech: App) -> None:
        forget(speech, "seq")
        text = {"prompt": "ab", "max_tokens": 2}
        for path, sent in (("/generate", text), ("/v1/completions", text), ("/generate_stream", {"inputs": "ab"})):
            assert self.post(speech, path, **sent).status_code == 200
        assert {one.model for one in speech.client.submitted} == {"gen"}
        assert self.post(speech, "/generate", audio=base64_of(b"0.5")).json()["model"] == "speech"

    def test_several_are_named_and_none_is_explained(self, speech: App) -> None:
        speech.service.models.add(Model(ModelSpec("dictation", "nowhere"), Origin.REQUEST, pinned=False))
        speech.service.models["dictation"].offer(served_speech().checkpoint)
        error = check_error(self.post(speech, "/generate", audio=base64_of(b"0.5")), 400, "model")
        assert "more than one transcribes speech: speech, dictation" in error["message"]
        for name in ("gen", "seq", "dictation"):
            forget(speech, name)
        error = check_error(self.post(speech, "/generate", prompt="ab"), 400, "prompt", code="wrong_task")
        assert "send a file as audio" in error["message"]
        forget(speech, "speech")
        error = check_error(self.post(speech, "/generate", audio=base64_of(b"0.5")), 400, "model", code="wrong_task")
        assert error["message"] == "no model transcribes speech"
