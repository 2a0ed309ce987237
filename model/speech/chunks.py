"""Long audio as chunks that overlap, all decoded at once, and one text of their outputs, as transformers' pipeline has
it (`chunk_length_s`): where two chunks overlap, the longest run of tokens that both have is found, and the halves of it
come from the chunk that heard more around them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.model.api.request import Source, audio_source
from triptych.model.speech.log_mel import LogMel
from triptych.model.speech.segments import FRAMES_PER_POSITION, Window

OVERLAP = 6  # a chunk shares a sixth of its length with each neighbour


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples `start` to `end` of an audio. The first `left` and the last `right` are its neighbours' too."""

    start: int
    end: int
    left: int
    right: int


def cut_chunks(num_samples: int, chunk_samples: int) -> list[Chunk]:
    """Cut an audio into chunks of `chunk_samples`; the last one may be shorter."""
    stride = round(chunk_samples / OVERLAP)
    found = []
    for start in range(0, num_samples, chunk_samples - 2 * stride):
        end = start + chunk_samples
        left, right = (0 if start == 0 else stride), (0 if end >= num_samples else stride)
        if min(end, num_samples) - start > left:
            found.append(Chunk(start, min(end, num_samples), left, right))
        if end >= num_samples:
            break
    return found


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a chunk's output, in seconds from the chunk's start: a timestamp has `stamp`, a word's part maybe a
    `start` and an `end`."""

    id: int
    stamp: float | None = None
    start: float = 0.0
    end: float = 0.0
    place: int = -1  # of what else is known of it, in a list of the caller's


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """What was decoded of a chunk; lengths are in seconds, `tokens` are without special ones other than timestamps."""

    length: float
    left: float
    right: float
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """A segment of the merged outputs, in seconds of the whole audio; None: its output has no such timestamp."""

    start: float | None
    end: float | None
    tokens: list[Token]


class RunJoiner:
    """Joins runs of tokens that each overlap the one before, as `_find_longest_common_sequence` does."""

    def __init__(self, *, timed: bool = False) -> None:
        self._timed = timed
        self._left: list[Token] = []
        self.num_runs = 0
        self.settled: list[Token] = []  # the beginning of what is joined, which later runs do not change

    def add(self, run: list[Token]) -> None:
        """Take the next run."""
        if not self.num_runs:
            self._left = run
        else:
            (left_start, left_stop), (right_start, right_stop) = _best_overlap(self._left, run, self._timed)
            self.settled += self._left[: (left_start + left_stop) // 2]
            self._left = run[(right_start + right_stop) // 2 :]
        self.num_runs += 1

    @property
    def joined(self) -> list[Token]:
        """All runs as one."""
        return self.settled + self._left


class ChunkMerger:
    """Joins the outputs of chunks, given in order, to segments.

    Without timestamps all of them are one segment, which `rest` gives. This is transformers' `_decode_asr`.
    """

    def __init__(self, *, timed: bool = False) -> None:
        """`timed`: tokens have times, and those that are the same must also be in the order of their times."""
        self._timed = timed
        self._offset = 0.0
        self._start: float | None = None  # of the open segment
        self._runs = RunJoiner(timed=timed)  # of the open segment, one of each chunk
        self._skips = False

    @property
    def settled(self) -> list[Token]:
        """The tokens of the open segment that later chunks do not change."""
        return self._runs.settled

    def add(self, output: ChunkOutput) -> list[Merged]:
        """Take the next chunk's output; return the segments that end in it."""
        ended: list[Merged] = []
        self._offset -= output.left
        last = _first_of_overlap(output) if output.right else None
        run: list[Token] = []
        for token in output.tokens:
            if token.stamp is None:
                run.append(_moved(token, self._offset))
                continue
            time = round(token.stamp + self._offset, 2)
            if last is not None and token.stamp >= last:
                self._skips = True  # it stands in the overlap: the next chunk says more; its second one is skipped too
            elif self._skips or (self._runs.num_runs and token.stamp < output.left):
                self._skips = False
            elif self._start is None:
                self._start = time
            elif time != self._start:
                self._runs.add(run)
                run = []
                ended.append(self._close(time))
        self._offset += output.length - output.right
        if run:
            self._runs.add(run)
        elif not self._runs.joined:
            self._start, self._runs = None, RunJoiner(timed=self._timed)
        return ended

    def rest(self) -> list[Merged]:
        """Return what no timestamp has ended, at most one segment."""
        return [self._close(None)] if self._runs.num_runs else []

    def _close(self, end: float | None) -> Merged:
        merged = Merged(self._start, end, self._runs.joined)
        self._start, self._runs = None, RunJoiner(timed=self._timed)
        return merged


def _best_overlap(
    left: Sequence[Token], right: Sequence[Token], timed: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Slide `right` over the end of `left`; return the places in both where most tokens are the same."""
    ids, others = (np.array([token.id for token in run], np.int64) for run in (left, right))
    starts, later = (np.array([(token.start, token.end) for token in run]).reshape(-1, 2) for run in (left, right))
    best, found = 0.0, ((len(left), len(left)), (0, 0))
    for shift, ours, theirs in _overlaps(len(left), len(right)):
        same = ids[slice(*ours)] == others[slice(*theirs)]
        if timed:
            same &= _not_later(starts[slice(*ours)], later[slice(*theirs)])
        matches = int(same.sum())
        matching = matches / shift + shift / 10000.0  # longer ones win a tie
        if matches > 1 and matching > best:
            best, found = matching, (ours, theirs)
    return found


def _overlaps(left: int, right: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
    for shift in range(1, left + right):
        ours = (max(0, left - shift), min(left, left + right - shift))
        yield shift, ours, (max(0, shift - left), min(right, shift))


def _not_later(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Whether each (start, end) of ours is at most theirs, as tuples compare."""
    first = ours[:, 0] < theirs[:, 0]
    return first | ((ours[:, 0] == theirs[:, 0]) & (ours[:, 1] <= theirs[:, 1]))


def _moved(token: Token, seconds: float) -> Token:
    return Token(token.id, None, round(token.start + seconds, 2), round(token.end + seconds, 2), token.place)


def _first_of_overlap(output: ChunkOutput) -> float | None:
    """Return the first timestamp in the overlap with the next chunk, which says more there, or else the last one."""
    border, found = output.length - output.right, None
    stamps: Iterable[float] = (token.stamp for token in reversed(output.tokens) if token.stamp is not None)
    for stamp in stamps:
        if found is not None and stamp < border:
            break
        found = stamp
    return found


# -- The features of one audio, and the windows of them that the encoder reads. Those of long audio are computed window
# by window, from samples that stay in memory: a first pass finds what their range depends on, the loudest value of the
# whole audio.

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
