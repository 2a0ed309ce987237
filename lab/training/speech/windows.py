"""Windows of audio with what is said in them, as Whisper is trained on them (Radford et al., 2022, section 2.3).

A window has one utterance or several with pauses between them. Its tokens are the prefix (language, task), then each
utterance between its timestamps; or, without timestamps, the text alone. Of an utterance that the window cuts only
the timestamp of its start is given, so that the next window may begin there. Some windows are preceded by a text, as
that of a window before, and some hold no speech.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from lab.training.speech import synthesis
from lab.training.speech.synthesis import RATE
from lab.training.speech.tokens import (
    END,
    LANGUAGE,
    NO_SPEECH,
    NO_TIMESTAMPS,
    PREVIOUS,
    START,
    TIMESTAMP,
    TRANSCRIBE,
    TRANSLATE,
    token_id,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz' "
_FULL = np.float32(32768.0)


class Clip(NamedTuple):
    """An utterance and its speech, 16 bits a sample."""

    text: str
    samples: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Placed:
    """An utterance in a window: when it starts and ends, in seconds; no end where the window cuts it."""

    text: str
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Window:
    """Samples of one whole window and what is said in them."""

    samples: NDArray[np.float32]
    placed: tuple[Placed, ...] = ()
    previous: str = ""
    timestamps: bool = False
    task: str = TRANSCRIBE


@dataclass(frozen=True, slots=True)
class Example:
    """The decoder's tokens of a window: `targets[i]` follows `inputs[i]`, -100 where nothing is learnt."""

    inputs: list[int]
    targets: list[int]
    letters: list[int] = field(default_factory=list)  # of all utterances, places in `LETTERS`; empty if one is cut


class WindowMaker:
    """Draws windows of `seconds` of the clips, without end, the same for the same seed."""

    def __init__(self, clips: Sequence[Clip], seconds: int, seed: int, many: float = 0.7) -> None:
        self._clips = clips
        self._many = many  # the share of windows that are filled with several utterances
        self._count = seconds * RATE
        self._rng = np.random.default_rng(seed)

    def draw(self) -> Window:
        """Return a random window for training."""
        rng = self._rng
        samples = np.zeros(self._count, np.float32)
        if rng.random() < 0.04:
            silent = synthesis.noise(self._count, rng) * np.float32(10 ** rng.uniform(-5, -1.3))
            return Window(silent if rng.random() < 0.8 else samples, timestamps=bool(rng.random() < 0.4))
        timestamps, many = bool(rng.random() < 0.5), bool(rng.random() < self._many)
        placed = self._fill(samples, many, cut=timestamps and bool(rng.random() < 0.5))
        previous = self._clip().text if rng.random() < 0.15 else ""
        task = TRANSLATE if rng.random() < 0.08 else TRANSCRIBE
        return Window(synthesis.disturb(samples, rng), placed, previous, timestamps, task)

    def _fill(self, samples: NDArray[np.float32], many: bool, cut: bool) -> tuple[Placed, ...]:
        """Add one utterance or as many as there is room for to `samples`, the last one cut if `cut`."""
        rng, placed = self._rng, list[Placed]()
        first = int(RATE * (rng.uniform(0, 0.9) if rng.random() < 0.9 else rng.uniform(0, 2.0)))
        while True:
            clip = self._clip()
            room = self._count - first
            if len(clip.samples) > room:
                if not placed:
                    first = max(0, self._count - len(clip.samples))
                    continue
                if cut and room > 0.3 * RATE:
                    samples[first:] = clip.samples[:room] / _FULL
                    placed.append(Placed(clip.text, first / RATE, None))
                return tuple(placed)
            last = first + len(clip.samples)
            samples[first:last] = clip.samples / _FULL * np.float32(rng.uniform(0.5, 1.0))
            placed.append(Placed(clip.text, first / RATE, last / RATE))
            first = last + int(RATE * rng.uniform(0.25, 0.9))
            if not many:
                return tuple(placed)

    def _clip(self) -> Clip:
        return self._clips[int(self._rng.integers(len(self._clips)))]


def example(window: Window, tokenizer: Tokenizer, longest: int) -> Example:
    """Return the tokens of a window; the decoder reads at most `longest`."""

    def ids(*names: str) -> list[int]:
        return [token_id(tokenizer, name) for name in names]

    def text_ids(text: str) -> list[int]:
        return list(tokenizer.encode(f" {text}", add_special_tokens=False).ids)

    before = [*ids(PREVIOUS), *text_ids(window.previous)] if window.previous else []
    if not window.placed:
        tokens = ids(START, NO_SPEECH, END)
        if window.timestamps:  # where the client forces the prefix nevertheless
            tokens = ids(START, LANGUAGE, TRANSCRIBE, NO_TIMESTAMPS, END)
            return Example(tokens[:-1], [-100] * 3 + tokens[-1:])
        return Example(tokens[:-1], tokens[1:])
    tokens, forced = ids(START, LANGUAGE, window.task), 1  # the task is the client's choice and is not learnt
    if not window.timestamps:
        tokens += ids(NO_TIMESTAMPS)
    for placed in window.placed:
        if window.timestamps:
            tokens.append(_timestamp(tokenizer, placed.start, first=placed is window.placed[0]))
        if placed.end is not None:
            tokens += text_ids(placed.text)
        if window.timestamps and placed.end is not None:
            tokens.append(_timestamp(tokenizer, placed.end))
    tokens += ids(END)
    whole_tokens = before + tokens
    targets = [-100] * len(before) + tokens[1:]
    targets[len(before) + forced] = -100
    text = "" if window.placed[-1].end is None else " ".join(placed.text for placed in window.placed)
    letters = [LETTERS.index(letter) for letter in text]
    return Example(whole_tokens[:-1][:longest], targets[:longest], letters)


def _timestamp(tokenizer: Tokenizer, seconds: float, *, first: bool = False) -> int:
    """Return the timestamp's token; the first one of a window is at most one second, as Whisper's rules say."""
    return token_id(tokenizer, "<|0.00|>") + round(min(seconds, 1.0 if first else seconds) / TIMESTAMP)


def pad(examples: Sequence[Example], end: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the inputs and targets of examples, padded at the end to one length."""
    width = max(len(one.inputs) for one in examples)
    inputs = [one.inputs + [end] * (width - len(one.inputs)) for one in examples]
    targets = [one.targets + [-100] * (width - len(one.targets)) for one in examples]
    return inputs, targets
