"""Samples of one rate to another, by a windowed-sinc filter in polyphase form (numpy).

The filter is a sinc with a Kaiser window (Kaiser and Schafer, 1980): flat up to 0.93 of the lower rate's half, and
80 dB down from 1.07 of it on, so that nothing folds back below 0.93.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

_ATTENUATION = 80.0  # dB
_TRANSITION = 0.14  # width of the transition band in half rates, around the lower one's half rate
_PHASES = 1000  # at most this many, which bounds the filters: an odd rate is taken for one 0.05 % away at most
_OUTPUTS = 64  # of a product, at least
_BLOCK = 1 << 20  # samples that are gathered for one product, which bounds memory


def resample(samples: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """Return mono samples at `target` Hz of samples `[n]` at `rate` Hz: `ceil(n * target / rate)`, or about that."""
    resampler = Resampler(rate, target)
    return np.concatenate((resampler.feed(samples), resampler.finish()))


class Resampler:
    """Resamples mono samples that come in parts. The result does not depend on how they are parted."""

    def __init__(self, rate: int, target: int) -> None:
        self._rate, self._target = rate, target
        ratio = Fraction(rate, target).limit_denominator(max(1, _PHASES * target // max(rate, target)))
        repeats = ceil(_OUTPUTS / ratio.denominator)
        self._outputs = ratio.denominator * repeats  # of a product, which passes `step` samples of the source
        self._step = ratio.numerator * repeats
        self._filters, half = _filters(self._outputs, self._step)  # [step + 2 * half, outputs]
        self._rest = np.zeros(half, np.float32)  # of the source, from where the next product begins
        self._taken = self._made = 0

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take samples and return those of the result that are complete."""
        self._taken += len(samples)
        if self._rate == self._target:
            return samples
        self._rest = np.concatenate((self._rest, samples))
        rounds = max(0, (len(self._rest) - len(self._filters)) // self._step + 1)
        result = self._products(rounds)
        self._rest = self._rest[rounds * self._step :]
        self._made += len(result)
        return result

    def finish(self) -> NDArray[np.float32]:
        """Return the rest of the result: beyond its end the source is silent."""
        if self._rate == self._target:
            return np.zeros(0, np.float32)
        whole = -(-self._taken * self._target // self._rate)
        missing = max(0, whole - self._made)  # an odd rate, taken for a lower one, has given more already
        rounds = -(-missing // self._outputs)
        size = max(0, rounds - 1) * self._step + len(self._filters)
        self._rest = np.pad(self._rest, (0, max(0, size - len(self._rest))))
        return self._products(rounds)[:missing]

    def _products(self, rounds: int) -> NDArray[np.float32]:
        result = np.empty((rounds, self._outputs), np.float32)
        if rounds:
            parts = np.lib.stride_tricks.sliding_window_view(self._rest, len(self._filters))[:: self._step]
            block = max(1, _BLOCK // len(self._filters))
            for start in range(0, rounds, block):
                end = min(start + block, rounds)
                np.matmul(np.ascontiguousarray(parts[start:end]), self._filters, out=result[start:end])
        return result.reshape(-1)


@lru_cache(maxsize=4)
def _filters(outputs: int, step: int) -> tuple[NDArray[np.float32], int]:
    """Return a column of weights for each of `outputs` samples within `step` of the source, and the filter's reach."""
    ratio = step / outputs
    cutoff = min(1.0, 1.0 / ratio)  # in half rates of the source
    half = ceil((_ATTENUATION - 7.95) / (2.285 * np.pi * _TRANSITION * cutoff) / 2)
    beta = 0.1102 * (_ATTENUATION - 8.7)
    distance = np.arange(step + 2 * half)[:, None] - half - np.arange(outputs)[None, :] * ratio
    inside = np.maximum(0.0, 1.0 - np.square(distance / half))
    window = np.where(np.abs(distance) <= half, np.i0(beta * np.sqrt(inside)) / np.i0(beta), 0.0)
    weights = cutoff * np.sinc(cutoff * distance) * window
    return (weights / weights.sum(axis=0)).astype(np.float32), half
