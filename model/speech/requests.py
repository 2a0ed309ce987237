"""The engine's requests of a transcription, and what their outputs say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.model.api.request import Alignment, FinishReason, Request, Source, TokenLogprob, TokenOutput
from triptych.model.api.sampling_params import Probe, SamplingParams
from triptych.model.checkpoint.speech import SpeechTokens
from triptych.model.speech.segments import FRAMES_PER_POSITION, Window
from triptych.model.speech.transcription import TEMPERATURES, Attempt, Decoding, Outcome

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SpeechOptions:
    """What a transcription is to be like; `prompt` and `suppress_tokens` are token ids."""

    language: str | None = None  # its code or English name; None: the folder's, else it is found out
    task: str | None = None  # None: the folder's, else to transcribe
    timestamps: bool | None = None  # segments are wanted, also where the audio is one window; None: not asked for
    writes_timestamps: bool = False  # outputs have them, by `completed`
    words: bool = False  # with times of their own
    parallel: bool = False  # all windows at once, as chunks that overlap
    prompt: tuple[int, ...] = ()
    carries_context: bool = True
    temperatures: tuple[float, ...] = TEMPERATURES
    forgets_failed: bool = False  # what failed at the last of them is no context
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    max_tokens: int | None = None
    num_beams: int | None = None  # at temperature 0; None: the folder's, else 1
    length_penalty: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    suppress_tokens: tuple[int, ...] = ()

    def completed(self, tokens: SpeechTokens, defaults: Mapping[str, Any]) -> SpeechOptions:
        """Return the options with what the folder sets for those that are not given.

        `defaults` are its sampling defaults. Raises `ValueError` for a language or a task that the model does not have.
        """
        longest = defaults.get("max_tokens", defaults.get("max_length"))
        return replace(
            self,
            language=tokens.language(self.language),
            task=tokens.task(self.task, self.language),
            writes_timestamps=self.words or (tokens.return_timestamps if self.timestamps is None else self.timestamps),
            max_tokens=longest if self.max_tokens is None else self.max_tokens,
            num_beams=defaults.get("num_beams", 1) if self.num_beams is None else self.num_beams,
            length_penalty=defaults.get("length_penalty", 1.0) if self.length_penalty is None else self.length_penalty,
        )


# Sampling defaults of a folder that hold for every window of a transcription, whatever is asked for.
_OF_THE_FOLDER = (
    *("repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("early_stopping", "renormalize_logits"),
)


@dataclass(slots=True)
class Output:
    """All outputs of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sum_logprob: float = 0.0
    probed: list[float] = field(default_factory=list)
    aligned: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, output: TokenOutput) -> None:
        """Take what a step added."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        if output.cumulative_logprob is not None:
            self.sum_logprob = output.cumulative_logprob
        if output.probe_logprobs is not None:
            self.probed = output.probe_logprobs
        if output.alignment is not None:
            self.aligned = output.alignment
        self.finish_reason = output.finish_reason

    @property
    def no_speech_prob(self) -> float:
        return math.exp(self.probed[0]) if self.probed else 0.0

    def outcome(self, end: int) -> Outcome:
        """Return what the output of an attempt says; `end` is the end id."""
        ended = bool(self.token_ids) and self.token_ids[-1] == end
        ids = self.token_ids[:-1] if ended else self.token_ids
        mean = self.sum_logprob / len(self.token_ids) if self.token_ids else 0.0
        return Outcome(tuple(ids), mean, self.no_speech_prob, ended)


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes the requests of one transcription of `template`, which has what is the same in all of them.

    `options` are complete, and `defaults` are the folder's sampling defaults.
    """

    tokens: SpeechTokens
    options: SpeechOptions
    template: Request
    max_model_len: int
    vocab_size: int
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def decoding(self, language: str | None, *, timestamps: bool) -> Decoding:
        """Return what all windows have in common, once the language is known."""
        options = self.options
        return Decoding(
            start=self._start(language, timestamps=timestamps),
            previous=self.tokens.previous,
            timestamp_begin=self.tokens.timestamp_begin,
            context=self.max_model_len,
            vocab_size=self.vocab_size,
            end=self.tokens.end,
            prompt=options.prompt,
            carries_context=options.carries_context and not options.parallel,
            forgets_failed=options.forgets_failed,
            temperatures=options.temperatures,
            compression_ratio_threshold=options.compression_ratio_threshold,
            logprob_threshold=options.logprob_threshold,
            no_speech_threshold=options.no_speech_threshold,
            max_tokens=options.max_tokens,
        )

    def detection(self, name: str, source: Source) -> Request:
        """Return the request that asks for a window's language; its only token is the language's."""
        languages = tuple(self.tokens.languages.values())
        params = SamplingParams(max_tokens=1, allowed_token_ids=languages)
        return self._request(name, source, (self.tokens.start,), params)

    def language_of(self, output: Output) -> str:
        """Return the code of the language that a detection found."""
        found = output.token_ids[0]
        return next(code for code, token in self.tokens.languages.items() if token == found)

    def attempt(self, name: str, source: Source, attempt: Attempt, *, timestamps: bool, draw: int) -> Request:
        """Return the request of an attempt at a window; `draw` tells the attempts of a transcription apart."""
        options, sampled = self.options, attempt.temperature > 0
        beams = 1 if sampled else options.num_beams or 1
        of_the_folder = {name: self.defaults[name] for name in _OF_THE_FOLDER if name in self.defaults}
        params = SamplingParams(
            max_tokens=attempt.max_tokens,
            temperature=attempt.temperature,
            top_k=options.top_k if sampled else 0,
            top_p=options.top_p if sampled else 1.0,
            seed=(options.seed + draw) & _MAX_SEED,
            num_beams=beams,
            length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
            logprobs=None if beams > 1 else options.logprobs,
            suppress_tokens=(*self.tokens.suppressed, *options.suppress_tokens),
            begin_suppress_tokens=self.tokens.suppressed_first,
            timestamps=self.tokens.timestamp_rules if timestamps else None,
            cumulative_logprob=True,
            probe=self._silence(attempt.prompt),
            **of_the_folder,
        )
        return self._request(name, source, attempt.prompt, params)

    def alignment(
        self, name: str, source: Source, window: Window, text: Sequence[int], language: str | None
    ) -> Request:
        """Return the request that says where each of a window's text tokens begins."""
        start = self._start(language, timestamps=True)
        room = self.max_model_len - len(start) - 3  # <|notimestamps|>, the end, and a token that is not looked at
        prompt = (*start, self.tokens.no_timestamps, *text[:room], self.tokens.end)
        positions = -(-window.num_frames // FRAMES_PER_POSITION)
        aligned = Alignment(
            self.tokens.alignment_heads,
            len(start),
            len(prompt) - 1,
            positions,
            median_filter_width=self.tokens.median_filter_width,
        )
        request = self._request(name, source, prompt, SamplingParams(max_tokens=1))
        return replace(request, alignment=aligned)

    def _start(self, language: str | None, *, timestamps: bool) -> tuple[int, ...]:
        """Return what an output begins with; a model of English alone is told no language and no task."""
        told = language if self.tokens.is_multilingual else None
        return self.tokens.prompt(told, self.options.task, timestamps=timestamps)

    def _silence(self, prompt: Sequence[int]) -> Probe:
        """Return the probe of the probability that there is no speech."""
        return Probe(len(prompt) - 1 - prompt[::-1].index(self.tokens.start), (self.tokens.no_speech,))

    def _request(self, name: str, source: Source, prompt: tuple[int, ...], params: SamplingParams) -> Request:
        return replace(
            self.template,
            request_id=name,
            prompt_token_ids=prompt,
            params=params,
            source=source,
            keeps_source=True,
        )


def token_times(aligned: Sequence[int], count: int, window_seconds: float, position_seconds: float) -> list[float]:
    """Return `count` + 1 seconds from a window's start: where each text token begins, and where the last one ends."""
    times = [min(position * position_seconds, window_seconds) for position in aligned]
    return [*times, *[times[-1] if times else 0.0] * (count + 1 - len(times))]
