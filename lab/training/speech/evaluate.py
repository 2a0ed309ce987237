"""Measures `speech`: the word error rate of what it transcribes greedily, one utterance a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.training.speech import clips, recipe, synthesis
from lab.training.speech.windows import Clip
from triptych.model.api.engine_config import EngineConfig
from triptych.model.api.request import audio_source
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.llm import LLM
from triptych.model.speech.log_mel import LogMel

HELD_OUT = 400  # utterances with each kind of voices
NOISE = 15.0  # decibels below the speech
_START = 0.3  # seconds of silence before the speech


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Word error rates: of voices that training hears, of the same with noise, of voices that it never hears."""

    known: float
    noisy: float
    unknown: float


def evaluate_speech(folder: Path, count: int = HELD_OUT) -> WordErrors:
    """Return the word error rates on held-out utterances."""
    llm = LLM(folder, EngineConfig(dtype="float32"))
    known, unknown = (clips.held_out_clips(count, held_out_voices=held_out) for held_out in (False, True))
    rng = np.random.default_rng(0)
    clean, other = [_window(clip) for clip in known], [_window(clip) for clip in unknown]
    noisy = [window + synthesis.noise(len(window), rng) * np.float32(_loudness(window)) for window in clean]
    texts, others = [clip.text for clip in known], [clip.text for clip in unknown]
    return WordErrors(
        known=word_error_rate(transcribed(llm, clean), texts),
        noisy=word_error_rate(transcribed(llm, noisy), texts),
        unknown=word_error_rate(transcribed(llm, other), others),
    )


def transcribed(llm: LLM, windows: Sequence[NDArray[np.float32]]) -> list[str]:
    """Return what is said in each window of samples, without timestamps."""
    log_mel = LogMel(recipe.SPEECH["num_mel_bins"], chunk_length=recipe.SECONDS)
    shape, positions = (log_mel.num_mel_bins, log_mel.window_frames), recipe.SPEECH["max_source_positions"]
    sources = [audio_source(log_mel.window(window).tobytes(), shape, positions) for window in windows]
    prefix = (recipe.START, recipe.LANGUAGE, recipe.TRANSCRIBE, recipe.NO_TIMESTAMPS)
    return [text.strip() for text in llm.generate(sources, SamplingParams(max_tokens=60), decoder_prompt=prefix)]


def word_error_rate(found: Sequence[str], expected: Sequence[str]) -> float:
    """Return the words to insert, delete or replace over the words expected."""
    pairs = [(one.split(), other.split()) for one, other in zip(found, expected, strict=True)]
    return sum(_distance(one, other) for one, other in pairs) / sum(len(other) for _, other in pairs)


def _distance(found: list[str], expected: list[str]) -> int:
    """Return Levenshtein's distance of two lists of words."""
    row = list(range(len(expected) + 1))
    for i, word in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(expected, 1):
            diagonal, row[j] = row[j], min(diagonal + (word != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def _window(clip: Clip) -> NDArray[np.float32]:
    room = round((recipe.SECONDS - _START) * synthesis.RATE)
    speech = clip.samples[:room].astype(np.float32) / 32768 * 0.7
    return np.pad(speech, (round(_START * synthesis.RATE), 0))


def _loudness(window: NDArray[np.float32]) -> float:
    """Return the level of noise that is `NOISE` below the speech."""
    speech = window[round(_START * synthesis.RATE) :]
    return float(np.sqrt(np.mean(np.square(speech))) * 10 ** (-NOISE / 20))
