"""Long audio as windows one after the other, each with what was said before (Radford et al. 2022, section 4.5).

`SequentialWindows` says which `Attempt` to compute next and takes its `Outcome`; it does no I/O, so that a service and
a program can both drive it. An output that repeats itself, or that the model finds unlikely, is decoded again at the
next temperature. Results are those of transformers' `generate` for long audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.model.speech.segments import Window, compression_ratio, cut_segments

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_UNRELIABLE_FROM = 0.5  # what was drawn at such a temperature is no context for the next window


@dataclass(frozen=True, slots=True)
class Decoding:
    """What all windows of a transcription have in common: token ids, and when an output counts as failed."""

    start: tuple[int, ...]  # <|startoftranscript|>, language, task, and <|notimestamps|> unless there are timestamps
    previous: int | None  # <|startofprev|>, which comes before the context of a window
    timestamp_begin: int
    context: int  # tokens that the decoder can hold
    vocab_size: int
    end: int  # <|endoftext|>
    prompt: tuple[int, ...] = ()  # text that comes before the audio
    carries_context: bool = True  # a window is told what was said in those before it
    forgets_failed: bool = False  # but not of an output that has failed at the last temperature
    temperatures: tuple[float, ...] = TEMPERATURES
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    max_tokens: int | None = None  # of a window's output; None: what the context has room for

    @property
    def most_context(self) -> int:
        """How many tokens of context a window gets at most."""
        return self.context // 2 - 1


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request to the engine: a window, decoded at one temperature."""

    window: Window
    prompt: tuple[int, ...]
    temperature: float
    max_tokens: int
    number: int  # of the attempts at this window, from 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt gave. `token_ids` are without the end id; the mean log-probability counts it."""

    token_ids: tuple[int, ...]
    mean_logprob: float
    no_speech_prob: float
    ended: bool = True  # by the end id


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the audio and what was said in it; `start` and `end` are seconds of the whole audio."""

    start: float
    end: float
    token_ids: tuple[int, ...]  # with the timestamps around the text
    window: Window
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(slots=True)
class SequentialWindows:
    """The windows of one audio of `num_frames`, each of at most `window_frames`; `frame_seconds` is the hop of a frame.

    Call `next` and `finish` in turns until `next` returns None.
    """

    decoding: Decoding
    num_frames: int
    window_frames: int
    frame_seconds: float
    seek: int = 0
    num_fallbacks: int = 0
    num_windows: int = 0
    _said: list[int] = field(default_factory=list)  # context: what was said, and before that the prompt
    _attempt: int = 0
    _carries: bool = False  # the next window gets context

    def __post_init__(self) -> None:
        self._carries = self.decoding.carries_context
        self._said = list(self.decoding.prompt)

    def next(self) -> Attempt | None:
        """Return what to compute now; None when all of the audio is done."""
        if self.seek >= self.num_frames:
            return None
        window = Window(self.seek, min(self.num_frames - self.seek, self.window_frames))
        prompt = (*self._context(), *self.decoding.start)
        room = self.decoding.context - len(prompt)
        most = room if self.decoding.max_tokens is None else min(room, self.decoding.max_tokens)
        return Attempt(window, prompt, self.decoding.temperatures[self._attempt], most, self._attempt)

    def finish(self, attempt: Attempt, outcome: Outcome) -> list[Segment] | None:
        """Take the outcome of an attempt; return its segments: none without speech, None if it has to be repeated."""
        ids = outcome.token_ids
        ratio = compression_ratio((*ids, self.decoding.end) if outcome.ended else ids, self.decoding.vocab_size)
        failed, silent = self._judge(outcome, ratio)
        forgets = failed and self.decoding.forgets_failed
        self._carries = self.decoding.carries_context and attempt.temperature < _UNRELIABLE_FROM and not forgets
        if failed and self._attempt + 1 < len(self.decoding.temperatures):
            self._attempt += 1
            self.num_fallbacks += 1
            return None
        self._attempt = 0
        self.num_windows += 1
        if silent:
            self.seek += attempt.window.num_frames
            return []
        found = self._accept(attempt, outcome, ratio)
        if not forgets:
            self._remember(found)
        return found

    def is_silent(self, no_speech_prob: float) -> bool:
        """Return whether a window of this probability may turn out to hold no speech, whatever its tokens say."""
        threshold = self.decoding.no_speech_threshold
        return threshold is not None and no_speech_prob > threshold

    def _judge(self, outcome: Outcome, ratio: float) -> tuple[bool, bool]:
        """Return whether the output has failed, and whether there is no speech."""
        decoding = self.decoding
        failed = decoding.compression_ratio_threshold is not None and ratio > decoding.compression_ratio_threshold
        unlikely = decoding.logprob_threshold is not None and outcome.mean_logprob < decoding.logprob_threshold
        if unlikely and self.is_silent(outcome.no_speech_prob):
            return False, True
        return failed or unlikely, False

    def _accept(self, attempt: Attempt, outcome: Outcome, ratio: float) -> list[Segment]:
        window, seconds = attempt.window, self.frame_seconds
        spans, frames = cut_segments(outcome.token_ids, self.decoding.timestamp_begin, window)
        found = [
            Segment(
                start=span.start * seconds,
                end=span.end * seconds,
                token_ids=outcome.token_ids[span.first : span.last],
                window=window,
                temperature=attempt.temperature,
                mean_logprob=outcome.mean_logprob,
                compression_ratio=ratio,
                no_speech_prob=outcome.no_speech_prob,
            )
            for span in spans
        ]
        self.seek += frames if frames > 0 else window.num_frames
        return found

    def _remember(self, segments: Sequence[Segment]) -> None:
        """Add what was said to the context of the windows that follow."""
        for segment in segments:
            self._said += _without_second_ending(segment.token_ids, self.decoding.timestamp_begin)
        del self._said[: -self.decoding.most_context]

    def _context(self) -> tuple[int, ...]:
        """Return what stands before the start of a window's prompt."""
        decoding = self.decoding
        if decoding.previous is None:
            return ()
        said: Sequence[int] = self._said if self._carries else decoding.prompt
        return (decoding.previous, *said[-decoding.most_context :]) if said else ()


def _without_second_ending(tokens: Sequence[int], timestamp_begin: int) -> Sequence[int]:
    """Return a segment's tokens with one timestamp at their end, where they have two."""
    return tokens[:-1] if len(tokens) > 2 and tokens[-2] >= timestamp_begin else tokens
