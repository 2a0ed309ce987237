"""A Whisper from a folder to a reply: random weights as transformers' `generate`, the embedded one through HTTP."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, WhisperForConditionalGeneration, WhisperProcessor, WhisperTokenizer

from tests.engine.thread_transport import ThreadTransport
from tests.service import whisper
from tests.service.asking import SAID, SAMPLE
from tests.service.support import live
from tests.service.whisper import BEGIN, END, START, noise
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.messages import ModelSpec
from triptych.model.checkpoint.folder import read_checkpoint
from triptych.model.client.async_engine import AsyncEngine
from triptych.model.errors import ConfigError
from triptych.model.llm import LLM
from triptych.model.speech.driver import Piece, Transcription
from triptych.model.speech.requests import SpeechOptions
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.app import create_app
from triptych.service.cli.main import main
from triptych.service.core.models import Models, ServedModel
from triptych.service.settings.service_settings import ServiceSettings

SPEECH = SAMPLE.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, whisper.whisper(folder)


@pytest.fixture(scope="module")
def llm(model: tuple[Path, WhisperForConditionalGeneration]) -> Iterator[LLM]:
    made = LLM(model[0], EngineConfig(dtype="float32", max_num_seqs=8))
    yield made
    made.close()


def reference(
    model: WhisperForConditionalGeneration, samples: np.ndarray[Any, Any], **options: Any
) -> list[tuple[float, float, list[int]]]:
    """Return the segments of transformers: start, end and tokens."""
    extract = whisper.extractor()
    features = extract(
        samples,
        sampling_rate=whisper.RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest",
        return_attention_mask=True,
    )
    with torch.no_grad():
        found = model.generate(
            features.input_features,
            attention_mask=features.attention_mask,
            return_timestamps=True,
            return_segments=True,
            task="transcribe",
            **options,
        )
    return [
        (round(float(one["start"]), 3), round(float(one["end"]), 3), one["tokens"].tolist())
        for one in found["segments"][0]
    ]


def text_of(tokens: list[int]) -> tuple[int, ...]:
    return tuple(one for one in tokens if one < END)


def segments(found: Transcription) -> list[tuple[float, float, tuple[int, ...]]]:
    return [(one.start, one.end, one.token_ids) for one in found.segments]


@pytest.mark.parametrize(
    ("seconds", "options", "theirs"),
    [
        (7.3, dict(carries_context=False, temperatures=(0.0,)), dict(temperature=0.0)),
        (7.3, dict(temperatures=(0.0,)), dict(condition_on_prev_tokens=True, temperature=0.0)),
        (
            6.1,
            dict(temperatures=(0.0,), num_beams=3, carries_context=False),
            dict(temperature=0.0, num_beams=3),
        ),
        (
            9.0,  # a threshold that some windows fail, whose output is the last attempt's: the same twice
            dict(temperatures=(0.0, 0.0), no_speech_threshold=0.5, logprob_threshold=-3.6),
            dict(
                condition_on_prev_tokens=True,
                temperature=(0.0, 0.0),
                no_speech_threshold=0.5,
                logprob_threshold=-3.6,
                compression_ratio_threshold=2.4,
            ),
        ),
    ],
    ids=["alone", "context", "beams", "thresholds"],
)
def test_long_audio_is_transcribed_as_by_transformers(
    model: tuple[Path, WhisperForConditionalGeneration],
    llm: LLM,
    seconds: float,
    options: dict[str, Any],
    theirs: dict[str, Any],
) -> None:
    never = dict(compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None)
    if "logprob_threshold" in options:
        never = {}
    samples = noise(seconds)
    found = llm.transcribe(samples, SpeechOptions(language="en", timestamps=True, **{**never, **options}))
    expected = reference(model[1], samples, language="en", **theirs)
    assert segments(found) == [(start, end, text_of(tokens)) for start, end, tokens in expected]
    assert len(found.segments) > 3
    assert any(token >= BEGIN for _, _, tokens in expected for token in tokens)


def test_an_audio_file_is_its_path_or_its_bytes(llm: LLM, tmp_path: Path) -> None:
    file, greedy = tmp_path / "noise.wav", SpeechOptions(temperatures=(0.0,), language="en")
    file.write_bytes(whisper.wave_file(noise(1.0)))
    expected = llm.transcribe(file.read_bytes(), greedy).text
    assert llm.transcribe(file, greedy).text == llm.transcribe(str(file), greedy).text == expected
    with pytest.raises(ConfigError, match=r"nowhere\.wav: No such file"):
        llm.transcribe(tmp_path / "nowhere.wav")
    file.write_bytes(b"text")
    with pytest.raises(ConfigError, match=r"noise\.wav: "):
        llm.transcribe(file)


def test_samples_are_mono_and_floating_point(llm: LLM) -> None:
    greedy, samples = SpeechOptions(temperatures=(0.0,), language="en"), noise(1.0)
    assert llm.transcribe(samples.astype(np.float64), greedy).text == llm.transcribe(samples, greedy).text
    for wrong, words in (
        (np.stack((samples, samples), axis=1), r"float32 of shape \(16000, 2\)"),
        ((samples * 32767).astype(np.int16), r"int16 of shape \(16000,\)"),
        (samples[:0], "there are no samples"),
        (np.full(100, np.nan, np.float32), "samples are no numbers"),
        (np.full(100, 1e300), "samples are no numbers"),  # in float32
    ):
        with pytest.raises(ConfigError, match=words):
            llm.transcribe(wrong, greedy)


def test_pieces_join_to_the_text_and_chunks_are_decoded(llm: LLM) -> None:
    pieces: list[Piece] = []
    found = llm.transcribe(noise(5.0), SpeechOptions(temperatures=(0.0,)), pieces.append)
    assert "".join(one.text for one in pieces) == found.text
    assert len(pieces) > len(found.segments)
    assert found.language in ("en", "de")
    words = llm.transcribe(noise(5.0), SpeechOptions(temperatures=(0.0,), words=True, language="en"))
    times = [(word.start, word.end) for one in words.segments for word in one.words]
    assert times and all(start <= end <= 5.0 for start, end in times)
    parallel = SpeechOptions(temperatures=(0.0,), parallel=True, timestamps=True, language="en")
    chunks = llm.transcribe(whisper.wave_file(noise(5.0)), parallel)
    assert chunks.num_windows >= 4 and chunks.text


@pytest.fixture(scope="module")
def trained() -> Iterator[LLM]:
    made = LLM(SPEECH, EngineConfig(dtype="float32", max_num_seqs=8))
    yield made
    made.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the application over a real engine, under a real server, with the embedded Whisper."""
    config = EngineConfig(kv_cache_memory=32 << 20, device="cpu", dtype="float32")
    checkpoint, tokenizer = read_checkpoint(SPEECH), Tokenizer.from_folder(SPEECH)
    models = Models([ServedModel("speech", checkpoint, tokenizer, config)])
    engine = AsyncEngine([ModelSpec("speech", str(SPEECH), config)], ThreadTransport, {"speech": tokenizer})
    app: Any = create_app(engine, models, ServiceSettings())
    with live(app) as found:
        yield found


def sample(times: int = 1) -> NDArray[np.float32]:
    """Return the embedded Whisper's sample sentence, repeated `times` times."""
    samples, rate = soundfile.read(SAMPLE, dtype="float32")
    assert rate == whisper.RATE
    return np.tile(samples, times)


def test_every_curl_of_the_page_says_what_is_said(url: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "speech.md").read_text()
    lines = re.findall(r"^curl .*$|^\(printf .*\n.*$", page, re.MULTILINE)
    assert len(lines) > 8
    (tmp_path / "speech.wav").write_bytes(whisper.wave_file(sample()))
    for line in lines:
        shown = line.replace("http://127.0.0.1:8000", url).replace("curl -s", "curl --fail-with-body -s")
        done = subprocess.run(
            ["bash", "-c", shown], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        text = done.stdout
        assert done.returncode == 0, (line, text, done.stderr)
        said = re.findall(r'"(?:delta|text)": ?"([^"]*)"', text) if text[:1] in "{d" else [text]
        assert any(SAID in one for one in (*said, "".join(said))), (line, text)


def test_a_reply_is_what_the_library_gives(url: str, trained: LLM) -> None:
    samples = sample(3)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    found = client.audio.transcriptions.create(
        file=("speech.wav", whisper.wave_file(samples)),
        model="speech",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        extra_body={"num_beams": 2},
    )
    expected = trained.transcribe(samples, SpeechOptions(timestamps=True, words=True, num_beams=2))
    assert found.text == expected.text and found.text.startswith(SAID)
    assert [(one.start, one.end) for one in found.segments or ()] == [(one.start, one.end) for one in expected.segments]
    words = [word for segment in expected.segments for word in segment.words]
    assert [(one.word, one.start, one.end) for one in found.words or ()] == [
        (one.text.strip(), one.start, one.end) for one in words
    ]
    flac = io.BytesIO()
    soundfile.write(flac, samples, whisper.RATE, format="FLAC", subtype="PCM_16")
    streams = [
        "".join(
            one.delta
            for one in client.audio.transcriptions.create(file=(name, data), model="speech", stream=True)
            if one.type == "transcript.text.delta"
        )
        for name, data in (("a.wav", whisper.wave_file(samples)), ("a.flac", flac.getvalue()))
    ]
    whole = trained.transcribe(samples, SpeechOptions(temperatures=(0.0,), forgets_failed=True))
    assert streams == [whole.text] * 2 and len(whole.text.split()) > 20


def test_the_command_line_transcribes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["transcribe", str(SPEECH), str(SAMPLE), "--format", "srt", "--dtype", "float32"])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert " --> " in shown and SAID in shown
    with pytest.raises(SystemExit) as ended:
        main(["transcribe", str(SPEECH), str(tmp_path / "none.wav")])
    assert ended.value.code == 2
    assert "none.wav" in capsys.readouterr().err


TIMES = range(BEGIN, whisper.SHAPE["vocab_size"])  # which a model of random weights writes without being asked
FORCED = [[1, whisper.DE], [2, whisper.TRANSLATE]]
OWN: dict[str, dict[str, Any]] = {  # what a folder sets by itself, in generation_config.json
    "language": {"language": "german"},
    "language's token": {"language": "<|de|>"},
    "task": {"language": "de", "task": "translate"},
    "forced_decoder_ids": {"forced_decoder_ids": FORCED},
    "forced_decoder_ids without a language": {"forced_decoder_ids": [[1, None], [2, whisper.TRANSLATE]]},
    "language before forced_decoder_ids": {"language": "en", "forced_decoder_ids": FORCED},
    "return_timestamps": {"language": "de", "return_timestamps": True},
    "num_beams": {"language": "de", "num_beams": 3, "length_penalty": 0.2, "early_stopping": True},
    "repetition_penalty": {"language": "de", "repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"language": "de", "no_repeat_ngram_size": 1},
    "max_length": {"language": "de", "max_length": 6},
    "max_new_tokens": {"language": "de", "max_new_tokens": 5, "max_length": None},
    "suppress_tokens": {"language": "de", "suppress_tokens": [-1, *range(3, 90), *TIMES]},
    "begin_suppress_tokens": {"language": "de", "begin_suppress_tokens": [*range(3, 90), END]},
    "max_initial_timestamp_index": {"language": "de", "return_timestamps": True, "max_initial_timestamp_index": 3},
}


def said_by_itself(folder: Path, samples: NDArray[np.float32], language: str | None = None) -> list[int]:
    """Return the tokens of a transcription by default settings."""
    made = LLM(folder, EngineConfig(dtype="float32", max_num_seqs=8, kv_cache_memory=4 << 20))
    plain = SpeechOptions(
        language=language,
        carries_context=False,
        temperatures=(0.0,),
        compression_ratio_threshold=None,
        logprob_threshold=None,
        no_speech_threshold=None,
    )
    found = made.transcribe(samples, plain)
    made.close()
    return [token for one in found.segments for token in one.token_ids]


def said_by_reference(
    model: WhisperForConditionalGeneration,
    generation: dict[str, Any],
    samples: NDArray[np.float32],
    **options: Any,
) -> list[int]:
    """Return the tokens of `generate` with a generation_config.json."""
    before, model.generation_config = model.generation_config, GenerationConfig.from_dict(generation)
    try:
        extract = whisper.extractor(model.config.num_mel_bins)
        features = extract(samples, sampling_rate=whisper.RATE, return_tensors="pt").input_features
        with torch.no_grad():
            found = model.generate(features, return_segments=True, **options)
    finally:
        model.generation_config = before
    return [int(token) for one in found["segments"][0] for token in one["tokens"] if token < END]


@pytest.mark.parametrize("setting", OWN)
def test_what_a_folder_sets_is_done_where_nothing_is_asked(
    setting: str, model: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path
) -> None:
    shutil.copytree(model[0], tmp_path, dirs_exist_ok=True)
    untimed = {} if "return_timestamps" in OWN[setting] else {"suppress_tokens": [1, 7, *range(START, BEGIN), *TIMES]}
    generation = {**whisper.GENERATION, **untimed, **OWN[setting]}
    generation = {name: value for name, value in generation.items() if value is not None}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    samples = noise(2.0, 4)  # a whole window, in which both end
    expected = said_by_reference(model[1], generation, samples)
    assert said_by_itself(tmp_path, samples) == expected != []


def test_a_language_that_is_asked_for_undoes_an_older_folders_task(
    model: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path
) -> None:
    shutil.copytree(model[0], tmp_path, dirs_exist_ok=True)
    generation = {**whisper.GENERATION, "return_timestamps": True, "forced_decoder_ids": FORCED}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    samples = noise(2.0, 4)
    expected = said_by_reference(model[1], generation, samples, language="en")
    assert said_by_itself(tmp_path, samples, "en") == expected
    assert said_by_reference(model[1], generation, samples, language="en", task="translate") != expected


ENGLISH = {"is_multilingual": False, "lang_to_id": None, "task_to_id": None}
# By how a folder was saved: the network's shape, what its generation_config.json says, its files.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fine-tuned in 2022": ({}, {}, "older"),
    "saved by transformers 5": ({}, {}, "newer"),
    "large-v3-turbo": ({"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1}, {}, "plain"),
    "distilled": ({"decoder_layers": 1}, {"alignment_heads": [[25, 2]]}, "plain"),
    "English alone": ({}, ENGLISH, "older"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_transcribe_however_they_were_saved(kind: str, tmp_path: Path) -> None:
    """Their outputs are the reference's; where it detects the language, it has to be told the task."""
    shape, changes, files = FOLDERS[kind]
    model = whisper.whisper(tmp_path, **shape)
    untimed = {"suppress_tokens": [1, 7, *range(START, BEGIN), *TIMES]}
    generation = {name: one for name, one in {**whisper.GENERATION, **untimed, **changes}.items() if one is not None}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if files != "plain":
        (tmp_path / "tokenizer.json").unlink()
        whisper.write_tokenizer_files(tmp_path)
    if files == "newer":
        tokenizer = WhisperTokenizer.from_pretrained(tmp_path)
        for name in ("vocab.json", "merges.txt", "added_tokens.json", "normalizer.json", "preprocessor_config.json"):
            (tmp_path / name).unlink()
        WhisperProcessor(whisper.extractor(), tokenizer).save_pretrained(tmp_path)
        assert (tmp_path / "processor_config.json").is_file()
    samples, told = noise(2.0, 4), {} if kind == "English alone" else {"task": "transcribe"}
    expected = said_by_reference(model, generation, samples, **told)
    assert said_by_itself(tmp_path, samples) == expected != []


def test_an_older_folder_has_its_lists_in_config_json(
    model: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without generation_config.json: lists and `forced_decoder_ids` are config.json's, tokens the tokenizer's."""
    shutil.copytree(model[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    monkeypatch.setattr("triptych.model.checkpoint.speech._MULTILINGUAL_VOCAB", 0)  # which tells older folders apart
    settings = json.loads((tmp_path / "config.json").read_text())
    settings |= {
        "suppress_tokens": [*range(3, 60), *TIMES],
        "begin_suppress_tokens": [70, END],
        "forced_decoder_ids": FORCED,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    samples = noise(2.0, 4)  # a whole window, in which both end
    whole = whisper.GENERATION | {name: settings[name] for name in ("suppress_tokens", "begin_suppress_tokens")}
    expected = said_by_reference(model[1], whole | {"forced_decoder_ids": FORCED}, samples)
    assert said_by_itself(tmp_path, samples) == expected != []
    tokens = read_checkpoint(tmp_path).speech
    assert tokens is not None and (tokens.default_language, tokens.default_task) == ("de", "translate")


def test_requests_overrule_what_a_folder_sets(
    model: tuple[Path, WhisperForConditionalGeneration], tmp_path: Path
) -> None:
    shutil.copytree(model[0], tmp_path, dirs_exist_ok=True)
    own = {"language": "de", "task": "translate", "return_timestamps": True, "num_beams": 3, "max_length": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({**whisper.GENERATION, **own}))
    found = read_checkpoint(tmp_path)
    assert found.speech is not None
    completed = SpeechOptions().completed(found.speech, found.sampling_defaults)
    told = (completed.language, completed.task, completed.writes_timestamps, completed.num_beams, completed.max_tokens)
    assert told == ("de", "translate", True, 3, 9)
    asked = SpeechOptions(language="English", task="transcribe", timestamps=False, num_beams=1, max_tokens=4)
    completed = asked.completed(found.speech, found.sampling_defaults)
    told = (completed.language, completed.task, completed.writes_timestamps, completed.num_beams, completed.max_tokens)
    assert told == ("en", "transcribe", False, 1, 4)
