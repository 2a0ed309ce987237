"""The workloads of the offline benchmark: seeded token ids and exact output lengths, equal for all engines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = tuple[int, ...]

POSITIONS = 1500  # of a window of sound
CLIENTS = 8  # that have one each
NO_TIMESTAMPS = 50363  # of the multilingual vocabulary: what a prompt ends with
_FIRST_ID = 100  # lower ids are special tokens in some models


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Holds one request: a prompt (decoder), a source (encoder-decoder) or a text (encoder).

    Of a model that reads sound the ids say which noise a window is, an id for each position (`window`); of one that
    reads pictures, one id says which noise a picture is (`picture`).
    """

    ids: tuple[int, ...]
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Holds requests that are all submitted at the start."""

    name: str
    asks: tuple[BenchRequest, ...]
    beams: int = 1
    temperature: float = 0.0

    @property
    def input_tokens(self) -> int:
        return sum(len(ask.ids) for ask in self.asks)

    @property
    def output_tokens(self) -> int:
        return sum(ask.output_tokens for ask in self.asks)


@dataclass(frozen=True, slots=True)
class Scale:
    """Scales a workload: the share of its requests (at most the first `at_most`) and of their lengths."""

    requests: float = 1.0
    lengths: float = 1.0
    seed: int = 0
    at_most: int | None = None


def window(ids: Ids, mel_bins: int) -> NDArray[np.float32]:
    """Return the log-mel frames `[mel bins, 2 * positions]` of the window that `ids` stand for."""
    return np.random.default_rng(ids).standard_normal((mel_bins, 2 * len(ids)), dtype=np.float32)


def picture(ids: Ids, size: int) -> NDArray[np.uint8]:
    """Return the pixels `[3, size, size]` of the picture that `ids` stand for."""
    return np.random.default_rng(ids).integers(256, size=(3, size, size), dtype=np.uint8)


QUICK = Scale(requests=0.25, lengths=0.5)


def workloads(form: str, vocab_size: int, scale: Scale) -> list[Workload]:
    """Return the workloads of a form of model: D is a decoder, E an encoder-decoder, S one that reads sound, N an
    encoder, V one that reads pictures."""
    rng = random.Random(scale.seed)

    def length(least: int, most: int) -> int:
        return max(1, round(rng.randint(least, most) * scale.lengths))

    def ids(count: int, source: random.Random = rng) -> tuple[int, ...]:
        return tuple(source.randrange(_FIRST_ID, vocab_size) for _ in range(count))

    def many(count: int, one: Callable[[], BenchRequest]) -> tuple[BenchRequest, ...]:
        share = max(1, round(count * scale.requests))
        return tuple(one() for _ in range(min(share, scale.at_most or share)))

    if form == "D":
        single = BenchRequest(ids(128), max(2, round(64 * scale.lengths)))
        batch = many(64, lambda: BenchRequest(ids(length(32, 512)), length(16, 256)))
        prompt = BenchRequest(ids(round(512 * scale.lengths), random.Random(scale.seed)), 1)
        works = [Workload("one at a time", (single,)), Workload(f"{len(batch)} at once", batch)]
        return [*works, Workload("a prompt", (prompt,))]
    if form == "E":
        single = BenchRequest(ids(128), max(2, round(64 * scale.lengths)))
        batch = many(64, lambda: BenchRequest(ids(length(16, 256)), length(16, 128)))
        return [
            Workload("one at a time", (single,)),
            Workload(f"{len(batch)} at once", batch),
            Workload(f"{len(batch)} at once, 4 beams", batch, beams=4),
        ]
    if form == "S":  # windows are whole, however short the lengths
        output = max(2, round(64 * scale.lengths))
        count = min(CLIENTS, scale.at_most or CLIENTS)
        windows = tuple(BenchRequest(ids(POSITIONS), output) for _ in range(count))
        return [
            Workload(f"{name}{and_beams}", asks, beams)
            for name, asks in (("one window", windows[:1]), (f"{count} windows", windows))
            for and_beams, beams in (("", 1), (", 5 beams", 5))
        ]
    if form == "V":
        pictures = many(128, lambda: BenchRequest(ids(1)))
        return [Workload("a picture", pictures[:1]), Workload(f"{len(pictures)} pictures", pictures)]
    texts = many(512, lambda: BenchRequest(ids(length(8, 256))))
    return [Workload(f"{len(texts)} texts", texts)]
