"""The features of one audio, and the windows of them that the encoder reads."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.api.source import Source, audio_source
from model.media.log_mel import LogMel
from model.speech.segments import FRAMES_PER_POSITION, Window


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """Log-mel features `[mel bins, frames]` of an audio of `num_frames`; there may be silence behind it."""

    features: NDArray[np.float32]
    num_frames: int
    window_frames: int
    frame_seconds: float

    @classmethod
    def of(cls, log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
        """Compute the features of samples: of one window with silence behind them, of longer audio as it is."""
        short = len(samples) <= log_mel.window_samples
        features = log_mel.window(samples) if short else log_mel.features(samples)
        frames = max(1, -(-len(samples) // log_mel.hop_length))
        return cls(
            features,
            min(frames, features.shape[1]),
            log_mel.window_frames,
            log_mel.hop_length / log_mel.sampling_rate,
        )

    @classmethod
    async def computed(cls, log_mel: LogMel, samples: NDArray[np.float32]) -> Spectrogram:
        """Compute the features in a thread, as `of` does.

        Whoever is cancelled meanwhile goes on when the thread has ended: samples are counted as long as they are there.
        """
        work = asyncio.ensure_future(asyncio.to_thread(cls.of, log_mel, samples))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    @property
    def position_seconds(self) -> float:
        """The seconds of a position of the encoder, which are those from a timestamp token to the next."""
        return self.frame_seconds * FRAMES_PER_POSITION

    def source(self, window: Window) -> Source:
        """Return what the encoder reads of a window; frames behind the last one are 0, as in transformers."""
        part = self.features[:, window.seek : window.seek + self.window_frames]
        filled = np.zeros((part.shape[0], self.window_frames), "<f4")
        filled[:, : part.shape[1]] = part
        positions = -(-self.window_frames // FRAMES_PER_POSITION)
        return audio_source(filled.tobytes(), filled.shape, positions)
