"""The features of one audio, and the windows of them that the encoder reads.

Those of long audio are computed window by window, from samples that stay in memory: a first pass finds what their range
depends on, the loudest value of the whole audio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from model.api.request import Source, audio_source
from model.speech.log_mel import LogMel
from model.speech.segments import FRAMES_PER_POSITION, Window

T = TypeVar("T")


@dataclass(slots=True)
class Spectrogram:
    """Log-mel features of an audio of `num_frames` frames, padded with silence up to `num_columns`."""

    num_frames: int
    num_columns: int
    window_frames: int
    frame_seconds: float
    features: Callable[[int, int], NDArray[np.float32]]  # [mel bins, frames] of the frames [first, last)
    _latest: tuple[Window, Source] | None = None

    @classmethod
    def of(cls, log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
        """Compute the features of one window, padded with silence, or the range of those of longer audio."""
        if len(samples) <= log_mel.window_samples:
            window = log_mel.window(samples)
            columns = window.shape[1]
            features = partial(_cut, window)
        else:
            columns = log_mel.count_frames(samples)
            features = partial(log_mel.part, samples, log_mel.loudest(samples))
        frames = max(1, -(-len(samples) // log_mel.hop_length))
        seconds = log_mel.hop_length / log_mel.sampling_rate
        return cls(min(frames, columns), columns, log_mel.window_frames, seconds, features)

    @classmethod
    async def computed(cls, log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
        """Do what `of` does in a thread."""
        return await _in_thread(lambda: cls.of(log_mel, samples))

    @property
    def position_seconds(self) -> float:
        """The seconds of a position of the encoder, which are those from a timestamp token to the next."""
        return self.frame_seconds * FRAMES_PER_POSITION

    @property
    def first(self) -> Window:
        """The window that the audio begins with."""
        return Window(0, min(self.num_frames, self.window_frames))

    async def load(self, window: Window) -> Source:
        """Return what the encoder reads of a window, computed in a thread unless it is the latest one again."""
        if self._latest is None or self._latest[0] != window:
            self._latest = window, await _in_thread(lambda: self.source(window))
        return self._latest[1]

    def release(self) -> None:
        """Let go of the samples: what ended by an exception may be referred to by it for long."""
        self.features, self._latest = partial(_cut, np.zeros((0, 0), np.float32)), None

    def source(self, window: Window) -> Source:
        """Compute what the encoder reads of a window; frames after the last one are 0, as in transformers."""
        part = self.features(window.seek, min(window.seek + self.window_frames, self.num_columns))
        filled = np.zeros((part.shape[0], self.window_frames), "<f4")
        filled[:, : part.shape[1]] = part
        positions = -(-self.window_frames // FRAMES_PER_POSITION)
        return audio_source(filled.tobytes(), filled.shape, positions)


def _cut(features: NDArray[np.float32], first: int, last: int) -> NDArray[np.float32]:
    return features[:, first:last]


async def _in_thread(work: Callable[[], T]) -> T:
    """Return what a thread computes.

    A cancelled caller returns when the thread has ended: samples are counted as long as they are held.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
