"""Samples to log-mel features, as Whisper reads them and its checkpoint's preprocessor_config.json describes them.

Radford et al. (2022), section 2.2. Spectra are computed in float64: weak bands next to strong ones stay exact. Needs
numpy, no torch. The transforms and products release the interpreter's lock, so a thread that computes features holds
up an event loop for milliseconds only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.model.errors import ConfigError

_HIGHEST = 8000.0  # Hz of the upper edge of the last filter, whatever the sampling rate
_FLOOR = 1e-10  # of a filter's power
_RANGE = 8.0  # powers of ten below the loudest value; what is weaker is raised to that
_BLOCK = 512  # frames that are transformed at a time, which bounds memory


@dataclass(frozen=True)
class LogMel:
    """Computes log-mel features: Hann windows, power spectra, Slaney's mel filters, log10, and a range of 80 dB."""

    num_mel_bins: int = 80
    n_fft: int = 400  # samples of one frame's window
    hop_length: int = 160  # samples from a frame to the next
    sampling_rate: int = 16000  # samples a second
    chunk_length: int = 30  # seconds of a window

    @property
    def window_samples(self) -> int:
        """Samples of one whole window."""
        return self.chunk_length * self.sampling_rate

    @property
    def window_frames(self) -> int:
        """Frames of one whole window."""
        return self.window_samples // self.hop_length

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return features `[num_mel_bins, len(samples) // hop_length]` of mono samples within -1 and 1, of any length.

        The range is that below the loudest value of all samples given: features of a part are not a part of these.
        """
        logs = self._logs(samples, 0, self.count_frames(samples))
        return _in_range(logs, logs.max()) if logs.size else logs

    def part(self, samples: NDArray[np.float32], loudest: np.float32, first: int, last: int) -> NDArray[np.float32]:
        """Return columns [first, last) of the features of all samples, whose `loudest` is given."""
        return _in_range(self._logs(samples, first, last), loudest)

    def loudest(self, samples: NDArray[np.float32]) -> np.float32:
        """Return the loudest value of at least a frame of samples, on which the range of their features depends.

        No filter gives more power than the frame has. So frames are tried in the order of their power, until those that
        are left have less than was found: of speech a few in a hundred.
        """
        power = np.empty(self.count_frames(samples))
        for start in range(0, len(power), _BLOCK):
            frames = self._frames(samples, start, min(start + _BLOCK, len(power))) * self._window
            power[start : start + len(frames)] = np.einsum("ij,ij->i", frames, frames)
        power *= self._filters.max() * self.n_fft / 2 * (1 + 1e-9)  # Parseval's theorem, and a margin for rounding
        order, most, loudest = np.argsort(-power), -1.0, 0
        for start in range(0, len(order), _BLOCK):
            places = order[start : start + _BLOCK]
            if power[places[0]] <= most:
                break
            begins = (places * self.hop_length - self.n_fft // 2).tolist()
            found = self._filtered(np.stack([_span(samples, at, at + self.n_fft) for at in begins])).max(axis=0)
            if (here := found.max()) > most:
                most, loudest = here, int(places[found.argmax()])
        value: np.float32 = self._logs(samples, loudest, loudest + 1).max()
        return value

    def count_frames(self, samples: NDArray[np.float32]) -> int:
        """Return how many frames samples have."""
        return len(samples) // self.hop_length

    def _logs(self, samples: NDArray[np.float32], first: int, last: int) -> NDArray[np.float32]:
        """Return what the filters give of frames [first, last), as powers of ten.

        Whole blocks are computed, which begin at multiples of `_BLOCK`: a frame has the same bits in every part.
        """
        logs = np.empty((self.num_mel_bins, last - first), np.float32)
        for start in range(first - first % _BLOCK, last, _BLOCK):
            end = min(start + _BLOCK, self.count_frames(samples))
            block = np.log10(np.maximum(self._filtered(self._frames(samples, start, end)), _FLOOR))
            here, there = max(first, start), min(last, end)
            logs[:, here - first : there - first] = block[:, here - start : there - start]
        return logs

    def _frames(self, samples: NDArray[np.float32], first: int, last: int) -> NDArray[np.float32]:
        """Return frames [first, last) `[count, n_fft]`, each around a multiple of the hop."""
        begin = first * self.hop_length - self.n_fft // 2
        span = _span(samples, begin, begin + (last - 1 - first) * self.hop_length + self.n_fft)
        return np.lib.stride_tricks.sliding_window_view(span, self.n_fft)[:: self.hop_length]

    def _filtered(self, frames: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the power that each filter gives of frames: `[num_mel_bins, count]`."""
        spectrum = np.fft.rfft(frames * self._window)  # [count, n_fft / 2 + 1]
        power = np.square(spectrum.real) + np.square(spectrum.imag)
        filtered: NDArray[np.float64] = self._filters @ power.T
        return filtered

    def window(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return features `[num_mel_bins, window_frames]` of at most one window, filled up with silence."""
        if len(samples) > self.window_samples:
            raise ValueError(f"{len(samples)} samples are more than a window of {self.window_samples}")
        return self.features(np.pad(samples, (0, self.window_samples - len(samples))))

    @cached_property
    def _window(self) -> NDArray[np.float64]:
        """The periodic Hann window `[n_fft]`."""
        return np.hanning(self.n_fft + 1)[:-1]

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        """Slaney's filters `[num_mel_bins, n_fft / 2 + 1]`: triangles of equal area, evenly spaced in mel."""
        edges = _hertz(np.linspace(0.0, _mel(_HIGHEST), self.num_mel_bins + 2))  # [bins + 2]
        frequencies = np.linspace(0.0, self.sampling_rate // 2, self.n_fft // 2 + 1)  # [n_fft / 2 + 1]
        lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
        return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (upper - lower))


def _span(samples: NDArray[np.float32], begin: int, end: int) -> NDArray[np.float32]:
    """Return samples [begin, end); they are mirrored at both ends, as by numpy's `reflect`."""
    if begin >= 0 and end <= len(samples):
        return samples[begin:end]
    period = max(1, 2 * (len(samples) - 1))
    places = np.abs(np.arange(begin, end)) % period
    return samples[np.minimum(places, period - places) if len(samples) > 1 else places]


def _in_range(logs: NDArray[np.float32], loudest: np.float32) -> NDArray[np.float32]:
    """Turn powers of ten into features, in place."""
    np.maximum(logs, loudest - _RANGE, out=logs)
    logs += 4.0
    logs /= 4.0
    return logs


def read_log_mel(raw: Mapping[str, Any], where: str = "preprocessor_config.json") -> LogMel:
    """Read a feature extractor's settings, with Whisper's defaults for missing fields; raises `ConfigError`.

    `where` is the place that they were read from.
    """
    features = LogMel(
        num_mel_bins=_integer(raw, "feature_size", 80, 1, 512, where),
        n_fft=_integer(raw, "n_fft", 400, 2, 8192, where),
        hop_length=_integer(raw, "hop_length", 160, 1, 8192, where),
        sampling_rate=_integer(raw, "sampling_rate", 16000, 16000, 192_000, where),
        chunk_length=_integer(raw, "chunk_length", 30, 1, 600, where),
    )
    if raw.get("dither"):
        raise ConfigError(f"{where}: dither adds random noise, which is not served; set it to 0")
    if raw.get("padding_value"):
        raise ConfigError(f"{where}: padding_value must be 0, found {raw['padding_value']!r}")
    return features


def _integer(raw: Mapping[str, Any], name: str, default: int, least: int, most: int, where: str) -> int:
    value = raw.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{where}: {name} must be an integer from {least} to {most}, found {value!r}")
    return value


# Slaney's scale (Auditory Toolbox, 1998): linear up to 1,000 Hz, 15 mel, then 27 mel for a factor of 6.4.


def _mel(frequency: float) -> float:
    return float(15.0 + np.log(frequency / 1000.0) * 27.0 / np.log(6.4)) if frequency >= 1000.0 else frequency * 0.015


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < 15.0, mel / 0.015, 1000.0 * np.exp((mel - 15.0) * np.log(6.4) / 27.0))
