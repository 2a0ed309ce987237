"""Transcription with an engine of this process: computes the requests of a `Transcriber` by stepping the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.model.api.request import FinishReason, Request
from triptych.model.api.sampling_params import SamplingParams
from triptych.model.checkpoint.folder import Checkpoint
from triptych.model.engine.generate_engine import GenerateEngine
from triptych.model.errors import ConfigError
from triptych.model.speech.audio_file import AudioError, AudioLimits, decode_audio
from triptych.model.speech.driver import Piece, Take, Transcriber, Transcription
from triptych.model.speech.requests import RequestMaker, SpeechOptions
from triptych.model.text.tokenizer import Tokenizer


def samples_of(audio: str | Path | bytes | NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    """Return mono samples at `rate` of a file, by its path or its bytes, or those given; raises `ConfigError`."""
    if isinstance(audio, np.ndarray):
        return _checked(audio)
    place, limits = "" if isinstance(audio, bytes) else f"{audio}: ", AudioLimits(seconds=24 * 3600, file_bytes=1 << 32)
    try:
        return decode_audio(audio if isinstance(audio, bytes) else Path(audio).read_bytes(), rate, limits)
    except OSError as error:
        raise ConfigError(f"{place}{error.strerror}") from None
    except AudioError as error:
        raise ConfigError(f"{place}{error}") from None


def _checked(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Return samples of a caller; raises `ConfigError` for what other libraries return and is no such sound."""
    if samples.dtype.kind != "f" or samples.ndim != 1:
        told = f"{samples.dtype} of shape {samples.shape}"
        raise ConfigError(f"audio: samples must be mono, [n], and floating-point numbers from -1 to 1, found {told}")
    with np.errstate(over="ignore"):  # what becomes too large for float32 is refused
        found = samples.astype(np.float32, copy=False)
    if not len(found) or not np.isfinite(found).all():
        raise ConfigError("audio: samples are no numbers" if len(found) else "audio: there are no samples")
    return found


def transcribe(
    engine: GenerateEngine,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    samples: NDArray[np.float32],
    options: SpeechOptions,
    emit: Callable[[Piece], None] | None,
) -> Transcription:
    """Return what is said in mono samples at the model's rate; raises `ConfigError` for what the model cannot do."""
    tokens, log_mel = checkpoint.speech, checkpoint.log_mel
    if tokens is None or log_mel is None:
        raise ConfigError(f"{engine.name} does not transcribe speech")
    try:
        options = options.completed(tokens, checkpoint.sampling_defaults)
    except ValueError as error:
        raise ConfigError(f"{engine.name}: {error}") from None
    if options.words and not tokens.alignment_heads:
        raise ConfigError(f"{engine.name} has no alignment_heads that it can use, which the times of words need")
    template = Request("", engine.name, (), SamplingParams(), arrival_time=time.monotonic())
    vocab_size = checkpoint.config.embedding.vocab_size
    long = len(samples) > log_mel.window_samples
    numbers = count()
    transcriber = Transcriber(
        maker=RequestMaker(tokens, options, template, engine.max_model_len, vocab_size, checkpoint.sampling_defaults),
        tokenizer=tokenizer,
        log_mel=log_mel,
        samples=samples,
        compute=_Steps(engine).compute,
        next_id=lambda: f"window-{next(numbers)}",
        emit=emit or (lambda piece: None),
        live=emit is not None,
        timestamps=options.writes_timestamps or (long and not options.parallel),
    )
    return asyncio.run(transcriber.run())


class _Steps:
    """Steps an engine while callers wait for outputs; their requests are computed together."""

    def __init__(self, engine: GenerateEngine) -> None:
        self._engine = engine
        self._takes: dict[str, Take] = {}  # of requests that have not ended

    async def compute(self, request: Request, take: Take) -> None:
        """Compute a request, and hand its outputs to `take`."""
        self._takes[request.request_id] = take
        self._engine.add(request)
        try:
            while request.request_id in self._takes:
                self._step()
                await asyncio.sleep(0)  # others may add requests
        finally:
            if self._takes.pop(request.request_id, None) is not None:
                self._engine.abort(request.request_id, None, FinishReason.CANCELLED)

    def _step(self) -> None:
        outputs, _ = self._engine.step()
        for output in outputs:
            take = self._takes.get(output.request_id)
            if take is None:
                continue
            take(output)
            if output.finish_reason is not None:
                del self._takes[output.request_id]
