"""The speech that windows are made of: utterances said once, kept on disk between runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

import numpy as np

from lab.training.speech import synthesis, utterances
from lab.training.speech.windows import Clip
from triptych.model.errors import ConfigError

_SHARD = 500
_LOUDEST = 32767


def training_clips(count: int, folder: Path, longest: float) -> list[Clip]:
    """Return the first `count` clips for training, those of more than `longest` seconds left out.

    The same on every machine that has the same espeak-ng; what `folder` has already is not made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clips: list[Clip] = []
    for first in range(0, count, _SHARD):
        file = folder / f"clips-{first}.npz"
        if not file.exists():
            _write(file, [_training_clip(seed) for seed in range(first, first + _SHARD)])
        clips += _read(file)
    return [clip for clip in clips[:count] if len(clip.samples) <= longest * synthesis.RATE]


def held_out_clips(count: int, *, held_out_voices: bool) -> list[Clip]:
    """Return `count` utterances with values that training never says, said by voices that it hears or never hears."""
    texts = utterances.held_out_utterances(count, seed=int(held_out_voices))
    rng = np.random.default_rng(count)
    voices = [synthesis.draw_voice(rng, held_out=held_out_voices) for _ in texts]
    return [Clip(*said) for said in _say_all(list(zip(texts, voices, strict=True)))]


def _training_clip(seed: int) -> tuple[str, synthesis.Voice]:
    return utterances.draw(random.Random(seed), held_out=False), synthesis.draw_voice(np.random.default_rng(seed))


def _say_all(wanted: Sequence[tuple[str, synthesis.Voice]]) -> list[Clip]:
    if which("espeak-ng") is None:
        raise ConfigError("speech is made by espeak-ng, which is not installed: apt-get install espeak-ng")

    def said(one: tuple[str, synthesis.Voice]) -> Clip:
        return Clip(one[0], (synthesis.say(*one) * _LOUDEST).astype(np.int16))

    with ThreadPoolExecutor(2) as threads:  # which wait for espeak-ng
        return list(threads.map(said, wanted))


def _write(file: Path, wanted: Sequence[tuple[str, synthesis.Voice]]) -> None:
    clips = _say_all(wanted)
    partial = file.with_suffix(".partial.npz")
    samples, sizes = np.concatenate([clip.samples for clip in clips]), [len(clip.samples) for clip in clips]
    np.savez(partial, texts=np.array([clip.text for clip in clips]), sizes=np.array(sizes), samples=samples)
    partial.replace(file)


def _read(file: Path) -> list[Clip]:
    stored = np.load(file)
    parts = np.split(stored["samples"], np.cumsum(stored["sizes"])[:-1])
    return [Clip(str(text), part) for text, part in zip(stored["texts"], parts, strict=True)]
