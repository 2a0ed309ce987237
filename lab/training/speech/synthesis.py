"""Text to speech by the program espeak-ng (Debian's package of that name), and what rooms and lines do to it.

Speech is mono float32 at 16 kHz. Random choices use numpy's generators with a given seed.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.model.speech.resampling import resample

RATE = 16000
_ESPEAK_RATE = 22050
_ACCENTS = ("en-us", "en-us", "en-gb", "en-gb-x-rp")
_TIMBRES = ("", "+m1", "+m3", "+m4", "+m7", "+f1", "+f2", "+f3", "+f4")
HELD_OUT_TIMBRES = ("+m2", "+f5")
_HEADER = 44  # bytes before the samples of what espeak-ng writes to a pipe


@dataclass(frozen=True, slots=True)
class Voice:
    """How espeak-ng says something: its voice, its words a minute and its pitch from 0 to 99."""

    name: str
    speed: int = 165
    pitch: int = 50


def draw_voice(rng: np.random.Generator, *, held_out: bool = False) -> Voice:
    """Return a random voice; the held-out ones have timbres that training never hears."""
    timbres = HELD_OUT_TIMBRES if held_out else _TIMBRES
    accent, timbre = (options[int(rng.integers(len(options)))] for options in (_ACCENTS, timbres))
    return Voice(accent + timbre, int(rng.integers(140, 191)), int(rng.integers(30, 71)))


def say(text: str, voice: Voice) -> NDArray[np.float32]:
    """Return the speech, loudest at 1, without the silence around it."""
    spoken = text.replace(" a m", " A M").replace(" p m", " P M")  # letters, not the article
    command = ["espeak-ng", "-v", voice.name, "-s", str(voice.speed), "-p", str(voice.pitch), "--stdout", spoken]
    stream = subprocess.run(command, check=True, capture_output=True).stdout
    speech = resample(np.frombuffer(stream[_HEADER:], "<i2").astype(np.float32), _ESPEAK_RATE, RATE)
    loud = np.flatnonzero(np.abs(speech) > 0.01 * np.abs(speech).max())
    speech = speech[loud[0] : loud[-1] + 1]
    return speech / np.abs(speech).max()


def disturb(window: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return the window as a microphone might have it: with an echo, over a telephone, too quiet, with noise."""
    if rng.random() < 0.15:
        window = _echo(window, rng)
    if rng.random() < 0.15:
        window = _band(window, rng)
    level = 10 ** rng.uniform(-1.5, -0.05)
    window = window * np.float32(level / max(1e-6, float(np.abs(window).max())))
    if rng.random() < 0.6:
        decibels = rng.uniform(12, 45)
        window = window + noise(len(window), rng) * np.float32(level * 0.15 * 10 ** (-decibels / 20))
    return np.clip(window, -1, 1).astype(np.float32)


def noise(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Return noise of unit power whose high frequencies are more or less damped."""
    samples = rng.standard_normal(count, np.float32)
    for _ in range(int(rng.integers(4))):
        samples[1:] += samples[:-1] * np.float32(0.9)
    return samples / np.sqrt(np.mean(samples**2))


def _echo(window: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Add a room's reverberation: noise that decays within 0.1 to 0.4 s."""
    count = int(RATE * rng.uniform(0.1, 0.4))
    response = rng.standard_normal(count) * np.exp(-6 * np.arange(count) / count) * rng.uniform(0.01, 0.06)
    response[0] = 1.0
    size = 1 << (len(window) + count).bit_length()
    return np.fft.irfft(np.fft.rfft(window, size) * np.fft.rfft(response, size), size)[: len(window)].astype(np.float32)


def _band(window: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Keep a band only, as telephones do."""
    spectrum = np.fft.rfft(window)
    frequencies = np.fft.rfftfreq(len(window), 1 / RATE)
    low, high = rng.uniform(20, 300), rng.uniform(3000, 7500)
    spectrum *= 1 / (1 + (low / np.maximum(frequencies, 1.0)) ** 4) / (1 + (frequencies / high) ** 8)
    return np.asarray(np.fft.irfft(spectrum, len(window)), np.float32)
