"""A model that reads audio over the scripted engine: windows of a second, and scripted outputs."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from tests.service.support import App, config, make_app, run
from triptych.model.api.request import Request
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.checkpoint.speech import SpeechTokens
from triptych.model.config.model import AudioConfig
from triptych.model.speech.audio_file import AudioError
from triptych.model.speech.chunks import Spectrogram, cut_chunks
from triptych.model.speech.log_mel import LogMel
from triptych.model.speech.segments import Window
from triptych.model.text.tokenizer import Tokenizer
from triptych.service.core.models import ServedModel
from triptych.service.speech.bodies import TranscribeReply

END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS, BEGIN = range(256, 266)
SPECIALS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
POSITIONS = 50  # of a window
SPEECH = SpeechTokens(
    start=START,
    end=END,
    no_timestamps=NO_TIMESTAMPS,
    previous=PREVIOUS,
    no_speech=NO_SPEECH,
    languages={"en": EN, "de": DE},
    tasks={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    alignment_heads=((0, 0),),
)
ENGLISH = SpeechTokens(
    start=START,
    end=END,
    no_timestamps=NO_TIMESTAMPS,
    previous=PREVIOUS,
    no_speech=NO_SPEECH,
    languages={},
    tasks={},
)
RATE = 16000
LOG_MEL = LogMel(num_mel_bins=4, chunk_length=1)
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def raw_speech_tokenizer(positions: int) -> RawTokenizer:
    """Return a tokenizer of bytes, then Whisper's special tokens, then its timestamps."""
    raw = RawTokenizer(models.BPE({char: at for at, char in enumerate(_ALPHABET)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIALS))
    raw.add_tokens([AddedToken(f"<|{at * 0.02:.2f}|>", normalized=False) for at in range(positions + 1)])
    return raw


TOKENIZER = Tokenizer(raw_speech_tokenizer(POSITIONS))


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def at(seconds: float) -> int:
    """Return the timestamp token."""
    return BEGIN + round(seconds * 50)


# The script for 2 s of audio, window by window.
SAID = (
    [BEGIN, *ids(" one"), at(0.5), at(0.5), *ids(" tw")],  # cut off: the next window begins at 0.5 s
    [BEGIN, *ids(" two"), at(0.9)],
    [BEGIN, *ids(" three"), at(0.3)],
)


def served_speech(name: str = "speech", tokens: SpeechTokens = SPEECH) -> ServedModel:
    audio = replace(config("encoder-decoder", 320), audio=AudioConfig(4, POSITIONS))
    checkpoint = Checkpoint(Path("."), audio, (), "float32", speech=tokens, log_mel=LOG_MEL)
    return ServedModel(name, checkpoint, TOKENIZER)


def sound(seconds: float, rate: int = RATE) -> NDArray[np.float32]:
    """Return sound that differs in every part."""
    return np.sin(np.arange(int(seconds * rate)) ** 1.2 / 7).astype(np.float32)


def chunk_digests(seconds: float) -> list[bytes]:
    """Return the sources of an audio's chunks in order."""
    samples = sound(seconds)
    parts = (samples[one.start : one.end] for one in cut_chunks(len(samples), RATE))
    return [Spectrogram.of(LOG_MEL, part).source(Window(0, 2 * POSITIONS)).digest for part in parts]


class ScriptedDecoder:
    """A decoder that takes a number of seconds as text for an audio file, such as b"2.5", and refuses other files."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.decoded: list[bytes] = []

    async def decode(self, data: bytes, sampling_rate: int) -> NDArray[np.float32]:
        self.decoded.append(data)
        if self.error is not None:
            raise self.error
        try:
            seconds = _wave_seconds(data) if data[:4] == b"RIFF" else float(data)
        except ValueError:
            raise AudioError("not an audio file of any kind") from None
        return sound(seconds, sampling_rate)

    def close(self) -> None:
        pass


def _wave_seconds(data: bytes) -> float:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        assert any(file.readframes(file.getnframes()))
        return file.getnframes() / RATE


def language(of: int) -> Callable[[Request], Sequence[int]]:
    return lambda request: [of, END]


def saying(*outputs: Sequence[int], spoken: int = EN) -> Callable[[Request], Sequence[int]]:
    """Scripted answers of an engine: languages, alignments, and windows in the order of their requests."""
    windows: dict[str, Sequence[int]] = {}

    def answer(request: Request) -> Sequence[int]:
        if request.params.allowed_token_ids or request.alignment is not None:
            return [spoken]
        if request.request_id not in windows:
            windows[request.request_id] = [*outputs[min(len(windows), len(outputs) - 1)], END]
        return windows[request.request_id]

    return answer


def speech_app(*outputs: Sequence[int], tokens: SpeechTokens = SPEECH, **options: Any) -> App:
    """Return an application with a model that reads audio, and the models of `make_app`."""
    room = {"max_model_len": 64, "max_num_batched_tokens": 128}
    app = make_app(served_speech(tokens=tokens), end_id=END, **room, **options)
    app.script.answer = saying(*outputs) if outputs else None
    app.app.state.speech.decoders = decoder = ScriptedDecoder()  # type: ignore[assignment]
    app.app.state.speech.decoders = decoder  # type: ignore[assignment]
    return app


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


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
    """Return the requests for outputs of windows, without those for languages and alignments."""
    return [one for one in app.client.submitted if not one.params.allowed_token_ids and one.alignment is None]
