"""A transcription from the first window to the last, over whatever computes an engine's requests.

A service computes them with those of others; a program steps an engine of its own. There is no I/O here: what is new
is handed to a callback, which must return at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from triptych.model.api.request import FinishReason, Request, Source, TokenLogprob, TokenOutput
from triptych.model.speech.chunks import Chunk, ChunkMerger, ChunkOutput, Merged, Spectrogram, Token, cut_chunks
from triptych.model.speech.log_mel import LogMel
from triptych.model.speech.requests import Output, RequestMaker, token_times
from triptych.model.speech.segments import LiveText, TimedWord, Window, Word, without_pauses, words_of
from triptych.model.speech.transcription import Attempt, Segment, SequentialWindows
from triptych.model.text.detokenizer import Detokenizer
from triptych.model.text.tokenizer import Tokenizer

Take = Callable[[TokenOutput], None]
Compute = Callable[[Request, Take], Awaitable[None]]  # calls back with each output of a request until it has ended

_DRAWS = 1 << 20  # attempts of a chunk have numbers of their own below this


class StoppedError(Exception):
    """A request ended before its output was complete: by its deadline, cancelled, or by a failure."""

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Written:
    """A segment as text; `token_ids` are those of the text alone."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    seek: int
    temperature: float
    mean_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[TimedWord, ...] = ()


@dataclass(slots=True)
class Piece:
    """What a transcription has newly: text that follows the text before, and segments that have ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    segments: list[Written] = field(default_factory=list)


@dataclass(slots=True)
class Transcription:
    """A transcription in progress; `text` joins the pieces' texts."""

    language: str | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    segments: list[Written] = field(default_factory=list)
    num_windows: int = 0
    num_silent: int = 0  # windows, of those
    num_fallbacks: int = 0  # outputs that had failed
    is_cut: bool = False  # the output of a window reached its most tokens


@dataclass(slots=True)
class Transcriber:
    """Transcribes one audio. `emit` gets every new piece, also text of windows that go on if `live`."""

    maker: RequestMaker
    tokenizer: Tokenizer
    log_mel: LogMel
    samples: NDArray[np.float32]
    compute: Compute
    next_id: Callable[[], str]
    emit: Callable[[Piece], None] = lambda piece: None
    live: bool = False
    max_windows: int = 8  # that are computed at a time
    timestamps: bool = True
    result: Transcription = field(init=False)
    _detokenizer: Detokenizer = field(init=False)
    _hidden: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        tokens = self.maker.tokens
        self.result = Transcription(self.maker.options.language or (None if tokens.is_multilingual else "en"))
        self._hidden = frozenset(one for one in self.tokenizer.special_ids if one < tokens.timestamp_begin)
        self._detokenizer = Detokenizer(self.tokenizer)

    async def run(self) -> Transcription:
        """Return the whole transcription; raises `StoppedError` and what `compute` raises, with `result` as it was."""
        try:
            if self.maker.options.parallel and len(self.samples) > self.log_mel.window_samples:
                await self._chunks()
            else:
                await self._windows()
        finally:
            self.samples = np.zeros(0, np.float32)  # the object may be kept for long
        self._show([], [], final=True)
        return self.result

    # One window after the other

    async def _windows(self) -> None:
        spectrogram = await Spectrogram.computed(self.log_mel, self.samples)
        try:
            await self._find_language(spectrogram)
            await self._windows_of(spectrogram)
        finally:
            spectrogram.release()

    async def _windows_of(self, spectrogram: Spectrogram) -> None:
        windows = self._sequence(spectrogram)
        draw = 0
        while (attempt := windows.next()) is not None:
            draw += 1
            source = await spectrogram.load(attempt.window)
            output, shown = await self._attempt(attempt, source, windows, draw)
            segments = windows.finish(attempt, output.outcome(self.maker.tokens.end))
            self._count(windows, output, segments)
            if segments:
                await self._accept(segments, output, shown, source, spectrogram)

    def _sequence(self, spectrogram: Spectrogram) -> SequentialWindows:
        decoding = self.maker.decoding(self.result.language, timestamps=self.timestamps)
        return SequentialWindows(decoding, spectrogram.num_frames, spectrogram.window_frames, spectrogram.frame_seconds)

    async def _find_language(self, spectrogram: Spectrogram) -> None:
        """Ask for the language of the first window, unless it is known."""
        if self.result.language is None:
            source = await spectrogram.load(spectrogram.first)
            output = await self._output(self.maker.detection(self.next_id(), source))
            self.result.language = self.maker.language_of(output)

    async def _attempt(
        self, attempt: Attempt, source: Source, windows: SequentialWindows, draw: int
    ) -> tuple[Output, int]:
        """Return the output of an attempt, and how many of its text tokens have been shown already."""
        request = self.maker.attempt(self.next_id(), source, attempt, timestamps=self.timestamps, draw=draw)
        output, live = Output(), LiveText(windows.decoding.timestamp_begin, self._hidden)
        is_last = attempt.number + 1 == len(windows.decoding.temperatures)
        shows = self.live and is_last and request.params.num_beams == 1

        def take(one: TokenOutput) -> None:
            output.add(one)
            if shows and not windows.is_silent(output.no_speech_prob):
                places = live.add(one.token_ids)
                if places:
                    self._show([output.token_ids[at] for at in places], _picked(output.logprobs, places))

        await self._computed(request, output, take)
        return output, live.num_certain

    async def _accept(
        self, segments: list[Segment], output: Output, shown: int, source: Source, spectrogram: Spectrogram
    ) -> None:
        """Add a window's segments to the transcription, and show what has not been shown of them."""
        accepted = sum(len(one.token_ids) for one in segments)
        places = [at for at in range(accepted) if self._is_text(output.token_ids[at])]
        times: list[float] = []
        if self.maker.options.words and places:
            text = [output.token_ids[at] for at in places]
            times = await self._times(segments[0].window, text, source, spectrogram)
        written, first = [], 0
        for segment in segments:
            ids = tuple(filter(self._is_text, segment.token_ids))
            words = self._words(ids, times[first : first + len(ids) + 1], segment.start, segment.end)
            first += len(ids)
            written.append(self._written(segment, segment.start, segment.end, ids, words))
        self.result.segments += written
        later = places[shown:]
        self._show([output.token_ids[at] for at in later], _picked(output.logprobs, later), written)

    async def _times(self, window: Window, text: list[int], source: Source, spectrogram: Spectrogram) -> list[float]:
        """Return where each of a window's text tokens begins and the last one ends, in seconds of the audio."""
        language = self.result.language
        output = await self._output(self.maker.alignment(self.next_id(), source, window, text, language))
        seconds, offset = spectrogram.frame_seconds, window.seek * spectrogram.frame_seconds
        inside = token_times(output.aligned, len(text), window.num_frames * seconds, spectrogram.position_seconds)
        return [offset + one for one in inside]

    # All chunks at once

    async def _chunks(self) -> None:
        chunks = cut_chunks(len(self.samples), self.log_mel.window_samples)
        room = asyncio.Semaphore(self.max_windows)
        known = asyncio.Event()  # the language: the first chunk finds it out
        if self.result.language is not None:
            known.set()
        merger = _Merging(ChunkMerger(timed=self.maker.options.words))
        tasks = [asyncio.create_task(self._chunk(number, chunk, room, known)) for number, chunk in enumerate(chunks)]
        try:
            for task, chunk in zip(tasks, chunks, strict=True):
                self._merge(merger, *await task, chunk)
            self._finish(merger)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _chunk(
        self, number: int, chunk: Chunk, room: asyncio.Semaphore, known: asyncio.Event
    ) -> tuple[list[Token], list[TokenLogprob], Segment | None]:
        """Return a chunk's tokens in seconds of the chunk, their log-probabilities, and what its last segment was."""
        if number:
            await known.wait()
        async with room:
            spectrogram = await Spectrogram.computed(self.log_mel, self.samples[chunk.start : chunk.end])
            await self._find_language(spectrogram)
            known.set()
            return await self._chunk_windows(number, spectrogram)

    async def _chunk_windows(
        self, number: int, spectrogram: Spectrogram
    ) -> tuple[list[Token], list[TokenLogprob], Segment | None]:
        windows = self._sequence(spectrogram)
        tokens: list[Token] = []
        logprobs: list[TokenLogprob] = []
        last: Segment | None = None
        draw = number * _DRAWS
        while (attempt := windows.next()) is not None:
            draw += 1
            source = await spectrogram.load(attempt.window)
            request = self.maker.attempt(self.next_id(), source, attempt, timestamps=self.timestamps, draw=draw)
            output = await self._output(request)
            segments = windows.finish(attempt, output.outcome(self.maker.tokens.end))
            self._count(windows, output, segments)
            if segments:
                last = segments[-1]
                tokens += await self._chunk_tokens(segments, output, len(logprobs), source, spectrogram)
                logprobs += output.logprobs
        return tokens, logprobs, last

    async def _chunk_tokens(
        self, segments: list[Segment], output: Output, first: int, source: Source, spectrogram: Spectrogram
    ) -> list[Token]:
        """Return the tokens of a window of a chunk; what is known of them begins at place `first`."""
        window, begin = segments[0].window, self.maker.tokens.timestamp_begin
        ids = output.token_ids[: sum(len(one.token_ids) for one in segments)]
        text = [one for one in ids if self._is_text(one)]
        times: Sequence[float] = ()
        if self.maker.options.words and text:
            times = await self._times(window, text, source, spectrogram)
        tokens, at = [], 0
        for place, token in enumerate(ids):
            if token >= begin:
                stamp = window.seek * spectrogram.frame_seconds + (token - begin) * spectrogram.position_seconds
                tokens.append(Token(token, stamp))
            elif token not in self._hidden:
                start, end = (times[at], times[at + 1]) if times else (0.0, 0.0)
                tokens.append(Token(token, None, start, end, first + place))
                at += 1
        return tokens

    def _merge(
        self, merging: _Merging, tokens: list[Token], logprobs: list[TokenLogprob], last: Segment | None, chunk: Chunk
    ) -> None:
        """Add the next chunk's tokens to the text."""
        rate = self.log_mel.sampling_rate
        first = len(merging.logprobs)
        tokens = [replace(one, place=first + one.place) if one.place >= 0 else one for one in tokens]
        merging.logprobs += logprobs
        if last is not None:
            seek = last.window.seek + chunk.start // self.log_mel.hop_length  # a frame of the whole audio
            merging.last = replace(last, window=replace(last.window, seek=seek))
        length, left, right = (chunk.end - chunk.start) / rate, chunk.left / rate, chunk.right / rate
        ended = merging.merger.add(ChunkOutput(length, left, right, tuple(tokens)))
        merging.seconds = chunk.end / rate
        self._take_merged(merging, ended, merging.merger.settled)

    def _finish(self, merging: _Merging) -> None:
        self._take_merged(merging, merging.merger.rest(), [])

    def _take_merged(self, merging: _Merging, ended: list[Merged], settled: list[Token]) -> None:
        """Show the segments that have ended and what is settled of the open one."""
        written = []
        for one in ended:
            if not one.tokens or merging.last is None:
                continue
            ids = tuple(token.id for token in one.tokens)
            start = merging.end if one.start is None else one.start
            merging.end = merging.seconds if one.end is None else one.end
            end = max(start, merging.end)
            words = [
                TimedWord(word.text, one.tokens[word.places[0]].start, one.tokens[word.places[-1]].end)
                for word in (self._grouped(ids) if self.maker.options.words else ())
            ]
            written.append(self._written(merging.last, start, end, ids, without_pauses(words, start, end)))
        tokens = [token for one in ended for token in one.tokens] + settled
        new = tokens[merging.num_shown :]
        merging.num_shown = len(settled)
        self.result.segments += written
        picked = [merging.logprobs[token.place] for token in new] if merging.logprobs else []
        self._show([token.id for token in new], picked, written)

    # Both

    async def _output(self, request: Request) -> Output:
        output = Output()
        await self._computed(request, output, output.add)
        return output

    async def _computed(self, request: Request, output: Output, take: Take) -> None:
        await self.compute(request, take)
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise StoppedError(output.finish_reason or FinishReason.ERROR)

    def _count(self, windows: SequentialWindows, output: Output, segments: list[Segment] | None) -> None:
        if segments is None:
            self.result.num_fallbacks += 1
            return
        self.result.num_windows += 1
        self.result.num_silent += not segments
        self.result.is_cut |= bool(segments) and output.finish_reason is FinishReason.LENGTH

    def _is_text(self, token: int) -> bool:
        return token < self.maker.tokens.timestamp_begin and token not in self._hidden

    def _written(
        self, segment: Segment, start: float, end: float, ids: tuple[int, ...], words: tuple[TimedWord, ...]
    ) -> Written:
        return Written(
            start=round(start, 3),
            end=round(end, 3),
            text=self.tokenizer.decode(ids),
            token_ids=ids,
            seek=segment.window.seek,
            temperature=segment.temperature,
            mean_logprob=segment.mean_logprob,
            compression_ratio=segment.compression_ratio,
            no_speech_prob=segment.no_speech_prob,
            words=words,
        )

    def _words(self, ids: tuple[int, ...], times: Sequence[float], start: float, end: float) -> tuple[TimedWord, ...]:
        """Return the words of a segment's text; each token begins at one of `times` and ends at the next."""
        if not times or not ids:
            return ()
        found = [TimedWord(word.text, times[word.places[0]], times[word.places[-1] + 1]) for word in self._grouped(ids)]
        return tuple(
            TimedWord(one.text, round(one.start, 3), round(one.end, 3)) for one in without_pauses(found, start, end)
        )

    def _grouped(self, ids: tuple[int, ...]) -> list[Word]:
        return words_of(ids, self.result.language, self.tokenizer.decode)

    def _show(
        self,
        ids: list[int],
        logprobs: list[TokenLogprob],
        segments: Sequence[Written] = (),
        *,
        final: bool = False,
    ) -> None:
        """Emit text tokens, and segments that have ended with them."""
        text = self._detokenizer.push(ids, final=final)
        if not self.result.text:
            text = text.lstrip()
        self.result.text += text
        self.result.token_ids += ids
        self.result.logprobs += logprobs
        if ids or segments or text:
            self.emit(Piece(text, ids, logprobs, list(segments)))


@dataclass(slots=True)
class _Merging:
    """The state of joining chunks: the end of the last segment, and how much of the open one was shown."""

    merger: ChunkMerger
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Segment | None = None  # the last chunk's, whose figures a segment gets that ended in it
    seconds: float = 0.0  # of the audio that was merged
    end: float = 0.0
    num_shown: int = 0


def _picked(logprobs: list[TokenLogprob], places: Sequence[int]) -> list[TokenLogprob]:
    return [logprobs[at] for at in places] if logprobs else []
